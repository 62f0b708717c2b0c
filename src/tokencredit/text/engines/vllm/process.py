"""Keep vLLM's changes of the process inside vLLM: environment, RNG state, threads, process groups, output."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import distributed, nn

from tokencredit.distributed.sharding import kind_of
from tokencredit.learn.rng import preserved

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine shares this process, so that tensors are passed as they are
    "VLLM_NO_USAGE_STATS": "1",
}
"""Variables that vLLM must start with."""
DEFAULTS = {"VLLM_LOGGING_LEVEL": "CRITICAL"}
"""Variables that the user may set otherwise; errors come as exceptions."""


@contextmanager
def contained() -> Iterator[None]:
    """A context in which vLLM starts; at its end the process is as before, apart from new threads and process groups.

    vLLM seeds the global generators, sets variables that child processes would inherit, replaces
    `torch.set_num_threads` and freezes the garbage collector's objects.
    """
    environment, hook, frozen = dict(os.environ), sys.excepthook, gc.get_freeze_count()
    dtype, threads, set_threads = torch.get_default_dtype(), torch.get_num_threads(), torch.set_num_threads
    with warnings.catch_warnings(action="ignore"), preserved(), _silenced():
        os.environ.update(DEFAULTS | environment | ENVIRONMENT)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(environment)
            sys.excepthook = hook
            torch.set_default_dtype(dtype)
            torch.set_num_threads = set_threads
            torch.set_num_threads(threads)
            if not frozen:
                gc.unfreeze()


@contextmanager
def classes_of(model: nn.Module) -> Iterator[None]:
    """A context at whose end the classes of a model's modules are as before.

    Models without an implementation in vLLM run in Transformers' own, whose classes vLLM patches for its compiler.
    """
    before = {kind: (kind.__bases__, dict(vars(kind))) for kind in {kind_of(module) for module in model.modules()}}
    try:
        yield
    finally:
        for kind, (bases, attributes) in before.items():
            if kind.__bases__ != bases:
                kind.__bases__ = bases
            for name, value in dict(vars(kind)).items():
                if name not in attributes:
                    delattr(kind, name)
                elif value is not attributes[name]:
                    setattr(kind, name, attributes[name])


@contextmanager
def _silenced() -> Iterator[None]:
    """A context in which nothing is printed, by C++ libraries either, unless the user set a level of vLLM's log."""
    if "VLLM_LOGGING_LEVEL" in os.environ:
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as nowhere, ExitStack() as restored:
        for number in (1, 2):
            copy = os.dup(number)
            restored.callback(os.close, copy)
            restored.callback(os.dup2, copy, number)
            os.dup2(nowhere.fileno(), number)
        try:
            yield
        finally:
            with suppress(ValueError, OSError):
                sys.stdout.flush()
                sys.stderr.flush()


@contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
    """A context for a step of sampling: vLLM draws from PyTorch's global generator, whatever the requests' seeds.

    On a CPU the ranks of tokens, which nobody reads, are not compiled: that would take 15 seconds of the first step.
    """
    devices = [] if device.type == "cpu" else [device]
    stance = "force_eager" if device.type == "cpu" else "default"
    with torch.random.fork_rng(devices), torch.compiler.set_stance(stance):
        yield


def leave_groups() -> None:
    """Destroy the process groups of a start that failed."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    with suppress(Exception):
        destroy_model_parallel()
        destroy_distributed_environment()


def shut_down(llm: Any, *, keep_group: bool, alone: bool) -> None:
    """Free an engine's memory, and the process groups that vLLM made.

    The engine's own finalizer is detached. With `keep_group` the default process group, which is the job's, stays;
    `alone` is true if no other engine of this process needs vLLM's groups.
    """
    destroy, core = distributed.destroy_process_group, llm.llm_engine.engine_core.engine_core
    environment = dict(os.environ)

    def destroy_own(group: Any = None) -> None:
        if distributed.is_initialized() and not (keep_group and group is None):
            destroy(group)

    distributed.destroy_process_group = destroy_own
    try:
        if alone:
            core.shutdown()
        else:
            core.model_executor.shutdown()
    finally:
        distributed.destroy_process_group = destroy
        os.environ.clear()
        os.environ.update(environment)
