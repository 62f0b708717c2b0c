"""Run a sweep: its runs as processes, some in parallel, then their comparison."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tokencredit.errors import ConfigError, RunStopped
from tokencredit.runs.folder import RunFolder, recover
from tokencredit.runs.untrusted import visible
from tokencredit.settings.yaml import dump_yaml
from tokencredit.signals import Signals
from tokencredit.sweep.plan import COMPARISON, Run, refuse_changed
from tokencredit.sweep.status import estimate, outcome, table, trouble

PAUSE = 0.1
"""Polling interval of the processes, in seconds."""
Process = subprocess.Popen[bytes]


def show(runs: Sequence[Run], jobs: int) -> None:
    """Print the runs and their states, and an estimate of the time left.

    Raises:
        ConfigError: a run was begun with other settings.
    """
    refuse_changed(runs)
    states = [run.state() for run in runs]
    for run, state in zip(runs, states, strict=True):
        say(f"{state:9}  {run.name}")
    left = len(runs) - states.count("finished")
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("finished", "to resume", "to begin"))
    say(f"{len(runs)} runs: {counts}; {estimate(runs, left, jobs)}")


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
    say(f"{len(runs)} files in {folder}; run each with: tokencredit {runs[0].world.command} --config FILE")
    say(f"afterwards `tokencredit sweep {file}` runs what is missing, and compares")


def sweep(runs: Sequence[Run], jobs: int, file: str) -> None:
    """Train all runs that are not finished, then compare all that are, and print the outcomes.

    Args:
        runs: runs of one sweep.
        jobs: number of runs in parallel.
        file: the sweep's file, for messages.

    Raises:
        ConfigError: a run was begun with other settings, or its folder cannot be made.
        RunStopped: at least one run failed; the others are finished.
        KeyboardInterrupt: after Ctrl-C, once the runs have written their checkpoints.
    """
    refuse_changed(runs)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if jobs > cores:
        say(f"--jobs {jobs} exceeds this machine's {cores} CPU cores; runs will slow each other down")
    work = Work(runs, jobs, share(cores, jobs))
    received = work.do()
    if received:
        say(f"resume with: tokencredit sweep {file}")
        if received == signal.SIGINT:
            raise KeyboardInterrupt
        return
    done = [run for run in runs if run.state() == "finished"]
    compare(done, home(runs) / COMPARISON)
    Console(highlight=False).print(table(runs, work.failures))
    for run, failure in work.failures.items():
        say(f"{run.name}: {failure}; see {run.log}")
    if work.failures:
        raise RunStopped(f"{len(work.failures)} of {len(runs)} runs failed; retry them with: tokencredit sweep {file}")


def say(text: str) -> None:
    """Print a line and flush it."""
    print(visible(text), flush=True)


def home(runs: Sequence[Run]) -> Path:
    """The sweep's folder."""
    return runs[0].folder.parents[1]


def share(cores: int, jobs: int) -> dict[str, str]:
    """The environment of one of several parallel processes, with its share of the threads unless that is set."""
    threads = {"OMP_NUM_THREADS": str(max(1, cores // jobs))} if jobs > 1 else {}
    return threads | os.environ | {"PYTHONUNBUFFERED": "1"}  # so that the log ends with the last line printed


class Work:
    """The runs of a sweep: waiting, running and failed."""

    def __init__(self, runs: Sequence[Run], jobs: int, environment: Mapping[str, str]):
        """Queue the runs that are not finished, to run `jobs` in parallel."""
        self.runs, self.jobs, self.environment = runs, jobs, environment
        self.waiting = [run for run in runs if run.state() != "finished"]
        self.going: dict[Run, Process | None] = {}
        """None for a run that has a process of an earlier sweep, which was killed and has left it behind."""
        self.failures: dict[Run, str] = {}

    def do(self) -> int | None:
        """Train until nothing is left; returns the signal that stopped it, if any."""
        received = None
        try:
            with Signals() as signals:
                while self.going or self.waiting:
                    if signals.received and not received:
                        received = signals.received
                        self.waiting = []
                        self.going = {run: process for run, process in self.going.items() if process}
                        self.forward(received)
                    while self.waiting and len(self.going) < self.jobs:
                        run = self.waiting.pop(0)
                        self.begin(run)
                        if run in self.going and self.going[run] is None:
                            say(f"{run.name}: a process of an earlier sweep is still running it; waiting for that")
                    for run, process in list(self.going.items()):
                        self.look(run, process, stopping=received is not None)
                    time.sleep(PAUSE)
        except KeyboardInterrupt:  # the second signal: at once
            self.forward(signal.SIGINT)
            for process in filter(None, self.going.values()):
                process.wait()
            return signal.SIGINT
        return received

    def begin(self, run: Run) -> None:
        """Start a run's process, unless one left behind by an earlier sweep is still running."""
        try:
            self.going[run] = start(run, self.environment)
        except OSError as error:
            self.end(run, f"cannot start: {error.strerror} ({error.filename})")

    def look(self, run: Run, process: Process | None, stopping: bool) -> None:
        """Check whether a run has ended."""
        if process is None and run.state() != "finished":
            self.begin(run)
        elif process is None or process.poll() is not None:
            failure = None
            if process is not None and process.returncode and not stopping:
                failure = trouble(run, process.returncode)
            self.end(run, failure)

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
        """Forward a signal: the processes have their own sessions, so a terminal's Ctrl-C does not reach them."""
        for process in filter(None, self.going.values()):
            process.send_signal(number)


def start(run: Run, environment: Mapping[str, str]) -> Process | None:
    """Start a run's process; None if another one is running, or has just finished the run.

    The process that writes the log holds a lock on it. The lock belongs to the open file, which the child inherits and
    this process closes, so it lasts exactly as long as the child.
    """
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    with run.log.open("ab") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        state = run.state()
        if state == "finished":
            return None
        flags = ["--resume", str(run.folder)]
        if state == "to begin":
            clear(run)
            settings = run.folder.with_name(f"{run.folder.name}.yaml")
            RunFolder(str(settings.parent)).write(settings.name, dump_yaml(run.config))
            flags = ["--config", str(settings), "--run.dir", str(run.folder)]
        command = [sys.executable, "-m", "tokencredit.cli", run.world.command, *flags]
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, **options, env=environment, start_new_session=True)


def clear(run: Run) -> None:
    """Remove the files of a process that was killed before its run could be resumed."""
    if (run.folder / "config.yaml").is_file():
        shutil.rmtree(run.folder)
    elif run.folder.is_dir():
        recover(run.folder)


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
