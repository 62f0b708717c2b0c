"""From the `function` of a reward term to a callable: a ready-made one, one of a module, or one of a file."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tokencredit.errors import ConfigError
from tokencredit.text.rewards.functions import READY_MADE, RewardFunction


def load_function(spec: str, kwargs: Mapping[str, Any]) -> RewardFunction:
    """The function that `spec` names.

    Args:
        spec: `pkg.module:name`, `path/file.py:name`, or the bare name of a ready-made function.
        kwargs: settings; a ready-made function is made with them, of any other they are only checked.

    Raises:
        ConfigError: there is no such file, module, attribute or ready-made function, the code cannot be run, or it does
            not take these settings.
    """
    place, colon, name = spec.rpartition(":")
    if not colon:
        if spec not in READY_MADE:
            raise ConfigError(
                f"function {spec!r} is none of the ready-made ones, {', '.join(READY_MADE)}; "
                "one of your own is 'pkg.module:name' or 'path/file.py:name'"
            )
        _check_kwargs(spec, READY_MADE[spec], kwargs)
        return READY_MADE[spec](**kwargs)
    module = _from_file(place) if place.endswith(".py") else _from_module(place)
    function: RewardFunction | None = getattr(module, name, None)
    if function is None:
        raise ConfigError(f"{place!r} has no {name!r}{_meant(name, vars(module))}")
    if not callable(function):
        raise ConfigError(f"{name!r} of {place!r} is a {type(function).__name__}, not a function")
    _check_kwargs(spec, function, kwargs, offered=("prompts", "completions"))
    return function


def _from_file(place: str) -> ModuleType:
    """Run a file as a module of its own name, so that it hides no other and no other hides it."""
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"there is no reward file {place!r} (looked for {path})")
    name = f"tokencredit_reward_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the name ends in .py, so there is a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and others look themselves up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"the reward file {place!r} cannot be run: {type(error).__name__}: {error}") from error
    return module


def _from_module(place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except Exception as error:  # whatever the module's own code raises
        raise ConfigError(
            f"the reward module {place!r} cannot be imported: {type(error).__name__}: {error}; "
            "a file is named by its path, as in 'rewards.py:name'"
        ) from error


def _meant(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _check_kwargs(spec: str, function: Any, kwargs: Mapping[str, Any], offered: tuple[str, ...] = ()) -> None:
    """Raise `ConfigError` unless the function takes these settings and, when nothing else is offered, needs no more."""
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for key in kwargs:
            if key not in parameters:
                takes = ", ".join(name for name in parameters if name not in offered) or "none"
                raise ConfigError(f"kwargs has {key!r}, which {spec} does not take; it takes {takes}")
    needed = [name for name, p in parameters.items() if p.default is p.empty and name not in kwargs]
    if needed and not offered:
        raise ConfigError(f"{spec} needs {', '.join(needed)}; give it in kwargs, as in kwargs: {{{needed[0]}: …}}")
