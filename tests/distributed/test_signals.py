"""Ctrl-C outside a run's iterations: one line and exit code 130, wherever the process is."""

import os
import pty
import signal
import subprocess
import sys
from functools import partial

import pytest

from tokencredit.distributed.processes import Processes
from tokencredit.distributed.signals import Signals

# Whoever started the tests in the background of a shell has told them, and us, to ignore Ctrl-C.
HEEDING = {"preexec_fn": partial(signal.signal, signal.SIGINT, signal.SIG_DFL)}
LINE = "tokencredit: interrupted"


@pytest.mark.parametrize(
    "module",
    [
        *["yaml", "torch._C"],
        *[
            pytest.param(module, marks=pytest.mark.proof)
            for module in ("numpy", "torch", "transformers.utils", "tokencredit.distributed.processes")
        ],
    ],
)
def test_ctrl_c_while_libraries_load(module, tmp_path):
    """The interpreter tells of each module once it is imported; the signal comes then."""
    command = [sys.executable, "-X", "importtime", "-m", "tokencredit", "train", "--run.dir", str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **HEEDING) as process:
        next(line for line in process.stderr if line.rpartition("|")[2].strip() == module)
        process.send_signal(signal.SIGINT)
        told = [line for line in process.stderr.read().splitlines() if not line.startswith("import time:")]
    assert process.returncode == 130
    assert told == [LINE]
    assert not (tmp_path / "run").exists()


def python(code):
    begin = (
        "import atexit, os, signal; from tokencredit.distributed.signals import end_on_interrupt, raising_interrupt\n"
    )
    command = [sys.executable, "-c", f"{begin}end_on_interrupt()\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, **HEEDING)
    return done.returncode, done.stderr


INTERRUPT = "os.kill(os.getpid(), signal.SIGINT)"
LAST = f"""
class Last:
    def __del__(self, os=os, signal=signal):
        {INTERRUPT}
last = Last()
"""


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        (INTERRUPT, (130, f"{LINE}\n")),
        (f"try:\n    {INTERRUPT}\nexcept BaseException: pass", (130, f"{LINE}\n")),
        (f"atexit.register(lambda: {INTERRUPT})", (130, f"{LINE}\n")),
        (LAST, (0, "")),
        (f"with raising_interrupt():\n    try: {INTERRUPT}\n    except KeyboardInterrupt: pass", (0, "")),
        (
            f"try:\n    with raising_interrupt(): {INTERRUPT}\nexcept KeyboardInterrupt: pass\n{INTERRUPT}",
            (130, f"{LINE}\n"),
        ),
    ],
    ids=["anywhere", "where exceptions are caught", "at exit", "when all is done", "in a run", "after a run"],
)
def test_ctrl_c(code, ended):
    assert python(code) == ended


def test_a_process_that_ignores_ctrl_c_goes_on_ignoring_it():
    code = "import os, signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    code += f"from tokencredit.distributed import signals\nsignals.end_on_interrupt()\n{INTERRUPT}\n"
    code += f"with signals.raising_interrupt(): {INTERRUPT}\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_program_of_its_own_keeps_its_handler():
    from tokencredit.distributed.signals import raising_interrupt

    before = signal.getsignal(signal.SIGINT)
    with raising_interrupt():
        assert signal.getsignal(signal.SIGINT) is before


WAIT = """
import os, signal, sys, time
from pathlib import Path
from tokencredit.distributed.signals import Signals

with Signals() as signals:
    os.write(1, b"ready")
    while not signals.received:
        time.sleep(0.01)
    print("a line", flush=True)
    os.kill(os.getpid(), signal.SIGHUP)
    Path(sys.argv[1]).write_text(signals.received.name)
"""


def test_a_signal_between_two_iterations_is_kept_while_the_caller_works():
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        with signals.released():
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signals.request(Processes()) == "SIGTERM"


def test_a_closed_terminal_stops_a_run_after_its_iteration(tmp_path):
    """Printing goes on without the terminal, and its second SIGHUP changes nothing."""
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, "-c", WAIT, str(tmp_path / "told")])
    shown = b""
    while not shown.endswith(b"ready"):
        shown += os.read(terminal, 100)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (tmp_path / "told").read_text() == "SIGHUP"


def test_under_nohup_a_closed_terminal_changes_nothing():
    code = "import os, signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    code += "from tokencredit.distributed.signals import Signals\n"
    code += "with Signals() as signals: os.kill(os.getpid(), signal.SIGHUP)\nassert signals.received is None"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""
