"""Tables of other projects' names and values, and the settings here that stand for theirs.

A table is data: `names` has a project's names by our keys, with a note in brackets; `values` the rules by which a key
here follows from several of theirs, or from another value; `defaults` theirs where ours differ; `fixed` what the
project always does. `translate(TRL, {"total_episodes": 2560, …})` makes settings for `PPOConfig.from_dict` of theirs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

NONE = "none"
"""The answer for a name without a counterpart here."""


class Without(str):
    """The reason that a rule gives no value; empty if the key keeps its default."""

    __slots__ = ()


DEFAULT = Without()


@dataclass(frozen=True)
class Project:
    """The settings of a project.

    Attributes:
        title: the project and its versions.
        names: its names, separated by spaces, by keys here and a note in brackets. A name stands for every longer one
            that ends with it after a dot, and may hold `*`.
        values: for keys here, the names that decide the value, and the function of their values. A name that begins
            with `=` is a key here that stands above. One that is not given has its default, or None.
        defaults: values of its names that are not given.
        fixed: values here that it always has.
        aliases: other names of its names, such as those of older versions.
        needs: a key that a configuration here has if it may be the project's.
        page: the page of docs/ with its names.
    """

    title: str
    names: Mapping[str, str]
    values: Mapping[str, tuple[str, Callable[..., Any]]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""
    page: str = ""

    @cached_property
    def answers(self) -> dict[str, str]:
        """Keys here, with a note, by name."""
        return {name: answer for answer, names in self.names.items() for name in names.split()}

    @cached_property
    def _patterns(self) -> list[str]:
        """Names with `*`, longest first."""
        return sorted((name for name in self.answers if "*" in name), key=len, reverse=True)

    def name_of(self, key: str, patterns: bool = True) -> str:
        """The name in the table that a key, maybe of nested groups, stands for; empty if there is none."""
        key = self.aliases.get(key, key)
        parts = key.split(".")
        for tail in (".".join(parts[number:]) for number in range(len(parts))):
            if tail in self.answers:
                return tail
            if patterns and (found := next((name for name in self._patterns if fnmatchcase(tail, name)), "")):
                return found
        return ""

    def answer(self, name: str) -> tuple[list[str], str]:
        """Keys here of a name in the table, none if it has no counterpart, and the note."""
        keys, note = split(self.answers[name])
        return [key for key in keys if key != NONE], note


def split(answer: str) -> tuple[list[str], str]:
    """The keys and the note of an answer."""
    keys, note = re.fullmatch(r"(.*?)(?: \((.*)\))?", answer).groups()  # type: ignore[union-attr]
    return keys.split(", "), note or ""


@dataclass
class Translation:
    """Settings here that stand for another project's.

    Attributes:
        settings: values by dotted key.
        origins: by the same keys, the names and values that they come from, or the project if the value is its own.
        undecided: by key, the reason that the value is left to the user.
        without: by their name, the reason that it has no counterpart here.
    """

    settings: dict[str, Any]
    origins: dict[str, str]
    undecided: dict[str, str] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)


def translate(project: Project, given: Mapping[str, Any]) -> Translation:
    """Settings here for a project's, by their dotted names; `rows`, the number of prompts, may be among them.

    Each name that is given, and not None, is in `origins`, or in `undecided` or `without` with the reason. Values are
    not checked against the ranges here.
    """
    made = Translation(dict(project.fixed), dict.fromkeys(project.fixed, f"as {project.title} does"))
    whole = {project.name_of(key) or key: key for key, value in given.items() if value is not None}
    values = dict(project.defaults) | {name: given[key] for name, key in whole.items()}

    def origin(names: list[str], value: Any = None) -> str:
        own = {name: whole.get(name, name) for name in names if name in values}
        shown = {name: "" if str(values[name]) in str(value) else f" {values[name]}" for name in own}
        parts = [f"{key}{shown[name]}{'' if name in whole else ' (default)'}" for name, key in own.items()]
        return f"default of {project.title}: {', '.join(own)}" if not whole.keys() & own else ", ".join(parts)

    rules = {key: (names.split(), function) for key, (names, function) in project.values.items()}
    used: set[str] = set()
    for key, (names, function) in rules.items():
        own = [name for name in names if not name.startswith("=")]
        if not values.keys() & own:
            continue
        arguments = [made.settings.get(x[1:]) if x.startswith("=") else values.get(x) for x in names]
        try:
            value = function(*arguments)
        except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError):  # a value of another type
            value = Without("no value that can be read")
        if not isinstance(value, Without):
            made.settings[key], made.origins[key] = value, origin(own, value)
        elif value:
            made.undecided[key] = f"{value} ({origin(own)})"
        used |= set(own) if value != DEFAULT else set()
    read = {name for names, _ in rules.values() for name in names}
    made.without = {whole[name]: "as by default here" for name in whole if name in read - used and name != "rows"}
    for name, value in values.items():
        keys = project.answer(name)[0] if name in project.answers else []
        keys = keys[:1] if name in read else keys  # a rule decides on the others
        for key in (key for key in keys if "(" not in key and key not in rules):
            made.settings[key], made.origins[key] = value, origin([name], value)
    for whole_name, value in given.items():
        name = project.name_of(whole_name)
        keys, note = project.answer(name) if name else ([], "no counterpart is known")
        if value is not None and whole_name != "rows" and name not in read and all("(" in key for key in keys):
            made.without[whole_name] = note or ", ".join(keys)
    return made
