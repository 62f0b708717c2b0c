"""The compute dtype of forward and backward passes, and the choice that `model.dtype: auto` makes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from tokencredit.processes import Processes

ROWS = 256
REPEATS = 20
WORTH = 0.75
"""Largest share of float32's time at which bfloat16 is chosen: near 1, its lost digits buy nothing."""


@dataclass(frozen=True)
class Precision:
    """The compute dtype of a model's passes on a device; weights stay float32."""

    dtype: Literal["float32", "bfloat16"]
    device: torch.device

    @property
    def half(self) -> bool:
        """True in bfloat16, where a pass with a KV cache and a pass over the whole text differ."""
        return self.dtype == "bfloat16"

    def autocast(self) -> torch.autocast:
        """A context for passes in this dtype."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.half)

    @contextmanager
    def no_grad(self) -> Iterator[None]:
        """A context for passes that train nothing."""
        with torch.no_grad(), self.autocast():
            yield


def choose(dtype: Literal["float32", "bfloat16", "auto"], width: int, processes: Processes) -> Precision:
    """The dtype asked for, the same on every process; `auto` is bfloat16 where this machine computes faster in it.

    Args:
        dtype: `float32`, `bfloat16` or `auto`.
        width: of the model's hidden states, on which it depends whether bfloat16 pays.
        processes: the job.
    """
    if dtype == "auto":
        dtype = "bfloat16" if processes.first(bfloat16_helps(width, processes.device)) else "float32"
    return Precision(dtype, processes.device)


def bfloat16_helps(width: int, device: torch.device) -> bool:
    """True if training is faster in bfloat16: known of GPUs, timed on CPUs, many of which only emulate it."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    with torch.random.fork_rng():
        layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).to(device)
        inputs = torch.randn(ROWS, width, device=device)
    # In turns, so that both meet the same machine; the least time is the one that nothing else disturbed.
    turns = [[_seconds(layers, inputs, enabled) for enabled in (True, False)] for _ in range(REPEATS)]
    half, full = (min(times) for times in zip(*turns, strict=True))
    return bool(half < WORTH * full)


def _seconds(layers: nn.Module, inputs: torch.Tensor, half: bool) -> float:
    """The time of a forward and backward pass."""
    started = time.perf_counter()
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=half):
        outputs = layers(inputs)
    outputs.float().sum().backward()
    return time.perf_counter() - started
