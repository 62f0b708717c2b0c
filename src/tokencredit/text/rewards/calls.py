"""Calls of reward functions: what they are given, how long they may take, how often they are tried."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tokencredit.errors import ConfigError, RunStopped
from tokencredit.processes import out_of_memory
from tokencredit.runs.untrusted import visible
from tokencredit.text.rewards.functions import RewardFunction

T = TypeVar("T")

LOG = logging.getLogger("tokencredit")

FIRST_PAUSE = 1.0
"""Seconds between a call that failed and the next; each pause after it is twice as long."""
LONGEST_PAUSE = 60.0


class RewardError(RunStopped):
    """A reward that could not be had; the message names the term and, where it can, the text."""

    stopped_by = "a reward that could not be computed"


class NonFiniteReward(RewardError):
    """A reward that is NaN or infinite."""


class NoAnswer(RewardError):
    """A call that took longer than its term's timeout."""


@dataclass
class Term:
    """A reward function with its name and weight."""

    name: str
    weight: float
    function: RewardFunction
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that it gets at every call, before any column of the same name."""
    retries: int = 2
    """How often a call that failed is made again."""
    timeout: float | None = None
    """Seconds that a call may take; None for as long as it likes."""


def begin(term: Term, offered: Mapping[str, Sequence[Any]], read: Callable[[Any], T]) -> Callable[[], T]:
    """Begin to ask a term, if its function is a coroutine's; returns what waits for the answer, or asks.

    Args:
        term: what is called, again where that fails.
        offered: what its function may ask for by name, one entry a completion.
        read: makes the answer of what the function returned, and raises `RewardError` if it cannot.

    Raises:
        ConfigError: the function needs something that is not offered.
    """
    args, kwargs = _arguments(term, offered)
    ask = functools.partial(_ask, term, offered, functools.partial(_call, term, args, kwargs), read)
    # A thread a term, so that one's pauses do not hold up the others.
    return _in_thread(ask).result if _is_coroutine(term.function) else ask


def _ask(term: Term, offered: Mapping[str, Sequence[Any]], call: Callable[[], Any], read: Callable[[Any], T]) -> T:
    """Call until there is an answer that can be read, or there are no retries left.

    What a function raises does not tell a service's failure from a mistake in the function: `reply["score"]` of an
    error message is a KeyError or a TypeError. So all is tried again but what a second try would not change: settings,
    numbers that are not finite, a lack of memory.

    Raises:
        RewardError: the last try failed too.
        NonFiniteReward: an answer has a number that is not finite.
        ConfigError: the function raised it.
        MemoryError, RuntimeError: memory ran out.
    """
    retries, pause = term.retries, FIRST_PAUSE
    while True:
        try:
            return read(call())
        except Exception as error:
            if isinstance(error, ConfigError | NonFiniteReward) or out_of_memory(error):
                raise
            if retries <= 0:
                raise RewardError(_last_word(term, offered, error)) from error
            LOG.warning("%s; trying again in %g s", _said(term, error), pause)
        time.sleep(pause)
        retries, pause = retries - 1, min(2 * pause, LONGEST_PAUSE)


def _call(term: Term, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """One call; a coroutine that does not answer in time is cancelled, a plain function's thread left behind."""
    if _is_coroutine(term.function):
        future = asyncio.run_coroutine_threadsafe(term.function(*args, **kwargs), _loop())
    elif term.timeout is not None:
        future = _in_thread(functools.partial(term.function, *args, **kwargs))
    else:
        return term.function(*args, **kwargs)
    # Not result(timeout): its TimeoutError could be the function's own.
    if not wait([future], term.timeout).done:
        future.cancel()
        raise NoAnswer(f"reward term {term.name!r} gave no answer within {term.timeout:g} s, its timeout")
    return future.result()


def _is_coroutine(function: RewardFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _in_thread(work: Callable[[], T]) -> Future[T]:
    """Begin work in a thread that the process, unlike with a pool's threads, does not wait for when it ends."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="reward", daemon=True).start()
    return future


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all coroutine functions, in a thread of its own.

    One loop for the whole process, because clients keep connections that belong to the loop they were opened in; a
    thread, because the caller may have a loop that runs already, as a notebook does.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rewards", daemon=True).start()
    return loop


def _arguments(term: Term, offered: Mapping[str, Sequence[Any]]) -> tuple[list[Any], dict[str, Any]]:
    """What of all that is offered a function takes: by name, or prompts and completions in the first two places."""
    parameters = inspect.signature(term.function).parameters
    named = {**offered, **term.kwargs}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        named = {name: value for name, value in named.items() if name in parameters}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [n for n, p in parameters.items() if p.default is p.empty and p.kind not in variadic and n not in named]
    if not missing:
        return [], named
    if len(missing) == 2 and missing == list(parameters)[:2]:
        rest = {name: value for name, value in named.items() if name not in ("prompts", "completions")}
        return [offered["prompts"], offered["completions"]], rest
    raise ConfigError(f"the reward {term.name!r} needs {', '.join(missing)}; there are {', '.join(sorted(offered))}")


def _last_word(term: Term, offered: Mapping[str, Sequence[Any]], error: Exception) -> str:
    """What to tell the person when a term is given up."""
    tries = f" (the last of {term.retries + 1} tries)" if term.retries > 0 else ""
    if isinstance(error, NoAnswer | OSError):
        return f"{_said(term, error)}{tries}; if it only takes longer, raise the term's timeout or its retries"
    if isinstance(error, RewardError):
        return f"{_said(term, error)}{tries}"
    return f"{_blame(term, offered, error)}{tries}"


def _blame(term: Term, offered: Mapping[str, Sequence[Any]], error: Exception) -> str:
    """Who raised, what, and on which completion: found by calling the function again on one at a time.

    Not further than to a call that says that a service is down, which would say so of every text.
    """
    for row in range(len(offered["prompts"])):
        alone = {name: column[row : row + 1] for name, column in offered.items()}
        try:
            _call(term, *_arguments(term, alone))
        except Exception as again:
            if out_of_memory(again):
                raise
            if isinstance(again, NoAnswer | OSError):
                return _said(term, error)
            prompt, completion = alone["prompts"][0], alone["completions"][0]
            return f"{_said(term, again)}; its prompt was {prompt!r} and its completion {completion!r}"
    together = len(offered["prompts"])
    return f"{_said(term, error)}; it did so on {together} completions together, on none of them alone"


def _said(term: Term, error: Exception) -> str:
    """What went wrong in a call, in one line; what a service sends may hold anything."""
    if isinstance(error, RewardError):
        return str(error)
    return f"reward term {term.name!r} raised {type(error).__name__}: {visible(str(error))}"
