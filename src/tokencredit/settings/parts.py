"""Parts of a run that may be a user's: a name of ours, `path/file.py:name`, or in Python the function or object."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

OWN = "own"
"""The value of a condition (`setting(needs=…)`) that holds for every part of a user."""
PYTHON = "python:"
"""Beginning of the text that stands for an object from Python in config.yaml."""
Part = Annotated[Any, OWN]
"""Type of a setting that takes parts of users, beside the names of ours."""


def is_own(value: Any) -> bool:
    """True for a user's part: `file.py:name`, or an object."""
    return ":" in value if isinstance(value, str) else not isinstance(value, int | float | list | dict | None)


def plain(value: Any) -> Any:
    """Settings as dicts, lists and plain values, objects from Python by their names: what a run writes down."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if is_dataclass(value) and not isinstance(value, type) and type(value).__module__.startswith(__package__):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    return PYTHON + name_of(value)


def label_of(part: Any) -> str:
    """The name of a user's part in tables and messages, from the part or from its text in config.yaml."""
    if not isinstance(part, str):
        return name_of(part)
    location, _, name = part.rpartition(":")
    return part.removeprefix(PYTHON) if part.startswith(PYTHON) else f"{name} ({Path(location).name})"


def name_of(part: Any) -> str:
    """The name of a function, class or object, with the arguments of a `partial` and its file."""
    whole = inspect.unwrap(part) if callable(part) else part
    fixed, inner = getattr(whole, "keywords", None), inspect.unwrap(getattr(whole, "func", whole))
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    if fixed:
        name += f"({', '.join(f'{key}={value!r:.40}' for key, value in fixed.items())})"
    try:
        known = inner if inspect.isroutine(inner) or inspect.isclass(inner) else type(inner)
        source = Path(inspect.getfile(known)).name
    except TypeError:
        source = ""
    return f"{name} ({source})" if source.endswith(".py") else name
