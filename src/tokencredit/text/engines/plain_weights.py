"""The weights of a policy under the names of a checkpoint, with its adapter merged: what another engine loads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from itertools import count
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from tokencredit.distributed.sharding import is_sharded, whole
from tokencredit.errors import ConfigError
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.peft_models import adapter_layers, merge

BASE = ".base_layer"
"""PEFT's module around an adapted layer's own weights."""
FILE_BYTES = 2**30
"""Bytes of a file of weights, which is held in memory once more while it is written."""


def plain_weights(policy: ActorCritic) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a policy's language model, as a checkpoint without an adapter holds them.

    A tied weight comes once under each of its names. The trained model stays as it is; weights without an adapter are
    its own tensors, not copies.

    Weights of a sharded policy that `sharding.gathered` does not hold are gathered one at a time: all processes must
    then iterate in step.

    Raises:
        ConfigError: the adapter cannot be merged.
    """
    adapter = policy.adapter
    if adapter is None:
        tensors = _whole_tensors(policy.lm)
    elif adapter.adds and _only_linear(policy.lm, adapter.name):
        tensors = _with_lora(policy.lm, adapter.name)
    else:
        try:
            tensors = iter(merge(deepcopy(policy.lm)).state_dict().items())
        except ConfigError as error:
            raise ConfigError(f"{error}; rollout.engine takes over merged weights: set it to local") from error
    # Transformers' conversions between the names of a checkpoint and those in memory.
    own = getattr(policy.lm, "_weight_conversions", None)
    if not (get_model_conversion_mapping(policy.lm, add_legacy=False) if own is None else own):
        return tensors
    converted: dict[str, Tensor] = revert_weight_conversion(policy.lm, dict(tensors))
    return iter(converted.items())


def write_weights(weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write `plain_weights` into a new folder of safetensors files, of about `FILE_BYTES` each.

    Whoever can read its parent can read them.
    """
    folder.mkdir()
    folder.chmod(0o700 | folder.parent.stat().st_mode & 0o055)
    part: dict[str, Tensor] = {}
    numbers, size = count(1), 0

    def write() -> None:
        file = folder / f"model-{next(numbers):05}.safetensors"
        save_file(part, file)
        file.chmod(0o600 | folder.stat().st_mode & 0o044)  # safetensors lets its owner alone read it

    for name, tensor in weights:
        # Copied, since a file cannot hold a tied weight under two names otherwise.
        part[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        size += tensor.nbytes
        if size >= FILE_BYTES:
            write()
            part, size = {}, 0
    if part:
        write()


def check_gathered(policy: ActorCritic) -> None:
    """Raise `ConfigError` for a sharded policy whose adapter can only be merged in a copy of the whole model."""
    if is_sharded(policy.lm) and policy.adapter is not None and not _only_linear(policy.lm, policy.adapter.name):
        raise ConfigError(
            "run.shard is full, and the adapter adapts layers that are not linear, so it cannot be merged into the "
            "weights that rollout.engine takes over; adapt linear layers only, or set rollout.engine: local"
        )


def _whole_tensors(lm: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `state_dict()`, which would take gathered weights away from a sharded model."""
    if not is_sharded(lm):
        yield from ((name, x.detach()) for name, x in lm.state_dict().items())
        return
    for name, parameter in lm.named_parameters(remove_duplicate=False):
        yield name, whole(parameter.detach())
    dropped = dict(lm.named_non_persistent_buffers(remove_duplicate=False))
    for name, buffer in lm.named_buffers(remove_duplicate=False):
        if name not in dropped:
            yield name, buffer


def _only_linear(lm: PreTrainedModel, adapter: str) -> bool:
    """True if all adapted layers are LoRA's plain linear ones, whose only change is one matrix added to the weight."""
    from peft.tuners.lora import Linear

    return all(
        type(layer) is Linear and adapter not in layer.lora_variant and not layer.lora_bias.get(adapter)
        for layer in adapter_layers(lm)
    )


def _with_lora(lm: PreTrainedModel, adapter: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors with LoRA's products added, one layer at a time."""
    from peft.tuners.lora import Linear

    layers = {name: layer for name, layer in lm.named_modules() if isinstance(layer, Linear)}
    own = tuple(f"{name}.lora_" for name in layers)
    for name, tensor in _whole_tensors(lm):
        if name.startswith(own):
            continue
        layer, base, kind = name.rpartition(BASE)
        if base and kind == ".weight" and adapter in layers[layer].lora_A:  # a critic's may adapt more layers
            with torch.no_grad():
                yield f"{layer}{kind}", tensor + layers[layer].get_delta_weight(adapter).to(tensor.dtype)
        else:
            yield name.replace(BASE, ""), tensor
