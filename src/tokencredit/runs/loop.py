"""A run from its first iteration, or from where it was cut short, to its end, whatever ends it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from tokencredit.runs.errors import RunStopped
from tokencredit.runs.record import RunRecord
from tokencredit.runs.signals import Signals

State = dict[str, Any]
"""A tree of dicts, lists, numbers, texts, None and tensors, as `checkpoint.write_state` takes it."""


class Stopping(Protocol):
    """`learn.stopping.EarlyStopping`."""

    def update(self, *, reward: float, kl: float) -> str | None:
        """Take in one iteration; what stops the run, or None."""


class Trainer(Protocol):
    """What a run needs of the world that it trains in."""

    args: Any
    record: RunRecord
    stopping: Stopping

    def iteration(self, number: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Do one iteration; its metrics and samples."""

    def state(self) -> tuple[State, State]:
        """Everything that the next iteration depends on: what all processes share, and this process's own."""

    def load(self, state: State, changed: set[str]) -> None:
        """Go on from what `state` gave, its second part under `process`; `changed` are keys with new settings."""

    def rewind(self) -> bool:
        """Go back to the beginning of the iteration that failed, if nothing was learned in it; whether it could."""

    def finish(self, stopped_by: str) -> dict[str, Any]:
        """Write what a run leaves at its end; its summary."""


def run(trainer: Trainer, *, resume: bool, reserve: int, weights: int) -> dict[str, Any]:
    """Do all iterations that are left, and return the run's summary.

    Args:
        trainer: what is run.
        resume: go on in the folder of `run.dir`, instead of beginning there.
        reserve: bytes that `finish` writes.
        weights: bytes of what is trained.

    Raises:
        ConfigError: the run cannot begin, or go on.
        RunStopped: it had to end early; what was learned is kept.
        KeyboardInterrupt: after one Ctrl-C likewise; after two nothing more is written.
    """
    args, record = trainer.args, trainer.record
    number = 0
    if resume:
        number, state, changed = record.resume(args, reserve)
        if state is not None:
            trainer.load(state, changed)
    else:
        record.begin(args, reserve, weights)
    stopped_by = None
    for metrics in record.history:
        stopped_by = _reached(trainer, metrics)
    wish = None
    try:
        with record.screen, Signals() as signals:
            while stopped_by is None and number < args.run.iterations:
                number += 1
                metrics, samples = trainer.iteration(number)
                record.iteration(metrics, samples)
                wish = signals.wish(record.accelerator)
                stopped_by = _reached(trainer, metrics) or ("interrupt" if wish == "SIGINT" else wish)
                if wish or record.due(number, last=stopped_by is not None):
                    record.checkpoint(number, *trainer.state())
    except KeyboardInterrupt:
        record.screen.say(f"stopped at once; {record.how_to_resume()}")
        raise
    except RunStopped as error:
        if trainer.rewind():
            record.checkpoint(number - 1, *trainer.state())
        trainer.finish(error.stopped_by)
        raise RunStopped(f"stopped in iteration {number}: {error}; {record.how_to_resume()}") from error
    except OSError as error:
        trainer.finish("a file that could not be written")
        raise RunStopped(f"stopped in iteration {number}: {error.strerror} ({error.filename})") from error
    summary = trainer.finish(stopped_by or "iterations")
    if wish:
        record.screen.say(record.how_to_resume())
    if wish == "SIGINT":
        raise KeyboardInterrupt
    return summary


def _reached(trainer: Trainer, metrics: Mapping[str, float]) -> str | None:
    """What stops the run after an iteration with these metrics, by its key."""
    key = trainer.stopping.update(reward=metrics[trainer.record.headline], kl=metrics.get("kl", 0.0))
    return None if key is None else f"stop.{key}"
