"""A sweep at work: its runs as processes, some at a time, until all are done; then their comparison."""

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
"""Seconds between two looks at the processes."""
Process = subprocess.Popen[bytes]


def show(runs: Sequence[Run], jobs: int) -> None:
    """Say what `sweep` would do, and how long it would take if the runs that are done tell.

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
    """Write each run's whole configuration into a file of its own, and say what to do with them.

    Raises:
        ConfigError: the folder is in use or cannot be made.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--export {str(folder)!r} holds files already; give another folder")
    files = RunFolder(str(folder))
    files.create(reserve=0)
    for run in runs:
        files.write(f"{run.variant}-seed-{run.seed}.yaml", dump_yaml(run.config))
    say(f"{len(runs)} files in {folder}; run each with: tokencredit {runs[0].world.command} --config FILE")
    say(f"afterwards `tokencredit sweep {file}` does what is missing, and compares")


def sweep(runs: Sequence[Run], jobs: int, file: str) -> None:
    """Do all runs that are not finished, then compare all that are, and say what came out.

    Args:
        runs: of one sweep.
        jobs: how many at a time.
        file: the sweep's file, for messages.

    Raises:
        ConfigError: a run was begun with other settings, or its folder cannot be made.
        RunStopped: at least one run failed; the others were done.
        KeyboardInterrupt: after Ctrl-C, once the runs have saved.
    """
    refuse_changed(runs)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if jobs > cores:
        say(f"--jobs {jobs} is more than this machine's processor cores, {cores}; runs will wait for one another")
    work = Work(runs, jobs, share(cores, jobs))
    asked = work.do()
    if asked:
        say(f"go on with: tokencredit sweep {file}")
        if asked == signal.SIGINT:
            raise KeyboardInterrupt
        return
    done = [run for run in runs if run.state() == "finished"]
    compare(done, home(runs) / COMPARISON)
    Console(highlight=False).print(table(runs, work.failures))
    for run, failure in work.failures.items():
        say(f"{run.name}: {failure}; see {run.log}")
    if work.failures:
        raise RunStopped(f"{len(work.failures)} of {len(runs)} runs failed; tokencredit sweep {file} tries them again")


def say(text: str) -> None:
    """One line, at once, also into a file."""
    print(visible(text), flush=True)


def home(runs: Sequence[Run]) -> Path:
    """The folder of a sweep."""
    return runs[0].folder.parents[1]


def share(cores: int, jobs: int) -> dict[str, str]:
    """The environment of one of several processes that run at a time: its share of the threads, unless that is set."""
    threads = {"OMP_NUM_THREADS": str(max(1, cores // jobs))} if jobs > 1 else {}
    return threads | os.environ | {"PYTHONUNBUFFERED": "1"}  # so that what was said last stands last in the log


class Work:
    """The runs of a sweep that wait, those that are going on, and what went wrong in those that failed."""

    def __init__(self, runs: Sequence[Run], jobs: int, environment: Mapping[str, str]):
        """Plan the runs that are not finished, `jobs` at a time."""
        self.runs, self.jobs, self.environment = runs, jobs, environment
        self.waiting = [run for run in runs if run.state() != "finished"]
        self.going: dict[Run, Process | None] = {}
        """None for a run that has a process of an earlier sweep, which was killed and has left it behind."""
        self.failures: dict[Run, str] = {}

    def do(self) -> int | None:
        """Work until nothing is left; the signal that asked to stop before, if one did."""
        asked = None
        try:
            with Signals() as signals:
                while self.going or self.waiting:
                    if signals.received and not asked:
                        asked = signals.received
                        self.waiting = []
                        self.going = {run: process for run, process in self.going.items() if process}
                        self.tell(asked)
                    while self.waiting and len(self.going) < self.jobs:
                        run = self.waiting.pop(0)
                        self.begin(run)
                        if run in self.going and self.going[run] is None:
                            say(f"{run.name}: a process that an earlier sweep began is still at it; waiting for it")
                    for run, process in list(self.going.items()):
                        self.look(run, process, stopping=asked is not None)
                    time.sleep(PAUSE)
        except KeyboardInterrupt:  # the second signal: at once
            self.tell(signal.SIGINT)
            for process in filter(None, self.going.values()):
                process.wait()
            return signal.SIGINT
        return asked

    def begin(self, run: Run) -> None:
        """Start a run's process, unless one that an earlier sweep has left behind is still at it."""
        try:
            self.going[run] = start(run, self.environment)
        except OSError as error:
            self.end(run, f"cannot begin: {error.strerror} ({error.filename})")

    def look(self, run: Run, process: Process | None, stopping: bool) -> None:
        """See whether a run has ended."""
        if process is None and run.state() != "finished":
            self.begin(run)
        elif process is None or process.poll() is not None:
            failure = None
            if process is not None and run.state() != "finished" and not stopping:
                failure = trouble(run, process.returncode)
            self.end(run, failure)

    def end(self, run: Run, failure: str | None) -> None:
        """Write down and say what became of a run."""
        self.going.pop(run, None)
        if failure:
            self.failures[run] = failure
        states = [{"run": run.name, "state": run.state(), "failure": self.failures.get(run)} for run in self.runs]
        RunFolder(str(home(self.runs))).write("sweep.json", json.dumps(states, indent=2) + "\n")
        done = sum(row["state"] == "finished" for row in states)
        left = len(self.runs) - done - len(self.failures)
        say(f"{run.name}: {failure or outcome(run)}")
        say(f"  {done} of {len(self.runs)} finished; {estimate(self.runs, left, self.jobs)}")

    def tell(self, number: int) -> None:
        """Pass a signal on; the processes are in sessions of their own, so a terminal's Ctrl-C has not reached them."""
        for process in filter(None, self.going.values()):
            process.send_signal(number)


def start(run: Run, environment: Mapping[str, str]) -> Process | None:
    """Start a run's process, or None if another one is at it, or has just finished it.

    Whoever writes the log holds a lock on it. The lock belongs to the opened file, which the process inherits and this
    one closes: it lasts exactly as long as the process, however this one ends.
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
        how = ["--resume", str(run.folder)]
        if state == "to begin":
            clear(run)
            settings = run.folder.with_name(f"{run.folder.name}.yaml")
            RunFolder(str(settings.parent)).write(settings.name, dump_yaml(run.config))
            how = ["--config", str(settings), "--run.dir", str(run.folder)]
        command = [sys.executable, "-m", "tokencredit.cli", run.world.command, *how]
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, **options, env=environment, start_new_session=True)


def clear(run: Run) -> None:
    """Remove what a process left that was killed before it could be resumed."""
    if (run.folder / "config.yaml").is_file():
        shutil.rmtree(run.folder)
    elif run.folder.is_dir():
        recover(run.folder)


def compare(done: Sequence[Run], out: Path) -> None:
    """Write the comparison of runs, if there is one."""
    from tokencredit.report.comparison_page import write_comparison  # Matplotlib and SciPy, at the end only

    try:
        say(f"compared in {write_comparison([run.folder for run in done], out=out)}")
    except ConfigError as error:
        say(f"no comparison: {error}")
