"""Parts of a run that may be a user's: a name of ours, `path/file.py:name`, or in Python the function or object."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from tokencredit.provenance.parts import describe, label

OWN = "own"
"""The value of a condition (`setting(needs=…)`) that holds for every part of a user."""
PYTHON = "python:"
"""Beginning of the text that stands for an object from Python in config.yaml."""
Part = Annotated[Any, OWN]
"""Type of a setting that takes parts of users, beside the names of ours."""


def is_own(value: Any) -> bool:
    """True for a user's part: `file.py:name`, or an object."""
    return ":" in value if isinstance(value, str) else not isinstance(value, int | float | list | dict | None)


def with_kwargs(group: Any, name: str) -> Any:
    """The value of a group's setting; a function or class from Python with the `kwargs` beside it."""
    value, kwargs = getattr(group, name), getattr(group, "kwargs", None)
    return partial(value, **kwargs) if kwargs and callable(value) else value


def plain(value: Any, *, named: bool = True) -> Any:
    """Settings as dicts, lists and plain values, objects from Python by their names: what a run writes down.

    If not `named`, all objects have one name, which is quick.
    """
    if isinstance(value, Mapping):
        return {key: plain(inner, named=named) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, named=named) for inner in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if is_dataclass(value) and not isinstance(value, type) and type(value).__module__.startswith(__package__):
        return {item.name: plain(with_kwargs(value, item.name), named=named) for item in fields(value)}
    return PYTHON + (name_of(value, digest=True) if named else "")


def label_of(part: Any) -> str:
    """The name of a part in tables and messages, from the part or its text in config.yaml; one of ours as it is."""
    if not isinstance(part, str):
        return name_of(part)
    if not is_own(part):
        return part
    location, _, name = part.rpartition(":")
    return part.removeprefix(PYTHON) if part.startswith(PYTHON) else f"{name} ({Path(location).name})"


def name_of(part: Any, *, digest: bool = False, without: Collection[str] = ()) -> str:
    """The name of a function, class or object with its arguments but some, its file, and on request its digest."""
    described = describe(inspect.unwrap(part) if callable(part) else part)
    arguments = {name: value for name, value in described.get("arguments", {}).items() if name not in without}
    return label(described | {"arguments": arguments}, digest=digest)
