"""Escape text from models, files and other people before it is shown."""

from __future__ import annotations

from io import TextIOWrapper
from typing import TextIO


def visible(text: str) -> str:
    """Text that is safe on a terminal: unprintable characters (escape codes, direction marks) are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def visible_lines(text: str) -> str:
    """Text of several lines, each of them `visible`."""
    return "\n".join(map(visible, text.split("\n")))


def accept_any_bytes(stream: TextIO) -> None:
    """Read bytes that the stream's encoding lacks as escapes, in place of an exception."""
    if isinstance(stream, TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
