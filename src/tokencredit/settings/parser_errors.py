"""The parser's errors in one line: the key, its value, the file, and what it must be."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

import yaml

from tokencredit.errors import quoted
from tokencredit.settings.data import PromptsConfig
from tokencredit.settings.fields import hint_of, no_group, unknown_key, wrong_value
from tokencredit.settings.renamed_keys import MOVED, renamed
from tokencredit.settings.training import MAX_SEED
from tokencredit.settings.yaml import flat, load_yaml, read_yaml

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser  # not installed everywhere

OPTIONS = {
    "PositiveInt": "a whole number, at least 1",
    "NonNegativeInt": "a whole number, at least 0",
    "PositiveFloat": "a number above 0",
    "Port": "a whole number, at least 0 and at most 65535",
    "Seed": f"a whole number, at least 0 and at most {MAX_SEED}",
}
"""Types of the commands' options, in words."""
ARGUMENTS = {
    "run": "RUN, the folder of a run",
    "pairs": "FILE, a JSONL file of pairs",
    "model": "MODEL, the folder of a run or a model, or a hub id",
    "runs": "RUN, the folder of each run",
    "file": "FILE, a sweep file",
}
"""Positional arguments of the commands, in words."""
TERMS = "a list of terms, such as --reward '[{function: f.py:f}]', or reward: [{function: f.py:f}] in a file"


def explain(message: str, arguments: Sequence[str], command: ArgumentParser | None, kind: type | None) -> str:
    """A parser's error in one line: key, value, file unless it was a flag, and the closest known key or choice.

    Args:
        message: the error.
        arguments: of the command line.
        command: parser of the subcommand, if there is one.
        kind: class of the configuration that it parses, if it does.
    """
    message = named(message)
    name, unknown = key_of(message)
    if match := re.match("Unexpected config:(.*)", message):
        return f"--config is {match[1].strip()!r}; it must be a file"
    if not unknown:
        return explain_value(name, message, kind) or one_line(message)
    if arguments[:1] == [f"--{name}"] and command is not None:
        return f"--{name} belongs after the command"
    file = None if any(a.startswith(f"--{name}") for a in arguments) else file_with(name, arguments)
    where = f"{file}: " if file else ""
    if name in MOVED:
        return renamed([name])
    keys = command.get_defaults(skip_validation=True).keys() if command else []
    known = [key for key in keys if key != "debug"]
    if kind is None:
        near = get_close_matches(name, known, n=1)
        return f"unknown option --{name}; " + (f"did you mean --{near[0]}?" if near else "see --help")
    return where + unknown_key(name, known)


def explain_file(message: str, file: Any, kind: type | None) -> str:
    """A parser's error on a value in a file, in one line that begins with the file."""
    message = named(message)
    if message.startswith("Unexpected config:"):
        return f"{file} holds no settings; it must be a mapping of keys to values"
    reason = explain_value(key_of(message)[0], message, kind) or one_line(message)
    return f"{file}: " + reason.replace('"<unicode string>"', str(file))


def explain_value(name: str, message: str, kind: type | None) -> str | None:
    """A message on the value in a parser's error, in words; None for an error of another kind."""
    message = one_line(message)
    if match := re.search(r"(File does not exist|Path is not a file): '?([^']*)", message):
        return f"--{name}: {match[2]!r} " + ("does not exist" if match[1].startswith("File") else "is not a file")
    if (match := re.search(r"Not of type (\w+): (\S+)", message)) and match[1] in OPTIONS:
        value = re.search(r"Given value: (.*)", message) or re.search(r": '(.*)'$", message) or (None, match[2])
        return f"--{name} is {value[1]}; it must be {OPTIONS[match[1]]}"
    if kind is None and (match := re.search(r"Expected a typing\.Literal\[(.*?)\]\. Got value: (.*)", message)):
        return f"--{name} is {match[2]}; it must be one of {match[1].replace(chr(39), '')}"
    if match := re.search(r"arguments are required: [\w-]+\.(\w+)", message):
        command = message.rpartition(": ")[2].partition(".")[0]
        return f"{command} needs {ARGUMENTS[match[1]]}"
    if match := re.search(r"Not of type RewardTerm: (.*)", message):
        inner = re.search(r"NestedArg\(key='(\w+)'", match[1])
        return f"--reward.{inner[1]}: reward has no keys of its own; it must be {TERMS}" if inner else match[1]
    return wrong_setting(name, message, kind)


def wrong_setting(name: str, message: str, kind: type | None) -> str | None:
    """A message on a setting's value in a parser's error; None for an error of another kind."""
    key = name
    if inner := re.search(r"with given class_path '[^']*': (Parser key|Option) [\"']([^\"']*)[\"']", message):
        key = f"{name}.{inner[2]}"
    hint = hint_of(kind, key) if kind else None
    if inner and hint is None:
        return unknown_key(key, [f"{name}.{item.name}" for item in fields(PromptsConfig)])
    match = re.search(r".*(?:Got|Given) value:(?: (.*)|$)|Unable to load config [\"'](.*?)[\"']", message)
    if match is None or hint is None or "Not a valid subclass" in message:
        return None
    text = match[1] or match[2] or ""
    try:
        value = load_yaml(text) if text else ""
    except yaml.YAMLError:
        value = text
    group: Any = next((option for option in (hint, *get_args(hint)) if is_dataclass(option)), None)
    if group is not None and get_origin(hint) is list:
        return f"{key} is {quoted(value)}; it must be {TERMS}"
    return no_group(key, value, fields(group)[0].name) if group is not None else wrong_value(key, value, hint)


def config_files(arguments: Sequence[str]) -> Iterator[str]:
    """The files after `--config`, the last one first."""
    for at in reversed(range(len(arguments))):
        name, equals, value = arguments[at].partition("=")
        if name == "--config" and (equals or len(arguments) > at + 1):
            yield value if equals else arguments[at + 1]


def file_with(key: str, arguments: Sequence[str]) -> str | None:
    """The last configuration file of the arguments that has this key, or keys below it."""
    for file in config_files(arguments):
        # A text of settings in place of a file may be too long for Path.is_file.
        settings = read_yaml(Path(file)) if os.path.isfile(file) else None  # noqa: PTH113
        if isinstance(settings, dict) and any(f"{name}.".startswith((f"{key}.", f"{key}[")) for name in flat(settings)):
            return file
    return None


def resumed_run(arguments: Sequence[str]) -> str | None:
    """The folder after `--resume`; a configuration file cannot set it."""
    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == "--resume" and (equals or len(arguments) > at + 1):
            return value if equals else arguments[at + 1]
    return None


def named(message: str) -> str:
    """A message without jsonargparse's advice on allowing an import."""
    return re.sub(
        r"Importing ('[^']*') is not allowed.*?to allow it\.", r"\1 names code, and none is imported here", message
    )


def one_line(text: str) -> str:
    """A text with all white space as single spaces."""
    return " ".join(text.split())


def key_of(message: str) -> tuple[str, bool]:
    """The key in a parser's error, if any, and whether the key is unknown."""
    for pattern in (
        r"(?P<known>)Parser key \"(?P<key>[^\"]+)\"",
        r"(?:Group '(?P<group>[^']+)'|Subcommand '[^']+') does not accept option '(?P<key>[^']+)'",
        r"unrecognized arguments: --(?P<key>[^\s=]+)",
        r"^Option '(?P<key>[^']+)' is not accepted",
    ):
        if match := re.search(pattern, message):
            parts = match.groupdict()
            group = f"{parts['group']}." if parts.get("group") else ""
            return group + parts["key"], "known" not in parts
    return "", False
