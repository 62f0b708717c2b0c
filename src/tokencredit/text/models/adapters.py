"""The trained adapter of a language model: its own, or a new one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from tokencredit.distributed.sharding import is_sharded, whole
from tokencredit.errors import ConfigError
from tokencredit.settings.model import CriticConfig, LoraConfig, ModelConfig
from tokencredit.text.models.architecture import weight_hash
from tokencredit.text.models.model_loading import same_weights
from tokencredit.text.models.peft_models import (
    ADAPTER_NAME,
    ADAPTER_WEIGHTS,
    active_adapter,
    adapter_layers,
    attach,
    attached,
    check_kind,
    name_base,
    on_head,
    peft_errors,
    peft_library,
    probe_logits,
    quiet,
    reproduces,
    saved_config,
)
from tokencredit.text.models.precision import whole_weights

REFERENCE = "tokencredit_reference"
"""PEFT's name for the frozen adapter of the reference model."""
CRITIC = "tokencredit_critic"
"""PEFT's name for the adapter of a critic."""
SHARDED = ("run.shard is full", "with sharded weights", "run.shard")
"""The arguments of `check_plain` for a sharded base."""
PLAIN_STARTS = (True, False, "gaussian", "orthogonal")
"""Initializations of LoRA that read no weight of the base model."""


class AdapterSwitch:
    """The adapters of a language model: the policy's, and others on the same base, between which it switches."""

    def __init__(self, lm: PreTrainedModel):
        self.lm, self.model, self.name = lm, attached(lm), active_adapter(lm)
        self.active: str | None = self.name

    @contextmanager
    def switched(self, name: str | None) -> Iterator[None]:
        """A context in which the model has another adapter, or none; the same parameters require gradients."""
        before = self.active
        self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, name: str | None) -> None:
        if name == self.active:
            return
        flags = [(parameter, parameter.requires_grad) for parameter in self.lm.parameters()]
        for layer in adapter_layers(self.lm):
            if self.active is None:
                layer.enable_adapters(True)
            layer.enable_adapters(False) if name is None else layer.set_adapter(name)
        self.active = name
        for parameter, flag in flags:  # PEFT's switches change requires_grad
            parameter.requires_grad_(flag)

    def recomputation(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Contexts of a checkpointed layer and of its recomputation, which takes place when another adapter is on."""
        return nullcontext(), self.switched(self.active)

    def add_critic(self, args: CriticConfig, saved: Path | None = None) -> None:
        """Add the adapter of a critic, a saved one or a new one, which begins as the base model.

        Raises:
            ConfigError: the policy's adapter is more than plain LoRA, the saved one has another rank or base, or no
                layer matches `critic.lora.target_modules`.
        """
        key = f"critic.lora.rank is {args.lora.rank}"
        check_plain(self.model.peft_config[self.name], key, "on a base that policy and critic share", "critic.lora")
        config = lora_config(args.lora) if saved is None else saved_config(str(saved))
        base = str(getattr(self.lm, "name_or_path", ""))
        if saved is not None and config.r != args.lora.rank:
            raise ConfigError(
                f"{key}, and the critic saved in {saved} has rank {config.r}; give that, or, for a new critic, "
                f"{args.start_anew}"
            )
        if saved is not None and base and not same_weights(config.base_model_name_or_path or base, base):
            raise ConfigError(
                f"the critic saved in {saved} is an adapter of {config.base_model_name_or_path!r}, and that of the "
                f"policy has the base {base!r}, other weights; for a new critic, {args.start_anew}"
            )
        trained = {name for name, p in self.lm.named_parameters() if p.requires_grad}
        with peft_errors("critic.lora cannot be used"):
            if saved is None:
                self.model.add_adapter(CRITIC, config)
            else:
                cached_file(str(saved), ADAPTER_WEIGHTS)  # PEFT would also read a pickle
                self.model.load_adapter(str(saved), CRITIC, is_trainable=True, torch_device=str(self.lm.device))
        for name, parameter in self.lm.named_parameters():
            parameter.requires_grad_(name in trained or owned(name, CRITIC))
        self.lm.eval()  # PEFT creates layers in training mode

    def critic_parameters(self) -> list[nn.Parameter]:
        """The parameters of the critic's adapter."""
        return [p for name, p in self.lm.named_parameters() if owned(name, CRITIC)]

    def save_named(self, folder: Path, name: str) -> None:
        """Write one of the adapters as a PEFT folder."""
        config = self.model.peft_config[name]
        config.base_model_name_or_path = self.lm.name_or_path or config.base_model_name_or_path  # PEFT looks there
        self.model.save_pretrained(folder, selected_adapters=[name], state_dict=self._state())
        if name != ADAPTER_NAME:  # PEFT writes a named adapter to a subfolder
            for file in (folder / name).iterdir():
                file.replace(folder / file.name)
            (folder / name).rmdir()
        name_base(folder)

    def _state(self) -> dict[str, Tensor]:
        """The model's tensors other than sharded ones, which PEFT would gather in all processes, and then drop."""
        return {name: x for name, x in self.model.state_dict().items() if not isinstance(x, DTensor)}


def owned(parameter: str, adapter: str) -> bool:
    """True for the name of a parameter that belongs to an adapter."""
    return adapter in parameter.split(".")


class Adapter(AdapterSwitch):
    """The trained adapter of a language model, and the switch to the reference model."""

    def __init__(self, lm: PreTrainedModel, *, start: Tensor | None = None, whole: bool = False):
        """Wrap the adapter attached to a model; a frozen one becomes trainable.

        `start` are `probe_logits` of the model before a new adapter was added; None if its adapter is not new. With
        `whole` the merged model is saved, because no folder holds the weights below the adapter.

        Raises:
            ConfigError: no gradient reaches it, or its folder would miss some of the trained parameters.
        """
        super().__init__(lm)
        if CRITIC in self.model.peft_config:  # of an earlier trainer of this model
            self.model.delete_adapter(CRITIC)
        self.whole, self.has_reference = whole, False
        if not any(p.requires_grad for name, p in lm.named_parameters() if self._owns(name)):
            self.model.set_adapter(self.name)
        biases = getattr(self.model.peft_config[self.name], "bias", "none") != "none"
        trained = {name: p for name, p in lm.named_parameters() if p.requires_grad}
        for name in trained:
            if not self._owns(name) and not (biases and name.split(".")[-1] == "bias"):
                raise ConfigError(
                    f"{name} is trainable but not part of the adapter, so it would not be saved; freeze it "
                    "(requires_grad_(False)), or add it to the adapter's modules_to_save"
                )
        with torch.enable_grad():
            loss = probe_logits(lm).sum()
        reached = trained and loss.requires_grad
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True) if reached else ()
        if all(gradient is None for gradient in gradients):
            raise ConfigError("no gradient reaches the adapter, so nothing would be trained; use another adapter type")
        with self.reference():
            self.off_is_start = start is not None and reproduces(lm, start)

    @property
    def adds(self) -> bool:
        """True for plain LoRA, which only adds to the outputs of the base layers and never reads their weights."""
        config = self.model.peft_config[self.name]
        return config.peft_type.value == "LORA" and not getattr(config, "use_dora", False)

    def hold_reference(self) -> bool:
        """Make `reference` switch to the starting model; returns False if that takes a copy of the model.

        An adapter continued from another run needs a second, frozen adapter with the same weights, which only LoRA
        allows without changing the base layers.
        """
        trained = {name for name, p in self.lm.named_parameters() if p.requires_grad and not owned(name, CRITIC)}
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
        state = peft.get_peft_model_state_dict(
            self.model, state_dict=self._state(), adapter_name=self.name, save_embedding_layers=False
        )
        peft.set_peft_model_state_dict(self.model, state, REFERENCE)
        for name, parameter in self.lm.named_parameters():
            parameter.requires_grad_(name in trained or owned(name, CRITIC))
        self.has_reference = True
        self.lm.eval()  # PEFT creates layers in training mode
        return True

    @contextmanager
    def reference(self) -> Iterator[None]:
        """A context in which the model is the one that the run started from, for passes without gradients."""
        with self.switched(REFERENCE if self.has_reference else None):
            yield

    def save(self, folder: Path) -> None:
        """Write a PEFT adapter folder, or the merged model if `whole`."""
        if self.whole:
            on_cpu: dict[int, Any] = {}  # the copies of its tensors, which deepcopy would make on their device
            for x in (*self.model.parameters(), *self.model.buffers()):
                copied = x.detach().to("cpu", copy=True)
                on_cpu[id(x)] = nn.Parameter(copied, requires_grad=False) if isinstance(x, nn.Parameter) else copied
            deepcopy(self.model, on_cpu).merge_and_unload().save_pretrained(folder)
            return
        self.save_named(folder, self.name)

    def _owns(self, parameter: str) -> bool:
        return owned(parameter, self.name)


def build_adapter(lm: PreTrainedModel, args: ModelConfig, peft_config: Any) -> Adapter | None:
    """The trained adapter: the model's own, a new one, or None if the whole model is trained.

    A new one is added to the model's layers in place, by `args.lora` or a PEFT configuration that replaces it.

    Raises:
        ConfigError: the model already has an adapter, or the new one matches no layer or would not be trained.
    """
    sharded = is_sharded(lm)
    if attached(lm) is not None:
        if sharded:
            check_plain(attached(lm).peft_config[active_adapter(lm)], *SHARDED)
        if args.lora.rank or peft_config is not None:
            new = f"model.lora.rank is {args.lora.rank}" if args.lora.rank else "peft_config is set"
            raise ConfigError(
                f"{args.name!r} has an adapter already, and {new}; leave that out to continue training the existing "
                "adapter, or set model.adapter: merge to merge it into the weights and train a new one"
            )
        return Adapter(lm)
    if not args.lora.rank and peft_config is None:
        return None
    start, below = probe_logits(lm).detach(), _hashes(lm)
    config = peft_config or lora_config(args.lora)
    if sharded:
        check_plain(config, *SHARDED)
    add_adapter(lm, config, "model.lora" if peft_config is None else "peft_config")
    # Some adapters, such as PiSSA, change the base weights when they are created, so the base model's folder is stale.
    whole = args.adapter == "merge" or _hashes(lm) != below
    with peft_errors("the new adapter cannot be used"):
        return Adapter(lm, start=start, whole=whole)


def check_plain(config: Any, setting: str, where: str, key: str) -> None:
    """Raise `ConfigError` for an adapter that needs more of its base model than the outputs of its layers."""
    kind, bias = config.peft_type.value, getattr(config, "bias", "none")
    parts = ("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication")
    reasons = {
        f"type {kind}": kind != "LORA",
        f"bias {bias!r}": bias != "none",
        **{part: getattr(config, part, None) for part in parts},
        "an initialization from the weights": getattr(config, "init_lora_weights", True) not in PLAIN_STARTS,
    }
    if needs := [reason for reason, holds in reasons.items() if holds]:
        raise ConfigError(
            f"{setting}, and the policy's adapter has {', '.join(needs)}; {where} an adapter must be plain LoRA, which "
            f"reads no weight of the model: change the adapter, or leave out {key}"
        )


def _hashes(lm: PreTrainedModel) -> list[int]:
    """Hashes of a model's weights without its adapter."""
    return [weight_hash(whole(x)) for name, x in whole_weights(lm) if ADAPTER_NAME not in name.split(".")]


def lora_config(args: LoraConfig, task: str = "CAUSAL_LM") -> Any:
    """The PEFT configuration of a LoRA adapter."""
    return peft_library().LoraConfig(
        r=args.rank,
        lora_alpha=args.alpha,
        lora_dropout=args.dropout,
        target_modules=args.target_modules or "all-linear",
        task_type=task,
    )


def add_adapter(lm: PreTrainedModel, config: Any, key: str) -> None:
    """Add a new adapter to a model's layers in place and attach it; `key` names its configuration in messages.

    Raises:
        ConfigError: no layer matches the target names, or PPO cannot train this type of adapter.
    """
    check_kind(config)
    try:
        with quiet():
            attach(lm, peft_library().get_peft_model(lm, config))
    except (TypeError, ValueError) as error:  # a TypeError is PiSSA's of quantised weights
        part = "" if isinstance(error, TypeError) else ".target_modules"
        raise ConfigError(f"{key}{part}: {error}") from error
    if on_head(lm):
        raise ConfigError(
            f"{key} adapts the output projection, where the adapter would be ignored; leave that layer out"
        )


def enable_checkpointing(model: PreTrainedModel, adapter: AdapterSwitch | None = None) -> None:
    """Switch on a model's gradient checkpointing; `ConfigError` if it has none.

    With several adapters on it, a layer is recomputed with the one that it had.
    """
    # Newer versions of Transformers deprecate the second name.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    try:
        enable({"use_reentrant": False} | ({} if adapter is None else {"context_fn": adapter.recomputation}))
    except ValueError as error:
        raise ConfigError(f"model.gradient_checkpointing is true: {error} Leave it out") from error
