"""The `tokencredit` command in this process, and in processes of its own."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from tokencredit.cli import main

HEAVY = ("torch", "transformers", "accelerate", "numpy")
COMMAND = ("-m", "tokencredit.cli")
TWO_PROCESSES = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
"""Starts two processes of a script or a module."""


def refused(capsys, *arguments):
    """The one line in which the command refuses its arguments."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tokencredit: ")
    assert err.count("\n") == 1
    return err.removeprefix("tokencredit: ").rstrip()


@contextmanager
def unread(monkeypatch):
    """A context whose output nobody reads, as that of `tokencredit train | head -1` after its first line."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w", encoding="utf-8") as output, monkeypatch.context() as changed:
        changed.setattr("sys.stdout", output)
        yield


def python(*arguments, cwd=None, timeout=300, **variables):
    """Run Python, which also finds `helpers`, to its end; `variables` are of the environment."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | variables,
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
    )


def command(*arguments, **variables):
    """Run the command to its end."""
    return python(*COMMAND, *arguments, **variables)


def start_command(*arguments):
    """Start the command."""
    return subprocess.Popen(
        [sys.executable, *COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        preexec_fn=_hear_ctrl_c,
    )


def _hear_ctrl_c():
    """A shell that starts us in its background lets us, and our children, ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for(condition, process=None, seconds=120.0):
    """Wait until something holds; False if the process ended first."""
    end = time.monotonic() + seconds
    while not condition():
        if process is not None and process.poll() is not None:
            return False
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds} s")
        time.sleep(0.005)
    return True


def processes_in(folder):
    """The numbers of the processes whose command names something in a folder, or that write their output there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{folder}{os.sep}" in (entry / "cmdline").read_text() + str((entry / "fd" / "1").readlink()):
                found.append(int(entry.name))
    return found


def imported(program, *packages):
    """The packages, of those named, that a program imports."""
    done = python("-c", f"{program}\nimport sys\nprint(*{set(packages)} & set(sys.modules))")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()
