"""Tables of other projects' names and values, and the settings here that stand for theirs.

A table is data: `names` has a project's names by our keys, with a note in brackets; `values` the rules by which a key
here follows from several of theirs; `defaults` theirs where ours differ; `fixed` what the project always does. A key
without a rule takes the first of its names that is given, by `values.CONVERSIONS`, which all projects share.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from tokencredit.settings.projects.values import CONVERSIONS, DEFAULT, Without, first

NONE = "none"
"""The answer for a name without a counterpart here."""
OPTIONAL = ("ppo.micro_batch_tokens", "eval.samples")
"""Keys without which the same is learned."""
Rules = Mapping[str, tuple[str, Callable[..., Any]]]


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
    values: Rules = field(default_factory=dict)
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
    def copied(self) -> dict[str, list[str]]:
        """Names by the keys here without a rule; a name that a rule reads stands for the first of its keys alone."""
        read = {name for names, _ in self.values.values() for name in names.split()}
        found: dict[str, list[str]] = {}
        for name in self.answers:
            keys = self.answer(name)[0]
            for key in keys[:1] if name in read else keys:
                if key not in self.values and "(" not in key:
                    found.setdefault(key, []).append(name)
        return found

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
        keys, note = re.fullmatch(r"(.*?)(?: \((.*)\))?", self.answers[name]).groups()  # type: ignore[union-attr]
        return [key for key in keys.split(", ") if key != NONE], note or ""


@dataclass
class Translation:
    """Settings here that stand for another project's.

    Attributes:
        settings: values by dotted key.
        origins: by the same keys, the names and values that they come from, or the project if the value is its own.
        undecided: by key, the reason that the value is left to the user.
        without: by their name, the reason that it has no counterpart here; empty for a name that is not known.
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
        if not whole.keys() & names:
            return f"default of {project.title}: {', '.join(names)}"
        hidden = {name for name in names if str(values[name]) in str(value) or name.endswith(".key")}  # a secret
        shown = {name: "" if name in hidden else f" {values[name]}" for name in names}
        return ", ".join(f"{whole.get(name, name)}{shown[name]}{' (default)' * (name not in whole)}" for name in names)

    # A key without a rule: what is given goes before the project's default.
    rules: dict[str, tuple[list[str], Callable[..., Any]]] = {
        key: ([name for name in names if name in whole] or names, first) for key, names in project.copied.items()
    }
    rules |= {key: (names.split(), function) for key, (names, function) in project.values.items()}
    used: set[str] = set()
    for key, (names, function) in rules.items():
        if not (own := [name for name in names if name in values]):
            continue
        arguments = [made.settings.get(x[1:]) if x.startswith("=") else values.get(x) for x in names]
        try:
            value = function(*arguments)
            if function is first and value is not DEFAULT:
                value = CONVERSIONS.get(key, first)(value)
        except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError):  # a value of another type
            value = Without("no value that can be read")
        if not isinstance(value, Without):
            made.settings[key], made.origins[key] = value, origin(own, value)
        elif key in OPTIONAL:
            made.without |= {whole[name]: value for name in own if value and name in whole}
        elif value:
            made.undecided[key] = f"{value} ({origin(own)})"
        used |= set(own) if value != DEFAULT else set()
    for key, value in given.items():
        name = project.name_of(key)
        if value is None or name in used or key in ("rows", *made.without):
            continue
        keys, note = project.answer(name) if name else ([], "")
        read = any("(" not in here for here in keys)
        made.without[key] = "without effect there, or so by default here" if read else note or ", ".join(keys)
    made.without |= {
        f"{name} {value} (default)": project.answer(name)[1]
        for name, value in project.defaults.items()
        if name not in whole and not project.answer(name)[0]
    }
    return made
