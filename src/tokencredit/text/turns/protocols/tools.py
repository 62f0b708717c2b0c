"""Tools: their descriptions, checks of a call's arguments, and the methods of an environment that are tools."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from tokencredit.errors import ConfigError

RESERVED = ("reset", "get_reward")
"""Public methods of an environment in TRL's form that are no tools."""
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
    "null": (type(None),),
}
"""Python types of JSON's; others, such as image, are not checked."""


@dataclass(frozen=True)
class Tool:
    """A tool's description, which its chat template shows to the policy."""

    name: str
    arguments: Mapping[str, Mapping[str, Any]]
    """JSON schema of each argument."""
    required: tuple[str, ...]

    def usage(self) -> str:
        """The tool with its arguments and their types, as `add(a: integer, b: integer, optional)`."""
        shown = [
            f"{key}: {_type(schema)}" + ", optional" * (key not in self.required)
            for key, schema in self.arguments.items()
        ]
        return f"{self.name}({'; '.join(shown)})"

    def mistake(self, arguments: Any) -> str | None:
        """What is wrong with the arguments of a call, and what the tool takes; None if nothing is."""
        if not isinstance(arguments, dict):
            return f"the arguments must be a JSON object; it takes {self.usage()}"
        unknown = [key for key in arguments if key not in self.arguments]
        missing = [key for key in self.required if key not in arguments]
        wrong = [key for key, x in arguments.items() if key not in unknown and not _fits(x, self.arguments[key])]
        problems = ((unknown, "is no argument"), (missing, "is missing"), (wrong, "has the wrong type or value"))
        for keys, problem in problems:
            if keys:
                return f"{keys[0]} {problem}; it takes {self.usage()}"
        return None


def describe(function: Callable[..., Any], label: str) -> Tool:
    """A function's description, from its type hints and docstring; `ConfigError` if one of them is missing."""
    if isinstance(function, type) or not callable(function) or not hasattr(function, "__name__"):
        raise ConfigError(f"{label} is {function!r}; a tool must be a function with type hints and a docstring")
    try:
        schema = get_json_schema(function)["function"]
    except Exception as error:  # of the function's own hints too: a name that is not imported
        advice = "; a method that is no tool has a name that begins with _" if "." in label else ""
        if label.endswith(".step"):  # it looks like the other protocol
            advice = "; for an environment without tools, reset takes one argument named row (docs/turns.md)"
        raise ConfigError(
            f"{label} cannot be a tool: {error}; a tool needs a type hint of each argument and a docstring with a "
            "description of each under Args:" + advice
        ) from error
    parameters, arguments = schema["parameters"], dict(schema["parameters"]["properties"])
    for name, parameter in inspect.signature(function).parameters.items():
        if name in arguments and parameter.default is None:  # as in limit: int = None
            arguments[name] = {**arguments[name], "nullable": True}
    return Tool(schema["name"], arguments, tuple(parameters.get("required", ())))


def describe_all(functions: Iterable[Callable[..., Any]], label: str) -> dict[str, Tool]:
    """Descriptions of functions by name; `ConfigError` if one cannot be a tool, or two have the same name."""
    tools: dict[str, Tool] = {}
    for function in functions:
        tool = describe(function, f"{label}{getattr(function, '__name__', '')}".rstrip())
        if tool.name in tools:
            raise ConfigError(f"two tools are named {tool.name!r}; give each its own name")
        tools[tool.name] = tool
    return tools


def methods(kind: type) -> dict[str, Callable[..., Any]]:
    """A class's public methods by name, in alphabetical order; no property is evaluated.

    Functions and static methods count, class methods do not, as in TRL's GRPOTrainer.
    """
    public: dict[str, Callable[..., Any]] = {}
    for name in sorted(dir(kind)):
        member = inspect.getattr_static(kind, name, None)
        function = member.__func__ if isinstance(member, staticmethod) else member
        if not name.startswith("_") and inspect.isfunction(function):
            public[name] = function
    return public


def _type(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    options = [_type(option) for option in schema.get("anyOf", ())]
    kinds = schema.get("type", options or "any")
    return kinds if isinstance(kinds, str) else " or ".join(kinds)


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """True if a JSON value has the type that a schema names, and is one of its choices."""
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema:
        return any(_fits(value, option) for option in schema["anyOf"])
    if "enum" in schema and value not in schema["enum"]:
        return False
    kinds = schema.get("type", ())
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    if kinds and not any(_has_type(value, kind) for kind in kinds):
        return False
    if isinstance(value, list) and "items" in schema:
        return all(_fits(item, schema["items"]) for item in value)
    if isinstance(value, dict) and isinstance(schema.get("additionalProperties"), Mapping):
        return all(_fits(item, schema["additionalProperties"]) for item in value.values())
    return True


def _has_type(value: Any, kind: str) -> bool:
    if kind not in TYPES:
        return True
    return isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
