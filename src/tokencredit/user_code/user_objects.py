"""Load user code by name, from a module or a file, and describe its errors in a line."""

from __future__ import annotations

import atexit
import difflib
import hashlib
import importlib
import inspect
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from tokencredit.distributed.processes import connection_lost, out_of_memory, restored
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.provenance.parts import LIBRARIES
from tokencredit.runs.untrusted import visible

MODULE = "tokencredit_user_"
"""Beginning of the names of modules that run the files of users."""


@restored()
def load_object(spec: str, kind: str) -> Any:
    """Load the object named `pkg.module:name` or `path/file.py:name`, a reward, environment or tool by its kind.

    A file is run once for all the objects that are loaded from it, and again after it has changed. Raises `ConfigError`
    if the file, module or attribute does not exist, or its code fails.
    """
    location, _, name = spec.rpartition(":")
    module = _from_file(location, kind) if location.endswith(".py") else _from_module(location, kind)
    value = getattr(module, name, None)
    if value is None:
        near = difflib.get_close_matches(name, vars(module), n=1)
        raise ConfigError(f"{location!r} has no {name!r}" + "".join(f"; did you mean {x!r}?" for x in near))
    return value


def _from_file(location: str, kind: str) -> ModuleType:
    """Import a file under a unique module name, so that it does not shadow another module."""
    path = Path(location).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"there is no {kind} file {location!r} (looked for {path})")
    key = hashlib.sha256(str(path).encode() + b"\0" + path.read_bytes()).hexdigest()[:12]
    stem = re.sub(r"\W", "_", path.stem)  # a dot would be that of a package
    name = f"{MODULE}{stem}_{key}"
    if name in sys.modules:
        return sys.modules[name]
    # A module that runs the file, here and in processes that it spawns. Not the file itself, whose compiled form would
    # be taken for that of another source of equal size and second.
    code = (
        "from pathlib import Path\n"
        f"__file__ = {str(path)!r}\n"
        "exec(compile(Path(__file__).read_bytes(), __file__, 'exec'))\n"
    )
    (_imported() / f"{name}.py").write_text(code, encoding="utf-8")
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"the {kind} file {location!r} {described(error)}") from error


@cache
def _imported() -> Path:
    """A folder on `sys.path` from which processes that user code spawns import the files of users by their names."""
    folder = tempfile.mkdtemp(prefix="tokencredit-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    sys.path.append(folder)
    return Path(folder)


def _from_module(location: str, kind: str) -> ModuleType:
    try:
        return importlib.import_module(location)
    except (Exception, SystemExit) as error:  # the module's code may raise anything
        raise ConfigError(
            f"the {kind} module {location!r} cannot be imported: {type(error).__name__}: {error}; "
            f"give a file by its path, as in '{kind}s.py:name'"
        ) from error


def check_kwargs(
    spec: str,
    function: Callable[..., Any],
    kwargs: Mapping[str, Any],
    others: tuple[str, ...] | None = None,
    key: str = "kwargs",
) -> None:
    """Raise `ConfigError` unless a function or class, named `spec` in messages, takes these settings.

    `others` are names of further arguments that it is called with; with None it must not require an argument that is
    not among the settings. `key` is that of the settings.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some classes written in C have none
        return
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for name in kwargs:
            if name not in parameters:
                takes = ", ".join(taken for taken in parameters if taken not in (others or ())) or "none"
                raise ConfigError(f"{key} has {name!r}, which {spec} does not take; it takes {takes}")
    required = [name for name, p in parameters.items() if p.default is p.empty and p.kind not in variadic]
    missing = [name for name in required if name not in kwargs]
    if missing and others is None:
        raise ConfigError(f"{spec} needs {', '.join(missing)}; give it in {key}, as in kwargs: {{{missing[0]}: …}}")


@contextmanager
def user_code(what: str, key: str = "") -> Iterator[None]:
    """A context for code of a user's, whose exceptions end the run with a line that names it, with file and line.

    `key` is that of the part of a run that it is.
    """
    try:
        with restored():
            yield
    except (Exception, SystemExit) as error:
        if isinstance(error, RunStopped | ConfigError) or connection_lost(error) or out_of_memory(error):
            raise
        stopped = RunStopped(f"{what} {described(error)}")
        stopped.parts = re.escape(key)
        raise stopped from error


def described(error: BaseException) -> str:
    """An exception's type and message, with file and line of the innermost frame in user code, if there is one."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    files = [
        (file, line) for file, line in frames if not file.startswith("<") and not Path(file).name.startswith(MODULE)
    ]
    user = [place for place in files if not any(Path(place[0]).is_relative_to(folder) for folder in LIBRARIES)]
    return summarized(error) + visible(" at {}:{}".format(*user[-1]) if user else "")


def summarized(error: BaseException) -> str:
    """An exception's type and message in one line, escaped because a service may send anything."""
    try:
        message = f": {error}".removesuffix(": ")
    except Exception:  # its class is a user's
        message = ""
    return visible(f"raised {type(error).__name__}{message}")
