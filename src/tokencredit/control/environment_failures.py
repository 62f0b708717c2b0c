"""Exceptions of environments, from this process or a worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tokencredit.errors import RunStopped


class EnvironmentRaised(RuntimeError):
    """An exception raised by an environment, as text, since it may come from another process."""


@contextmanager
def environment_errors() -> Iterator[None]:
    """Turn an environment's exception, or the death of its process, into `RunStopped`."""
    try:
        yield
    except EnvironmentRaised as error:
        raise RunStopped(str(error)) from error
    except (EOFError, ConnectionError) as error:
        raise RunStopped("a process that ran an environment has ended; was it killed?") from error
