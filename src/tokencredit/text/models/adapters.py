"""The adapter that is trained on a language model: the one that it has, or a new one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tokencredit.errors import ConfigError
from tokencredit.settings.model import LoraConfig, ModelConfig
from tokencredit.text.models.parts import weight_hash
from tokencredit.text.models.peft_models import (
    NAME,
    active_adapter,
    adapter_layers,
    attach,
    attached,
    check_kind,
    computes,
    few_logits,
    naming,
    on_head,
    peft_library,
    quiet,
)

REFERENCE = "tokencredit_reference"
"""PEFT's name of the frozen adapter that the reference uses."""


class Adapter:
    """The adapter that is trained on a language model, and the switch to the reference."""

    def __init__(self, lm: PreTrainedModel, *, start: Tensor | None = None, whole: bool = False):
        """Take the adapter attached to a model; one that is frozen becomes trainable.

        Args:
            lm: the model.
            start: logits of the model before a new adapter was put on it; None if its adapter is not new.
            whole: save the whole model, because the weights below the adapter are in no folder.

        Raises:
            ConfigError: no gradient would reach it, or its folder would not hold all that is trained.
        """
        self.lm, self.model, self.name = lm, attached(lm), active_adapter(lm)
        self.whole, self.has_reference = whole, False
        if not any(p.requires_grad for name, p in lm.named_parameters() if self._owns(name)):
            self.model.set_adapter(self.name)
        self._check_saved()
        self._check_gradient()
        with self.reference():
            self.off_is_start = start is not None and computes(lm, start)

    @property
    def adds(self) -> bool:
        """True if its layers add to what the layers beneath compute, and read their weights for nothing else: LoRA."""
        config = self.model.peft_config[self.name]
        return config.peft_type.value == "LORA" and not getattr(config, "use_dora", False)

    def hold_reference(self) -> bool:
        """Make `reference` switch to the model that the run starts from; False if only a copy of it can be that.

        An adapter that went on from another run needs a second, frozen one with its weights. Only LoRA takes that
        without a change to the layers below.
        """
        trained = {name for name, p in self.lm.named_parameters() if p.requires_grad}
        head = any(p.requires_grad for p in self.lm.get_output_embeddings().parameters())
        if head or not all(map(self._owns, trained)):
            return False
        config = self.model.peft_config[self.name]
        if self.off_is_start:
            return True
        if config.peft_type.value != "LORA" or config.layer_replication is not None:
            return False
        peft, frozen = peft_library(), copy(config)
        frozen.init_lora_weights, frozen.inference_mode, frozen.lora_dropout = True, True, 0.0
        if REFERENCE in self.model.peft_config:
            self.model.delete_adapter(REFERENCE)
        self.model.add_adapter(REFERENCE, frozen)
        state = peft.get_peft_model_state_dict(self.model, adapter_name=self.name, save_embedding_layers=False)
        peft.set_peft_model_state_dict(self.model, state, REFERENCE)
        for name, parameter in self.lm.named_parameters():
            parameter.requires_grad_(name in trained)
        self.has_reference = True
        self.lm.eval()  # new layers are in training mode
        return True

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Let the model be the one that the run started from, for passes without gradients."""
        flags = [(parameter, parameter.requires_grad) for parameter in self.lm.parameters()]
        layers = adapter_layers(self.lm)
        try:
            for layer in layers:
                layer.set_adapter(REFERENCE) if self.has_reference else layer.enable_adapters(False)
            yield
        finally:
            for layer in layers:
                layer.set_adapter(self.name) if self.has_reference else layer.enable_adapters(True)
            for parameter, flag in flags:  # PEFT's switches set them
                parameter.requires_grad_(flag)

    def save(self, folder: Path) -> None:
        """Write a folder that PEFT loads, or the whole model where the adapter alone would not do."""
        if self.whole:
            tensors = [*self.model.parameters(), *self.model.buffers()]
            on_cpu: dict[int, Any] = {id(x): _on_cpu(x) for x in tensors}
            deepcopy(self.model, on_cpu).merge_and_unload().save_pretrained(folder)
            return
        self.model.save_pretrained(folder, selected_adapters=[self.name])
        if self.name != NAME:  # PEFT gives it a folder of its own
            for file in (folder / self.name).iterdir():
                file.replace(folder / file.name)
            (folder / self.name).rmdir()

    def _owns(self, parameter: str) -> bool:
        return self.name in parameter.split(".")

    def _check_saved(self) -> None:
        biases = getattr(self.model.peft_config[self.name], "bias", "none") != "none"
        for name, parameter in self.lm.named_parameters():
            if parameter.requires_grad and not self._owns(name) and not (biases and name.split(".")[-1] == "bias"):
                raise ConfigError(
                    f"{name} is trained beside the adapter, whose folder would not hold it; freeze it "
                    "(requires_grad_(False)), or name it in the adapter's modules_to_save"
                )

    def _check_gradient(self) -> None:
        trained = [p for p in self.lm.parameters() if p.requires_grad]
        with torch.enable_grad():
            loss = few_logits(self.lm).sum()
        gradients = torch.autograd.grad(loss, trained, allow_unused=True) if trained and loss.requires_grad else ()
        if all(gradient is None for gradient in gradients):
            raise ConfigError("no gradient reaches the adapter, so nothing would be trained; take another kind")


def build_adapter(lm: PreTrainedModel, args: ModelConfig, peft_config: Any) -> Adapter | None:
    """The adapter that is trained: the one that the model has, a new one, or None for the whole model.

    Args:
        lm: the model; a new adapter is put on its layers in place.
        args: `lora` says which new adapter.
        peft_config: a configuration of PEFT's in place of `args.lora`; None for none.

    Raises:
        ConfigError: there is one already, or the new one fits no layer or would not be trained.
    """
    if attached(lm) is not None:
        if args.lora.rank or peft_config is not None:
            new = f"model.lora.rank is {args.lora.rank}" if args.lora.rank else "peft_config is set"
            raise ConfigError(
                f"{args.name!r} has an adapter already, and {new}; leave that out to train the adapter that is there "
                "further, or set model.adapter: merge to add it to the weights and train a new one"
            )
        return Adapter(lm)
    if not args.lora.rank and peft_config is None:
        return None
    start, below = few_logits(lm).detach(), _hashes(lm)
    add_adapter(lm, peft_config or lora_config(args.lora), "model.lora" if peft_config is None else "peft_config")
    # Some kinds begin by a change to the weights below, at random for PiSSA's fast form; no other folder has those.
    whole = args.adapter == "merge" or _hashes(lm) != below
    with naming("the new adapter cannot be used"):
        return Adapter(lm, start=start, whole=whole)


def _hashes(lm: PreTrainedModel) -> list[int]:
    """A number for each of a model's own weights, its adapter's left out; the same only for the same weights."""
    return [weight_hash(p) for name, p in lm.named_parameters() if NAME not in name.split(".")]


def lora_config(args: LoraConfig) -> Any:
    """PEFT's configuration of a low-rank adapter.

    Raises:
        ConfigError: PEFT is not installed.
    """
    return peft_library().LoraConfig(
        r=args.rank,
        lora_alpha=args.alpha,
        lora_dropout=args.dropout,
        target_modules=args.target_modules or "all-linear",
        task_type="CAUSAL_LM",
    )


def add_adapter(lm: PreTrainedModel, config: Any, key: str) -> None:
    """Put a new adapter on a model's layers, in place, and attach it; `key` names its configuration in messages.

    Raises:
        ConfigError: no layer has one of the target names, or PPO would not train its kind.
    """
    check_kind(config)
    try:
        with quiet():
            attach(lm, peft_library().get_peft_model(lm, config))
    except ValueError as error:
        raise ConfigError(f"{key}.target_modules: {error}") from error
    if on_head(lm):
        raise ConfigError(
            f"{key} puts an adapter on the output projection, where it would be ignored; leave that layer out"
        )


def _on_cpu(tensor: Tensor) -> Tensor:
    copied = tensor.detach().to("cpu", copy=True)
    return nn.Parameter(copied, requires_grad=False) if isinstance(tensor, nn.Parameter) else copied
