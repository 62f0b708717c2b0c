"""Describe errors of user code in a line: the exception, and the place in the user's file."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

from tokencredit.runs.untrusted import visible

PACKAGE = str(Path(__file__).parents[2])
LIBRARIES = [PACKAGE, *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))]
"""Folders whose code is not the user's."""


def described(error: BaseException) -> str:
    """An exception's type and message with its place in user code."""
    return summarized(error) + visible(_place(error))


def summarized(error: BaseException) -> str:
    """An exception's type and message in one line, escaped because a service may send anything."""
    return visible(f"raised {type(error).__name__}: {error}")


def _place(error: BaseException) -> str:
    """File and line of the innermost frame in user code, as text; empty if there is none."""
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    user = [(file, line) for file, line in places if not file.startswith("<") and not _installed(Path(file))]
    return " at {}:{}".format(*user[-1]) if user else ""


def _installed(file: Path) -> bool:
    """True for a file of Tokencredit, of Python's library or of an installed package."""
    return any(file.is_relative_to(folder) for folder in LIBRARIES)
