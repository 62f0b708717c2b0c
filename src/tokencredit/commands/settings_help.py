"""The settings of a configuration in words: help, a commented YAML file, and a JSON schema."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from functools import cache
from itertools import pairwise
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from tokencredit.errors import ConfigError, pages_by_title
from tokencredit.settings.data import KINDS
from tokencredit.settings.fields import Setting, hints_of, options_of, settings_of, wanted_of
from tokencredit.settings.reader import dump_yaml
from tokencredit.settings.run_kind import RUN_KINDS

MIN_WIDTH, MAX_WIDTH = 60, 120
"""Width of texts in characters, within which it follows the terminal's."""
SCHEMA_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null"}
SCHEMA_LIMITS = {"at_least": "minimum", "above": "exclusiveMinimum", "at_most": "maximum", "below": "exclusiveMaximum"}


@cache
def docs_of(kind: type) -> dict[str, str]:
    """The docstring of each field of a dataclass, or of its class for a group, on one line: its help."""
    docs = {name: " ".join(str(hint.__doc__).split()) for name, hint in hints_of(kind).items() if is_dataclass(hint)}
    for part in reversed([part for part in kind.__mro__ if is_dataclass(part)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(part))).body[0].body  # type: ignore[attr-defined]
        for line, following in pairwise(body):
            if isinstance(line, ast.AnnAssign) and isinstance(following, ast.Expr):
                docs[line.target.id] = " ".join(following.value.value.split())  # type: ignore[attr-defined,union-attr]
    return docs


def help_of(setting: Setting) -> str:
    """The meaning of a setting."""
    return pages_by_title(docs_of(setting.kind).get(setting.name, ""))


def rows_of(kind: type, topic: str | None = None) -> dict[str, str]:
    """Rows for `table`: flags with short defaults, and the meanings of all settings or those of a group or one key.

    Raises:
        ConfigError: there is no such group or key.
    """
    known = {key: setting for key, setting in settings_of(kind).items() if not is_dataclass(setting.hint)}
    wanted = [key for key in known if topic is None or key == topic or key.startswith(f"{topic}.")]
    if not wanted:
        groups = ", ".join(dict.fromkeys(key.partition(".")[0] for key in known if "." in key))
        raise ConfigError(f"--help has no group {topic}; give all" + (f", or one of {groups}" if groups else ""))
    return {f"--{key} {_short(known[key].default)}".rstrip(): help_of(known[key]) for key in wanted}


def _short(default: Any) -> str:
    """A default, if it is short."""
    if isinstance(default, str):
        return default
    return json.dumps(default) if isinstance(default, int | float | None) else ""


def first_sentences(rows: Mapping[str, str | None]) -> dict[str, str]:
    """The rows of a table, each with the first sentence of its text."""
    return {name: re.split(r"(?<=\.)\s", " ".join(str(text).split()))[0] for name, text in rows.items()}


def table(rows: Mapping[str, str]) -> list[str]:
    """Lines of two columns, of which the second is wrapped."""
    width = min(max(shutil.get_terminal_size().columns, MIN_WIDTH), MAX_WIDTH)
    left = max(map(len, rows)) + 4
    lines: list[str] = []
    for name, text in rows.items():
        head = f"  {name}".ljust(left)
        lines += textwrap.wrap(text, width, initial_indent=head, subsequent_indent=" " * left) or [head]
    return lines


def commented_yaml(config: Any) -> str:
    """A configuration as a YAML file with the meaning of each key; a run's first line names the schema for editors."""
    summary = textwrap.wrap(" ".join(str(config.__doc__).split()), MAX_WIDTH - 2)
    commands = [run_kind.command for run_kind in RUN_KINDS.values() if run_kind.config is type(config)]
    head = [f"yaml-language-server: $schema=tokencredit-{command}.schema.json" for command in commands]
    return "\n".join([*(f"# {line}" for line in [*head, *summary]), *_commented(config, "")]) + "\n"


def _commented(config: Any, indent: str) -> Iterator[str]:
    for key, setting in settings_of(config.__class__).items():
        if "." in key:
            continue
        value, text = getattr(config, key), help_of(setting)
        group = is_dataclass(value)
        if not group:
            text = f"{text} ({type_and_range(setting)})"
        yield ""
        yield from (f"{indent}# {line}" for line in textwrap.wrap(text, MAX_WIDTH - 2 - len(indent)))
        if group:
            yield f"{indent}{key}:"
            yield from _commented(value, f"{indent}  ")
        else:
            # Of a list of terms, the key that names the kind of a term comes first.
            plain = [_kind_first(x) if is_dataclass(x) else x for x in value] if isinstance(value, list) else value
            yield from (f"{indent}{line}" for line in dump_yaml({key: plain}).splitlines())


def _kind_first(term: Any) -> dict[str, Any]:
    return dict(sorted(asdict(term).items(), key=lambda pair: pair[0] not in KINDS))


def type_and_range(setting: Setting) -> str:
    """Type, range and null of a setting, in words."""
    options = options_of(setting.hint)
    words = [" or ".join(wanted_of(option) for option in options if option is not NoneType)]
    words += [f"{word.replace('_', ' ')} {limit}" for word, limit in setting.limits.items()]
    return ", ".join(words) + (", or null" if NoneType in options else "")


def json_schema(kind: type) -> dict[str, Any]:
    """The JSON schema of a configuration's YAML files."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_object(kind)}


def _object(kind: Any, *required: str) -> dict[str, Any]:
    settings = {key: setting for key, setting in settings_of(kind).items() if "." not in key}
    properties = {key: {"description": help_of(x), **_schema(x.hint, x.limits)} for key, x in settings.items()}
    schema = {"type": "object", "additionalProperties": False, "properties": properties}
    return schema | ({"required": list(required)} if required else {})


def _schema(hint: Any, limits: Mapping[str, float]) -> dict[str, Any]:
    options = [_option_schema(option, limits) for option in options_of(hint)]
    return options[0] if len(options) == 1 else {"anyOf": options}


def _option_schema(option: Any, limits: Mapping[str, float]) -> dict[str, Any]:
    if is_dataclass(option):
        return _object(option)
    if get_origin(option) is Literal:
        return {"enum": list(get_args(option))}
    if get_origin(option) is Annotated:
        return {"type": "string", "pattern": ":"}
    if get_origin(option) is list:
        (element,) = get_args(option)
        terms = [_object(term, name) for name, term in KINDS.items() if is_dataclass(element)]
        return {"type": "array", "items": {"anyOf": terms} if terms else _schema(element, {})}
    ranges = {SCHEMA_LIMITS[word]: limit for word, limit in limits.items()} if option in (int, float) else {}
    return {"type": SCHEMA_TYPES.get(option, "object"), **ranges}
