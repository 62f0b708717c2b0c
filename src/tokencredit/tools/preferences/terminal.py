"""Labelling in the terminal, by single keys; without a terminal, by lines of standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from rich.text import Text as Shown

from tokencredit.distributed.signals import raising_interrupt
from tokencredit.runs.untrusted import accept_any_bytes
from tokencredit.tools.preferences.labels import Pair, Session, readable

KEYS = {"a": "A", "b": "B", "t": "tie", "s": "skip"}
ESCAPE = "\x1b"
KEY_BYTES = 64
"""Bytes read at once: a key that sends several sends them together."""
HELP = "a or b: the better one   t: tie   s: skip   u: back   q: quit"


def label_in_terminal(session: Session, console: Console, read_key: Callable[[], str]) -> None:
    """Show pairs and read labels until all pairs have one, `q`, or an empty key, the end of the input."""
    while (pair := session.current()) is not None:
        show(session, pair, console)
        while (key := read_key()[:1].lower()) not in (*KEYS, "u", "q", ""):
            console.print(HELP)
        if key in ("q", ""):
            return
        if key == "u":
            session.back()
        else:
            session.label(KEYS[key])


def show(session: Session, pair: Pair, console: Console) -> None:
    """Print a pair, and how many are left."""
    left, label = session.counts()["left"], session.existing_label()
    console.rule(f"{left} of {len(session.pairs)} left" + (f", this one is labelled {label}" if label else ""))
    console.print(Shown(readable(pair.prompt)))
    table = Table(expand=True)
    for name in ("A", "B"):
        table.add_column(name, ratio=1)
    table.add_row(Shown(readable(pair.a)), Shown(readable(pair.b)))
    console.print(table)
    console.print(HELP)


def key_reader() -> Callable[[], str]:
    """Reads a key of the terminal, without Enter; a line where standard input is no POSIX terminal."""
    try:
        import termios
        import tty
    except ImportError:  # Windows
        return sys.stdin.readline
    if not sys.stdin.isatty():
        accept_any_bytes(sys.stdin)
        return sys.stdin.readline

    def read() -> str:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
        try:
            with raising_interrupt():
                tty.setcbreak(descriptor)
                pressed = os.read(descriptor, KEY_BYTES).decode(errors="replace")
                return ESCAPE if pressed.startswith(ESCAPE) else pressed  # an arrow is ESC [ A
        finally:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

    return read
