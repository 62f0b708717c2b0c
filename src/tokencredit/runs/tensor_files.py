"""Tensors in a folder of safetensors files, written by all processes at once, and read again in any layout.

PyTorch's distributed checkpoints with their Hugging Face storage: each process writes its parts of sharded tensors, and
some of the others, into a file of its own. The files' headers say where a part belongs. Headers are untrusted.
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tokencredit.distributed.processes import Processes

FILES, SMALLEST_FILE, LARGEST_FILE = 64, 2**26, 2**30
"""A checkpoint has about so many files of tensors, each of so many bytes of all processes together: PyTorch holds a
whole file in memory, twice, before it writes it."""
Shape = tuple[int, ...]


class DamagedTensors(ValueError):
    """Files that do not hold the tensors; the message names the tensor or the problem."""


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], processes: Processes) -> None:
    """Write tensors by name into a new folder; all processes call it alike, and raise the `OSError` of any."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    if not tensors:
        return
    writer = HuggingFaceStorageWriter(str(folder), file_numbers(tensors), save_distributed=True)
    try:
        with _quiet():
            save(dict(tensors), storage_writer=writer, no_dist=processes.count == 1)
    except CheckpointException as error:  # not an `Exception`
        rank, failure = _first_failure(error.failures)
        if isinstance(failure, OSError):
            raise failure from error
        raise OSError(errno.EIO, f"process {rank}: {type(failure).__name__}: {failure}", str(folder)) from error


def file_numbers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The number, from 1, of each tensor's file; each process writes files of these numbers."""
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    limit = min(max(total // FILES, SMALLEST_FILE), LARGEST_FILE)
    numbers, number, size = {}, 1, 0
    for name, tensor in tensors.items():
        more = tensor.numel() * tensor.element_size()
        if size and size + more > limit:
            number, size = number + 1, 0
        size += more
        numbers[name] = number
    return numbers


def read_tensors(
    folder: Path, shapes: Mapping[str, Shape], sharded: Mapping[str, Tensor], processes: Processes
) -> dict[str, Tensor]:
    """Read tensors of these names and shapes from `write_tensors`' folder; all processes call it with the same names.

    `sharded` are sharded tensors, by a part between slashes of the names that are read like them. All others are whole.

    Raises:
        DamagedTensors: a tensor, or part of it, is missing, or its parts do not fit together.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    if not shapes:
        return {}
    reader = HuggingFaceStorageReader(str(folder))
    try:
        with processes.agreed(DamagedTensors), _refused():
            stored = reader.read_metadata().state_dict_metadata
            dtypes = {name: _checked(name, shape, stored) for name, shape in shapes.items()}
            tensors = {name: _empty(name, shapes[name], dtype, sharded) for name, dtype in dtypes.items()}
        with _quiet():
            load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=processes.count == 1)
    except CheckpointException as error:
        raise DamagedTensors(str(_first_failure(error.failures)[1])) from error
    return tensors


def _first_failure(failures: Mapping[int, tuple[BaseException, Any]]) -> tuple[int, Exception]:
    """The first failure with its rank; raises what is no `Exception`, such as Ctrl-C, which PyTorch wraps too."""
    for failure, _ in failures.values():
        if not isinstance(failure, Exception):
            raise failure
    return next((rank, failure) for rank, (failure, _) in failures.items() if isinstance(failure, Exception))


def _checked(name: str, shape: Shape, stored: Mapping[str, Any]) -> torch.dtype:
    """The dtype of a stored tensor, after a check that its parts fill this shape, each row once."""
    if name not in stored:
        raise DamagedTensors(f"the tensor {name!r} is missing")
    parts = sorted((tuple(part.offsets), tuple(part.sizes)) for part in stored[name].chunks)
    row = 0
    for offsets, sizes in parts:
        # Parts are of whole rows, since modules are sharded along their first axis.
        if offsets != (row, *[0] * (len(shape) - 1))[: len(shape)] or sizes[1:] != shape[1:]:
            raise DamagedTensors(f"the tensor {name!r} has a part that overlaps others, leaves a gap or does not fit")
        row += sizes[0] if sizes else 1
    if row != (shape[0] if shape else 1):
        raise DamagedTensors(f"the tensor {name!r} has {row} rows, not {shape[0] if shape else 1}")
    dtype: torch.dtype = stored[name].properties.dtype
    return dtype


def _empty(name: str, shape: Shape, dtype: torch.dtype, sharded: Mapping[str, Tensor]) -> Tensor:
    """A tensor to read into, sharded like the tensor of its name if it has its shape."""
    like = next((sharded[part] for part in name.split("/") if part in sharded), None)
    if isinstance(like, DTensor) and tuple(like.shape) == shape:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype)


@contextmanager
def _refused() -> Iterator[None]:
    """A context in which any error is raised as `DamagedTensors`, since a foreign header may hold anything."""
    try:
        yield
    except Exception as error:
        raise (
            error if isinstance(error, DamagedTensors) else DamagedTensors(f"{type(error).__name__}: {error}")
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """A context without the warning that a single process writes or reads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
