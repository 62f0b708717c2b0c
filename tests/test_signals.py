"""Ctrl-C outside a run's iterations: one line and exit code 130, wherever the process is."""

import signal
import subprocess
import sys
from functools import partial

import pytest

# Whoever started the tests in the background of a shell has told them, and us, to ignore Ctrl-C.
HEEDING = {"preexec_fn": partial(signal.signal, signal.SIGINT, signal.SIG_DFL)}
LINE = "tokencredit: interrupted"


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["yaml", "jsonargparse", "numpy", "torch._C", "torch", "transformers.utils", "tokencredit.processes"]
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
    begin = "import atexit, os, signal; from tokencredit.signals import end_on_interrupt, raising_interrupt\n"
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
    code = "import os, signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nend = __import__('tokencredit.signals')\n"
    code += f"end.signals.end_on_interrupt()\n{INTERRUPT}\nwith end.signals.raising_interrupt(): {INTERRUPT}\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_program_of_its_own_keeps_its_handler():
    from tokencredit.signals import raising_interrupt

    before = signal.getsignal(signal.SIGINT)
    with raising_interrupt():
        assert signal.getsignal(signal.SIGINT) is before
