"""Memory that runs out."""

from __future__ import annotations

import torch


def out_of_memory(error: BaseException) -> bool:
    """Whether this is what PyTorch or Python raises when memory runs out; on processors PyTorch has no type for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
