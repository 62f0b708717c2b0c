"""PEFT models around language models: from folders, from Python, from Transformers; checks; merging."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from tokencredit.errors import ConfigError
from tokencredit.text.models.parts import trunk_of

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAME = "default"
"""PEFT's name of a new or loaded adapter."""
UNSUPPORTED = {
    "ADALORA": "it needs calls after each optimizer step, which are not made",
    "ADAPTION_PROMPT": "its parameters belong to no adapter layer, so it can be neither merged nor switched",
    "POLY": "PEFT's own forward pass routes it, and is not called",
    "SHADOW": "PEFT's own forward pass adds it, and is not called",
    "XLORA": "PEFT's own forward pass routes it, and is not called",
}
"""Kinds of adapters that would not be trained, and why."""
UNSUPPORTED_LORA = {
    "alora_invocation_tokens": "PEFT's own forward pass places it, and is not called",
    "arrow_config": "it routes among adapters, and one is trained",
    "monteclora_config": "it needs a loss of its own, which is not added",
}
"""Variants of LoRA that would not be trained as they should, by the argument that asks for them, and why."""
SHARED = ("vblora_vector_bank", ".tinylora_v.", ".unilora_theta_d.")
"""Parameters that layers share, which PEFT counts as missing in the layers when it loads them."""
SAME = 1e-4
"""Largest difference of logits, in nats, between two ways to the same outputs."""


def peft_library() -> Any:
    """The module `peft`.

    Raises:
        ConfigError: PEFT is not installed.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError("an adapter needs PEFT, which is not installed: pip install tokencredit[peft]") from error
    return peft


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings about what is meant so: a name of Transformers that PEFT uses, GPT-2's transposed layers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False", UserWarning)
        yield


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Turn what PEFT raises into one message."""
    try:
        with quiet():
            yield
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, KeyError, OSError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        raise ConfigError(f"{what}: {' '.join(str(error).split())}") from error


def saved_config(folder: str) -> Any:
    """PEFT's configuration of the adapter in a folder or a hub repository; None if it holds no adapter."""
    what = f"cannot read {ADAPTER_CONFIG} of {folder!r}"
    with naming(what):
        if find_adapter_config_file(folder) is None:
            return None
    peft = peft_library()
    with naming(what):
        return peft.PeftConfig.from_pretrained(folder)


def load_adapter(lm: PreTrainedModel, folder: str) -> None:
    """Put the adapter of a folder or a hub repository on its base model, in place, and attach it.

    Raises:
        ConfigError: it is of a kind that is not trained here, does not fit the model, or is not whole.
    """
    peft, config = peft_library(), saved_config(folder)
    check_kind(config)
    if getattr(lm, "peft_config", None):
        raise ConfigError(f"the base model of the adapter {folder!r} has an adapter itself; merge that one into it")
    with naming(f"cannot load a language model from {folder!r}"):
        cached_file(folder, ADAPTER_WEIGHTS)  # PEFT would also read a pickle
        config.inference_mode = False
        model = peft.PeftModel(lm, config, NAME)
        result = model.load_adapter(folder, NAME, is_trainable=True, torch_device=str(lm.device))
    apart = [key for key in result.missing_keys if not any(name in key for name in SHARED)] + result.unexpected_keys
    if apart:
        raise ConfigError(f"the adapter {folder!r} and {ADAPTER_CONFIG} do not match; on one side only: {apart[0]}")
    attach(lm, model)


def take_over(model: Any) -> PreTrainedModel:
    """The language model of a model from Python, in float32, with the adapter attached that is on its layers, if any.

    Raises:
        ConfigError: it is no language model of Transformers', or its adapter is of a kind that is not trained here.
    """
    if isinstance(model, PreTrainedModel):
        model.eval().float()
        if getattr(model, "peft_config", None) and attached(model) is None:
            attach(model, _wrapped(model))
        return model
    try:
        peft = peft_library()
    except ConfigError:
        peft = None
    if peft is None or not isinstance(model, peft.PeftModel):
        raise ConfigError(f"model is a {type(model).__name__}; give a name, a folder, a PreTrainedModel or a PeftModel")
    check_kind(model.active_peft_config)
    lm: PreTrainedModel = model.eval().float().get_base_model()
    attach(lm, model)
    return lm


def attached(lm: PreTrainedModel) -> Any:
    """The PEFT model around a language model; None without an adapter."""
    return vars(lm).get("peft_model") if getattr(lm, "peft_config", None) else None


def attach(lm: PreTrainedModel, model: Any) -> None:
    """Remember the PEFT model around a language model."""
    vars(lm)["peft_model"] = model  # not as a module: its weights must not be registered twice


def _wrapped(lm: PreTrainedModel) -> Any:
    """A PEFT model around layers that Transformers has adapted, with the same weights.

    PEFT knows no other way than to adapt the layers again, which begins their adapter anew, and to load its weights.
    """
    peft, name = peft_library(), active_adapter(lm)
    config = lm.peft_config[name]
    check_kind(config)
    before = few_logits(lm).detach()
    again = copy(config)
    again.inference_mode = False
    if hasattr(again, "init_lora_weights"):
        again.init_lora_weights = True  # other kinds change the layers below once more
    with naming("cannot take over the model's adapter"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = peft.get_peft_model_state_dict(lm, adapter_name=name, save_embedding_layers=False)
        model = peft.PeftModel(lm, again, name)
        peft.set_peft_model_state_dict(model, {f"base_model.model.{key}": x for key, x in state.items()}, name)
    model.peft_config[name] = config
    if not computes(lm, before):
        raise ConfigError(
            f"the model's {config.peft_type.value} adapter cannot be taken over from Transformers; "
            "load it with peft.PeftModel.from_pretrained"
        )
    return model


def check_kind(config: Any) -> None:
    """Raise `ConfigError` for an adapter that PPO would not train, or not as it should."""
    kind, why = config.peft_type.value, UNSUPPORTED.get(config.peft_type.value)
    if config.is_prompt_learning:
        why = "PEFT's own forward pass adds its virtual tokens, and is not called"
    for argument, reason in UNSUPPORTED_LORA.items():
        if getattr(config, argument, None) is not None:
            kind, why = f"{kind} with {argument}", reason
    if why is not None:
        raise ConfigError(f"an adapter of kind {kind} cannot be trained here: {why}; take LoRA or another kind")


def merge(lm: PreTrainedModel) -> PreTrainedModel:
    """The model with its adapter added to the weights, in place.

    Raises:
        ConfigError: adapters of its kind cannot be merged.
    """
    what = f"cannot merge the model's {lm.peft_config[active_adapter(lm)].peft_type.value} adapter"
    before = few_logits(lm).detach()
    with naming(what):
        merged: PreTrainedModel = attached(lm).merge_and_unload()
    if not computes(merged, before):
        raise ConfigError(f"{what}: the merged model computes something else")
    if getattr(merged, "_hf_peft_config_loaded", False):  # Transformers would save it as an adapter, and so name it
        merged._hf_peft_config_loaded = False
        vars(merged).pop("_weight_conversions", None)
    return merged.requires_grad_(True)


def plain_decoder(lm: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model's trunk, with its adapter, if it has one, merged."""
    trunk: PreTrainedModel
    trunk = deepcopy(trunk_of(lm)) if attached(lm) is None else trunk_of(merge(deepcopy(lm)))
    return trunk


def adapter_layers(lm: PreTrainedModel) -> list[Any]:
    """The layers and wrappers of a model's adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return [module for module in lm.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)]


def on_head(lm: PreTrainedModel) -> bool:
    """True if an adapter is on a model's output projection, whose weight is read past it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(module, BaseTunerLayer) for module in lm.get_output_embeddings().modules())


def active_adapter(lm: PreTrainedModel) -> str:
    """The name of the one adapter that takes part in a model's passes.

    Raises:
        ConfigError: several or none does, or it is switched off or merged for the moment.
    """
    layers = adapter_layers(lm)
    names = sorted({name for layer in layers for name in layer.active_adapters})
    if len(names) != 1:
        active = ", ".join(names) or "none"
        raise ConfigError(f"one adapter of the model must be active, and these are: {active}; choose by set_adapter")
    if any(layer.disable_adapters or getattr(layer, "merged_adapters", None) for layer in layers):
        raise ConfigError(
            f"the model's adapter {names[0]!r} is switched off or merged; call enable_adapter_layers() or "
            "unmerge_adapter(), or give the model that merge_and_unload() returns"
        )
    return str(names[0])


def few_logits(lm: PreTrainedModel) -> Tensor:
    """Logits of a few tokens, by the two halves of the model that PPO uses."""
    ids = torch.arange(min(4, lm.config.get_text_config().vocab_size), device=lm.device).unsqueeze(0)
    hidden = trunk_of(lm)(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).last_hidden_state
    logits: Tensor = lm.get_output_embeddings()(hidden)
    return logits


@torch.no_grad()
def computes(lm: PreTrainedModel, logits: Tensor) -> bool:
    """True if the model gives these logits."""
    return torch.allclose(few_logits(lm), logits, atol=SAME, rtol=SAME)
