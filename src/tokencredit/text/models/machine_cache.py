"""Measurements of this machine, made once and kept in the user's cache folder for later runs."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Collection, Mapping
from datetime import date
from pathlib import Path
from typing import Any

PARTS = ("model name", "CPU implementer", "CPU architecture", "CPU variant", "CPU part")
"""Lines of Linux's /proc/cpuinfo that name a processor: the first on x86, the others on ARM."""


def measure_once(
    name: str, key: Mapping[str, Any], results: Collection[str], measure: Callable[[], str]
) -> tuple[str, str]:
    """Measure, unless that was done before on this machine; returns the result and its origin in words.

    The first process to measure keeps its result; one that measured at the same time takes that result too. A folder
    that cannot be read or written lets each process measure anew.

    Args:
        name: of what is measured.
        key: all that the result depends on.
        results: possible results; a file with anything else in it is replaced.
        measure: measures.
    """
    file = cache_file(name, key)
    if file is None:
        return measure(), "timed now; this user has no cache folder to keep that in"
    record = read_record(file, name, key, results)
    if record is None:
        ours = {**key, name: measure(), "date": date.today().isoformat()}
        try:
            record = write_first(file, ours, lambda: read_record(file, name, key, results))
        except OSError as error:
            return ours[name], f"timed now; it cannot be kept in {file}: {error.strerror}"
        if record is ours:
            return ours[name], f"timed now, and kept for later runs in {file}"
    return record[name], f"as timed on {record.get('date')} ({file})"


def cache_file(name: str, key: Mapping[str, Any]) -> Path | None:
    """The file of a measurement in `$XDG_CACHE_HOME/tokencredit` or `~/.cache/tokencredit`; None without a home."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        folder = base if base.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    return folder / "tokencredit" / f"{name}-{digest}.json"


def read_record(file: Path, name: str, key: Mapping[str, Any], results: Collection[str]) -> dict[str, Any] | None:
    """The record in a file; None if there is none that can be used."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    fits = isinstance(record, dict) and all(record.get(part) == value for part, value in key.items())
    return record if fits and record.get(name) in list(results) else None


def write_first(file: Path, ours: dict[str, Any], theirs: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    """Write a whole file, unless another process has written a record first; returns the record that is kept.

    Raises:
        OSError: the folder cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, part = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with open(descriptor, "w", encoding="utf-8") as text:
            text.write(json.dumps(ours, indent=2) + "\n")
        try:
            os.link(part, file)  # unlike a rename, it leaves what is there
        except FileExistsError:
            if (first := theirs()) is not None:
                return first
            os.replace(part, file)
    finally:
        Path(part).unlink(missing_ok=True)
    return ours


def processor() -> str:
    """The processor's name, the same on every machine that has it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    parts = {name.strip(): value.strip() for name, _, value in lines}
    named = " ".join(parts[part] for part in PARTS if part in parts)
    return named or platform.processor() or platform.machine()
