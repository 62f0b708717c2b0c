"""The reader of settings: strict YAML, dicts and flags, with nested or dotted keys, become a configuration."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar, get_args, get_origin

import yaml

from tokencredit.errors import ConfigError
from tokencredit.settings.fields import Named, check_value, hints_of, no_group, options_of, settings_of, unknown_key

Kind = TypeVar("Kind")

MAX_SIZE = 2_000_000
"""Maximum characters per document."""
MAX_DEPTH = 50
"""Maximum nesting of lists and mappings."""
FLOAT = re.compile(
    r"""[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[0-9][0-9_]*[eE][-+]?[0-9]+
    |\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
    |\.(?:inf|Inf|INF))$
    |\.(?:nan|NaN|NAN)$""",
    re.VERBOSE,
)


INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$")


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's safe loader, in which 1e-5 is a number, and dates, 010 and 1:30 are texts.

    The C version takes a tenth of the time.
    """

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """A mapping; raises `yaml.MarkedYAMLError` for a key that is given twice."""
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in keys:
                    raise yaml.MarkedYAMLError(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
                keys.add(key.value)
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made


class Dumper(yaml.SafeDumper):
    """The matching dumper: it quotes texts that `Loader` would read as numbers, and writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        """True: a value is written again wherever it stands."""
        return True


for kind in (Loader, Dumper):
    kind.yaml_implicit_resolvers = {
        first: [(tag, fits) for tag, fits in resolvers if not tag.endswith((":timestamp", ":float", ":int"))]
        for first, resolvers in kind.yaml_implicit_resolvers.items()
    }
    # YAML 1.1 wants 1.0e-5, and reads 010 as 8 and 1:30 as 90.
    kind.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))
    kind.add_implicit_resolver("tag:yaml.org,2002:int", INT, list("-+0123456789"))


def load_yaml(text: str) -> Any:
    """Load a YAML document: dicts, lists, texts, numbers and None.

    Raises:
        yaml.YAMLError: invalid YAML, a tag, an alias, a duplicate key, a number too long, or beyond the limits.
    """
    if len(text) > MAX_SIZE:
        raise yaml.YAMLError(f"it has {len(text)} characters; a configuration may have {MAX_SIZE}")
    try:
        refuse(text)
        return yaml.load(text, Loader=Loader)
    except ValueError as error:  # a number too long, half a character
        raise yaml.YAMLError(str(error)) from error


def refuse(text: str) -> None:
    """Raise `yaml.YAMLError`, which names the line, for anything but plain nested values; nothing is constructed."""
    depth, problem = 0, ""
    for event in yaml.parse(text, Loader=Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            problem = f"*{event.anchor} is an alias; write the value again"
        elif (tag := getattr(event, "tag", None)) not in (None, "!"):
            problem = f"{tag!r} is a tag; configurations hold plain values"
        elif depth > MAX_DEPTH:
            problem = f"more than {MAX_DEPTH} nested lists"
        if problem:
            mark: Any = event.start_mark
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def read_yaml(file: Path) -> dict[Any, Any]:
    """Load a YAML file of settings.

    Raises:
        ConfigError: the file cannot be read, holds no mapping, or as `load_yaml`; the message names file and line.
    """
    text = ""
    try:
        text = file.read_text(encoding="utf-8")
        settings = load_yaml(text)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).replace('in "<unicode string>", ', "").split())
        mark: Any = getattr(error, "problem_mark", None)
        tab = mark is not None and text[mark.index : mark.index + 1] == "\t"
        raise ConfigError(f"{file}: {reason}{'; indent with spaces, not with tabs' if tab else ''}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{file}: it holds no settings; it must be a mapping of keys to values")
    return settings


def dump_yaml(settings: Mapping[str, Any]) -> str:
    """Settings as YAML, in their order; `load_yaml` reads them back."""
    return yaml.dump(settings, Dumper=Dumper, sort_keys=False, allow_unicode=True)


class Configuration(Named):
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
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{str(path)!r} {'is not a file' if file.exists() else 'does not exist'}")
    settings = read_yaml(file)
    try:
        groups = grouped(kind, settings.items())
        _values(kind(), groups, settings_of(kind))
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
            made.setdefault(name, ...)
        elif key in made or (isinstance(made.get(name), Mapping) and rest in made[name]):
            raise ConfigError(f"{prefix}{key} is given twice")
        elif dot and get_origin(hints.get(name)) is dict and isinstance(made.get(name, {}), Mapping):
            made[name] = {**made.get(name, {}), rest: value}
        else:
            made[key] = value
    for name, inner in groups.items():
        if made[name] is not ...:
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
    """Values of a dataclass's fields, with its groups instantiated; each is checked by itself."""
    hints, made = hints_of(default.__class__), dict[str, Any]()
    limits = {item.name: item.metadata.get("limits", {}) for item in fields(default)}
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if name not in hints:
            while isinstance(value, Mapping) and value:  # a group of another project, whose key may be known
                (name, value), *_ = value.items()
                key = f"{key}.{name}"
            raise ConfigError(unknown_key(key, known))
        if not is_dataclass(hints[name]) or value is None:
            made[name] = _converted(key, value, hints[name])
            check_value(key, made[name], hints[name], limits[name])
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
    if hasattr(value, "item") and not getattr(value, "shape", ()):  # a number, and not an array
        value = value.item()
    if value is None or isinstance(value, str | bool | int | float) or callable(value):
        return value
    raise ConfigError(f"{key} is {value!r}, which is not a dict, list, str, number, bool or None")
