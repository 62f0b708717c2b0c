"""How settings are declared and checked: ranges, choices, nested groups. Imports nothing heavy."""

from __future__ import annotations

import math
from dataclasses import field, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from tokencredit.errors import ConfigError

Config = TypeVar("Config")


def setting(default: Any, **limits: float) -> Any:
    """A field with a range: `at_least`, `above`, `at_most` or `below`."""
    return field(default=default, metadata=limits)


def require_config(config: Any, kind: type[Config]) -> Config:
    """The configuration; raises `ConfigError` if it is something else, such as a dict."""
    if not isinstance(config, kind):
        raise ConfigError(
            f"args is a {type(config).__name__}; give a {kind.__name__}, such as {kind.__name__}.from_dict(…)"
        )
    return config


def check(config: Any, prefix: str = "") -> None:
    """Raise `ConfigError` for the first field, at any depth, that is outside its range or not one of its choices."""
    hints = get_type_hints(type(config))
    for item in fields(config):
        key, value = prefix + item.name, getattr(config, item.name)
        if value is None and NoneType not in get_args(hints[item.name]):
            raise ConfigError(f"{key} is null, and needs a value")
        kinds = [kind for kind in (hints[item.name], *get_args(hints[item.name])) if isinstance(kind, type)]
        group = next((kind for kind in kinds if is_dataclass(kind)), None)
        is_list = get_origin(hints[item.name]) is list
        if group is not None and not is_list and not (value is None or isinstance(value, group)):
            raise ConfigError(f"{key} is {value!r}; it must be a {group.__name__}")
        if is_dataclass(value):
            check(value, f"{key}.")
        elif isinstance(value, list):
            for position, element in enumerate(value):
                if is_dataclass(element):
                    check(element, f"{key}[{position}].")
        elif get_origin(hints[item.name]) is Literal and value not in get_args(hints[item.name]):
            choices = ", ".join(get_args(hints[item.name]))
            raise ConfigError(f"{key} is {value!r}; it must be one of {choices}")
        elif item.metadata and value is not None:
            _check_range(key, value, **item.metadata)


def _check_range(
    key: str,
    value: float,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
    below: float = math.inf,
) -> None:
    if at_least <= value <= at_most and above < value < below:
        return
    limits = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    wanted = [f"{word} {limit:g}" for word, limit in limits.items() if math.isfinite(limit)]
    if not math.isfinite(value):
        wanted.append("finite")
    raise ConfigError(f"{key} is {value!r}; it must be {' and '.join(wanted)}")
