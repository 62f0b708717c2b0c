"""Models of scripts for TRL: a causal model whose critic the trainer holds, references, sampling, value models."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tokencredit.errors import ConfigError
from tokencredit.text.models.adapters import AdapterSwitch
from tokencredit.text.models.peft_models import active_adapter, peft_library

HEAD = ("v_head_init_strategy", "v_head_initializer_range", "summary_dropout_prob")
REWARD_ADAPTER = "reward"


class AutoModelForCausalLMWithValueHead(nn.Module):
    """A causal language model, `pretrained_model`; its value head is the trainer's critic, which starts at 0."""

    def __init__(self, pretrained_model: Any, **ignored: Any):
        super().__init__()
        self.pretrained_model = pretrained_model
        self.is_peft_model = hasattr(pretrained_model, "peft_config")
        self.reward_head: nn.Linear | None = None
        self.ignored = sorted(ignored)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *args: Any,
        peft_config: Any = None,
        reward_adapter: str | None = None,
        is_trainable: bool = True,
        **kwargs: Any,
    ) -> AutoModelForCausalLMWithValueHead:
        """Load a model by its name, or take a loaded one; `peft_config` adds an adapter, `reward_adapter` scores."""
        head = {name: kwargs.pop(name) for name in HEAD if name in kwargs}
        model = pretrained_model_name_or_path
        if isinstance(model, str | Path):
            model = AutoModelForCausalLM.from_pretrained(model, *args, **kwargs)
            model.config._name_or_path = str(pretrained_model_name_or_path)  # an adapter's, not its base's
        if getattr(model, "_hf_peft_config_loaded", False) and is_trainable:  # the folder was an adapter's
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("lora_" in name)
        if peft_config is not None:
            model = peft_library().get_peft_model(model, peft_config)
        wrapped = cls(model, **head)
        if reward_adapter is not None:
            wrapped.add_reward_adapter(reward_adapter)
        return wrapped

    def __getattr__(self, name: str) -> Any:
        """An attribute of the model, unless this has it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("pretrained_model"), name)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None, None]:
        """Logits; loss and values are the trainer's."""
        return self.pretrained_model(*args, **kwargs).logits, None, None

    def add_reward_adapter(self, name: str) -> None:
        """Load an adapter of a reward model on the same base, with its score head."""
        if not self.is_peft_model:
            raise ConfigError("reward_adapter needs peft_config, whose adapter is the policy")
        files = peft_library().utils.load_peft_weights(name, device="cpu")
        heads = [weight for key, weight in files.items() if re.search(r"\bscore\.(?:.*\.)?weight$", key)]
        if len(heads) != 1:
            raise ConfigError(f"reward_adapter {name!r} has no score head; give the adapter of a reward model")
        self.pretrained_model.load_adapter(name, REWARD_ADAPTER, is_trainable=False)
        self.reward_head = nn.Linear(heads[0].shape[1], heads[0].shape[0], bias=False)
        self.reward_head.weight.data.copy_(heads[0])
        self.reward_head.requires_grad_(False)

    @torch.no_grad()
    def compute_reward_score(self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Tensor:
        """The reward adapter's outputs at each position, `[batch, time, outputs]`."""
        if self.reward_head is None:
            raise ConfigError("compute_reward_score needs a reward_adapter; give it to from_pretrained")
        with AdapterSwitch(self.pretrained_model).switched(REWARD_ADAPTER):
            inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
            states = self.pretrained_model(**inputs, output_hidden_states=True).hidden_states[-1]
        head = self.reward_head.to(states.device)
        scores: Tensor = head(states.to(head.weight.dtype))
        return scores


class AutoModelForSeq2SeqLMWithValueHead:
    """A name that scripts import; such models are not trained here."""

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> None:
        """Raise `ConfigError`."""
        raise ConfigError("sequence-to-sequence models are not trained; use AutoModelForCausalLMWithValueHead")


def create_reference_model(model: Any, num_shared_layers: int | None = None, pattern: str | None = None) -> Any:
    """A frozen copy of a model. The first `num_shared_layers` layers, and what is before them, are frozen in both.

    `pattern` names a layer, such as `transformer.h.{layer}`; by default the first number in a name counts layers.
    """
    if num_shared_layers is not None:
        freeze_layers(model, num_shared_layers, pattern)
    return deepcopy(model).requires_grad_(False).eval()


def freeze_layers(model: Any, count: int, pattern: str | None = None) -> None:
    """Freeze the first `count` layers, and what is before them; `ConfigError` if no layer is left."""
    of_layer = re.compile(r"\.(\d+)\." if pattern is None else re.escape(pattern).replace(r"\{layer\}", r"(\d+)\."))
    below = []
    for name, parameter in model.named_parameters():
        match = of_layer.search(name)
        if match and int(match[1]) >= count:
            break
        below.append(parameter)
    else:
        matching = "" if pattern is None else f" that match the pattern {pattern!r}, if there are any"
        raise ConfigError(f"num_shared_layers is {count}; it must be below the number of layers{matching}")
    for parameter in below:
        parameter.requires_grad_(False)


def respond_to_batch(model: Any, queries: Tensor, txt_len: int = 20, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Sample `txt_len` tokens after each query, `[batch, time]` without padding."""
    device = next(model.parameters()).device
    kwargs = {"max_new_tokens": txt_len, "min_new_tokens": txt_len, "do_sample": True, "top_k": top_k, "top_p": top_p}
    mask = torch.ones_like(queries, device=device)
    texts: Tensor = model.generate(input_ids=queries.to(device), attention_mask=mask, **kwargs)
    return texts[:, -txt_len:]


class LengthSampler:
    """Samples a length from `min_value` to `max_value − 1`."""

    def __init__(self, min_value: int, max_value: int):
        self.values = range(min_value, max_value)

    def __call__(self) -> int:
        """A length."""
        return int(np.random.choice(self.values))  # noqa: NPY002  (the generator that scripts seed)


def same_but_head(model: Any, folder: Path) -> bool:
    """True if a folder holds the value model but for the weights of its score head."""
    if not (folder / "config.json").is_file():
        return False
    saved, own = type(model).from_pretrained(folder, dtype="auto").state_dict(), model.state_dict()
    return saved.keys() == own.keys() and all(
        torch.equal(saved[name], own[name].cpu()) for name in own if not name.startswith("score.")
    )


def choose_adapter(model: Any, own: str | None, other: str | None) -> None:
    """Activate the adapter `own`; `ConfigError` unless `other`, the reference's, begins with the same weights."""
    adapters = getattr(model, "peft_config", {})
    for name, adapter in {"model_adapter_name": own, "ref_adapter_name": other}.items():
        if adapter is not None and adapter not in adapters:
            there = f"the adapters {', '.join(adapters)}" if adapters else "no adapter"
            raise ConfigError(f"{name} is {adapter!r}, and model has {there}")
    if own is not None:
        model.set_adapter(own)
    if other is not None:
        own, weights = active_adapter(model), dict(model.named_parameters())
        one, two = ({n.replace(f".{x}.", "."): weights[n] for n in weights if f".{x}." in n} for x in (own, other))
        if one.keys() != two.keys() or not all(torch.equal(one[name], two[name]) for name in one):
            raise ConfigError(f"ref_adapter_name {other!r} differs from {own!r}, whose start is the reference here")
        model.delete_adapter(other)
