"""The compute dtype of forward and backward passes, and the choice that `model.dtype: auto` makes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tokencredit.processes import Processes
from tokencredit.runs.folder import read_choices
from tokencredit.text.models.machine_cache import measure_once, processor

Dtype = Literal["float32", "bfloat16"]
DTYPES: dict[bool, Dtype] = {True: "bfloat16", False: "float32"}
"""By whether bfloat16 helps."""

ROWS = 256
REPEATS = 20
WORTH = 0.75
"""Largest share of float32's time at which bfloat16 is chosen: near 1, its lost digits buy nothing."""


@dataclass(frozen=True)
class Precision:
    """The compute dtype of a model's passes on a device; weights stay float32."""

    dtype: Dtype
    device: torch.device
    reason: str | None = None
    """Where the choice of `auto` comes from; None for a dtype that was asked for."""

    @property
    def half(self) -> bool:
        """True in bfloat16, where a pass with a KV cache and a pass over the whole text differ."""
        return self.dtype == "bfloat16"

    @property
    def choices(self) -> dict[str, str]:
        """The settings that were `auto`, and what they stand for."""
        return {} if self.reason is None else {"model.dtype": self.dtype}

    @property
    def notes(self) -> list[str]:
        """The choice of `auto` in words, for a run's events."""
        return [] if self.reason is None else [f"model.dtype auto: {self.dtype}, {self.reason}"]

    def autocast(self) -> torch.autocast:
        """A context for passes in this dtype."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.half)

    @contextmanager
    def no_grad(self) -> Iterator[None]:
        """A context for passes that train nothing."""
        with torch.no_grad(), self.autocast():
            yield

    def updates(self) -> AbstractContextManager[None]:
        """A context for updates, backward passes included; on a GPU in float32 the same gradient each time.

        PyTorch's fused attention kernels add up float32 gradients in any order, its plain attention does not.
        """
        exact = self.device.type == "cuda" and not self.half
        return sdpa_kernel(SDPBackend.MATH) if exact else nullcontext()


def products(model: nn.Module) -> Iterator[nn.Module]:
    """Layers that multiply by a matrix, whose weight and bias autocast rounds at each pass."""
    return (module for module in model.modules() if isinstance(module, nn.Linear | Conv1D))


def rounded(module: nn.Module, dtype: torch.dtype) -> dict[str, nn.Parameter | None]:
    """A layer's own parameters in another dtype, by name."""
    own = {name: x for name, x in module._parameters.items() if x is not None}
    return {name: nn.Parameter(x.to(dtype), requires_grad=False) for name, x in own.items()}


def round_frozen(lm: PreTrainedModel) -> None:
    """Keep the weights of products that are not trained in bfloat16, but for the projection to the vocabulary.

    Under autocast, which rounds them anyway, no result changes, and they take half the memory. Logits are of the
    weights as they are. Without autocast the model can no longer be called.
    """
    head = set(lm.get_output_embeddings().modules())  # several, where PEFT saves a copy of it
    for module in products(lm):
        if module not in head and not any(p.requires_grad for p in module.parameters(recurse=False)):
            module._parameters.update(rounded(module, torch.bfloat16))


def choose(
    dtype: Literal["float32", "bfloat16", "auto"], width: int, processes: Processes, run: str | Path | None
) -> Precision:
    """The dtype asked for, the same on every process; `auto` is bfloat16 where this machine computes faster in it.

    Args:
        dtype: `float32`, `bfloat16` or `auto`.
        width: of the model's hidden states, on which it depends whether bfloat16 pays.
        processes: the job, whose first process chooses.
        run: the run's folder, if one is given; a run that was begun there keeps its choice.

    Raises:
        ConfigError: the folder's choices cannot be read.
    """
    if dtype != "auto":
        return Precision(dtype, processes.device)
    before = None if run is None else read_choices(Path(run)).get("model.dtype")
    if before is not None:
        half, reason = before == "bfloat16", "as when this run began"
    elif processes.main:
        half, reason = choose_for_machine(width, processes.device)
    else:
        half, reason = False, "as the first process chose"
    return Precision(DTYPES[processes.first(half)], processes.device, reason)


def choose_for_machine(width: int, device: torch.device) -> tuple[bool, str]:
    """True if bfloat16 helps on this machine, and where that comes from: processors are timed once, then remembered."""
    if device.type == "cuda":
        half = bfloat16_helps(width, device)
        return half, f"since this GPU {'computes in bfloat16' if half else 'only emulates bfloat16'}"
    # The number of threads is left out: a sweep changes it with --jobs, and its runs are to agree.
    key = {"processor": processor(), "device": device.type, "torch": torch.__version__, "width": width}
    dtype, origin = measure_once("dtype", key, tuple(DTYPES.values()), lambda: DTYPES[bfloat16_helps(width, device)])
    return dtype == "bfloat16", origin


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
