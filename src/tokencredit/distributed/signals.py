"""Ctrl-C, SIGTERM and SIGHUP: the first stops a run where it can be resumed, the second stops it at once.

Outside a run, Ctrl-C ends the command at once, in one line.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokencredit.distributed.processes import Processes

HANGUP = getattr(signal, "SIGHUP", None)
"""The signal of a closed terminal; Windows has none."""
WATCHED = (signal.SIGINT, signal.SIGTERM, *([] if HANGUP is None else [HANGUP]))
INTERRUPTED, UNREAD = 130, 141
"""Exit codes after Ctrl-C and after SIGPIPE, as in shells."""
NO_READER = "tokencredit: nobody reads this output any more; the work goes on\n"
"""Said of work whose result is in files, when its output is closed."""


def end_on_interrupt() -> None:
    """Let Ctrl-C end this process with one line and `INTERRUPTED`, unless the caller ignores it, as under `nohup`.

    Not by a KeyboardInterrupt: while libraries load, C extensions turn it into other exceptions, and at interpreter
    exit Python prints it.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)
        # The last of the functions at exit, since it is the first: after them Python takes its handlers back, and
        # Ctrl-C would kill a process whose work is done.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def _end(_number: int, _frame: FrameType | None) -> None:
    # Neither print nor sys.exit, which may be what the signal interrupted.
    try:
        os.write(2, b"\ntokencredit: interrupted\n" if os.isatty(2) else b"tokencredit: interrupted\n")
    finally:  # also if nobody reads stderr any more
        os._exit(INTERRUPTED)


@contextmanager
def raising_interrupt() -> Iterator[None]:
    """A context in which Ctrl-C raises KeyboardInterrupt despite `end_on_interrupt`: work that saves first."""
    before = signal.getsignal(signal.SIGINT)
    if before is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if before is _end:
            signal.signal(signal.SIGINT, before)


GRACE = 10.0
"""Seconds after the first signal in which an evaluation may still end."""


class Signals:
    """Signal handlers within a `with` block, in the main thread only: Python delivers signals to no other."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.since = 0.0
        """Time of the first signal, by `time.monotonic`."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        self.received = None
        self._watch()
        return self

    def _watch(self) -> None:
        if threading.current_thread() is threading.main_thread():
            # Signals that the caller ignores, as under `nohup`, stay ignored.
            watched = [number for number in WATCHED if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._handle) for number in watched}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def released(self) -> Iterator[None]:
        """A context within the block in which the caller's handlers are back; what was received stays."""
        self.__exit__()
        try:
            yield
        finally:
            self._watch()

    def overdue(self) -> bool:
        """True `GRACE` seconds after a signal that this process received."""
        return self.received is not None and time.monotonic() - self.since > GRACE

    def request(self, processes: Processes) -> str | None:
        """Name of the signal received by any process; None if there is none."""
        received = int(self.received or 0)
        if processes.count > 1:
            import torch  # not at the top: sweeps use signals without torch

            received = int(processes.max(torch.tensor(received, device=processes.device)))
        return signal.Signals(received).name if received else None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == HANGUP:
            _leave_closed_terminal()
        if self.received is not None:
            if number == HANGUP:  # both the shell and the system may send it for a closed terminal
                return
            raise KeyboardInterrupt
        self.received, self.since = signal.Signals(number), time.monotonic()
        # Not print, which the signal may have interrupted.
        with suppress(OSError):  # nobody reads it any more
            os.write(2, f"\n{self.received.name}: stopping after this iteration; again to stop at once\n".encode())


def leave_closed_output(word: str = "") -> None:
    """Send standard output nowhere, since nobody reads it any more; `word` goes to standard error."""
    _discard(sys.stdout.fileno())
    try:
        print(word, end="", file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr.fileno())


def _leave_closed_terminal() -> None:
    """Send the process's output nowhere if its terminal is gone, so that printing does not fail."""
    for output in (1, 2):
        try:
            os.write(output, b"")
        except OSError:
            _discard(output)


def _discard(output: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, output)
    os.close(nowhere)
