"""Reading what a run has written: JSON objects, one or one a line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokencredit.runs.errors import ConfigError


def read_lines(file: Path, skip: Callable[[bytes], bool] = lambda _: False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each record of a file of JSON lines stands, and the record; none if there is no such file.

    A last line without an end, which is still being written, is left out, and so is what `skip` says.

    Raises:
        ConfigError: a line that is no JSON object; the message names it.
    """
    if not file.is_file():
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n") and line.strip() and not skip(line):
                where = f"{file}, line {number}"
                yield where, read_object(where, line)


def read_object(where: Any, text: str | bytes) -> dict[str, Any]:
    """A JSON object, or a `ConfigError` that says where there is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is not a JSON object")
    return found
