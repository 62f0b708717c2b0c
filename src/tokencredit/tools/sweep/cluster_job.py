"""A run's job on a cluster: it trains the run on some node, and talks to the sweep through files that both see.

The folder `seed-N.job` beside the run's holds `signals`, written by the sweep: the job's token and then a signal per
line; and `status-TOKEN.json`, written by the job: its node and, at the end, its exit code. On a network file system a
file that is there from the beginning is read anew each time, one that appears later may stay invisible for a minute.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tokencredit.distributed.signals import WATCHED
from tokencredit.runs.folder import write_file
from tokencredit.settings.reader import read_yaml
from tokencredit.settings.run_kind import run_kind_of
from tokencredit.tools.sweep.launch import Ended, Resources, start, trouble, write_settings
from tokencredit.tools.sweep.sweep_file import SweepRun

NOT_SHARED = 3
"""Exit code of a job that does not see the sweep's folder."""
SHARE = "a sweep on a cluster needs one file system that all its nodes share, with the same paths"
PAUSE = 0.5
"""Seconds between two looks at the process and at `signals`."""


class JobFolder:
    """The sweep's side of the files that it shares with a run's job."""

    def __init__(self, run: SweepRun):
        self.run, self.path = run, run.job

    def prepare(self) -> str:
        """Write what a new job reads; returns its token."""
        self.path.mkdir(parents=True, exist_ok=True)
        for old in self.path.glob("status-*.json"):
            old.unlink()
        write_settings(self.run)
        token = secrets.token_hex(8)
        write_file(self.path / "signals", f"{token}\n")
        return token

    def send(self, number: int) -> None:
        """Write a signal for the job to read."""
        with (self.path / "signals").open("a", encoding="utf-8") as file:
            file.write(f"{signal.Signals(number).name}\n")

    def status(self) -> dict[str, Any]:
        """What the newest job wrote; empty if it has not begun."""
        token, *_ = read_signals(self.path) or [""]
        return read_json(status_file(self.path, token))

    def ended(self) -> Ended | None:
        """How the job ended, by its status file; None before."""
        status = self.status()
        code = status.get("code")
        if not isinstance(code, int):
            return None
        if self.run.state() == "finished":
            return Ended()
        if status.get("evicted"):
            return Ended(f"stopped by the cluster on {status.get('node')}", lost=True)
        return Ended(trouble(self.run, code) if code else None)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file of a job's folder; empty if there is none yet."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_signals(folder: Path) -> list[str]:
    """The lines of a job's `signals`; none if there is no such file."""
    try:
        return (folder / "signals").read_text(encoding="utf-8").split()
    except OSError:
        return []


def status_file(folder: Path, token: str) -> Path:
    """File in which the job with this token writes how it is."""
    return folder / f"status-{token}.json"


def command(run: SweepRun, token: str, resources: Resources) -> list[str]:
    """Arguments of Python that are a run's job."""
    numbers = str(resources.cores), str(resources.gpus)
    return ["-m", "tokencredit.tools.sweep.cluster_job", str(run.settings), token, *numbers]


def main(arguments: list[str]) -> int:
    """Train a run on this node, with the arguments of `command`; returns the exit code of its process."""
    settings, token, cores, gpus = Path(arguments[0]), arguments[1], int(arguments[2]), int(arguments[3])
    folder = settings.with_suffix(".job")
    if read_signals(folder)[:1] != [token]:
        print(f"tokencredit: {str(folder.absolute())!r} is not the sweep's on {socket.gethostname()}", file=sys.stderr)
        return NOT_SHARED
    run_kind = run_kind_of(read_yaml(settings))
    config = run_kind.config.from_yaml(settings)
    at = Path(str(config.run.dir))
    run = SweepRun(run_kind, at.parent.name, config.seed, at, config)
    status = {"node": socket.gethostname()}
    write_file(status_file(folder, token), json.dumps(status) + "\n")
    attempt = Attempt(run, Resources(cores, gpus), token)
    code = attempt.train()
    write_file(status_file(folder, token), json.dumps(status | {"code": code, "evicted": attempt.evicted}) + "\n")
    return code


class Attempt:
    """A job's process, the signals it gets, and the end of it."""

    def __init__(self, run: SweepRun, resources: Resources, token: str):
        self.run, self.gpus, self.token = run, resources.gpus, token
        self.environment = os.environ | resources.environment() | {"PYTHONUNBUFFERED": "1"}
        self.process: subprocess.Popen[bytes] | None = None
        self.evicted = False
        """The cluster stopped the run: time limit, preemption, or a dead worker."""
        self.stopped = False
        self.signals_read, self.parent = 0, os.getppid()

    def train(self) -> int:
        """Train until the process ends; returns its exit code, 0 also for a run that was stopped before it began."""
        signal.signal(signal.SIGTERM, self.evict)
        while self.process is None or self.process.poll() is None:
            self.listen()
            if self.process is None and not self.begin():
                return 0
            time.sleep(PAUSE)
        return self.process.returncode

    def begin(self) -> bool:
        """Start the process, unless another one is still at the run; False if there is nothing to do any more."""
        if self.stopped or self.run.state() == "finished":
            return False
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # for the process, to which Slurm may send it too
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)  # Ray's workers block Ctrl-C; the process would inherit it
        self.process = start(self.run, self.environment, max(1, self.gpus), tied=True)
        signal.signal(signal.SIGUSR2, self.evict)  # Slurm's warning before the time limit
        if self.stopped and self.process is not None:  # in the meantime
            self.process.send_signal(signal.SIGTERM)
        return True

    def listen(self) -> None:
        """Pass on signals of the sweep; stop if the worker is dead, or a newer job has taken this one's place."""
        token, *names = read_signals(self.run.job) or [self.token]
        if token != self.token or os.getppid() != self.parent:
            self.evict()
            return
        for name in names[self.signals_read :]:
            self.signals_read += 1
            self.forward(signal.Signals[name])

    def evict(self, *_: object) -> None:
        """Let the process save and end."""
        if not self.stopped:
            self.evicted = True
            self.forward(signal.SIGTERM)

    def forward(self, number: int) -> None:
        """Pass a signal on."""
        self.stopped = True
        if self.process is not None:
            self.process.send_signal(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
