"""Start a sweep's runs: the interface of launchers, and the launcher of processes on this machine."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tokencredit.distributed.signals import NO_READER, leave_closed_output
from tokencredit.runs.folder import RunFolder, recover
from tokencredit.runs.untrusted import visible
from tokencredit.settings.parts import plain
from tokencredit.settings.reader import dump_yaml
from tokencredit.tools.sweep.sweep_file import SweepRun

PR_SET_PDEATHSIG = 1
"""Option of Linux' `prctl`: the signal that a process gets when its parent dies."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")


@dataclass(frozen=True)
class Resources:
    """CPU cores and GPUs per run on a cluster."""

    cores: int = 1
    gpus: int = 0

    def environment(self) -> dict[str, str]:
        """Environment variables of a run: threads per process, and no GPU unless it asked for one."""
        threads = max(1, self.cores // max(1, self.gpus))
        return {"OMP_NUM_THREADS": str(threads)} | ({} if self.gpus else {"CUDA_VISIBLE_DEVICES": ""})

    def __str__(self) -> str:
        return f"{self.cores} CPU core{'s' * (self.cores != 1)} and {self.gpus or 'no'} GPU{'s' * (self.gpus != 1)}"


@dataclass(frozen=True)
class Ended:
    """How a run's job ended."""

    failure: str | None = None
    """Reason in words; None if it did not fail."""
    lost: bool = False
    """A dead node or a time limit ended the job: another one may continue the run."""


class RunJob(Protocol):
    """A job that trains a run."""

    inherited: str | None
    """Message on a job of an earlier sweep that is waited for; None for a new job."""

    def poll(self) -> Ended | None:
        """How the job ended; None until then."""

    def send(self, number: int) -> None:
        """Pass a signal on to the run; a job that has not begun is withdrawn."""


class Launcher(ABC):
    """Starts jobs."""

    pause = 1.0
    """Seconds between polls."""

    @abstractmethod
    def start(self, run: SweepRun) -> RunJob:
        """A job that trains the run; raises `OSError` if it cannot be started."""

    def close(self) -> None:  # noqa: B027  (most hold nothing)
        """Release what the launcher holds, by default nothing; its jobs have ended or go on alone."""


class Local(Launcher):
    """Launcher of processes on this machine."""

    pause = 0.1

    def __init__(self, jobs: int):
        """Give each of several parallel processes its share of the threads."""
        self.environment = share(cpu_cores(), jobs)

    def start(self, run: SweepRun) -> RunJob:
        """A process that trains the run, or the wait for the one that an earlier sweep left behind."""
        return LocalJob(run, self.environment)


class LocalJob:
    """A process on this machine."""

    def __init__(self, run: SweepRun, environment: Mapping[str, str]):
        self.run, self.environment = run, environment
        self.process = start(run, environment)
        left_behind = self.process is None and run.state() != "finished"
        self.inherited = "a process of an earlier sweep is still running it" if left_behind else None
        self.withdrawn = False

    def poll(self) -> Ended | None:
        """How the process ended; starts one once a process of an earlier sweep has stopped short."""
        if self.process is None:
            if self.withdrawn or self.run.state() == "finished":
                return Ended()
            try:
                self.process = start(self.run, self.environment)
            except OSError as error:
                return Ended(cannot_start(error))
        if self.process is None or self.process.poll() is None:
            return None
        return Ended(trouble(self.run, self.process.returncode) if self.process.returncode else None)

    def send(self, number: int) -> None:
        """Forward a signal: the process has its own session, so a terminal's Ctrl-C does not reach it."""
        if self.process is None:
            self.withdrawn = True
        elif os.name != "nt":  # where Ctrl-C reaches all processes of a console
            self.process.send_signal(number)


def say(text: str) -> None:
    """Print a line and flush it; the sweep goes on if nobody reads it."""
    try:
        print(visible(text), flush=True)
    except BrokenPipeError:
        leave_closed_output(NO_READER)


def trouble(run: SweepRun, code: int) -> str:
    """Reason of a failure: exit code, and last line of the log."""
    lines = run.log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    cause = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
    return f"{cause}: {last.removeprefix('tokencredit: ')}"


def cannot_start(error: OSError) -> str:
    """Reason why a job cannot be started."""
    return f"cannot start: {error.strerror} ({error.filename})"


def cpu_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share(cores: int, jobs: int) -> dict[str, str]:
    """The environment of one of several parallel processes, with its share of the threads unless that is set."""
    threads = {"OMP_NUM_THREADS": str(max(1, cores // jobs))} if jobs > 1 else {}
    return threads | os.environ | {"PYTHONUNBUFFERED": "1"}  # so that the log ends with the last line printed


def start(
    run: SweepRun, environment: Mapping[str, str], processes: int = 1, tied: bool = False
) -> subprocess.Popen[bytes] | None:
    """Start a run's process; None if another one is running, or has just finished the run.

    The process that writes the log holds a lock on it. The lock belongs to the open file, which the child inherits and
    this process closes, so it lasts exactly as long as the child. `torchrun` starts several `processes`. With `tied`,
    on Linux, the process gets SIGTERM once this one is dead, however it died. Raises `OSError` if it cannot start.
    """
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    with run.log.open("ab") as log:
        try:
            import fcntl  # Windows has none; logs there are not locked

            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except ImportError:
            pass
        state = run.state()
        if state == "finished":
            return None
        flags = ["--resume", str(run.folder)]
        if state == "to begin":
            # Remove the files of a process that was killed before its run could be resumed.
            if (run.folder / "config.yaml").is_file():
                shutil.rmtree(run.folder)
            elif run.folder.is_dir():
                recover(run.folder)
            flags = ["--config", str(write_settings(run)), "--run.dir", str(run.folder)]
        several = [*TORCHRUN, str(processes)] if processes > 1 else []
        command = [sys.executable, *several, "-m", "tokencredit.cli", run.run_kind.command, *flags]
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        if tied and sys.platform == "linux":
            options["preexec_fn"] = partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
        return subprocess.Popen(command, **options, env=environment, start_new_session=True)


def write_settings(run: SweepRun) -> Path:
    """Write a run's whole configuration beside its folder; returns the file."""
    RunFolder(str(run.settings.parent)).write(run.settings.name, dump_yaml(plain(run.config)))
    return run.settings
