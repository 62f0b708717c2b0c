"""Declaration and checks of settings: types, ranges, choices, and the other settings that one needs.

Imports nothing heavy.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, Field, asdict, field, fields, is_dataclass, replace
from functools import cache, reduce
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from tokencredit.errors import ConfigError, quoted
from tokencredit.settings.trl import NONE, TRL, trl_names
from tokencredit.settings.yaml import flat

Config = TypeVar("Config")

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}
ROWS = ("train_dataset", "eval_dataset", "environment_factory")
"""Arguments of `PPOTrainer` that a setting may need; a configuration alone does not show whether they are given."""


def setting(default: Any, *, needs: str | tuple[str, ...] = (), **limits: float) -> Any:
    """A field with a range, or one that has an effect only together with other settings.

    Args:
        default: the field's default.
        needs: conditions that must all hold, or else a value other than the default is refused. `target` holds if that
            setting is not null, 0, false or empty, `not dataset` if it is; `schedule: linear, cosine` and `kind: not
            none` compare its value; ` or ` separates alternatives. Settings are of the same group, or whole keys. A
            setting that this kind of configuration lacks has no value.
        limits: `at_least`, `above`, `at_most` or `below`.
    """
    return field(default=default, metadata={"needs": (needs,) if isinstance(needs, str) else needs, "limits": limits})


def require_config(config: Any, kind: type[Config]) -> Config:
    """The configuration, checked again, since fields may have been changed since; None gives the default.

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
    return config


def values(default: Any, settings: Mapping[str, Any], known: Collection[str] = (), prefix: str = "") -> dict[str, Any]:
    """Values of a dataclass's fields from nested dicts, with its groups instantiated; types are not checked.

    Args:
        default: an instance with the default groups.
        settings: the nested dicts, as read from YAML.
        known: all keys of the configuration, to suggest one for an unknown key.
        prefix: prefix of its keys.

    Raises:
        ConfigError: a key is unknown, or a group is not a dict.
    """
    hints = _hints(default.__class__)
    made: dict[str, Any] = {}
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if name not in hints:
            raise ConfigError(unknown_key(key, known))
        hint = hints[name]
        group = _group_of(hint)
        if group is None or value is None:
            made[name] = value
        elif get_origin(hint) is not list:
            made[name] = _group(getattr(default, name) or group(), value, known, key)
        elif isinstance(value, list):  # of one of several kinds of groups
            made[name] = [group.read(inner, f"{key}[{place}]") for place, inner in enumerate(value)]
        else:
            made[name] = value
    return made


def _group(default: Any, settings: Any, known: Collection[str], key: str) -> Any:
    if not isinstance(settings, Mapping):
        raise ConfigError(no_group(key, settings, fields(default)[0].name))
    return replace(default, **values(default, settings, known, f"{key}."))


def no_group(key: str, value: Any, name: str) -> str:
    """A message on a value where a group of keys belongs, with the name of one of them."""
    return f"{key} is {quoted(value)}; it must hold keys, such as {key}.{name}"


def unknown_key(key: str, known: Collection[str]) -> str:
    """A message on an unknown key: the key for a name of TRL's, or the closest known one."""
    if any(here in known or here == NONE for here in TRL.get(key, "").split(", ")):
        return f"unknown key {key}; {trl_names([key])}"
    near = [name for name in known if name.endswith(f".{key}")] or difflib.get_close_matches(key, known, n=1)
    return f"unknown key {key}; " + (
        f"did you mean {' or '.join(near)}?" if near else "see --print_config for all keys"
    )


def check(config: Any, prefix: str = "") -> None:
    """Raise `ConfigError` for the first field, at any depth, with a wrong type, a value outside its range, or no valid
    choice."""
    hints = _hints(config.__class__)
    for name in vars(config):
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1)
            advice = trl_names([prefix + name]) or (f"did you mean {prefix}{near[0]}?" if near else "")
            raise ConfigError(f"unknown key {prefix}{name}" + (f"; {advice}" if advice else ""))
    for item in fields(config):
        key, value = prefix + item.name, getattr(config, item.name)
        _check_type(key, value, hints[item.name], item.metadata.get("limits", {}))


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _options(hint: Any) -> tuple[Any, ...]:
    """The members of a union; any other hint alone."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _check_type(key: str, value: Any, hint: Any, limits: Mapping[str, float]) -> None:
    options = _options(hint)
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
            _check_type(f"{key}[{position}]", element, get_args(fitting)[0], {})
    elif isinstance(value, dict):
        _check_plain(key, value)
    elif fitting in (int, float):
        _check_range(key, value, **limits)


def wrong_value(key: str, value: Any, hint: Any) -> str:
    """A message on a value of another type, or none of the choices, with the closest choice."""
    options = [option for option in _options(hint) if option is not NoneType]
    wanted = " or ".join(map(_wanted, options))
    choices = [choice for option in options if get_origin(option) is Literal for choice in get_args(option)]
    near = difflib.get_close_matches(str(value), choices, n=1)
    advice = f"; did you mean {near[0]}?" if near else _advice(value)
    return f"{key} is {quoted(value)}; it must be {wanted}{advice}"


def hint_of(kind: Any, key: str) -> Any:
    """The type of a setting by its whole key; None if there is no such key."""
    hint: Any = kind
    for name in key.split("."):
        group = _group_of(hint)
        hint = None if group is None else _hints(group).get(name)
    return hint


def _group_of(hint: Any) -> Any:
    """The dataclass in a type: itself, one that may be null, or of a list; None for another type."""
    return next((option for option in (hint, *get_args(hint)) if is_dataclass(option)), None)


def _is(value: Any, option: Any) -> bool:
    """True for a value of exactly this type; YAML gives no other."""
    if is_dataclass(option):
        return isinstance(value, option)  # type: ignore[arg-type]  # a class
    if get_origin(option) is Literal:
        return type(value) is str and value in get_args(option)
    if option is float:
        return type(value) in (int, float)
    return type(value) is (get_origin(option) or option)


def _wanted(option: Any) -> str:
    if is_dataclass(option) and isinstance(option, type):
        return f"{'an' if option.__name__[0] in 'AEIOU' else 'a'} {option.__name__}"
    if get_origin(option) is Literal:
        return f"one of {', '.join(get_args(option))}"
    if get_origin(option) is list:
        (element,) = get_args(option)
        return f"a list of {PLURALS.get(element) or _wanted(element).removeprefix('a ').replace('one of', 'any of')}"
    return WORDS.get(option, "a dict")


def _advice(value: Any) -> str:
    if isinstance(value, os.PathLike):
        return "; give str(path)"
    return "; give its .item()" if hasattr(value, "item") else ""  # NumPy's and PyTorch's numbers


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


def _check_range(
    key: str,
    value: float,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
    below: float = math.inf,
) -> None:
    if _is_finite(value) and at_least <= value <= at_most and above < value < below:
        return
    limits = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    wanted = [f"{word} {limit}" for word, limit in limits.items() if math.isfinite(limit)]
    if not _is_finite(value):
        wanted.append("finite")
    raise ConfigError(f"{key} is {quoted(value)}; it must be {' and '.join(wanted)}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


class Rule(NamedTuple):
    """The conditions under which a setting has an effect, and its defaults."""

    needs: tuple[str, ...]
    own: Any
    """Default of its class."""
    default: Any
    """Default of the whole configuration."""


class UnusedSetting(NamedTuple):
    """A setting without an effect."""

    why: str
    """The reason, such as `without kl.target`."""
    rule: Rule


def refuse_unused(config: Any, rows: Collection[str] = ROWS) -> None:
    """Raise `ConfigError` for the first setting that has no effect with the others and is not its default.

    Args:
        config: a whole configuration.
        rows: the arguments of `ROWS` that are given, or may be.
    """
    settings = flat(asdict(config))
    for key, (why, rule) in unused(type(config), settings, rows).items():
        if settings[key] not in (rule.own, rule.default):
            raise ConfigError(f"{key} is {quoted(settings[key])}, which has no effect {why}; leave it out")


def unused(kind: type, settings: Mapping[str, Any], rows: Collection[str] = ROWS) -> dict[str, UnusedSetting]:
    """Settings, by key, that have no effect with the others, whatever their values.

    Args:
        kind: class of the whole configuration.
        settings: the whole configuration, as `flat` gives it.
        rows: as in `refuse_unused`.
    """
    rules, known = _rules(kind), {**settings, **dict.fromkeys(rows, True)}
    reasons: dict[str, UnusedSetting] = {}
    for key in settings:
        rule, group = rules.get(key), key[: key.rfind(".") + 1]
        for need in rule.needs if rule else ():
            conditions = [Condition.read(text, known, group) for text in need.split(" or ")]
            if rule and not any(condition.holds(known) for condition in conditions):
                reasons.setdefault(key, UnusedSetting(_why(conditions), rule))
    return reasons


def without_idle(
    kind: type, settings: Mapping[str, Any], begun: Mapping[str, Any], rows: Collection[str] = ()
) -> dict[str, Any]:
    """A run's settings, with defaults for those without an effect unless they differ from `begun`.

    Args:
        kind: class of the whole configuration.
        settings: values of its fields, for a command, which has no rows.
        begun: settings that the run began with, as `flat` gives them.
        rows: the arguments of `ROWS` that the run may have begun with, and whose settings a command reads.
    """
    draft: Any = object.__new__(kind)  # not checked yet
    vars(draft).update(settings)
    now = flat(asdict(draft))
    for key, (_, rule) in unused(kind, now, rows).items():
        if now[key] == begun.get(key):
            *groups, name = key.split(".")
            setattr(reduce(getattr, groups, draft), name, rule.default)
    return dict(vars(draft))


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
        return (str(value) in self.values if self.values else bool(value)) is not self.negated

    def __str__(self) -> str:
        return f"{self.key}: {', '.join(self.values)}" if self.values else self.key


def _why(conditions: list[Condition]) -> str:
    """The reason that a setting has no effect when none of these conditions holds."""
    words = {False: "without", True: "with"}
    lists = {negated: [str(x) for x in conditions if x.negated is negated] for negated in words}
    joints = {False: " or ", True: " and "}  # none of these holds; all of those are set
    return " and ".join(f"{words[negated]} {joints[negated].join(names)}" for negated, names in lists.items() if names)


@cache
def _rules(kind: type) -> dict[str, Rule]:
    """Rules of all settings by key."""
    return dict(_walk(kind, None, ""))


def _walk(kind: Any, default: Any, prefix: str) -> Iterator[tuple[str, Rule]]:
    """Rules of a class of settings, whose default in the whole configuration is an instance of it or None."""
    for item in fields(kind):
        key, own, hint = prefix + item.name, _default(item), _hints(kind)[item.name]
        here = own if default is None else getattr(default, item.name)
        yield key, Rule(item.metadata.get("needs", ()), own, here)
        for option in _options(hint):
            if is_dataclass(option):
                yield from _walk(option, here, f"{key}.")


def _default(item: Field[Any]) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()
