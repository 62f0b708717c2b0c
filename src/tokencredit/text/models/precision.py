"""The compute dtype of forward and backward passes, and its choice by `model.dtype: auto`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tokencredit.distributed.processes import Processes
from tokencredit.runs.folder import read_choices

Dtype = Literal["float32", "bfloat16"]
CPU_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")
"""PyTorch's names of instruction sets with bfloat16 products: two of x86, two of ARM."""


@dataclass(frozen=True)
class Precision:
    """Compute dtype of forward and backward passes on a device; trained weights stay float32."""

    dtype: Dtype
    device: torch.device
    reason: str | None = None
    """The reason for the choice of `auto`; None for a configured dtype."""

    @property
    def bfloat16(self) -> bool:
        """True for bfloat16, in which decoding with a KV cache and a full forward pass differ by rounding."""
        return self.dtype == "bfloat16"

    @property
    def choices(self) -> dict[str, Any]:
        """Resolved `auto` settings."""
        return {} if self.reason is None else {"model.dtype": self.dtype}

    @property
    def notes(self) -> list[str]:
        """Lines for a run's events about resolved `auto` settings."""
        return [] if self.reason is None else [f"model.dtype auto: {self.dtype}, {self.reason}"]

    def autocast(self) -> torch.autocast:
        """A context for forward passes in this dtype."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16)

    @contextmanager
    def no_grad(self) -> Iterator[None]:
        """A context for forward passes in this dtype without gradients."""
        with torch.no_grad(), self.autocast():
            yield

    def updates(self) -> AbstractContextManager[None]:
        """A context for updates, backward passes included; deterministic on a GPU in float32.

        PyTorch's fused attention kernels sum float32 gradients in any order; its math attention does not.
        """
        exact = self.device.type == "cuda" and not self.bfloat16
        return sdpa_kernel(SDPBackend.MATH) if exact else nullcontext()


def matrix_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Layers with a matrix product, whose weight and bias autocast rounds in every forward pass."""
    return (module for module in model.modules() if isinstance(module, nn.Linear | Conv1D))


def rounded(module: nn.Module, dtype: torch.dtype) -> dict[str, nn.Parameter | None]:
    """Copies of a layer's own parameters in another dtype, by name."""
    parameters = {name: x for name, x in module._parameters.items() if x is not None}
    return {name: nn.Parameter(x.to(dtype), requires_grad=False) for name, x in parameters.items()}


def round_frozen(lm: PreTrainedModel) -> None:
    """Store frozen matrix weights in bfloat16, except for the vocabulary projection.

    Autocast rounds them anyway, so no result changes and they take half the memory. The model can then only be called
    under autocast.
    """
    head = set(lm.get_output_embeddings().modules())  # several modules if PEFT wraps it
    for module in matrix_layers(lm):
        if module not in head and not any(p.requires_grad for p in module.parameters(recurse=False)):
            module._parameters.update(rounded(module, torch.bfloat16))


def choose_precision(
    dtype: Literal["float32", "bfloat16", "auto"], processes: Processes, run: str | Path | None
) -> Precision:
    """The configured precision, the same on every process; `auto` is bfloat16 where the device computes in it.

    The first process chooses; a resumed run, whose folder is `run`, keeps its choice.

    Raises:
        ConfigError: the folder's choices cannot be read.
    """
    if dtype != "auto":
        return Precision(dtype, processes.device)
    before = None if run is None else read_choices(Path(run)).get("model.dtype")
    if before is not None:
        half, reason = before == "bfloat16", "as when this run began"
    elif processes.main:
        half, reason = choose_for_device(processes.device)
    else:
        half, reason = False, "as the first process chose"
    return Precision("bfloat16" if processes.first(half) else "float32", processes.device, reason)


def choose_for_device(device: torch.device) -> tuple[bool, str]:
    """True if a device has bfloat16 arithmetic, rather than emulating it, and the reason as text."""
    if device.type == "cuda":
        half = torch.cuda.is_bf16_supported(including_emulation=False)
        return half, f"since this GPU {'computes in bfloat16' if half else 'only emulates bfloat16'}"
    if device.type != "cpu":
        return False, f"since bfloat16 is untested on {device.type}"
    capabilities = torch.cpu.get_capabilities()
    name = next((name for name in CPU_INSTRUCTIONS if capabilities.get(name)), None)
    if name is None:
        return False, "since this CPU has no bfloat16 instructions"
    return True, f"since this CPU has bfloat16 instructions ({name})"
