"""Escape text from models, files and other people before it is shown."""

from __future__ import annotations


def visible(text: str) -> str:
    """Text that cannot act on a terminal: whatever does not print (escape codes, direction marks) is spelt out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
