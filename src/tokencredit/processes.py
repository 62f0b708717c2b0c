"""Distributed training: this process's device and rank, collective operations, and out-of-memory errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Any, cast

import torch
from accelerate import PartialState
from accelerate.utils import gather, pad_across_processes, parse_flag_from_env, reduce
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Processes:
    """This process and the others of its job, as started by any PyTorch launcher; alone, a job of one.

    Built on Accelerate's `PartialState`, which holds ranks and devices but no dtypes, so other runs in the same Python
    process are unaffected.

    Attributes:
        device: of this process.
        count: processes in the job.
        rank: of this process, from 0.
        main: true in the one process that writes files and the screen.
    """

    def __init__(self) -> None:
        """Join the job; `ACCELERATE_USE_CPU=true` keeps it off GPUs."""
        self._state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
        self.device: torch.device = self._state.device
        self.count: int = self._state.num_processes
        self.rank: int = self._state.process_index
        self.main: bool = self._state.is_main_process

    def sum(self, tensor: Tensor) -> Tensor:
        """The elementwise sum of a tensor over all processes, on each of them."""
        return tensor if self.count == 1 else cast(Tensor, reduce(tensor, "sum"))

    def gather(self, tensor: Tensor) -> Tensor:
        """Tensors of all processes, concatenated along the first axis; shorter ones are padded with −1."""
        return tensor if self.count == 1 else cast(Tensor, gather(pad_across_processes(tensor, pad_index=-1)))

    def max(self, tensor: Tensor) -> Tensor:
        """The elementwise maximum of a tensor over all processes."""
        return tensor if self.count == 1 else cast(Tensor, gather(tensor.unsqueeze(0))).amax(0)

    def all(self, true: bool) -> bool:
        """True if it is true in every process."""
        return true if self.count == 1 else not bool(self.max(torch.tensor(not true, device=self.device)))

    def first(self, true: bool) -> bool:
        """The main process's value, in every process."""
        return not self.all(not true or self.rank != 0)

    def alone(self) -> Processes:
        """This process as a job of one, for work whose amount differs between processes."""
        single = copy(self)
        single.count, single.rank, single.main = 1, 0, True
        return single

    def wait(self) -> None:
        """Wait for all processes."""
        self._state.wait_for_everyone()

    def settle(self) -> None:
        """Wait until the device has finished, so that a clock measures its time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Leave the job; for commands, at their end."""
        self._state.destroy_process_group()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model for forward passes with gradients: gradients are averaged over processes."""
        if self.count == 1:
            return model
        on_gpu = self.device.type != "cpu"
        return DistributedDataParallel(model, device_ids=[self.device.index] if on_gpu else None)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A context in which backward passes of a wrapped model do not synchronize gradients."""
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Sum gradients over all processes, after backward passes through an unwrapped model."""
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = self.sum(parameter.grad)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss that is this process's part of a sum; wrapped models average, so scale up."""
        (loss if self.count == 1 else loss * self.count).backward()


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Limit PyTorch to this many threads within the context; None leaves their number."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def out_of_memory(error: BaseException) -> bool:
    """True for an out-of-memory error; on a CPU PyTorch has no exception type for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
