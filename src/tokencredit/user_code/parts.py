"""Load the parts of a run that may be a user's: estimators, losses and critics."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeVar

from tokencredit.core.estimator_table import BOUNDS, SETTINGS, parameters_of
from tokencredit.distributed.processes import connection_lost, out_of_memory, restored
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.settings.parts import PYTHON, is_own, name_of
from tokencredit.settings.training import AdvantageSettings
from tokencredit.user_code.user_objects import check_kwargs, described, load_object

Advantage = TypeVar("Advantage", bound=AdvantageSettings)


def load_part(value: Any, key: str) -> Any:
    """The object of a setting: as it is, or loaded by its name, `path/file.py:name`.

    Raises:
        ConfigError: there is no such object, or it was given from Python, and only its name is known.
    """
    if not isinstance(value, str):
        return value
    if value.startswith(PYTHON):
        name = value.removeprefix(PYTHON)
        group, _, field = key.rpartition(".")
        raise ConfigError(
            f"{key} is {value}, which was given from Python, and a file cannot hold it: give it again, as in "
            f"config.{group}.{field} = {name}, or name its file, {key}: path/file.py:{re.split(r'[ (]', name)[0]}"
        )
    return load_object(value, key.rpartition(".")[2])


def guarded(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """The function, whose exceptions end the run with a line that names it, file and line."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with restored():
                return function(*args, **kwargs)
        except (Exception, SystemExit) as error:
            if isinstance(error, RunStopped | ConfigError) or connection_lost(error) or out_of_memory(error):
                raise
            raise RunStopped(f"{what} {described(error)}") from error

    return call


def load_estimator(args: Advantage, inputs: Collection[str]) -> Advantage:
    """The settings with the function of an estimator of the user's in place of its name; others as they are.

    Args:
        args: the settings.
        inputs: what this kind of run can give besides rewards, values, bounds and settings.

    Raises:
        ConfigError: it cannot be loaded, is no function, or needs what there is not.
    """
    if not is_own(args.estimator):
        return args
    function = load_part(args.estimator, "advantage.estimator")
    name = name_of(function)
    if not callable(function) or isinstance(function, type):
        raise ConfigError(f"advantage.estimator {name} is not a function (docs/your-own.md)")
    check_kwargs(name, function, args.kwargs, ())
    if args.kwargs:
        function = partial(function, **args.kwargs)
    known = ("rewards", "values", *BOUNDS, *SETTINGS, *inputs)
    for parameter in parameters_of(function).values():
        required = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        if required and (parameter.name not in known or parameter.kind is parameter.POSITIONAL_ONLY):
            raise ConfigError(
                f"advantage.estimator {name} needs {parameter.name}, which this run does not have; it may name "
                f"{', '.join(known)}, or give advantage.kwargs"
            )
    return replace(args, estimator=guarded(function, f"advantage.estimator {name}"), kwargs={})
