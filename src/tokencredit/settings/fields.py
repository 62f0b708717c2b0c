"""Declaration and checks of settings: types, ranges, choices, and the other settings that one needs.

Imports nothing heavy.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, field, fields, is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from tokencredit.errors import ConfigError, quoted
from tokencredit.settings.foreign_names import misspelt, suggestion
from tokencredit.settings.parts import OWN, is_own, plain
from tokencredit.settings.projects.values import CHOICES

Config = TypeVar("Config")

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
FITS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}
PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}
ROWS = ("train_dataset", "eval_dataset", "environment_factory")
"""Arguments of `PPOTrainer` that a setting may need; a configuration alone does not show whether they are given."""


def setting(default: Any, *, needs: str | tuple[str, ...] = (), **limits: float) -> Any:
    """A field with a range, or one that has an effect only together with other settings.

    Args:
        default: the field's default, or a function that makes it.
        needs: conditions that must all hold, or else a value other than the default is refused. `target` holds if that
            setting is not null, 0, false or empty, `not dataset` if it is; `schedule: linear, cosine` and `kind: not
            none` compare its value, and `own` is a user's part; ` or ` separates alternatives. Settings are of the
            same group, or whole keys. A setting that this kind of configuration lacks has no value.
        limits: `at_least`, `above`, `at_most` or `below`.
    """
    metadata = {"needs": (needs,) if isinstance(needs, str) else needs, "limits": limits}
    made: dict[str, Any] = {"default_factory" if callable(default) else "default": default}
    return field(**made, metadata=metadata)


def at_home(path: str) -> str:
    """A path with the home folder in place of `~`, and otherwise unchanged: a shell replaces it only in some places."""
    return os.path.expanduser(path)  # noqa: PTH111  # a Path would make a hub id of ./name


class Named:
    """Base class of settings whose constructor answers a keyword that is none of them with the one that is meant."""

    def __new__(cls, *_values: Any, **keywords: Any) -> Self:
        """Raise `ConfigError` for such a keyword."""
        kind: Any = cls
        if unknown := sorted(keywords.keys() - hints_of(kind)):
            raise ConfigError(unknown_key(unknown[0], settings_of(kind)))
        return super().__new__(cls)


class Group(Named):
    """Base class of groups of settings: types and ranges are checked when one is made."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value of the wrong type or range."""
        check(self, f"{type(self).__name__}.")


def require_config(config: Any, kind: type[Config]) -> Config:
    """A copy of the configuration, checked again, since fields may have been changed since; None gives the default.

    What the caller changes afterwards, such as the seed for the next run, then changes nothing of this one.

    Raises:
        ConfigError: it is something else, such as a dict, or has an invalid value.
    """
    if config is None:
        return kind()
    if not isinstance(config, kind):
        raise ConfigError(
            f"args is a {type(config).__name__}; give a {kind.__name__}, such as {kind.__name__}.from_dict(…)"
        )
    config.__post_init__()  # type: ignore[attr-defined]
    copied: Config = _copied(config)
    return copied


def _copied(value: Any) -> Any:
    """A copy of settings and of what they contain; parts of the user's as they are."""
    if isinstance(value, Named):
        made: Any = value
        return replace(made, **{item.name: _copied(getattr(made, item.name)) for item in fields(made)})
    if type(value) is dict:
        return {key: _copied(x) for key, x in value.items()}
    return [_copied(x) for x in value] if type(value) is list else value


def no_group(key: str, value: Any, name: str) -> str:
    """A message on a value where a group of keys belongs, with the name of one of them."""
    return f"{key} is {quoted(value)}; it must hold keys, such as {key}.{name}"


def unknown_key(key: str, known: Collection[str]) -> str:
    """A message on an unknown key, with the one that is meant, if that is clear."""
    return f"unknown key {key}; {suggestion(key, known)}"


def check(config: Any, prefix: str = "") -> None:
    """Raise `ConfigError` for the first field, at any depth, with a wrong type, a value outside its range, or no valid
    choice."""
    hints = hints_of(config.__class__)
    for name in vars(config):
        if name not in hints:
            raise ConfigError(unknown_key(prefix + name, [prefix + known for known in settings_of(config.__class__)]))
    for item in fields(config):
        key, value = prefix + item.name, getattr(config, item.name)
        check_value(key, value, hints[item.name], item.metadata.get("limits", {}))


@cache
def hints_of(kind: Any) -> dict[str, Any]:
    """Types of a dataclass's fields."""
    return get_type_hints(kind, include_extras=True)


def options_of(hint: Any) -> tuple[Any, ...]:
    """The members of a union; any other hint alone."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def check_value(key: str, value: Any, hint: Any, limits: Mapping[str, float]) -> None:
    """Raise `ConfigError` for a value of another type or outside its limits."""
    options = options_of(hint)
    if value is None:
        if NoneType in options:
            return
        raise ConfigError(f"{key} is null; it needs a value")
    fitting = next((option for option in options if _is(value, option)), None)
    if fitting is None:
        raise ConfigError(wrong_value(key, value, hint))
    if is_dataclass(fitting):
        check(value, f"{key}.")
    elif isinstance(value, list):
        for position, element in enumerate(value):
            check_value(f"{key}[{position}]", element, get_args(fitting)[0], {})
    elif isinstance(value, dict):
        _check_plain(key, value)
    elif fitting in (int, float):
        _check_range(key, value, limits)


def wrong_value(key: str, value: Any, hint: Any) -> str:
    """A message on a value of another type, or none of the choices, with the closest choice."""
    options = [option for option in options_of(hint) if option is not NoneType]
    wanted = " or ".join(map(wanted_of, options))
    choices = [choice for option in options if get_origin(option) is Literal for choice in get_args(option)]
    named = CHOICES.get(str(value))
    near = misspelt(str(value), choices) if named is None else [named] if named in choices else []
    if str(value).lower() == "none" and NoneType in options_of(hint):
        near = ["null"]
    if isinstance(value, str) and value and list[str] in options:
        wanted += f", such as {json.dumps([value], ensure_ascii=False)}"
    advice = f"; did you mean {near[0]}?" if near else _advice(value)
    if is_own(value) and key in ("critic.kind", "AgentCriticConfig.kind"):  # of texts one would be accepted
        advice = "; agents take none of your own"
    return f"{key} is {quoted(value)}; it must be {wanted}{advice}"


def _is(value: Any, option: Any) -> bool:
    """True for a value of exactly this type; YAML gives no other."""
    if is_dataclass(option):
        return isinstance(value, option)  # type: ignore[arg-type]  # a class
    if get_origin(option) is Literal:
        return type(value) is str and value in get_args(option)
    if get_origin(option) is Annotated:
        return is_own(value)
    if option is float:
        return type(value) in (int, float)
    return type(value) is (get_origin(option) or option)


def wanted_of(option: Any) -> str:
    """A type in words."""
    if is_dataclass(option) and isinstance(option, type):
        return f"{'an' if option.__name__[0] in 'AEIOU' else 'a'} {option.__name__}"
    if get_origin(option) is Literal:
        return f"one of {', '.join(get_args(option))}"
    if get_origin(option) is Annotated:
        return "your own, path/file.py:name (docs/your-own.md)"
    if get_origin(option) is list:
        (element,) = get_args(option)
        if is_dataclass(element):
            return "a list of terms, such as --reward '[{function: f.py:f}]', or reward: [{function: f.py:f}] in a file"
        return f"a list of {PLURALS.get(element) or wanted_of(element).removeprefix('a ').replace('one of', 'any of')}"
    return WORDS.get(option, "a dict")


def _advice(value: Any) -> str:
    if isinstance(value, os.PathLike):
        return "; give str(path)"
    if hasattr(value, "item"):  # NumPy's and PyTorch's
        return "; give its .tolist()" if getattr(value, "shape", ()) else "; give its .item()"
    return ""


def _check_plain(key: str, value: Any) -> None:
    """Raise `ConfigError` for a value inside a dict that config.yaml cannot hold."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if type(name) is not str:
                raise ConfigError(f"{key} has the key {quoted(name)}; keys must be texts")
            _check_plain(f"{key}.{name}", inner)
    elif type(value) is list:
        for position, inner in enumerate(value):
            _check_plain(f"{key}[{position}]", inner)
    elif value is not None and type(value) not in WORDS:
        raise ConfigError(
            f"{key} is {quoted(value)}; it must be a dict, list, text, number, true, false or null{_advice(value)}"
        )


def _check_range(key: str, value: float, limits: Mapping[str, float]) -> None:
    finite = abs(value) < 2**1024  # false for NaN, and for a whole number beyond all floats
    if finite and all(FITS[word](value, limit) for word, limit in limits.items()):
        return
    wanted = [f"{word.replace('_', ' ')} {limit}" for word, limit in limits.items()] + ["finite"] * (not finite)
    raise ConfigError(f"{key} is {quoted(value)}; it must be {' and '.join(wanted)}")


def refuse(config: Any, keys: str, reason: str, prefix: str = "") -> NoReturn:
    """Raise `ConfigError` with the values of these keys, separated by spaces, and the reason with its cure."""
    values = [f"{prefix}{key} is {_shown(operator.attrgetter(key)(config))}" for key in keys.split()]
    raise ConfigError(f"{', and '.join(values)}; {reason}")


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) and value else quoted(value)


class Setting(NamedTuple):
    """A setting or a group of them, as its class declares it."""

    name: str
    kind: type
    """The dataclass that declares it."""
    hint: Any
    needs: tuple[str, ...]
    """The conditions under which it has an effect."""
    limits: Mapping[str, float]
    """Its range, as `setting` takes it."""
    own: Any
    """Default of its class."""
    default: Any
    """Default of the whole configuration."""


def refuse_unused(config: Any, rows: Collection[str] = ROWS) -> None:
    """Raise `ConfigError` for the first setting that has no effect with the others and is not its default.

    `rows` are the arguments of `ROWS` that are given, or may be.
    """
    groups = {item.name: plain(getattr(config, item.name), named=False) for item in fields(config)}
    settings, declared = flat(groups), settings_of(config.__class__)
    # A dict is one setting, whatever its keys.
    settings |= {key: operator.attrgetter(key)(config) for key, x in declared.items() if get_origin(x.hint) is dict}
    for key, why in unused(config.__class__, settings, rows).items():
        if settings[key] not in (declared[key].own, declared[key].default):
            raise ConfigError(f"{key} is {quoted(settings[key])}, which has no effect {why}; leave it out")


def unused(kind: Any, settings: Mapping[str, Any], rows: Collection[str] = ROWS) -> dict[str, str]:
    """The reasons, such as `without kl.target`, by key of settings that have no effect with the others.

    `kind` is the class of the whole configuration, `settings` are as `flat` gives them, `rows` as in `refuse_unused`.
    """
    declared, known = settings_of(kind), {**settings, **dict.fromkeys(rows, True)}
    reasons: dict[str, str] = {}
    for key in filter(declared.__contains__, settings):
        group = key[: key.rfind(".") + 1]
        for need in declared[key].needs:
            conditions = [Condition.read(text, known, group) for text in need.split(" or ")]
            if not any(condition.holds(known) for condition in conditions):
                reasons.setdefault(key, _why(conditions))
    return reasons


class Condition(NamedTuple):
    """A condition of `setting(needs=…)`, on a whole key."""

    key: str
    values: list[str]
    """Empty if any value but null, 0, false and empty will do."""
    negated: bool

    @classmethod
    def read(cls, text: str, known: Mapping[str, Any], group: str) -> Condition:
        """Parse a condition; a setting of the same group takes precedence over one with that whole key."""
        name, _, values = text.partition(": ")
        negated = name.startswith("not ") or values.startswith("not ")
        name, values = name.removeprefix("not "), values.removeprefix("not ")
        return cls(group + name if group + name in known else name, values.split(", ") if values else [], negated)

    def holds(self, known: Mapping[str, Any]) -> bool:
        """True if the settings fulfil it."""
        value = known.get(self.key)
        named = OWN if OWN in self.values and is_own(value) else str(value)
        return (named in self.values if self.values else bool(value)) is not self.negated

    def __str__(self) -> str:
        values = ["one of your own" if value == OWN else value for value in self.values]
        return f"{self.key}: {', '.join(values)}" if values else self.key


def _why(conditions: list[Condition]) -> str:
    """The reason that a setting has no effect when none of these conditions holds."""
    words = {False: "without", True: "with"}
    lists = {negated: [str(x) for x in conditions if x.negated is negated] for negated in words}
    joints = {False: " or ", True: " and "}  # none of these holds; all of those are set
    return " and ".join(f"{words[negated]} {joints[negated].join(names)}" for negated, names in lists.items() if names)


@cache
def settings_of(kind: Any) -> dict[str, Setting]:
    """All settings and groups of a configuration by key, each group before its settings."""
    return dict(_walk(kind, None, ""))


def _walk(kind: Any, default: Any, prefix: str) -> Iterator[tuple[str, Setting]]:
    """Those of a class, whose default in the whole configuration is an instance of it or None."""
    for item in fields(kind):
        own = item.default if item.default_factory is MISSING else item.default_factory()
        here, hint = own if default is None else getattr(default, item.name), hints_of(kind)[item.name]
        needs, limits = item.metadata.get("needs", ()), item.metadata.get("limits", {})
        yield prefix + item.name, Setting(item.name, kind, hint, needs, limits, own, here)
        if is_dataclass(hint):
            yield from _walk(hint, here, f"{prefix}{item.name}.")


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
