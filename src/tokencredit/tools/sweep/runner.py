"""Run a sweep: its runs, some in parallel, then their comparison."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from shlex import quote

from rich.table import Table

from tokencredit.distributed.signals import Signals
from tokencredit.errors import ConfigError, NotInstalled, RunStopped
from tokencredit.runs.console import Output
from tokencredit.runs.folder import RunFolder, saved
from tokencredit.runs.summary import duration, figure, mean
from tokencredit.settings.parts import plain
from tokencredit.settings.reader import dump_yaml
from tokencredit.tools.sweep.launch import Launcher, RunJob, cannot_start, say
from tokencredit.tools.sweep.sweep_file import COMPARISON, SweepRun

LOSSES = 3
"""Jobs in a row that a cluster may take from a run before it has written another checkpoint."""


def show(runs: Sequence[SweepRun], jobs: int | None, place: str | None = None) -> None:
    """Print the runs and their states, an estimate of the time left, and the place of runs that are not here."""
    states = [run.state() for run in runs]
    for run, state in zip(runs, states, strict=True):
        say(f"{state:9}  {run.name}")
    left = len(runs) - states.count("finished")
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("finished", "to resume", "to begin"))
    say(f"{len(runs)} runs: {counts}; {estimate(runs, left, jobs)}")
    if place:
        say(f"on {place}")


def export(runs: Sequence[SweepRun], folder: Path, file: str) -> None:
    """Write each run's whole configuration to a file in a new folder, and print how to use them."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--export {str(folder)!r} holds files already; give another folder")
    files = RunFolder(str(folder))
    files.create(reserve=0)
    for run in runs:
        files.write(f"{run.variant}-seed-{run.seed}.yaml", dump_yaml(plain(run.config)))
    say(f"{len(runs)} files in {folder}; run each with: tokencredit {runs[0].run_kind.command} --config FILE")
    say(f"afterwards `tokencredit sweep {quote(file)}` runs what is missing, and compares")


def sweep(
    runs: Sequence[SweepRun], launcher: Launcher, jobs: int | None, again: str, every: Sequence[SweepRun] = ()
) -> None:
    """Train all runs that are not finished, then compare all that are, and print the outcomes.

    `jobs` runs are in parallel, None for as many as a cluster has room for; `again` is the command that continues.
    `every` has the runs of the whole file, which are compared too, if `runs` are those of its first seeds.

    Raises:
        ConfigError: a run's folder cannot be made.
        RunStopped: at least one run failed, or was stopped by another process.
        KeyboardInterrupt: after Ctrl-C, once the runs have written their checkpoints.
    """
    scheduler = Scheduler(runs, launcher, jobs, every)
    received = scheduler.run()
    if received:
        say(f"resume with: {again}")
        if received == signal.SIGINT:
            raise KeyboardInterrupt
        return
    if done := [run for run in every or runs if run.state() == "finished"]:
        compare(done, home(runs) / COMPARISON)
    Output(highlight=False).print(table(runs, scheduler.failures))
    for run, failure in scheduler.failures.items():
        say(f"{run.name}: {failure}; see {run.log}")
    unfinished = sum(run.state() != "finished" for run in runs)
    advice = f"; retry them with: {again}" if unfinished else ""
    if scheduler.failures:
        raise RunStopped(f"{len(scheduler.failures)} of {len(runs)} runs failed{advice}")
    if unfinished:
        raise RunStopped(f"{unfinished} of {len(runs)} runs were stopped{advice}")


def home(runs: Sequence[SweepRun]) -> Path:
    """The sweep's folder."""
    return runs[0].folder.parents[1]


class Scheduler:
    """The runs of a sweep: waiting, running (`jobs` in parallel, None for no limit) and failed; see `sweep`."""

    def __init__(self, runs: Sequence[SweepRun], launcher: Launcher, jobs: int | None, every: Sequence[SweepRun] = ()):
        self.runs, self.every, self.launcher, self.jobs = runs, every or runs, launcher, jobs
        self.waiting = [run for run in runs if run.state() != "finished"]
        self.running: dict[SweepRun, RunJob] = {}
        self.failures: dict[SweepRun, str] = {}
        self.losses: dict[SweepRun, tuple[int, int]] = {}
        """Jobs lost since a run's newest checkpoint, and that checkpoint's iteration."""

    def run(self) -> int | None:
        """Train until nothing is left; returns the signal that stopped it, if any."""
        received = None
        try:
            with Signals() as signals:
                while self.running or self.waiting:
                    if signals.received and not received:
                        received = signals.received
                        self.waiting = []
                        self.forward(received)
                    while self.waiting and len(self.running) < (self.jobs or len(self.runs)):
                        self.begin(self.waiting.pop(0))
                    for run, job in list(self.running.items()):
                        self.poll(run, job, stopping=received is not None)
                    time.sleep(self.launcher.pause)
        except KeyboardInterrupt:  # the second signal: at once
            self.forward(signal.SIGINT)
            for job in self.running.values():
                while job.poll() is None:
                    time.sleep(self.launcher.pause)
            return signal.SIGINT
        return received

    def begin(self, run: SweepRun) -> None:
        """Start a run's job, unless one left behind by an earlier sweep is still running."""
        try:
            job = self.running[run] = self.launcher.start(run)
        except OSError as error:
            self.end(run, cannot_start(error))
            return
        if job.inherited:
            say(f"{run.name}: {job.inherited}; waiting for that")

    def poll(self, run: SweepRun, job: RunJob, stopping: bool) -> None:
        """Check whether a run's job has ended."""
        ended = job.poll()
        if ended is None:
            return
        if ended.lost and not stopping and self.may_continue(run):
            say(f"{run.name}: {ended.failure}; continuing it in another job")
            self.begin(run)
        else:
            self.end(run, None if stopping else ended.failure)

    def may_continue(self, run: SweepRun) -> bool:
        """Count a lost job; False once too many were lost in a row without a new checkpoint between them."""
        newest = max(saved(run.folder), default=0)
        count, before = self.losses.get(run, (0, newest))
        count = count + 1 if newest == before else 1
        self.losses[run] = count, newest
        return count < LOSSES

    def end(self, run: SweepRun, failure: str | None) -> None:
        """Record and print a run's outcome."""
        self.running.pop(run, None)
        if failure:
            self.failures[run] = failure
        states = {run: run.state() for run in self.every}
        rows = [{"run": x.name, "state": state, "failure": self.failures.get(x)} for x, state in states.items()]
        RunFolder(str(home(self.runs))).write("sweep.json", json.dumps(rows, indent=2) + "\n")
        done = sum(states[run] == "finished" for run in self.runs)
        left = sum(states[run] != "finished" and run not in self.failures for run in self.runs)
        say(f"{run.name}: {failure or outcome(run)}")
        say(f"  {done} of {len(self.runs)} finished; {estimate(self.runs, left, self.jobs)}")

    def forward(self, number: int) -> None:
        """Forward a signal to all jobs."""
        for job in self.running.values():
            job.send(number)


def estimate(runs: Sequence[SweepRun], left: int, jobs: int | None) -> str:
    """Time left, estimated from the finished runs; the time per run alone if a cluster decides how many run at once."""
    each = mean(run.summary()["seconds"] for run in runs if run.state() == "finished")
    if not left:
        return "nothing is left to run"
    if each is None:
        return "no time estimate before one is finished"
    if jobs is None:
        return f"{left} left, at {duration(each)} per run"
    return f"about {duration(each * left / min(jobs, left))} left, at {duration(each)} per run, {jobs} in parallel"


def outcome(run: SweepRun) -> str:
    """Outcome of a run that did not fail, in a few words."""
    if run.state() != "finished":
        return "stopped, to be resumed"
    summary, name = run.summary(), run.run_kind.outcome
    first, last = (figure(summary[f"{name}_{end}"]) for end in ("first", "last"))
    return f"{name} {first} → {last}, {duration(summary['seconds'])}"


def table(runs: Sequence[SweepRun], failures: Collection[SweepRun]) -> Table:
    """Status table: one row per variant, with means over its seeds, those with numbers, and the failed runs."""
    name = runs[0].run_kind.outcome
    status = Table()
    for title in ("variant", "seeds done", f"{name.replace('_', ' ')}, first → last", "time per run", "failed"):
        status.add_column(title, overflow="fold")
    for variant in dict.fromkeys(run.variant for run in runs):
        mine = [run for run in runs if run.variant == variant]
        summaries = [run.summary() for run in mine if run.state() == "finished"]
        known = [x for x in summaries if None not in (x[f"{name}_first"], x[f"{name}_last"])]
        first, last = (mean(x[f"{name}_{end}"] for x in known) for end in ("first", "last"))
        seconds = mean(x["seconds"] for x in summaries)
        failed = ", ".join(f"seed {run.seed}" for run in mine if run in failures)
        figures = f"{figure(first)} → {figure(last)}" if summaries else ""
        figures += f" (of {len(known)})" * (len(known) < len(summaries))
        time = "" if seconds is None else duration(seconds)
        status.add_row(variant, f"{len(summaries)} of {len(mine)}", figures, time, failed)
    return status


def check_packages(runs: Sequence[SweepRun]) -> None:
    """Say, before the first run, that a package is missing for the comparison at the end."""
    from tokencredit.report.comparison.files import check_formats

    try:
        check_formats(home(runs) / COMPARISON, None)
    except NotInstalled as error:
        say(f"no comparison at the end: {error}")


def compare(done: Sequence[SweepRun], out: Path) -> None:
    """Write the comparison of runs, if they can be compared."""
    from tokencredit.report.comparison import compare as comparing
    from tokencredit.report.comparison import files

    try:
        comparison = comparing.compare([run.folder for run in done])
        page = files.write_comparison(comparison, out)
    except ConfigError as error:
        say(f"no comparison: {error}")
        return
    for sentence in comparison.verdict:
        say(sentence)
    say(f"compared in {page}")
