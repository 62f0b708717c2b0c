"""Tests that `make fast` leaves out without a mark of their own: most train, sample or start a process."""

from functools import cache
from inspect import unwrap
from types import CodeType, FunctionType

SLOW = {"PPOTrainer", "ControlTrainer", "OfflineTrainer", "SamplingConfig", "ContinuousSampler", "BackgroundSampler"}
SLOW |= {"VllmServer", "embedder", "planned", "write_comparison", "warm", "starter", "subprocess", "browser"}


def is_slow(item):
    """True for a test that uses one of SLOW: by itself, by a fixture or by a function of the tests that it calls."""
    fixtures = [one.func for found in item._fixtureinfo.name2fixturedefs.values() for one in found]
    todo, seen = [item.function, *fixtures], set()
    while todo:
        function = todo.pop()
        if function not in seen:
            seen.add(function)
            names, called = _uses(function)
            if names & SLOW:
                return True
            todo += called
    return not SLOW.isdisjoint(item.fixturenames)


@cache
def _uses(function):
    """Names that a function uses, and the functions and methods of the tests among them."""
    function = unwrap(function)
    codes, names = [function.__code__], set()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    called = (one for name in names for one in _functions(function.__globals__.get(name)))
    return names, [one for one in called if one.__module__.startswith(("tests.", "helpers."))]


def _functions(value):
    """A function, or the methods of a class."""
    values = vars(value).values() if isinstance(value, type) else [value]
    return [one for one in values if isinstance(one, FunctionType)]
