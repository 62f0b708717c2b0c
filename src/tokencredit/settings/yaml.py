"""Strict YAML of settings: plain values within size limits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tokencredit.errors import ConfigError

MOST_VALUES = 100_000
"""Maximum values per document. An alias counts as all values it stands for, and each hundred characters as one more."""
DEEPEST = 50
"""Maximum nesting of lists and mappings."""
FLOAT = re.compile(
    r"""[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[0-9][0-9_]*[eE][-+]?[0-9]+
    |\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
    |\.(?:inf|Inf|INF))$
    |\.(?:nan|NaN|NAN)$""",
    re.VERBOSE,
)


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's safe loader, in which 1e-5 is a number and a date is text; the C version takes a tenth of the time."""


class Dumper(yaml.SafeDumper):
    """The matching dumper: it quotes texts that `Loader` would read as numbers."""


for kind in (Loader, Dumper):
    kind.yaml_implicit_resolvers = {
        first: [(tag, fits) for tag, fits in resolvers if not tag.endswith((":timestamp", ":float"))]
        for first, resolvers in kind.yaml_implicit_resolvers.items()
    }
    # YAML 1.1 wants 1.0e-5.
    kind.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))


class Refused(yaml.MarkedYAMLError):
    """YAML that is refused: a tag, a duplicate key, or a document beyond the limits."""


@dataclass
class Collection:
    """A list or mapping that the scan is inside of."""

    anchor: str | None
    before: int
    """Number of values before it."""
    keys: set[str] | None
    """Keys so far; None for a list."""
    at_key: bool = True


def load_yaml(text: str) -> Any:
    """Load a YAML document: dicts, lists, texts, numbers and None.

    Raises:
        yaml.YAMLError: invalid YAML, a tag, a duplicate key, a `class_path`, a number too long, or beyond the limits.
    """
    try:
        for inner in scan(text):
            check_inner(inner)
        return yaml.load(text, Loader=Loader)
    except ValueError as error:  # a number too long, half a character
        raise yaml.YAMLError(str(error)) from error


def read_yaml(file: Path) -> Any:
    """Load a YAML file.

    Raises:
        ConfigError: the file cannot be read, or as `load_yaml`; the message names file and line.
    """
    try:
        return load_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).replace('in "<unicode string>", ', "").split())
        raise ConfigError(f"{file}: {reason}") from error


def dump_yaml(settings: Mapping[str, Any]) -> str:
    """Settings as YAML, in their order; `load_yaml` reads them back."""
    return yaml.dump(settings, Dumper=Dumper, sort_keys=False, allow_unicode=True)


def check_inner(text: str) -> None:
    """Apply the limits to a text inside a document too: the command's parser reads values as YAML again.

    Raises:
        yaml.YAMLError: it is YAML beyond the limits.
    """
    try:
        list(scan(text, plain=False))
    except Refused:
        raise
    except (yaml.YAMLError, UnicodeError):
        return  # a text like any other


def scan(text: str, *, plain: bool = True) -> Iterator[str]:
    """Yield each scalar of a YAML document while it is within the limits; nothing is constructed.

    Args:
        text: the document.
        plain: refuse tags, duplicate keys, and `class_path`.

    Raises:
        yaml.YAMLError: invalid or refused YAML; the message names the line.
    """
    sizes: dict[str, int] = {}  # values that each anchor stands for, once it is complete
    around: list[Collection] = []
    values = 0
    for event in yaml.parse(text, Loader=Loader):
        if isinstance(event, yaml.CollectionEndEvent):
            done = around.pop()
            if done.anchor is not None:
                sizes[done.anchor] = values - done.before
        elif isinstance(event, yaml.NodeEvent):
            if plain:
                check_plain(event, around[-1] if around else None)
            before, own = values, 1 + len(getattr(event, "value", "")) // 100
            if isinstance(event, yaml.AliasEvent):
                if any(event.anchor == outer.anchor for outer in around):
                    raise refused(event, f"the alias *{event.anchor} contains itself")
                own = sizes.get(str(event.anchor), 1)
            values += own
            if values > MOST_VALUES:
                raise refused(event, f"more than {MOST_VALUES} values, aliases expanded")
            if isinstance(event, yaml.ScalarEvent):
                if event.anchor is not None:
                    sizes[event.anchor] = own
                yield event.value
            elif isinstance(event, yaml.CollectionStartEvent):
                keys = set[str]() if isinstance(event, yaml.MappingStartEvent) else None
                around.append(Collection(event.anchor, before, keys))
                if len(around) > DEEPEST:
                    raise refused(event, f"more than {DEEPEST} nested lists")


def check_plain(event: yaml.NodeEvent, around: Collection | None) -> None:
    """Refuse a tag, a duplicate key, or a key that names a class."""
    tag = getattr(event, "tag", None)
    if tag not in (None, "!"):
        raise refused(event, f"{tag!r} is a tag; configurations hold plain values")
    if around is None or around.keys is None:
        return
    if around.at_key and isinstance(event, yaml.ScalarEvent):
        if event.value in around.keys:
            raise refused(event, f"{event.value} is given twice")
        if event.value == "class_path":  # jsonargparse would import the class
            raise refused(event, "class_path is not a setting")
        around.keys.add(event.value)
    around.at_key = not around.at_key


def refused(event: yaml.Event, problem: str) -> Refused:
    """The error for an event, with its line."""
    mark: Any = event.start_mark
    return Refused(problem=problem, problem_mark=mark)


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Settings by whole keys; entries of a list of groups by `[number]`, other lists are values.

    >>> flat({"kl": {"coef": 1}, "reward": [{"weight": 2}], "eval": {}})
    {'kl.coef': 1, 'reward[0].weight': 2}
    """
    if isinstance(config, Mapping):
        pairs = [(f"{prefix}.{key}" if prefix else str(key), value) for key, value in config.items()]
    elif isinstance(config, list) and any(isinstance(item, Mapping) for item in config):
        pairs = [(f"{prefix}[{number}]", item) for number, item in enumerate(config)]
    else:
        return {prefix: config}
    return {name: leaf for key, value in pairs for name, leaf in flat(value, key).items()}


def nested(settings: Mapping[Any, Any]) -> dict[str, Any]:
    """Settings with dotted keys as groups; the inverse of `flat`.

    >>> nested({"kl.coef": 1, "kl": {"place": "loss"}})
    {'kl': {'coef': 1, 'place': 'loss'}}

    Raises:
        ConfigError: a key is given twice, or is not text.
    """
    groups: dict[str, Any] = {}
    for key, value in settings.items():
        _put(groups, key, value, prefix="")
    return groups


def _put(groups: dict[str, Any], key: Any, value: Any, prefix: str) -> None:
    if not isinstance(key, str):
        where = prefix.rstrip(".") or "a mapping of settings"
        raise ConfigError(f"{where} has {key!r}, which YAML does not read as text; quote it")
    name, dot, rest = key.partition(".")
    inner = {rest: value} if dot else value
    if name in groups and not (isinstance(inner, Mapping) and isinstance(groups[name], dict)):
        raise ConfigError(f"{prefix}{name} is given twice")
    if not isinstance(inner, Mapping):
        groups[name] = inner
        return
    group = groups.setdefault(name, {})
    for inner_key, inner_value in inner.items():
        _put(group, inner_key, inner_value, f"{prefix}{name}.")
