"""The weights of a policy under the names of a checkpoint, with its adapter merged: what another engine loads."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

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
    """
    tensors = _merged(policy)
    if not _conversions(policy.lm):
        return tensors
    converted: dict[str, Tensor] = revert_weight_conversion(policy.lm, dict(tensors))
    return iter(converted.items())


def write_plain_weights(policy: ActorCritic, folder: Path) -> None:
    """Write `plain_weights` into a new folder of safetensors files, of about `FILE_BYTES` each."""
    folder.mkdir()
    part: dict[str, Tensor] = {}
    numbers, size = count(1), 0
    for name, tensor in plain_weights(policy):
        # Copied, since a file cannot hold a tied weight under two names otherwise.
        part[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        size += tensor.nbytes
        if size >= FILE_BYTES:
            save_file(part, folder / f"model-{next(numbers):05}.safetensors")
            part, size = {}, 0
    if part:
        save_file(part, folder / f"model-{next(numbers):05}.safetensors")


def _conversions(lm: PreTrainedModel) -> list[Any]:
    """Transformers' conversions between the names of a checkpoint and those in memory."""
    own = getattr(lm, "_weight_conversions", None)
    found: list[Any] = get_model_conversion_mapping(lm, add_legacy=False) if own is None else own
    return found


def _merged(policy: ActorCritic) -> Iterator[tuple[str, Tensor]]:
    """Tensors with the adapter merged, under the names in memory."""
    if policy.adapter is None:
        return ((name, x.detach()) for name, x in policy.lm.state_dict().items())
    if policy.adapter.adds and _only_linear(policy.lm, policy.adapter.name):
        return _with_lora(policy.lm, policy.adapter.name)
    return iter(merge(deepcopy(policy.lm)).state_dict().items())


def _only_linear(lm: PreTrainedModel, adapter: str) -> bool:
    """True if all adapted layers are LoRA's plain linear ones, whose change of the weight is one matrix."""
    from peft.tuners.lora import Linear

    return all(type(layer) is Linear and adapter not in layer.lora_variant for layer in adapter_layers(lm))


def _with_lora(lm: PreTrainedModel, adapter: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors with LoRA's products added, one layer at a time."""
    from peft.tuners.lora import Linear

    layers = {name: layer for name, layer in lm.named_modules() if isinstance(layer, Linear)}
    own = tuple(f"{name}.lora_" for name in layers)
    for name, tensor in lm.state_dict().items():
        if name.startswith(own):
            continue
        layer, base, kind = name.rpartition(BASE)
        if base and kind == ".weight":
            with torch.no_grad():
                yield f"{layer}{kind}", tensor.detach() + layers[layer].get_delta_weight(adapter).to(tensor.dtype)
        else:
            yield name.replace(BASE, ""), tensor.detach()
