"""Pages of the site's reference, from the settings' descriptions and the names of docstrings."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from typing import Any

import tokencredit as tc
from tokencredit import core
from tokencredit.commands.settings_help import docs_of, type_and_range
from tokencredit.settings.data import KINDS
from tokencredit.settings.fields import Setting, hints_of, settings_of
from tokencredit.settings.run_kind import RUN_KINDS


def reference_pages() -> Iterator[tuple[str, str]]:
    """Names and texts of the pages that are made of settings and docstrings."""
    for run_kind in RUN_KINDS.values():
        yield f"{run_kind.command}.md", settings_page(run_kind.command, run_kind.config)
    public = {name: getattr(tc, name) for name in tc.__all__ if name != "core"}
    settings = [name for name, value in public.items() if is_settings(value)]
    others = [name for name in public if name not in settings]
    yield "python.rst", names_page("Trainers and functions", "Public names, from their docstrings.", tc, others)
    keys = "The pages of settings explain the fields, which are the keys of a configuration."
    yield "configurations.rst", names_page("Settings as classes", keys, tc, settings)
    for module in dict.fromkeys(core._MODULES.values()):
        names = [name for name, home in core._MODULES.items() if home == module]
        contract = str(inspect.getdoc(import_module(f"tokencredit.core.{module}")))
        yield f"core.{module}.rst", names_page(f"core: {module.replace('_', ' ')}", contract, core, names, module)


def settings_page(command: str, kind: Any) -> str:
    """A page in Markdown with every key of a command that trains."""
    printed = f"`tokencredit {command} --print_config` writes all of them as a YAML file, with their meanings."
    settings = settings_of(kind)
    # Keys without a group come before the first group's heading.
    alone = {key: setting for key, setting in settings.items() if "." not in key and not is_dataclass(setting.hint)}
    parts = [f"# Settings of {command}", f"{inspect.getdoc(kind)} {printed}"]
    for key, setting in (alone | settings).items():
        parts += [f"## {key}"] * (is_dataclass(setting.hint) and "." not in key) + [entry(key, setting)]
    for name, term in KINDS.items() if "reward" in settings else ():
        parts += [f"## reward: {name}", str(inspect.getdoc(term))]
        parts += [entry(key, setting) for key, setting in settings_of(term).items()]
    return re.sub(r"\bdocs/(([\w-]+)\.md)", r"[\2](../\1)", "\n\n".join(parts)) + "\n"


def entry(key: str, setting: Setting) -> str:
    """A setting with its default, meaning, type and range, and the conditions under which it has an effect."""
    meaning = docs_of(setting.kind).get(setting.name, "")  # with files of pages, which become links
    if is_dataclass(setting.hint):
        return f"**{key}**: {meaning}" if "." in key else meaning
    value: Any = setting.default
    if isinstance(value, list):
        value = [changed(item) if is_dataclass(item) else item for item in value]
    shown = "" if value is MISSING else f": {value if isinstance(value, str) else json.dumps(value)}"
    needs = "".join(f" Needs `{need}`." for need in setting.needs)
    kind = re.sub(r"--\w+ '[^']+'", r"`\g<0>`", type_and_range(setting))
    return f"`{key}{shown}`\n: {meaning} *({kind})*{needs}"


def changed(term: Any) -> dict[str, Any]:
    """What a configuration needs for a reward term: its kind, and the settings that are not the class's defaults."""
    values = {item.name: getattr(term, item.name) for item in fields(term)}
    return dict([term.source()]) | {
        item.name: values[item.name] for item in fields(term) if values[item.name] != item.default
    }


def names_page(title: str, text: str, package: Any, names: list[str], module: str = "") -> str:
    """A page in reStructuredText with the docstrings of public names of a package, which a module of it may define."""
    home = package.__name__
    entries = [names_entry(getattr(package, name), f"{home}.{name}", f"{home}.{module}.{name}") for name in names]
    listed = [f"   ~{entry.split()[2].removesuffix('()')}" for entry in entries]
    summary = ".. autosummary::\n   :nosignatures:\n\n" + "\n".join(listed)
    return "\n\n".join([f"{title}\n{'=' * len(title)}", text, summary, *entries]) + "\n"


def names_entry(value: Any, public: str, defined: str) -> str:
    """The directive that documents a public name; data have their docstring only where they are defined."""
    if not callable(value):
        return f".. autodata:: {defined}\n   :no-value:"
    if not inspect.isclass(value):
        return f".. autofunction:: {public}"
    members = "   :members:\n   :inherited-members: tuple, BaseException"
    if not is_settings(value):
        return f".. autoclass:: {public}\n{members}"
    keys = ", ".join(hints_of(value))  # which the pages of settings explain
    return f".. autoclass:: {public}()\n{members}\n   :exclude-members: {keys}"


def is_settings(value: Any) -> bool:
    """True for a class of settings."""
    return str(value.__module__).startswith("tokencredit.settings.")
