"""Factories of environments: their protocol and tools, their instances, and the environments' own rewards."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokencredit.errors import ConfigError, RunStopped
from tokencredit.text.rewards.calls import RewardError, Term
from tokencredit.text.turns.protocols.tools import RESERVED, Tool, describe_all, methods
from tokencredit.user_code.user_objects import check_kwargs, described
from tokencredit.user_code.workers import TimedOut, Workers, begin, call_within

TRIES = 3
"""Tries to create and reset an environment before the run stops."""


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

    def made(self, environment: Any) -> bool:
        """True for an environment of this factory's class, by name: a function may define its class anew per call."""
        return type(environment).__name__ == self.kind.__name__

    def checked(self, environment: Any) -> Any:
        """The new environment; `ConfigError` if its class is another than the first one's, whose form was read."""
        if not self.made(environment):
            raise ConfigError(
                f"{self.label} gives a {type(environment).__name__}, and gave a {self.kind.__name__} before; give one "
                "class, or a dict of names to classes, from which the column 'environment' selects"
            )
        return environment

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
                f"{self.label}: reset{signature} does not take {', '.join(names) or 'no argument'}: {error}; let it "
                "take the data set's columns by name, or **row; for an environment with step, one argument named row"
            ) from error


class NoEnvironment:
    """In place of an environment if there are only functions."""

    def reset(self, **row: Any) -> None:
        """Nothing to reset."""


def inspect_factory(
    label: str, create: Any, functions: Sequence[Callable[..., Any]], workers: Workers, timeout: float
) -> Factory:
    """Create a first environment and read its protocol; raises `ConfigError` if it cannot be used.

    `create` is a class, or a function that returns an environment, and takes no arguments; `label` names it;
    `functions` are tools of all episodes.
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
    public = methods(kind)
    if "reset" not in public:
        raise ConfigError(f"{label} gives a {kind.__name__}, which has no method reset; see docs/turns.md")
    tools = describe_all(functions, "the tool ")
    if takes_row(first.reset):
        if "step" not in public:
            raise ConfigError(
                f"{label}: reset takes a row, as environments with step(completion) do, and {kind.__name__} has no "
                "step; add it, or let reset take **row for an environment whose methods are tools"
            )
        if "get_reward" in public:
            raise ConfigError(
                f"{label}: {kind.__name__} has step, which returns the reward, and get_reward, which would not be "
                "called; pay in step alone, or let reset take **row for an environment whose methods are tools"
            )
        if tools:
            raise ConfigError(
                f"tools are given, and {label} has step, which receives whole completions; leave one of them out"
            )
        return Factory(label, create, first, True, {}, (), pays=True)
    own = describe_all([getattr(first, name) for name in public if name not in RESERVED], f"{kind.__name__}.")
    if doubled := [name for name in own if name in tools]:
        raise ConfigError(f"two tools are named {doubled[0]!r}: a function and a method of {kind.__name__}")
    return Factory(label, create, first, False, tools | own, tuple(functions), pays="get_reward" in public)


def takes_row(reset: Callable[..., Any]) -> bool:
    """True if a bound `reset` takes one argument named row, and no others without defaults: the plain protocol."""
    parameters = inspect.signature(reset).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = [p.name for p in named if p.default is p.empty]
    return required == ["row"] and not any(p.kind is p.VAR_KEYWORD for p in parameters)


class EnvironmentFailed(RunStopped):
    """An environment could not be created or reset, so that an episode has no prompt; or every episode failed."""

    stopped_by = "an environment that failed"
    parts = r"env\.factory|environment_factory.*"


class Instance:
    """One environment of a factory, used by one episode at a time: created once, and reset often."""

    def __init__(self, factory: Factory, workers: Workers, timeout: float, number: int):
        """Create no environment yet; `number` is its place in the order of creation."""
        self.factory, self.workers, self.timeout, self.number = factory, workers, timeout, number
        self.value: Any = None
        """The environment; None before the first episode."""
        self.user: Any = None
        """The last episode that it was given to."""
        self.hung = False
        """True if a call timed out. It may still go on and change the environment, so the next episode gets another."""

    def reset(self, /, *args: Any, **kwargs: Any) -> Any:
        """Create the environment if necessary, reset it, and return what `reset` returned.

        A failed try is repeated with a new environment; each has its own copy of the arguments. Raises
        `EnvironmentFailed` if the last try failed too.
        """
        for left in reversed(range(TRIES)):
            try:
                if self.value is None or self.hung:
                    self.value = self.factory.checked(call_within(self.workers, self.timeout, self.factory.create))
                    self.hung = False
                copied = copy.deepcopy((args, kwargs))
                return call_within(self.workers, self.timeout, self.value.reset, *copied[0], **copied[1])
            except ConfigError:
                raise
            except BaseException as error:  # SystemExit too; Ctrl-C does not come into threads
                late = isinstance(error, TimedOut)
                problem = f"{error}; raise env.timeout if it is only slow" if late else described(error)
                self.value = None
                if not left:
                    raise EnvironmentFailed(f"{self.factory.label}: {problem} (the last of {TRIES} tries)") from error
        raise AssertionError


def own_reward(factory: Factory, workers: Workers, timeout: float) -> Term:
    """A term named after the environment's class, with weight 1; None for completions of other environments.

    An environment in TRL's form pays `get_reward()` for the whole episode. One of the plain protocol pays at the last
    token of each turn: the term is a list with one number per acted token.
    """
    name = factory.kind.__name__

    def by_turn(
        environments: Sequence[Any], turn_rewards: Sequence[Sequence[tuple[int, float]]]
    ) -> list[list[float] | None]:
        """Rewards of acted tokens, from the number of tokens and the reward of each turn."""
        return [
            [number for count, reward in turns for number in (*[0.0] * (count - 1), reward)]
            if factory.made(environment)
            else None
            for environment, turns in zip(environments, turn_rewards, strict=True)
        ]

    def by_episode(environments: Sequence[Any]) -> list[Any]:
        # All calls begin before the first is waited for.
        own: list[Any] = [e if factory.made(e) else None for e in environments]
        waiting = [None if e is None else begin(workers, timeout, e.get_reward) for e in own]
        try:
            return [None if result is None else result() for result in waiting]
        except TimedOut as error:
            cause = f"get_reward {error}; raise env.timeout if it is only slow"
            raise RewardError(f"reward term {name!r}: {cause}") from error
        except (Exception, SystemExit) as error:
            raise RewardError(f"reward term {name!r}: get_reward {described(error)}") from error

    # Without retries, which would call all the others again too: `get_reward` may have effects.
    return Term(name, 1.0, by_turn if factory.steps else by_episode, retries=0)
