"""Calls of reward functions: arguments, timeouts and retries."""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NoReturn, TypeVar

from tokencredit.distributed.processes import out_of_memory, restored
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.runs.untrusted import visible
from tokencredit.text.rewards.ready_made import RewardFunction
from tokencredit.user_code.user_objects import described
from tokencredit.user_code.workers import TimedOut, Workers, call_within, finished, is_coroutine_function

T = TypeVar("T")
Columns = Mapping[str, Sequence[Any]]
"""Arguments that reward functions may take by name, one entry per completion."""

LOG = logging.getLogger("tokencredit")

REFERENCE = "ref_logprobs"
"""Column with log-probs under the reference model."""
TRAINING = "prompts.dataset (train_dataset in Python)"
"""Data set whose columns reward functions receive, in messages."""
WORKERS = Workers()
"""Threads of calls with a timeout, and of async terms."""
EARLY = Workers()
"""Threads of calls that are started early, which wait for those of `WORKERS`."""
FIRST_BACKOFF, MAX_BACKOFF = 1.0, 60.0
"""Seconds before the first retry, doubled for each further one up to the longest."""


class RewardError(RunStopped):
    """A reward could not be computed; the message names the term and, if known, the text."""

    stopped_by = "a reward that could not be computed"
    parts = r"reward_funcs.*|reward\[\d+\]\.function|env\.factory|environment_factory.*"


class NonFiniteScore(RewardError):
    """A score is NaN, infinite or too large."""


class MalformedResult(RewardError):
    """A function returned something other than one entry per completion, each a number, None or one per token."""


REPEATING = (NameError, ImportError, SyntaxError, NotImplementedError)
"""Errors that a further try would repeat: they lie in settings or code, not in a service."""


class RewardTimeout(RewardError):
    """A call exceeded its term's timeout."""


@dataclass
class Term:
    """A reward function with its name and weight."""

    name: str
    weight: float
    function: RewardFunction
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of every call; they take precedence over columns of the same name."""
    retries: int = 2
    """Retries after a failed call."""
    timeout: float | None = None
    """Timeout of a call in seconds; None for no timeout."""
    prefix: bool = False
    """True if the function may score unfinished completions, for the values of their states."""
    scored: int = field(default=0, compare=False)
    """Texts that it has scored, prefixes included."""


def start_call(term: Term, columns: Columns, read: Callable[[Any], T], *, early: bool = False) -> Callable[[], T]:
    """Start an async term's call, or prepare a sync one; the returned callable blocks for the result.

    `columns` are the arguments that its function may take by name, one entry per completion; `read` parses and checks
    what it returns, and raises `MalformedResult`. An `early` call is started in any case.
    """
    args, kwargs = _arguments(term, columns)
    call = functools.partial(_call_with_retries, term, columns, functools.partial(_call, term, args, kwargs), read)
    if early:
        return EARLY.submit(call).result
    # One thread per async term, so that the backoff of one does not delay the others.
    return WORKERS.submit(call).result if is_coroutine_function(term.function) else call


def start_early(term: Term, columns: Columns, read: Callable[[Any], T], reference: bool) -> Callable[[], T] | None:
    """Start a call before the reference model has read the completions, as `start_call` does.

    With `reference` there will be a column `ref_logprobs`. None for a term that must wait: its function has a parameter
    `ref_logprobs`, or is called in the caller's thread, since it is no coroutine function and has no timeout.
    """
    in_threads = is_coroutine_function(term.function) or term.timeout is not None
    if not in_threads or REFERENCE in _parameters(term):
        return None
    known = {**columns, REFERENCE: _NotYet(term.name)} if reference else columns
    return start_call(term, known, read, early=True)


class _NotYet(Sequence[Any]):
    """The column `ref_logprobs` of a call that was started early; reading it raises `ConfigError`."""

    def __init__(self, term: str):
        self.term = term

    def __getitem__(self, index: Any) -> Any:
        return self if isinstance(index, slice) else self._refuse()

    def __len__(self) -> int:
        return self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigError(
            f"the reward {self.term!r} reads ref_logprobs before there are any, since rollout.max_age is above 0; give "
            "its function a parameter of that name"
        )


def _call_with_retries(term: Term, columns: Columns, call: Callable[[], Any], read: Callable[[Any], T]) -> T:
    """Call with retries until it succeeds.

    An exception does not tell a failing service from a bug in the function: `reply["score"]` of an error message is a
    KeyError or a TypeError. Everything is retried except errors of memory, and those that would repeat.
    """
    retries, backoff = term.retries, FIRST_BACKOFF
    while True:
        try:
            return read(call())
        except Exception as error:
            if isinstance(error, ConfigError | NonFiniteScore | MalformedResult) or out_of_memory(error):
                raise
            if retries <= 0 or isinstance(error, REPEATING):
                tries = term.retries - retries + 1
                raise RewardError(_final_message(term, columns, error, tries)) from error
            LOG.warning("%s; trying again in %g s", _summary(term, error), backoff)
        time.sleep(backoff)
        retries, backoff = retries - 1, min(2 * backoff, MAX_BACKOFF)


def _call(term: Term, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call once; on a timeout a coroutine is cancelled, and a sync function's thread is abandoned."""
    # Lists of its own, which it may change, for the next term and the next try have theirs.
    args = [copied(value) for value in args]
    kwargs = {name: value if name in term.kwargs else copied(value) for name, value in kwargs.items()}
    try:
        with restored():
            if term.timeout is None and not is_coroutine_function(term.function):
                result = term.function(*args, **kwargs)  # in this thread: it may be bound to it
                return finished(result, None)
            return call_within(WORKERS, term.timeout, term.function, *args, **kwargs)
    except TimedOut as error:
        raise RewardTimeout(f"reward term {term.name!r} exceeded its timeout of {term.timeout:g} s") from error
    except SystemExit as error:  # it fails its call, and must not end the run as if it were done
        raise RewardError(f"reward term {term.name!r} called sys.exit({error.code!r})") from error


def copied(value: Any) -> Any:
    """A value whose lists and dicts are copies, at every depth; other objects are the same."""
    if type(value) is list:
        return [copied(x) for x in value]
    return {key: copied(x) for key, x in value.items()} if type(value) is dict else value


def _parameters(term: Term) -> Mapping[str, inspect.Parameter]:
    """The parameters of a term's function; `ConfigError` for one that shows none, such as `max`."""
    try:
        return inspect.signature(term.function).parameters
    except ValueError as error:
        raise ConfigError(f"the reward {term.name!r}: {error}; call it in a function of completions") from error


def _arguments(term: Term, columns: Columns, source: str = TRAINING) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a function: columns by name; prompts and completions also as the first two positional ones."""
    parameters = _parameters(term)
    named = {**columns, **term.kwargs}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        named = {name: value for name, value in named.items() if name in parameters}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [n for n, p in parameters.items() if p.default is p.empty and p.kind not in variadic and n not in named]
    if not missing:
        by_position = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_ONLY]
        return [named.pop(name) for name in takewhile(named.__contains__, by_position)], named
    if len(missing) == 2 and missing == list(parameters)[:2]:
        rest = {name: value for name, value in named.items() if name not in ("prompts", "completions")}
        return [columns["prompts"], columns["completions"]], rest
    if REFERENCE in missing:
        raise ConfigError(
            f"the reward {term.name!r} needs ref_logprobs, of a reference model, and there is none because kl.coef is "
            "0; set kl.coef above 0 (1e-6 costs next to nothing)"
        )
    raise ConfigError(
        f"the reward {term.name!r} needs {', '.join(missing)}; there are {', '.join(sorted(columns))}; others come "
        f"from the columns of {source} or from the term's kwargs"
    )


def check_columns(terms: Sequence[Term], names: Iterable[str], source: str = TRAINING) -> None:
    """Raise `ConfigError` unless each term's function finds its required arguments among columns of these names.

    `source` names the data set in messages.
    """
    for term in terms:
        _arguments(term, dict.fromkeys(names, ()), source)


def _final_message(term: Term, columns: Columns, error: Exception, count: int) -> str:
    """The error message of a term after its last try, the `count`-th."""
    tries = f" (the last of {count} tries)" if count > 1 else ""
    if isinstance(error, RewardTimeout | OSError):
        return f"{_summary(term, error)}{tries}; if the service is only slow, raise the term's timeout or retries"
    return f"{_summary(term, error) if isinstance(error, RewardError) else _locate(term, columns, error)}{tries}"


def _locate(term: Term, columns: Columns, error: Exception) -> str:
    """The error message with the completion that causes it, found by calling the function on one at a time.

    Stops at a timeout or OSError: a service that is down would fail on every completion.
    """
    for row in range(len(columns["prompts"])):
        alone = {name: column[row : row + 1] for name, column in columns.items()}
        try:
            _call(term, *_arguments(term, alone))
        except Exception as again:
            if out_of_memory(again):
                raise
            if isinstance(again, RewardTimeout | OSError):
                return _summary(term, error)
            prompt, completion = alone["prompts"][0], alone["completions"][0]
            return f"{_summary(term, again)}; its prompt was {prompt!r} and its completion {completion!r}"
    return f"{_summary(term, error)} on a batch of {len(columns['prompts'])} completions, but on none of them alone"


def _summary(term: Term, error: Exception) -> str:
    """A failed call's error in one line, escaped because a service may send anything."""
    if isinstance(error, RewardError):
        return str(error)
    return f"reward term {visible(repr(term.name))} {described(error)}"
