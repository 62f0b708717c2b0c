"""Run a sweep: its runs, some in parallel, then their comparison."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tokencredit.distributed.signals import Signals
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.runs.folder import RunFolder
from tokencredit.runs.resuming import saved
from tokencredit.settings.yaml import dump_yaml
from tokencredit.tools.sweep.launch import Job, Launcher, cannot_start
from tokencredit.tools.sweep.status import estimate, outcome, say, table
from tokencredit.tools.sweep.sweep_file import COMPARISON, Run

LOSSES = 3
"""Jobs in a row that a cluster may take from a run before it has written another checkpoint."""


def show(runs: Sequence[Run], jobs: int | None, place: str | None = None) -> None:
    """Print the runs and their states, an estimate of the time left, and the place of runs that are not here."""
    states = [run.state() for run in runs]
    for run, state in zip(runs, states, strict=True):
        say(f"{state:9}  {run.name}")
    left = len(runs) - states.count("finished")
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("finished", "to resume", "to begin"))
    say(f"{len(runs)} runs: {counts}; {estimate(runs, left, jobs)}")
    if place:
        say(f"on {place}")


def export(runs: Sequence[Run], folder: Path, file: str) -> None:
    """Write each run's whole configuration to its own file, and print how to use them.

    Raises:
        ConfigError: the folder is not empty, or cannot be made.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--export {str(folder)!r} holds files already; give another folder")
    files = RunFolder(str(folder))
    files.create(reserve=0)
    for run in runs:
        files.write(f"{run.variant}-seed-{run.seed}.yaml", dump_yaml(run.config))
    say(f"{len(runs)} files in {folder}; run each with: tokencredit {runs[0].run_kind.command} --config FILE")
    say(f"afterwards `tokencredit sweep {file}` runs what is missing, and compares")


def sweep(runs: Sequence[Run], launcher: Launcher, jobs: int | None, again: str) -> None:
    """Train all runs that are not finished, then compare all that are, and print the outcomes.

    Args:
        runs: runs of one sweep.
        launcher: starts their jobs.
        jobs: number of runs in parallel; None for as many as a cluster has room for.
        again: the command that continues the sweep, for messages.

    Raises:
        ConfigError: a run's folder cannot be made.
        RunStopped: at least one run failed; the others are finished.
        KeyboardInterrupt: after Ctrl-C, once the runs have written their checkpoints.
    """
    work = Work(runs, launcher, jobs)
    received = work.do()
    if received:
        say(f"resume with: {again}")
        if received == signal.SIGINT:
            raise KeyboardInterrupt
        return
    done = [run for run in runs if run.state() == "finished"]
    compare(done, home(runs) / COMPARISON)
    Console(highlight=False).print(table(runs, work.failures))
    for run, failure in work.failures.items():
        say(f"{run.name}: {failure}; see {run.log}")
    if work.failures:
        raise RunStopped(f"{len(work.failures)} of {len(runs)} runs failed; retry them with: {again}")


def home(runs: Sequence[Run]) -> Path:
    """The sweep's folder."""
    return runs[0].folder.parents[1]


class Work:
    """The runs of a sweep: waiting, running and failed."""

    def __init__(self, runs: Sequence[Run], launcher: Launcher, jobs: int | None):
        """Queue the runs that are not finished, to run `jobs` in parallel."""
        self.runs, self.launcher, self.jobs = runs, launcher, jobs
        self.waiting = [run for run in runs if run.state() != "finished"]
        self.going: dict[Run, Job] = {}
        self.failures: dict[Run, str] = {}
        self.losses: dict[Run, tuple[int, int]] = {}
        """Jobs lost since a run's newest checkpoint, and that checkpoint's iteration."""

    def do(self) -> int | None:
        """Train until nothing is left; returns the signal that stopped it, if any."""
        received = None
        try:
            with Signals() as signals:
                while self.going or self.waiting:
                    if signals.received and not received:
                        received = signals.received
                        self.waiting = []
                        self.forward(received)
                    while self.waiting and len(self.going) < (self.jobs or len(self.runs)):
                        self.begin(self.waiting.pop(0))
                    for run, job in list(self.going.items()):
                        self.look(run, job, stopping=received is not None)
                    time.sleep(self.launcher.pause)
        except KeyboardInterrupt:  # the second signal: at once
            self.forward(signal.SIGINT)
            for job in self.going.values():
                while job.poll() is None:
                    time.sleep(self.launcher.pause)
            return signal.SIGINT
        return received

    def begin(self, run: Run) -> None:
        """Start a run's job, unless one left behind by an earlier sweep is still running."""
        try:
            job = self.going[run] = self.launcher.start(run)
        except OSError as error:
            self.end(run, cannot_start(error))
            return
        if job.inherited:
            say(f"{run.name}: {job.inherited}; waiting for that")

    def look(self, run: Run, job: Job, stopping: bool) -> None:
        """Check whether a run's job has ended."""
        ended = job.poll()
        if ended is None:
            return
        if ended.lost and not stopping and self.may_continue(run):
            say(f"{run.name}: {ended.failure}; continuing it in another job")
            self.begin(run)
        else:
            self.end(run, None if stopping else ended.failure)

    def may_continue(self, run: Run) -> bool:
        """Count a lost job; False once too many were lost in a row without a new checkpoint between them."""
        newest = max(saved(run.folder / "checkpoints"), default=0)
        count, before = self.losses.get(run, (0, newest))
        count = count + 1 if newest == before else 1
        self.losses[run] = count, newest
        return count < LOSSES

    def end(self, run: Run, failure: str | None) -> None:
        """Record and print a run's outcome."""
        self.going.pop(run, None)
        if failure:
            self.failures[run] = failure
        states = [{"run": run.name, "state": run.state(), "failure": self.failures.get(run)} for run in self.runs]
        RunFolder(str(home(self.runs))).write("sweep.json", json.dumps(states, indent=2) + "\n")
        done = sum(row["state"] == "finished" for row in states)
        left = len(self.runs) - done - len(self.failures)
        say(f"{run.name}: {failure or outcome(run)}")
        say(f"  {done} of {len(self.runs)} finished; {estimate(self.runs, left, self.jobs)}")

    def forward(self, number: int) -> None:
        """Forward a signal to all jobs."""
        for job in self.going.values():
            job.send(number)


def compare(done: Sequence[Run], out: Path) -> None:
    """Write the comparison of runs, if they can be compared."""
    from tokencredit.report.comparison_page import write_comparison  # Matplotlib and SciPy, at the end only

    try:
        comparison = write_comparison([run.folder for run in done], out=out)
    except ConfigError as error:
        say(f"no comparison: {error}")
        return
    for sentence in comparison.verdict:
        say(sentence)
    say(f"compared in {comparison.page}")
