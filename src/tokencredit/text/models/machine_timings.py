"""Machine measurements, made once and kept in the user's cache folder."""

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
"""Keys of /proc/cpuinfo that identify a processor: the first on x86, the others on ARM."""


def measure_once(
    name: str, key: Mapping[str, Any], results: Collection[str], measure: Callable[[], str]
) -> tuple[str, str]:
    """Return a cached measurement, or measure and cache it; also returns where the result comes from, as text.

    If several processes measure at the same time, all use the result that is written first. Without a readable and
    writable folder, each process measures.

    Args:
        name: name of the measurement.
        key: everything that the result depends on.
        results: possible results; a file with any other is replaced.
        measure: performs the measurement.
    """
    file = cache_file(name, key)
    if file is None:
        return measure(), "timed now, and not cached: no home folder"
    record = read_record(file, name, key, results)
    if record is None:
        measured = {**key, name: measure(), "date": date.today().isoformat()}
        try:
            record = write_first(file, measured, lambda: read_record(file, name, key, results))
        except OSError as error:
            return measured[name], f"timed now, and not cached in {file}: {error.strerror}"
        if record is measured:
            return measured[name], f"timed now, and kept for later runs in {file}"
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
    """The record in a file; None if it is missing, unreadable or for another key."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    matches = isinstance(record, dict) and all(record.get(part) == value for part, value in key.items())
    return record if matches and record.get(name) in list(results) else None


def write_first(file: Path, record: dict[str, Any], read: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    """Write a record atomically unless another process was first; returns the record in the file.

    Raises:
        OSError: the folder cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, part = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as text:
            text.write(json.dumps(record, indent=2) + "\n")
        try:
            os.link(part, file)  # unlike a rename, it never replaces a file
        except FileExistsError:
            if (first := read()) is not None:
                return first
            Path(part).replace(file)
    finally:
        Path(part).unlink(missing_ok=True)
    return record


def processor() -> str:
    """The processor's model name."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    parts = {name.strip(): value.strip() for name, _, value in lines}
    model = " ".join(parts[part] for part in PARTS if part in parts)
    return model or platform.processor() or platform.machine()
