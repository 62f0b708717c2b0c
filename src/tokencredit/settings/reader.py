"""The reader of settings: nested or dotted keys, from dicts, files and flags, become a checked configuration."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar, get_args, get_origin

from tokencredit.errors import ConfigError
from tokencredit.settings.fields import check_value, hints_of, no_group, options_of, settings_of, unknown_key
from tokencredit.settings.yaml import read_yaml

Kind = TypeVar("Kind")


class Configuration:
    """Base class of whole configurations."""

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Read a configuration from a YAML file, as `--config` does.

        Raises:
            ConfigError: there is no such file, or it has a key or value that is refused.
        """
        return build(cls, read_settings(cls, path))

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Self:
        """Make a configuration from settings with dotted or nested keys; the rest takes defaults.

        Raises:
            ConfigError: a key or value is refused, or a key is given twice.
        """
        if not isinstance(settings, Mapping):
            raise ConfigError(f"{settings!r} is not a dict of settings; read a file with from_yaml")
        return build(cls, grouped(cls, _plain(settings).items()))


def read_settings(kind: type, path: str | Path) -> dict[str, Any]:
    """The settings of a YAML file, by groups; each by itself is checked.

    Raises:
        ConfigError: the file cannot be read, or has a key or value that is refused; the message names the file.
    """
    if not Path(path).is_file():
        raise ConfigError(f"{str(path)!r} {'is not a file' if Path(path).exists() else 'does not exist'}")
    settings = read_yaml(Path(path))
    try:
        if not isinstance(settings, Mapping):
            raise ConfigError("it holds no settings; it must be a mapping of keys to values")
        groups = grouped(kind, settings.items())
        limits = {item.name: item.metadata.get("limits", {}) for item in fields(kind)}
        for name, value in _values(kind(), groups, settings_of(kind)).items():
            check_value(name, value, hints_of(kind)[name], limits[name])
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return groups


def build(kind: type[Kind], settings: Mapping[str, Any]) -> Kind:
    """The configuration of settings by groups; raises `ConfigError` for one that is refused."""
    default: Any = kind()
    known: Any = kind  # a dataclass
    made: Kind = replace(default, **_values(default, settings, settings_of(known)))
    return made


def grouped(kind: Any, settings: Iterable[tuple[Any, Any]], prefix: str = "") -> dict[str, Any]:
    """Settings with dotted keys moved into their groups; dicts that are values stay as they are.

    Raises:
        ConfigError: a key is no text, or is given twice.
    """
    hints, made = hints_of(kind), dict[str, Any]()
    groups: dict[str, list[tuple[Any, Any]]] = {}
    for key, value in settings:
        if not isinstance(key, str):
            raise ConfigError(f"{prefix}{key!r} is a key that YAML does not read as text; quote it")
        name, dot, rest = key.partition(".")
        if is_dataclass(hints.get(name)) and (dot or isinstance(value, Mapping)):
            groups.setdefault(name, []).extend([(rest, value)] if dot else value.items())
            made.setdefault(name, None)
        elif key in made:
            raise ConfigError(f"{prefix}{key} is given twice")
        else:
            made[key] = value
    for name, inner in groups.items():
        if made[name] is not None:
            raise ConfigError(f"{prefix}{name} is given twice")
        made[name] = grouped(hints[name], inner, f"{prefix}{name}.")
    return made


def merged(kind: Any, first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by groups, of which the second override the first."""
    both = dict(first)
    for name, value in second.items():
        before, group = both.get(name), hints_of(kind).get(name)
        if is_dataclass(group) and isinstance(before, Mapping) and isinstance(value, Mapping):
            value = merged(group, before, value)
        both[name] = value
    return both


def _values(default: Any, settings: Mapping[str, Any], known: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Values of a dataclass's fields, with its groups instantiated; types are not checked."""
    hints, made = hints_of(default.__class__), dict[str, Any]()
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if name not in hints:
            raise ConfigError(unknown_key(key, known))
        if not is_dataclass(hints[name]) or value is None:
            made[name] = _converted(key, value, hints[name])
        elif isinstance(value, Mapping):
            group = getattr(default, name)
            made[name] = replace(group, **_values(group, value, known, f"{key}."))
        else:
            raise ConfigError(no_group(key, value, fields(hints[name])[0].name))
    return made


def _converted(key: str, value: Any, hint: Any) -> Any:
    """A value with whole numbers as floats where floats belong, and mappings of a list of groups as groups."""
    for option in options_of(hint):
        if option is float and type(value) is int and abs(value) < 2**1000:  # a larger one is refused as not finite
            return float(value)
        if get_origin(option) is list and isinstance(value, list):
            element: Any = get_args(option)[0]
            read: Any = getattr(element, "read", None) or (lambda x, at, of=element: _converted(at, x, of))
            return [read(inner, f"{key}[{position}]") for position, inner in enumerate(value)]
    return value


def _plain(value: Any, key: str = "") -> Any:
    """Settings as YAML types; paths, dataclasses, tuples and NumPy numbers are converted."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {name: _plain(inner, f"{key}.{name}" if key else str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{key}[{place}]") for place, inner in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item"):
        value = value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ConfigError(f"{key} is {value!r}, which is not a dict, list, str, number, bool or None")
