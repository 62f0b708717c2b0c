"""The number format of the model's passes."""

from __future__ import annotations

import time

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, parse_flag_from_env
from torch import nn

ROWS = 256
REPEATS = 20
WORTH = 0.75
"""Share of float32's time that bfloat16 may take at most: near 1, its lost digits buy nothing."""


def this_process() -> PartialState:
    """Accelerate's knowledge of processes and devices, before an Accelerator can be made of the number format."""
    return PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))


def choose(dtype: str, width: int) -> str:
    """`float32` or `bfloat16`, the same on every process; `auto` is bfloat16 where this machine computes faster in it.

    Args:
        dtype: `float32`, `bfloat16` or `auto`.
        width: of the model's hidden states, on which it depends whether bfloat16 pays.
    """
    if dtype != "auto":
        return dtype
    state = this_process()
    answer = ["bfloat16" if bfloat16_helps(width, state.device) else "float32"]
    if state.num_processes > 1:
        broadcast_object_list(answer)
    return answer[0]


def bfloat16_helps(width: int, device: torch.device) -> bool:
    """Whether training goes faster in bfloat16: known of GPUs, tried out on processors, where many only emulate it."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    with torch.random.fork_rng():
        layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).to(device)
        inputs = torch.randn(ROWS, width, device=device)
    # In turns, so that both meet the same machine; the least time is the one that nothing else disturbed.
    turns = [[_seconds(layers, inputs, enabled) for enabled in (True, False)] for _ in range(REPEATS)]
    half, full = (min(times) for times in zip(*turns, strict=True))
    return half < WORTH * full


def _seconds(layers: nn.Module, inputs: torch.Tensor, half: bool) -> float:
    """The time of a forward and backward pass."""
    started = time.perf_counter()
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=half):
        outputs = layers(inputs)
    outputs.float().sum().backward()
    return time.perf_counter() - started
