"""Stages of an iteration: timing, callbacks, and advice for out-of-memory errors."""

from __future__ import annotations

import time
from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from numbers import Real
from typing import Any

import torch

from tokencredit.distributed.processes import Processes, out_of_memory
from tokencredit.errors import OutOfMemory, RunStopped
from tokencredit.learn.experience import Experience
from tokencredit.learn.update import NonFiniteUpdate
from tokencredit.runs.recorder import RunRecord
from tokencredit.runs.untrusted import visible
from tokencredit.text.batch import Batch

MEMORY_ADVICE = {
    "rollout": "lower rollout.batch_size or rollout.max_new_tokens",
    "reward": "lower the batch_size of the reward's terms",
    "audit": "lower rollout.batch_size, the number of texts sampled at once, or audit.continuations",
    "continuations": "lower rollout.batch_size, the number of texts sampled at once, or critic.continuations",
    "evaluation": "lower eval.samples or eval.max_new_tokens",
}
"""Advice shown when a stage runs out of memory."""


class Stages:
    """Runs and times a trainer's stages, and calls its callbacks.

    Attributes:
        seconds: duration of each stage; the trainer sets a new dict for each iteration.
    """

    def __init__(self, trainer: Any, callbacks: Sequence[Any]):
        """Store the callbacks, whose `before_STAGE(trainer)` and `after_STAGE(trainer, **results)` are called."""
        self.trainer, self.callbacks = trainer, list(callbacks)
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[dict[str, Any]]:
        """A context around a stage, with a dict for the stage's results.

        Raises:
            OutOfMemory: the stage ran out of memory.
            RunStopped: a callback set a metric to something other than a number.
        """
        self._call(f"before_{name}")
        results: dict[str, Any] = {}
        started = time.perf_counter()
        try:
            yield results
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            advice = MEMORY_ADVICE.get(name, "lower ppo.micro_batch_tokens, or set model.gradient_checkpointing")
            raise OutOfMemory(f"out of memory in its {name} stage; {advice}") from error
        self.trainer.pipeline.processes.settle()
        self.seconds[name] = time.perf_counter() - started
        self._call(f"after_{name}", **results)
        for metric, value in results.get("metrics", {}).items():
            if not isinstance(value, Real):
                raise RunStopped(f"a callback set metrics[{metric!r}] to {visible(repr(value))}; it must be a number")

    def _call(self, event: str, **results: Any) -> None:
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                method(self.trainer, **results)


def count_step(
    record: RunRecord, number: int, scored: Batch, minibatch: Experience, error: NonFiniteUpdate | None
) -> None:
    """Count skipped optimizer steps in a row, and save their minibatches.

    Args:
        record: the run's recorder.
        number: the iteration; 0 before the first.
        scored: the batch of the update.
        minibatch: the step's part of the batch.
        error: the reason why the step was skipped; None if it was taken.

    Raises:
        TooManyBadSteps: this is the `MAX_BAD_STEPS`-th skipped step in a row.
    """
    if error is None:
        record.bad_in_a_row = 0
        return
    text = None if error.row is None else text_of_row(scored, error.row, record.processes)
    reason = str(error) if text is None else f"{error.term} of the text {text!r} is not finite"
    record.bad_step(number, reason, minibatch.tensors(), text=text)


def text_of_row(scored: Batch, row: int, processes: Processes) -> str:
    """The text of a row, counted over all processes, in each of them; collective."""
    texts = scored.texts()
    ends = list(accumulate(processes.gather(torch.tensor([len(texts)], device=processes.device)).tolist()))
    owner = bisect(ends, row)
    return processes.texts(texts[row - (ends[owner] - len(texts))] if owner == processes.rank else "")[owner]
