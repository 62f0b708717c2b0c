"""Factories of environments: which protocol an environment has, its tools, and checks before the first episode."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokencredit.errors import ConfigError
from tokencredit.text.turns.protocols.tools import RESERVED, Tool, describe_all, methods
from tokencredit.text.user_code.user_errors import described
from tokencredit.text.user_code.user_objects import check_kwargs
from tokencredit.text.user_code.workers import TimedOut, Workers, call_within

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Factory:
    """A factory of environments, and its first one, from which all else here was read."""

    label: str
    """Its name in messages."""
    create: Callable[[], Any]
    first: Any
    steps: bool
    """True for the plain protocol: `reset(row)` and `step(completion)`."""
    tools: Mapping[str, Tool]
    """Tools by name: functions given to all episodes, then the environment's methods."""
    functions: Sequence[Callable[..., Any]]
    """The functions among them."""
    pays: bool
    """True if the environment gives rewards."""

    @property
    def kind(self) -> type:
        """The environment's class."""
        return type(self.first)

    def takes_seed(self) -> bool:
        """True if the `reset` of TRL's form names an argument `seed`."""
        return "seed" in inspect.signature(self.first.reset).parameters

    def callables(self, environment: Any) -> dict[str, Callable[..., Any]]:
        """Functions and the environment's methods that are tools, by name."""
        functions = {function.__name__: function for function in self.functions}
        return {name: functions[name] if name in functions else getattr(environment, name) for name in self.tools}

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise `ConfigError` if TRL's `reset(**row)` does not take the data set's columns."""
        if self.steps:
            return
        signature = inspect.signature(self.first.reset)
        names = sorted({*columns, "seed"} if self.takes_seed() else columns)
        try:
            signature.bind(**dict.fromkeys(names))
        except TypeError as error:
            raise ConfigError(
                f"{self.label}: reset{signature} does not take {', '.join(names) or 'no argument'}: {error}; "
                "let it take the data set's columns by "
                "name, or **row; for an environment with step, one argument named row"
            ) from error


def inspect_factory(
    label: str, create: Any, functions: Sequence[Callable[..., Any]], workers: Workers, timeout: float
) -> Factory:
    """Create a first environment and read its protocol.

    Args:
        label: the factory's name in messages.
        create: a class, or a function that returns an environment; it takes no arguments.
        functions: tools of all episodes.
        workers: threads for the user's code.
        timeout: timeout of a call in seconds.

    Raises:
        ConfigError: the factory takes arguments, fails or returns None; the environment has neither protocol; a method
            cannot be a tool, or has the name of a function.
    """
    if not callable(create):
        raise ConfigError(f"{label} is {create!r}; it must be a class, or a function that returns an environment")
    check_kwargs(label, create, {})
    try:
        first = call_within(workers, timeout, create)
    except TimedOut as error:
        raise ConfigError(f"{label} took longer than env.timeout, {timeout:g} s, to create an environment") from error
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{label} created no environment, it {described(error)}") from error
    kind = type(first)
    found = methods(kind)
    if "reset" not in found:
        raise ConfigError(f"{label} gives a {kind.__name__}, which has no method reset; see docs/turns.md")
    given = describe_all(functions, "")
    if takes_row(first.reset):
        if "step" not in found:
            raise ConfigError(
                f"{label}: reset takes a row, as environments with step(completion) do, and {kind.__name__} has no "
                "step; add it, or let reset take **row for an environment whose methods are tools"
            )
        if given:
            raise ConfigError(
                f"tools are given, and {label} has step, which receives whole completions; leave one of them out"
            )
        return Factory(label, create, first, True, {}, (), pays=True)
    own = [getattr(first, name) for name in found if name not in RESERVED]
    tools = given | describe_all(own, f"{kind.__name__}.")
    if doubled := [method.__name__ for method in own if method.__name__ in given]:
        raise ConfigError(f"two tools are named {doubled[0]!r}: a function and a method of {kind.__name__}")
    return Factory(label, create, first, False, tools, tuple(functions), pays="get_reward" in found)


def takes_row(reset: Callable[..., Any]) -> bool:
    """True if a bound `reset` takes one argument named row, and no others without defaults: the plain protocol."""
    parameters = inspect.signature(reset).parameters.values()
    named = [p for p in parameters if p.kind not in VARIADIC]
    required = [p.name for p in named if p.default is p.empty]
    return required == ["row"] and not any(p.kind is p.VAR_KEYWORD for p in parameters)
