"""Distributed training: this process's device and rank, collective operations, and errors of memory and connections."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import copy
from pathlib import Path
from typing import Any, ClassVar, cast
from weakref import WeakSet

import torch
from accelerate import PartialState
from accelerate.utils import gather, pad_across_processes, parse_flag_from_env, reduce
from torch import Tensor, nn
from torch.distributed import DistError
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tokencredit.distributed.heartbeats import Heartbeats
from tokencredit.distributed.job import Job, launched
from tokencredit.distributed.sharding import sharded_in
from tokencredit.errors import ConfigError, OutOfMemory, RunStopped

M_MMAP_THRESHOLD = -3
"""The parameter of glibc's mallopt(3)."""
RETURNED = 2**19
"""Bytes from which freed blocks are returned to the system, with `return_freed_memory`."""


class Processes:
    """This process and the others of its job, as started by any PyTorch launcher; alone, a job of one.

    Built on Accelerate's `PartialState`, which holds ranks and devices but no dtypes, so other runs in the same Python
    process are unaffected. `main` is true in the one process that writes files and the screen.
    """

    job: ClassVar[Job | None] = None
    """The job that a launcher started, once joined with a timeout; as `PartialState`, one per Python process."""
    _heartbeats: ClassVar[Heartbeats | None] = None
    _wrapped: ClassVar[WeakSet[DistributedDataParallel]] = WeakSet()

    def __init__(self, timeout: float | None = None) -> None:
        """Join the job, with `run.timeout` for processes that train; `ACCELERATE_USE_CPU=true` keeps it off GPUs.

        Raises:
            ConfigError: Accelerate cannot join the processes of the job on this device.
            ProcessLost: a process of the job did not start in time.
        """
        if timeout is not None and Processes.job is None and launched():
            Processes.job = Job(timeout)
        group = {} if Processes.job is None else Processes.job.group()
        # Without this, PartialState makes each process of a job on CPUs a job of its own.
        on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or (launched() and not torch.accelerator.is_available())
        self._state = PartialState(cpu=on_cpu, **group)
        self.device: torch.device = self._state.device
        self.count: int = self._state.num_processes
        if launched() and self.count != int(os.environ["WORLD_SIZE"]):
            problem = f"a launcher started {os.environ['WORLD_SIZE']} processes (WORLD_SIZE), not joined on"
            raise ConfigError(f"{problem} {self.device.type}; set ACCELERATE_USE_CPU=true, or start one process")
        self.rank: int = self._state.process_index
        self.main: bool = self._state.is_main_process

    def hardware(self) -> dict[str, Any]:
        """Device, CPU threads and number of processes, for a run's record."""
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        return {"device": gpu, "threads": torch.get_num_threads(), "processes": self.count}

    def sum(self, tensor: Tensor) -> Tensor:
        """The elementwise sum of a tensor over all processes, on each of them."""
        return tensor if self.count == 1 else cast(Tensor, reduce(tensor, "sum"))

    def gather(self, tensor: Tensor) -> Tensor:
        """Tensors of all processes, concatenated along the first axis; shorter ones are padded with −1."""
        return tensor if self.count == 1 else cast(Tensor, gather(pad_across_processes(tensor, pad_index=-1)))

    def share(self, count: int) -> slice:
        """This process's part of `count` rows that all processes share; the parts' sizes differ by at most one."""
        least, more = divmod(count, self.count)
        first = self.rank * least + min(self.rank, more)
        return slice(first, first + least + (self.rank < more))

    def gather_rows(self, tensor: Tensor, shares: Sequence[int]) -> Tensor:
        """Rows of all processes, those of the first one first; `shares` are their numbers of rows, which may differ."""
        longest = max(shares)
        if self.count == 1 or longest == 0:
            return tensor
        missing = tensor.new_zeros(longest - len(tensor), *tensor.shape[1:])
        gathered = cast(Tensor, gather(torch.cat([tensor, missing]))).split(longest)
        return torch.cat([part[:share] for part, share in zip(gathered, shares, strict=True)])

    def exchange_rows(self, tensor: Tensor, wanted: Sequence[Tensor], shares: Sequence[int]) -> Tensor:
        """This process's rows after an exchange of rows among all processes, which have `shares` rows each now.

        `wanted` are the rows that each process receives, in order, by their numbers in the result of `gather_rows`.
        """
        ends = torch.tensor(shares, device=tensor.device).cumsum(0)
        owners = [torch.bucketize(rows, ends, right=True) for rows in wanted]
        first = int(ends[self.rank]) - shares[self.rank]
        sent = [rows[owner == self.rank] - first for rows, owner in zip(wanted, owners, strict=True)]
        mine = owners[self.rank]
        received = tensor.new_empty(len(mine), *tensor.shape[1:])
        counts = torch.bincount(mine, minlength=self.count).tolist()
        sizes = [len(rows) for rows in sent]
        torch.distributed.all_to_all_single(received, tensor[torch.cat(sent)].contiguous(), counts, sizes)
        exchanged = torch.empty_like(received)
        exchanged[mine.argsort(stable=True)] = received
        return exchanged

    def texts(self, text: str) -> list[str]:
        """The texts of all processes, in each of them, by rank."""
        if self.count == 1:
            return [text]
        own = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.device)
        sizes = self.gather(torch.tensor([len(own)], device=self.device)).tolist()
        parts = self.gather_rows(own, sizes).split(sizes)
        return [bytes(part.tolist()).decode() for part in parts]

    @contextmanager
    def agreed(self, *kinds: type[Exception]) -> Iterator[None]:
        """A context at whose end all processes raise an error of the same kind if one of them raised.

        `kinds` are the errors that are sent to the others, ordered by severity. With `MemoryError` every out-of-memory
        error is raised as one; not for a context with collective operations, some of which it may leave to the others.
        """
        error: Exception | None = None
        try:
            yield
        except kinds as raised:
            error = raised
        except RuntimeError as raised:
            if MemoryError not in kinds or not out_of_memory(raised):
                raise
            error = MemoryError(str(raised))
            error.__cause__ = raised
        own = next((number for number, kind in enumerate(kinds) if isinstance(error, kind)), None)
        texts = self.texts("" if error is None else json.dumps([own, *_described(error)]))
        errors = {rank: json.loads(text) for rank, text in enumerate(texts) if text}
        if not errors:
            return
        worst = max(number for number, *_ in errors.values())
        if error is not None and own == worst:
            raise error
        rank = next(rank for rank, (number, *_) in errors.items() if number == worst)
        _, message, code, file, about = errors[rank]
        kind, message = kinds[worst], f"process {rank}: {message}"
        sent: Exception = OSError(code, message, file) if kind is OSError else kind(message)
        for name, value in about.items():
            setattr(sent, name, value)
        raise sent

    def max(self, tensor: Tensor) -> Tensor:
        """The elementwise maximum of a tensor over all processes."""
        return tensor if self.count == 1 else cast(Tensor, gather(tensor.unsqueeze(0))).amax(0)

    def most(self, number: int) -> int:
        """The largest of a number of each process."""
        return number if self.count == 1 else int(self.max(torch.tensor(number, device=self.device)))

    def all(self, true: bool) -> bool:
        """True if it is true in every process."""
        return true if self.count == 1 else not bool(self.max(torch.tensor(not true, device=self.device)))

    def any(self, true: bool) -> bool:
        """True if it is true in some process."""
        return not self.all(not true)

    def first(self, true: bool) -> bool:
        """The main process's value, in every process."""
        return not self.all(not true or self.rank != 0)

    def restarted(self) -> bool:
        """True if the job ran before, as far as its launcher remembers."""
        return Processes.job is not None and Processes.job.starts > 1

    def meet(self, place: str) -> bool:
        """True if all processes come to this place within some seconds: after an error they may be anywhere."""
        return Processes.job is None or Processes.job.meet(place)

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

    @contextmanager
    def watched(self, note: Callable[[str], None] | None = None) -> Iterator[None]:
        """A context in which this process ends if another one hangs; within another one it only replaces `note`.

        `note` is then called, in another thread, with the reason.
        """
        if Processes.job is None or Processes.job.count == 1:
            yield
            return
        outer = Processes._heartbeats
        heartbeats = Processes._heartbeats = outer or Heartbeats(Processes.job)
        before, heartbeats.note = heartbeats.note, note
        try:
            yield
        finally:
            heartbeats.note, Processes._heartbeats = before, outer
            if outer is None:
                heartbeats.leave()

    def close(self) -> None:
        """Leave the job; for commands, at their end. Wrapped models cannot train any more."""
        # A reducer that drops the process group last holds Python's lock, for which the group's threads may wait.
        for model in Processes._wrapped:
            for name in ("process_group", "reducer", "logger"):
                vars(model).pop(name, None)
        self._state.destroy_process_group()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model for forward passes with gradients: gradients are averaged over processes.

        A model with sharded modules stays as it is: its passes average sharded gradients, `average_gradients` the rest.
        """
        if self.count == 1 or sharded_in(model):
            return model
        on_gpu = self.device.type != "cpu"
        wrapped = DistributedDataParallel(model, device_ids=[self.device.index] if on_gpu else None)
        Processes._wrapped.add(wrapped)
        return wrapped

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """A context in which backward passes of a wrapped model do not synchronize gradients."""
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    def average_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Average gradients over all processes, after backward passes through an unwrapped model.

        Gradients of sharded parameters, which are averaged already, stay as they are.
        """
        for parameter in parameters if self.count > 1 else ():
            if parameter.grad is not None and not isinstance(parameter.grad, DTensor):
                parameter.grad = self.sum(parameter.grad) / self.count

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss that is this process's part of a sum; processes average, so scale up."""
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


@contextmanager
def restored() -> Iterator[None]:
    """A context for user code, after which gradients, default device, dtype and working directory are as before.

    The last two belong to the whole process: they are restored in the main thread only, since other threads overlap.
    """
    gradients, dtype, device = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device()
    folder = None
    with suppress(FileNotFoundError):  # it is gone
        folder = Path.cwd()
    try:
        yield
    finally:
        torch.set_grad_enabled(gradients)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)  # a device slows down every call
        if threading.current_thread() is threading.main_thread():
            torch.set_default_dtype(dtype)
            if folder is not None:
                with suppress(OSError):  # it is gone
                    os.chdir(folder)


def return_freed_memory() -> None:
    """Let the C library return freed blocks of `RETURNED` bytes or more to the system, in the whole process.

    glibc raises that limit to 32 MB once larger blocks are freed. The gathered weights of sharded models, some MB per
    layer, then leave its heap fragmented, at 1.2 times the peak. Without glibc, and if the user has set
    MALLOC_MMAP_THRESHOLD_, nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt(M_MMAP_THRESHOLD, RETURNED)


def out_of_memory(error: BaseException) -> bool:
    """True for an out-of-memory error; on a CPU PyTorch has no exception type for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


@contextmanager
def lack_of_memory(message: str) -> Iterator[None]:
    """A context that raises an out-of-memory error as `OutOfMemory` with this message."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise OutOfMemory(message) from error


def _described(error: Exception) -> tuple[str, int, str | None, dict[str, str]]:
    """Message of an error; for an `OSError` also its number and its file, for a `RunStopped` what it says by names."""
    if isinstance(error, OSError):
        return error.strerror or str(error), error.errno or errno.EIO, error.filename and str(error.filename), {}
    about = {name: getattr(error, name) for name in ("stopped_by", "parts") if isinstance(error, RunStopped)}
    return str(error) or type(error).__name__, 0, None, about


def connection_lost(error: BaseException) -> bool:
    """True for the error of a collective operation in which another process ended or cannot be reached."""
    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))
