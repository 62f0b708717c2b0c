"""Instances of environments: created once, reset often, and replaced when a call of theirs hangs."""

from __future__ import annotations

import copy
from typing import Any

from tokencredit.errors import ConfigError, RunStopped
from tokencredit.text.turns.protocols.factories import Factory
from tokencredit.text.user_code.user_errors import described
from tokencredit.text.user_code.workers import TimedOut, Workers, call_within

TRIES = 3
"""Tries to create and reset an environment before the run stops."""


class EnvironmentFailed(RunStopped):
    """An environment could not be created or reset, so that an episode has no prompt."""

    stopped_by = "an environment that could not be reset"


class Instance:
    """One environment of a factory, used by one episode at a time."""

    def __init__(self, factory: Factory, workers: Workers, timeout: float, number: int):
        """Create no environment yet.

        Args:
            factory: creates it.
            workers: threads for the user's code.
            timeout: timeout of a call in seconds.
            number: its place in the order of creation.
        """
        self.factory, self.workers, self.timeout, self.number = factory, workers, timeout, number
        self.value: Any = None
        """The environment; None before the first episode."""
        self.hung = False
        """True if a call timed out. It may still go on and change the environment, so the next episode gets another."""

    def reset(self, /, *args: Any, **kwargs: Any) -> Any:
        """Create the environment if necessary, reset it, and return what `reset` returned.

        A failed try is repeated with a new environment; each has its own copy of the arguments.

        Raises:
            EnvironmentFailed: the last try failed too.
            ConfigError: the environment raised it.
        """
        for left in reversed(range(TRIES)):
            try:
                if self.value is None or self.hung:
                    self.value = call_within(self.workers, self.timeout, self.factory.create)
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
