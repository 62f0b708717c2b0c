"""Count the memory of live tensors, by part, while operations run."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokencredit.tools.plan.work import Work

LARGE = 2**25
"""Bytes from which the C library (glibc) takes a tensor's memory from the kernel, and returns it when it is freed. It
keeps the memory of smaller ones for tensors to come, so their highest sum stays resident."""


class LiveMemory(TorchDispatchMode):
    """Sums the storages that operations in this context make, by part, while they live."""

    answers: ClassVar[dict[Any, Any]] = {}
    """Functions for the operations that fake tensors do not know, or whose result depends on numbers."""

    def __init__(self, work: Work, weights: set[int], projection: torch.Size):
        """Leave out the storages of weights; `projection` is the shape of the vocabulary projection."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.work, self.weights, self.projection = work, weights, projection
        self.storages: dict[int, tuple[int, str]] = {}
        self.now = defaultdict[str, float](float)
        self.reset()

    def reset(self) -> None:
        """Forget the peaks."""
        self.peak = self.now.copy()
        self.sizes, self.peaks = [0.0, 0.0], [0.0, 0.0]
        for size, _ in self.storages.values():
            self._resize(size, 1)

    @property
    def retained(self) -> float:
        """Bytes that the C library holds beyond the peak: the highest sums of small and large tensors may not meet."""
        return sum(self.peaks) - sum(self.peak.values())

    def label(self, tensor: Tensor, part: str) -> None:
        """Count a tensor's storage as another part from now on."""
        key = tensor.untyped_storage()._cdata
        if key in self.storages:
            size, before = self.storages[key]
            self.storages[key] = size, part
            self.now[before] -= size
            self.now[part] += size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count the storages that it makes."""
        kwargs = kwargs or {}
        result = self.answers[func](self, *args, **kwargs) if func in self.answers else NotImplemented
        if result is NotImplemented:
            result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor, self._part(func, args, tensor))
        return result

    def _part(self, func: Any, args: Any, tensor: Tensor) -> str:
        if func is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self.weights:
            return "bfloat16 copies"
        if self.projection[0] not in tensor.shape:
            return "activations"
        return "gradients" if tensor.shape == self.projection else "logits"

    def _add(self, tensor: Tensor, part: str) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.storages or key in self.weights:
            return
        self.storages[key] = size, part
        self.now[part] += size
        self._resize(size, 1)
        if sum(self.now.values()) > sum(self.peak.values()):
            self.peak = self.now.copy()
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        size, part = self.storages.pop(key)
        self.now[part] -= size
        self._resize(size, -1)

    def _resize(self, size: int, sign: int) -> None:
        large = size >= LARGE
        self.sizes[large] += sign * size
        self.peaks[large] = max(self.peaks[large], self.sizes[large])


def _value(live: LiveMemory, x: Tensor) -> Any:
    """The number in a fake tensor: a mask has padding or not, a count is 1."""
    return not live.work.padded if x.dtype == torch.bool else 1


def _grouped_product(_live: LiveMemory, a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Any:
    """The product of a mixture's experts in float32, of which PyTorch knows the shape in bfloat16 alone."""
    if a.dtype == torch.bfloat16 or offs is None:
        return NotImplemented
    groups = (len(offs),) if b.dim() == 2 else ()
    return a.new_empty(*groups, a.shape[-2], b.shape[-1])


def _member_rows(live: LiveMemory, x: Tensor) -> Tensor:
    """Indices of the rows of one of an ensemble's members, of which each has as many."""
    return x.new_empty(-(-len(x) // live.work.config.critic.members), 1, dtype=torch.long)


class FakeMemory(LiveMemory):
    """The same for fake tensors, which have no numbers."""

    answers: ClassVar[dict[Any, Any]] = {
        torch.ops.aten._local_scalar_dense.default: _value,
        torch.ops.aten._grouped_mm.default: _grouped_product,
        torch.ops.aten.nonzero.default: _member_rows,
    }
