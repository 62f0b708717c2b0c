"""A run.yaml from another project's settings, with the origin of each value as a comment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from tokencredit.errors import ConfigError
from tokencredit.runs.untrusted import visible
from tokencredit.settings.fields import check_value, settings_of, unused
from tokencredit.settings.projects.translation import Project, Translation, translate
from tokencredit.settings.reader import Dumper
from tokencredit.settings.text import PPOConfig

MAX_LISTED = 12
"""Names on the terminal; the file has all."""
NEEDED = {
    "model.name": "no model is named",
    "reward": "no reward is named; the default rewards negative reviews of films",
    "prompts.dataset": "no prompts are named",
    "run.iterations": "no length is given",
}
"""Keys without which a run would be another one, and the reason that is said."""
OPEN: dict[str, Any] = {
    "model.name": "./MODEL",
    "reward": [{"function": "REWARD.py:reward"}],
    "prompts.dataset": "PROMPTS.jsonl",
}
"""Values of keys that are left to the user, which no run takes: the defaults would train something else."""


@dataclass
class Migrated:
    """A configuration that loads, and what is said of the rest.

    Attributes:
        translation: the settings, their origins, and those that are not carried over.
        title: the project.
        idle: by key, the reason that a value would have no effect here.
        notes: remarks on what was not read.
    """

    translation: Translation
    title: str
    idle: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def text(self, names: str) -> str:
        """The YAML file."""
        made = self.translation
        groups: dict[str, Any] = {}
        for key in filter(made.settings.__contains__, settings_of(PPOConfig)):
            *outer, last = key.split(".")
            inner = groups
            for name in outer:
                inner = inner.setdefault(name, {})
            inner[last] = key
        lines = [f"# {names} ({self.title}), by tokencredit migrate. A comment names the setting that a value is from."]
        lines += [*self._lines(groups), *_section("Left to you", made.undecided)]
        lines += [*_section("Without effect here", self.idle), *_section("Not read", dict.fromkeys(self.notes, ""))]
        reasons: dict[str, list[str]] = {}
        for name, reason in made.without.items():
            reasons.setdefault(reason, []).append(name)
        by_names = {", ".join(own): reason for reason, own in reasons.items()}
        return "\n".join([*lines, *_section("Without counterpart", by_names)]) + "\n"

    def summary(self, names: str) -> str:
        """The lines for the terminal."""
        made = self.translation
        own = sum(map(_own, made.origins.values()))
        left = [f"  left to you: {key}: {reason}" for key, reason in made.undecided.items()]
        left += [f"  without effect here: {key} {reason}" for key, reason in self.idle.items()]
        left += [f"  not read: {note}" for note in self.notes]
        head = f"{names}: {self.title}, {len(made.settings)} settings, {own} of them its defaults"
        kept = [key for key, value in made.settings.items() if "$" in str(value)]
        left += [f"  holds a variable of the shell: {', '.join(kept)}"] * bool(kept)
        listed = ", ".join(list(made.without)[:MAX_LISTED])
        more = f" and {len(made.without) - MAX_LISTED} more" if len(made.without) > MAX_LISTED else ""
        tail = [f"  without counterpart, with reasons in the file: {listed}{more}"] * bool(made.without)
        return "\n".join(visible(line) for line in [head, *left, *tail])

    def _lines(self, groups: Mapping[str, Any], indent: str = "") -> list[str]:
        lines = []
        for name, inner in groups.items():
            if isinstance(inner, dict):
                lines += [f"{indent}{name}:", *self._lines(inner, f"{indent}  ")]
                continue
            value = yaml.dump(self.translation.settings[inner], Dumper=Dumper, default_flow_style=True, width=10**6)
            text = value.removesuffix("...\n").strip()
            lines.append(f"{indent}{name}: {text}  # {comment(self.translation.origins[inner])}")
        return lines


def comment(text: str) -> str:
    """A text on one line."""
    return visible(" ".join(text.split()))


def _section(title: str, rows: Mapping[str, str]) -> list[str]:
    lines = [f"#   {comment(f'{name}: {reason}' if reason else name)}" for name, reason in rows.items()]
    return ["", f"# {title}:", *lines] if lines else []


def migrated(project: Project, given: Mapping[str, Any], notes: list[str]) -> Migrated:
    """A configuration that loads, of a project's settings; values that are refused here are left to the user."""
    made = Migrated(translate(project, given), project.title, notes=notes)
    translation, known = made.translation, settings_of(PPOConfig)
    for key in list(translation.settings):
        try:
            if key not in known:
                raise ConfigError(f"there is no key {key}")
            value = translation.settings[key]
            if float in (known[key].hint, *getattr(known[key].hint, "__args__", ())) and type(value) is int:
                translation.settings[key] = value = float(value)
            if key != "reward":  # whose terms are checked with the whole
                check_value(key, value, known[key].hint, known[key].limits)
        except (ConfigError, OverflowError) as error:
            _leave(translation, key, str(error))
    _drop_idle(made)
    while message := _refused(translation.settings):
        named = re.findall(r"[a-z_]+(?:\.[a-z_]+)+|\breward\b", message)
        named = sorted(filter(translation.settings.__contains__, named), key=lambda x: not _own(translation.origins[x]))
        if not named:
            raise ConfigError(message)
        key = named[0]  # rather a default of the project's than a value that was given
        _leave(translation, key, message)
        _drop_idle(made)
    for key, reason in NEEDED.items():
        if key not in translation.settings and key not in translation.undecided:
            translation.undecided[key] = reason
    for key in OPEN.keys() & translation.undecided.keys():
        translation.settings[key], translation.origins[key] = OPEN[key], "left to you"
    return made


def _own(origin: str) -> bool:
    """True for a value that is the project's, not the file's."""
    return origin.startswith(("as ", "default of "))


def _leave(translation: Translation, key: str, reason: str) -> None:
    value, origin = translation.settings.pop(key), translation.origins.pop(key)
    translation.undecided[key] = reason if str(value) in reason else f"{reason} ({origin})"


def _refused(settings: Mapping[str, Any]) -> str:
    try:
        PPOConfig.from_dict(settings)
    except ConfigError as error:
        return str(error)
    return ""


def _drop_idle(made: Migrated) -> None:
    """Leave out settings that have no effect with the others, which a configuration refuses."""
    settings, known = made.translation.settings, settings_of(PPOConfig)
    values = {key: setting.default for key, setting in known.items()} | settings
    for key, why in unused(PPOConfig, values, rows=()).items():
        if key in settings and settings[key] != known[key].default:
            origin = made.translation.origins.pop(key)
            del settings[key]
            if not _own(origin):
                made.idle[key] = f"{why} ({origin})"
