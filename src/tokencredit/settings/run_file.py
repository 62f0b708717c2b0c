"""Read a run's own config.yaml; unlike files written by hand, it needs no jsonargparse."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from tokencredit.errors import ConfigError
from tokencredit.settings.code_policy import refuse_foreign_code
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.fields import values, without_idle
from tokencredit.settings.offline import OfflineSettings
from tokencredit.settings.renamed_keys import renamed
from tokencredit.settings.run_kind import RUN_KINDS, other_run_kind
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.yaml import flat, read_yaml

Config = TypeVar("Config", bound=PPOConfig | ControlConfig | OfflineSettings)


def run_config_file(run: Path) -> Path:
    """The path of a run's config.yaml; raises `ConfigError` if the folder is not a run's."""
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{str(run)!r} is not a run's folder: it has no config.yaml")
    return run / "config.yaml"


def read_config(file: Path, kind: type[Config], no_code: bool = False) -> Config:
    """Read the configuration of a run.

    A setting without an effect, which an older version accepted, takes its default.

    Args:
        file: the run's config.yaml.
        kind: class of the configuration.
        no_code: refuse a configuration that would execute user code.

    Raises:
        ConfigError: the file is missing or not a run's configuration of this kind, or user code is refused.
    """
    settings = read_yaml(run_config_file(file.parent))
    try:
        if not isinstance(settings, Mapping):
            raise ConfigError("it holds no settings; it must be a mapping of keys to values")
        if run_kind := other_run_kind(settings, next(w.command for w in RUN_KINDS.values() if w.config is kind)):
            raise ConfigError(
                f"it is of a run of tokencredit {run_kind.command}, which this command cannot read; use tokencredit "
                f"{run_kind.sampler} {shlex.quote(str(file.parent))}"
            )
        keys, default = flat(settings), kind()
        if old := renamed(keys):
            raise ConfigError(old)
        fields = vars(default) | values(default, settings, flat(asdict(default)))
        config = kind(**without_idle(kind, fields, keys, rows=("environment_factory",)))
        if no_code:
            refuse_foreign_code(config)
        return config
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
