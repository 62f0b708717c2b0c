"""Count kernels and host syncs of a piece of code, on any device, through PyTorch's dispatcher.

A host sync is an operation for which Python waits, such as `.item()`, `.tolist()`, `bool(tensor)`, an index by a bool
mask, `torch.tensor(…, device=…)` or `x[index] = 1.0`. On a CPU it costs nothing; on a GPU the queue of kernels runs
empty. The counter sees the same code on both. A kernel is an operation that writes memory, views left out: before
fusion, one launch or more on a GPU.
"""

from __future__ import annotations

import traceback
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

TO_PYTHON = {"item", "tolist", "numpy", "cpu", "is_nonzero"}
TO_PYTHON |= {"__bool__", "__int__", "__float__", "__index__", "__array__"}
"""Tensor methods that copy numbers to Python."""
SIZED_BY_VALUES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "equal"}
"""Operations with a data-dependent output size or result."""
WITHOUT_KERNEL = {"detach", "alias", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


class Counts:
    """A context that counts `kernels` and `syncs`, each by name; syncs are named by operation and source line."""

    def __init__(self) -> None:
        self.kernels: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self._modes = (_Functions(self), _Operations(self))
        self._inside = False

    def __enter__(self) -> Counts:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def sync(self, name: str) -> None:
        """Record a sync at the nearest Python line outside PyTorch."""
        frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and __file__ != f.filename]
        where = frames[-1]
        self.syncs[f"{name} at {'/'.join(where.filename.split('/')[-3:])}:{where.lineno}"] += 1


class _Functions(TorchFunctionMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name == "tensor" and (kwargs or {}).get("device") is not None:  # Python waits for the copy to the GPU
            self.counts.sync(name)
        if name == "__setitem__" and _by_tensor(args[1]) and not isinstance(args[2], Tensor):
            self.counts.sync("a number put by index")  # a CPU tensor is made of it, and copied
        if name in TO_PYTHON and args and isinstance(args[0], Tensor):
            self.counts.sync(name)
            self.counts._inside = True  # nested operations belong to this sync
            try:
                return function(*args, **(kwargs or {}))
            finally:
                self.counts._inside = False
        return function(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation.overloadpacket.__name__
        if not self.counts._inside:
            if name == "_local_scalar_dense" or name in SIZED_BY_VALUES:
                self.counts.sync(name)
            elif name in ("index", "index_put", "index_put_", "_unsafe_index"):
                bools = [x for x in args[1] if isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)]
                if bools:
                    self.counts.sync(f"{name} by a mask")
        if not operation.is_view and name not in WITHOUT_KERNEL:
            self.counts.kernels[name] += 1
        return operation(*args, **(kwargs or {}))


def _by_tensor(index: Any) -> bool:
    """True if an index has a tensor in it."""
    return any(isinstance(part, Tensor) for part in (index if isinstance(index, tuple) else (index,)))
