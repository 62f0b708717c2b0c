"""Load the `function` of a reward term: ready-made, from a module, or from a file."""

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
from tokencredit.text.rewards.ready_made import READY_MADE, RewardFunction


def load_function(spec: str, kwargs: Mapping[str, Any]) -> RewardFunction:
    """Load the function named by `spec`.

    Args:
        spec: `pkg.module:name`, `path/file.py:name`, or the bare name of a ready-made function.
        kwargs: settings; passed to a ready-made function's factory, only checked for any other function.

    Raises:
        ConfigError: the file, module, attribute or ready-made function does not exist, its code fails, or it does not
            take these settings.
    """
    location, colon, name = spec.rpartition(":")
    if not colon:
        if spec not in READY_MADE:
            raise ConfigError(
                f"function {spec!r} is none of the ready-made ones, {', '.join(READY_MADE)}; "
                "name your own as 'pkg.module:name' or 'path/file.py:name'"
            )
        _check_kwargs(spec, READY_MADE[spec], kwargs)
        return READY_MADE[spec](**kwargs)
    module = _from_file(location) if location.endswith(".py") else _from_module(location)
    function: RewardFunction | None = getattr(module, name, None)
    if function is None:
        raise ConfigError(f"{location!r} has no {name!r}{_suggestion(name, vars(module))}")
    if not callable(function):
        raise ConfigError(f"{name!r} of {location!r} is a {type(function).__name__}, not a function")
    _check_kwargs(spec, function, kwargs, columns=("prompts", "completions"))
    return function


def _from_file(location: str) -> ModuleType:
    """Import a file under a unique module name, so that it does not shadow another module."""
    path = Path(location).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"there is no reward file {location!r} (looked for {path})")
    name = f"tokencredit_reward_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the name ends in .py, so there is a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"the reward file {location!r} cannot be run: {type(error).__name__}: {error}") from error
    return module


def _from_module(location: str) -> ModuleType:
    try:
        return importlib.import_module(location)
    except (Exception, SystemExit) as error:  # the module's code may raise anything
        raise ConfigError(
            f"the reward module {location!r} cannot be imported: {type(error).__name__}: {error}; "
            "give a file by its path, as in 'rewards.py:name'"
        ) from error


def _suggestion(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _check_kwargs(spec: str, function: Any, kwargs: Mapping[str, Any], columns: tuple[str, ...] = ()) -> None:
    """Raise `ConfigError` unless the function takes these settings and, without columns, requires no others."""
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for key in kwargs:
            if key not in parameters:
                takes = ", ".join(name for name in parameters if name not in columns) or "none"
                raise ConfigError(f"kwargs has {key!r}, which {spec} does not take; it takes {takes}")
    missing = [name for name, p in parameters.items() if p.default is p.empty and name not in kwargs]
    if missing and not columns:
        raise ConfigError(f"{spec} needs {', '.join(missing)}; give it in kwargs, as in kwargs: {{{missing[0]}: …}}")
