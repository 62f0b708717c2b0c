"""Strict YAML of settings: plain values, without tags and aliases, within size limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tokencredit.errors import ConfigError

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


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's safe loader, in which 1e-5 is a number and a date is text; the C version takes a tenth of the time."""


class Dumper(yaml.SafeDumper):
    """The matching dumper: it quotes texts that `Loader` would read as numbers, and writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        """True: a value is written again wherever it stands."""
        return True


for kind in (Loader, Dumper):
    kind.yaml_implicit_resolvers = {
        first: [(tag, fits) for tag, fits in resolvers if not tag.endswith((":timestamp", ":float"))]
        for first, resolvers in kind.yaml_implicit_resolvers.items()
    }
    # YAML 1.1 wants 1.0e-5.
    kind.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))


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
    around: list[set[str] | None] = []  # of each mapping around, its keys so far; of a list, None
    at_key: list[bool] = []  # of each mapping around, whether a key comes next
    for event in yaml.parse(text, Loader=Loader):
        if isinstance(event, yaml.CollectionEndEvent):
            around.pop()
            at_key.pop()
        if not isinstance(event, yaml.NodeEvent):
            continue
        problem = None
        if isinstance(event, yaml.AliasEvent):
            problem = f"*{event.anchor} is an alias; write the value again"
        elif (tag := getattr(event, "tag", None)) not in (None, "!"):
            problem = f"{tag!r} is a tag; configurations hold plain values"
        elif at_key and at_key[-1] and isinstance(event, yaml.ScalarEvent):
            keys = around[-1] or set()
            problem = f"{event.value} is given twice" if event.value in keys else None
            around[-1] = keys | {event.value}
        if at_key:
            at_key[-1] = around[-1] is not None and not at_key[-1]
        if isinstance(event, yaml.CollectionStartEvent):
            mapping = isinstance(event, yaml.MappingStartEvent)
            around.append(set() if mapping else None)
            at_key.append(mapping)
            problem = f"more than {MAX_DEPTH} nested lists" if len(around) > MAX_DEPTH else problem
        if problem is not None:
            mark: Any = event.start_mark
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


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
