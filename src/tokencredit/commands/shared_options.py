"""Types and checks of options that several commands have."""

from __future__ import annotations

from jsonargparse import Namespace
from jsonargparse.typing import restricted_number_type

from tokencredit.errors import ConfigError
from tokencredit.settings.training import MAX_SEED

Seed = restricted_number_type("Seed", int, [(">=", 0), ("<=", MAX_SEED)])


def refuse_empty(options: Namespace, name: str) -> None:
    """Raise `ConfigError` if an option for a folder is an empty text."""
    if options[name] == "":
        raise ConfigError(f"--{name} is empty; give a folder")


def require_gymnasium() -> None:
    """Raise `ConfigError` if the Gymnasium world is not installed."""
    try:
        import gymnasium  # noqa: F401
    except ImportError as error:
        raise ConfigError("agents need Gymnasium, which is not installed: pip install tokencredit[control]") from error
