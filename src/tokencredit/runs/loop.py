"""Run loop: start or resume a run, train, save, and handle every way it may end."""

from __future__ import annotations

import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from tokencredit.audit.verdict import audit_command, remedy, significant
from tokencredit.distributed.processes import connection_lost, out_of_memory
from tokencredit.errors import ConfigError, EngineLost, RunStopped
from tokencredit.learn.controllers import EarlyStopping
from tokencredit.learn.rng import preserved
from tokencredit.runs.folder import AUDIT, saved
from tokencredit.runs.jsonl import read_metrics
from tokencredit.runs.recorder import RunRecord
from tokencredit.runs.resuming import at_iteration, changes, refuse_other_parts
from tokencredit.runs.summary import Summary
from tokencredit.runs.transcript import acted, of_iteration
from tokencredit.runs.untrusted import visible
from tokencredit.settings.parts import plain
from tokencredit.settings.training import AuditSettings, RunSettings

State = dict[str, Any]
"""A tree of dicts, lists, numbers, texts, None and tensors, for `checkpoint.write_checkpoint`."""
Iteration = tuple[dict[str, float], list[dict[str, Any]]]
"""Metrics and samples of an iteration."""
INTERRUPT = "interrupt"
"""What stopped a run, of Ctrl-C."""
AUDIT_SHARE = 0.07
"""Share of a run's time that the audit at its end plans with, so that it stays below 8 %."""
MIN_AUDITED = 20.0
"""Shortest run with an audit at its end, in seconds."""
AUDIT_ROWS = (8, 64)
"""Fewest and most completions or episodes of an audit at the end; figures of fewer say nothing."""
AT_END = AuditSettings(continuations=32, states=4)
"""Most continuations and the states of an audit at the end, within its time."""


class Trainer(ABC):
    """What the run loop needs of a trainer."""

    args: Any
    record: RunRecord
    stopping: EarlyStopping
    notes: Sequence[str] = ()
    """Events to log when a run starts."""
    progress: Iteration | None = None
    """Metrics and samples so far of the iteration, once its update is complete."""
    summary: Summary | None = None
    """The run's summary; None until it has ended."""

    def __repr__(self) -> str:
        what, folder = next(iter(self.overview()))[1], self.record.folder.path
        done = f"{len(self.record.history)} of {self.record.args.iterations} iterations"
        return f"<{type(self).__name__} {folder}: {visible(what)}, {done}>"

    @abstractmethod
    def overview(self) -> Iterable[tuple[str, str]]:
        """What the run trains, and where: pairs of a label and a text."""

    @abstractmethod
    def iteration(self, number: int) -> Iteration:
        """Run one iteration; returns its metrics and samples."""

    @abstractmethod
    def state(self) -> tuple[State, State]:
        """State of the next iteration's inputs: shared by all processes, and this process's own."""

    def sharded_tensors(self) -> Mapping[str, Tensor]:
        """The sharded parameters, by name; the state has tensors of these names."""
        return {}

    @abstractmethod
    def load(self, state: State, changed: set[str]) -> Sequence[str]:
        """Restore `state`, from `resuming.for_trainer`; `changed` are keys with new settings.

        Returns lines for the user.
        """

    def learned(self) -> Iteration | None:
        """Metrics and samples so far of the failed iteration if its update was complete, else None."""
        return self.progress

    def rewind(self) -> tuple[State, State] | None:
        """The result of `state` at the start of the failed iteration if nothing was learned in it, else None."""
        return None

    @abstractmethod
    def finish(self, stopped_by: str) -> Summary:
        """Write the run's final files; returns its summary."""


Steps = Generator[int, str | None, Summary]
"""A run in steps: yields the iterations done before the next one; what is sent, a reason, ends the run."""


def run(trainer: Trainer, *, resume: bool, reserve: int, weights: int, first: Iterable[None] = ()) -> Summary:
    """Run all remaining iterations, and return the run's summary; arguments and errors as in `steps`.

    A trainer that was interrupted goes on with its run.
    """
    interrupted = trainer.summary is not None and trainer.summary.stopped_by == INTERRUPT
    remaining = steps(trainer, resume=resume or interrupted, reserve=reserve, weights=weights, first=first)
    while True:
        try:
            next(remaining)
        except StopIteration as end:
            summary: Summary = end.value
            return summary


def steps(
    trainer: Trainer,
    *,
    resume: bool,
    reserve: int,
    weights: int,
    first: Iterable[None] = (),
    by_hand: bool = False,
) -> Steps:
    """The run's iterations, each done when the generator is advanced; the last one gives the summary.

    Args:
        trainer: the trainer.
        resume: resume the run in `run.dir` instead of starting one.
        reserve: bytes that `finish` writes.
        weights: bytes of the trained weights.
        first: work before the next iteration, in steps; a signal stops it between two.
        by_hand: the caller works between iterations, and Ctrl-C is then the caller's.

    Raises:
        ConfigError: the run cannot start or resume.
        RunStopped: it ended early, or nothing was learned; the policy is saved.
        RunComplete: the run to be resumed has done all its iterations.
        KeyboardInterrupt: after one Ctrl-C, likewise, except where Python is interactive, which gets the summary as if
            the run were at its end; after two, nothing more is written.
        Exception: a bug, here or in a library; the policy is saved, and a note says where the run stopped.
    """
    if not isinstance(resume, bool):  # Transformers' trainers take a folder here
        raise ConfigError(f"resume_from_checkpoint is {resume!r}; it must be true or false, for the run in run.dir")
    if trainer.summary is not None and trainer.summary.stopped_by != INTERRUPT:  # its rates and files are at their end
        folder = str(trainer.record.folder.path)
        raise ConfigError(
            f"this trainer's run, {folder!r}, has ended; make a new trainer to continue it, or to begin one"
        )
    try:
        with trainer.record.processes.watched(trainer.record.log):
            return (yield from _steps(trainer, resume, reserve, weights, first, by_hand))
    finally:
        trainer.record.folder.unlock()


def _steps(trainer: Trainer, resume: bool, reserve: int, weights: int, first: Iterable[None], by_hand: bool) -> Steps:
    record = trainer.record
    record.by_hand = by_hand
    # The folder, and with `resume` the newest checkpoint. Rules that have stopped the run before stop it again.
    number, stopped_by = _begin(trainer, resume, reserve, weights)
    signal, waiting = None, False
    try:
        with record.screen, record.signals as signals:
            # Work before the first iteration: the critic's pretraining.
            for _ in first:
                if signal := signals.request(record.processes):
                    stopped_by = _stopped_by(signal)
                    break
            while stopped_by is None and number < record.args.iterations:
                waiting = True
                try:
                    with signals.released() if by_hand else nullcontext():
                        stopped_by = yield number
                except KeyboardInterrupt:
                    stopped_by, signal = INTERRUPT, "SIGINT"
                waiting = False
                if stopped_by:
                    if number:
                        record.checkpoint(number, *(trainer.rewind() or trainer.state()))
                    break
                # One iteration, and its lines in metrics.jsonl and samples.jsonl.
                number += 1
                metrics, samples = trainer.iteration(number)
                record.iteration(metrics, samples)
                # All processes agree on a signal, since all must leave the loop after the same iteration.
                signal = signals.request(record.processes)
                stopped_by = _reached(trainer, metrics) or _stopped_by(signal)
                # A checkpoint every few iterations, at the best one, at the end, and before a signal ends the run.
                if signal or record.due(number, last=stopped_by is not None):
                    record.checkpoint(number, *trainer.state())
    except KeyboardInterrupt:  # a second Ctrl-C: nothing more is written
        record.screen.say(f"stopped at once; {record.how_to_resume()}")
        raise
    except (Exception, SystemExit) as error:  # user code, libraries and bugs may raise anything
        if connection_lost(error):  # nothing can be saved without the others
            raise
        stopped = _failed(trainer, number, error, waiting)
        if isinstance(error, RunStopped | OSError | ConfigError | SystemExit) or out_of_memory(error):
            raise stopped from error
        error.add_note(str(stopped))
        raise  # with its traceback
    # The trained model, the summary and the report. A run without a single step of the optimizer has failed.
    failure = record.nothing_learned() if stopped_by is None else None
    record.failed = failure is not None
    try:
        summary = trainer.finish(stopped_by or (failure.stopped_by if failure else "iterations"))
    except KeyboardInterrupt:
        record.screen.say(f"stopped at once; {record.how_to_resume()}")
        raise
    if failure:
        record.processes.wait()  # a process that ends with an error makes the launcher end the one that saves
        raise failure
    trainer.summary = summary
    if signal:
        record.screen.say(record.how_to_resume())
    if signal == "SIGINT" and not hasattr(sys, "ps1"):  # a notebook or a prompt, whose next cell needs the summary
        raise KeyboardInterrupt
    return summary


def _begin(trainer: Trainer, resume: bool, reserve: int, weights: int) -> tuple[int, str | None]:
    """Start or resume a run; returns the iterations done, and the rule that has stopped it, if any."""
    args, record = trainer.args, trainer.record
    number = 0
    if resume:
        number = record.resume(args, reserve, partial(load, trainer), trainer.sharded_tensors())
    else:
        record.begin(args, reserve, weights)
    job = record.processes.job
    if record.main and job is not None and (why := job.restarted_because()):
        record.event(why)
    record.screen.pairs(trainer.overview())
    if number == 0:
        notes = list(trainer.notes)
        # Not refused, since a run of several processes may go on in one.
        if record.processes.count == 1 and record.args.timeout != RunSettings.timeout:
            notes.append(f"run.timeout is {record.args.timeout:g}, which has no effect in one process")
        for note in notes:
            record.event(note)
    # Counters of the stopping rules are in no checkpoint: they follow from the metrics.
    stopped_by = None
    trainer.stopping.reset()
    for metrics in record.history[record.history.since :]:
        stopped_by = _reached(trainer, metrics)
    return number, stopped_by


def load(trainer: Trainer, state: State, changed: set[str]) -> Sequence[str]:
    """Restore a checkpoint; raises `ConfigError` if it does not fit, since it may come from anywhere."""
    try:
        return trainer.load(state, changed)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, ConfigError | RunStopped) or connection_lost(error):
            raise
        raise ConfigError(f"the checkpoint does not fit this run: {type(error).__name__}: {error}") from error


def read_back(trainer: Trainer, number: int | None = None) -> int:
    """Load a checkpoint of the run in the trainer's folder, by default the newest, to measure it; its iteration."""
    record, run = trainer.record, trainer.record.folder.path
    refuse_other_parts(run, record.parts)
    number, state = at_iteration(run, number, record.processes, trainer.sharded_tensors())
    load(trainer, state, set())
    for row in [*read_metrics(run / "metrics.jsonl")][:number]:
        record.history.append(row)
    return number


def as_trained(trainer: Trainer) -> None:
    """Let a trainer that has trained nothing be as one of these settings that trained in its folder, if one did."""
    run = trainer.record.folder.path
    if trainer.record.history or not (run / "config.yaml").is_file():
        return
    for key, (before, now) in changes(run / "config.yaml", plain(trainer.args)).items():
        if not key.startswith(("run.", "eval.", "stop.", "audit.")):
            raise ConfigError(f"{key} is {now!r}; the run in {str(run)!r} had {before!r}: give the same")
    with preserved():
        read_back(trainer)


def _reached(trainer: Trainer, metrics: Mapping[str, float]) -> str | None:
    """Key of the rule that stops the run after an iteration with these metrics, or None."""
    key = trainer.stopping.update(reward=metrics[trainer.record.run_kind.headline], kl=metrics.get("kl", 0.0))
    return None if key is None else f"stop.{key}"


def _stopped_by(signal: str | None) -> str | None:
    """A signal's name in the summary."""
    return INTERRUPT if signal == "SIGINT" else signal


def audit_at_end(
    record: RunRecord,
    summary: Summary,
    settings: AuditSettings,
    cost: Callable[[], float],
    audit: Callable[[int, float], dict[str, Any]],
) -> None:
    """Audit the final policy of a run that is at its end, unless it is audited already; every process calls it.

    The audit comes after everything is saved, and changes none of it. A line says why a run has none. `cost` gives the
    seconds per completion or episode of an audit, and raises `ConfigError` if the run cannot be audited; `audit` audits
    so many of them within so many seconds, and returns the contents of audit.json.
    """
    at_end = summary.stopped_by == "iterations" or summary.stopped_by.startswith("stop.")
    if not settings.at_end or not at_end or record.failed or not summary.iterations:
        return
    if settings.every and summary.iterations % settings.every == 0:  # it is audited
        _say_significant(record, record.history[-1])
        return
    least, most = AUDIT_ROWS
    command = "" if record.registers else audit_command(record.folder.path, record.config)
    try:
        # The clock of the main process decides for all.
        seconds, each = json.loads(record.processes.texts(json.dumps([summary.seconds, cost()]))[0])
        budget = AUDIT_SHARE * seconds
        rows = min(int(budget / each), most) if each > 0 else 0
        if seconds < MIN_AUDITED or rows < least:
            needed = max(MIN_AUDITED, least * each / AUDIT_SHARE)
            now = f"{command}{'()' * (command == 'trainer.audit')} now, or " if command else ""
            record.screen.say(
                f"no audit at the end: it needs a run of {needed:.0f} s, to take less than 8 % of its time; to audit "
                f"anyway: {now}train with audit.every"
            )
            return
        found = audit(rows, budget)
    except (ConfigError, RunStopped, OSError, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) and record.processes.count > 1:  # the others may not have one
            raise
        record.event(f"no audit at the end: {_reason(error) or 'it was interrupted'}")
        return
    if record.main:
        record.folder.write_json(AUDIT, found)
        record.screen.audited(found["metrics"])
        _say_significant(record, found["metrics"])
        if advice := remedy(found, command, record.history, saved(record.folder.path)):
            record.screen.say(advice)


def _say_significant(record: RunRecord, metrics: Mapping[str, float]) -> None:
    """Show how many tokens of the last samples have a significant advantage, by the metrics of the final audit."""
    error = metrics.get("audit/advantage_error", 0.0)
    if error > 0 and record.samples:
        shown = [x for sample in of_iteration(record.samples, -1) for x in acted(sample)["advantages"]]
        record.screen.say(significant(shown, error, len(record.history)))


def _failed(trainer: Trainer, number: int, error: BaseException, waiting: bool) -> RunStopped:
    """Save what a failed run has learned; returns the error that ends it, which was the caller's if `waiting`."""
    record, place = trainer.record, f"in iteration {number}" if number else "in the critic's pretraining"
    place = f"before iteration {number + 1}" if waiting else place
    # A run whose folder was moved or removed makes no new one.
    if not record.folder.path.is_dir():
        return RunStopped(
            f"stopped {place}: the run's folder {str(record.folder.path)!r} is gone, so nothing more is written; "
            "if it was moved, resume the run under its new path"
        )
    record.failed = True
    lines = [f"stopped {place}: {_reason(error)}"]
    # Checkpoints are written by all processes. If only this one failed, the others do not come.
    if record.processes.meet(f"stopped {place}"):
        lines += _save_partial(trainer, number, error, waiting)
        record.processes.wait()  # a process that ends with an error makes the launcher end the one that saves
    else:
        lines.append("other processes did not stop with this one, so nothing more is saved")
    if (newest := saved(record.folder.path)[-1:]) and newest[0] < number - 1:
        lines.append(f"the newest checkpoint is of iteration {newest[0]}")
    kind = EngineLost if isinstance(error, EngineLost) else RunStopped
    # Code that failed is mended before the run goes on, and is then another than it began with.
    mended = [key for key in record.parts if re.fullmatch(getattr(error, "parts", ""), key)]
    return kind("; ".join([*lines, record.how_to_resume(mended)]))


def _save_partial(trainer: Trainer, number: int, error: BaseException, waiting: bool) -> Iterator[str]:
    """Save a checkpoint and the policy; yields a line for each that cannot be saved."""
    record = trainer.record
    try:
        begun = trainer.rewind()
        if begun or (waiting and number):
            record.checkpoint(number - (not waiting), *(begun or trainer.state()))
        elif len(record.history) < number:
            # An iteration that failed after its update ends here, without what it would have measured next.
            learned = trainer.learned()
            if record.processes.all(learned is not None) and learned is not None:
                record.iteration(*learned)
                record.checkpoint(number, *trainer.state())
    except Exception as again:
        yield f"its checkpoint could not be written: {_reason(again)}"
    cause = "a file that could not be written" if isinstance(error, OSError) else RunStopped.stopped_by
    try:
        trainer.finish(getattr(error, "stopped_by", cause))
    except Exception as again:
        yield f"the policy could not be saved: {_reason(again)}"


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.strerror} ({error.filename})"
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r}) was called"
    known = isinstance(error, OSError | RunStopped | ConfigError | KeyboardInterrupt)
    return str(error) if known else f"{type(error).__name__}: {error}"
