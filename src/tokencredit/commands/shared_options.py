"""Types and checks of options that several commands have."""

from __future__ import annotations

from tokencredit.errors import ConfigError
from tokencredit.settings.command_line import Options


def refuse_empty(options: Options, name: str) -> None:
    """Raise `ConfigError` if an option for a folder is an empty text."""
    if options[name] == "":
        raise ConfigError(f"--{name} is empty; give a folder")


def require_gymnasium() -> None:
    """Raise `ConfigError` if the Gymnasium world is not installed."""
    try:
        import gymnasium  # noqa: F401
    except ImportError as error:
        raise ConfigError("agents need Gymnasium, which is not installed: pip install tokencredit[control]") from error
