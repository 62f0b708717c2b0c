"""A run's own config.yaml, read back; jsonargparse, which reads what people write, is not needed for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from tokencredit.errors import ConfigError
from tokencredit.settings.code_policy import refuse_foreign_code
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.fields import values, without_idle
from tokencredit.settings.moved import renamed
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.yaml import flat, read_yaml

Config = TypeVar("Config", bound=PPOConfig | ControlConfig)


def read_config(file: Path, kind: type[Config], no_code: bool = False) -> Config:
    """The configuration of a run, from the file in its folder.

    A setting without an effect, which an older version let pass, takes its default.

    Args:
        file: the run's config.yaml.
        kind: of the configuration.
        no_code: refuse one that lets code of others run.

    Raises:
        ConfigError: there is no such file, it is not the configuration of a run, or as `no_code` says.
    """
    if not file.is_file():
        raise ConfigError(f"{str(file.parent)!r} is not a run's folder: it has no config.yaml")
    settings = read_yaml(file)
    try:
        if not isinstance(settings, Mapping):
            raise ConfigError("it holds no settings; it must be a mapping of keys to values")
        keys, default = flat(settings), kind()
        if old := renamed(keys):
            raise ConfigError(old)
        fields = vars(default) | values(default, settings, flat(asdict(default)))
        config = kind(**without_idle(kind, fields, keys))
        if no_code:
            refuse_foreign_code(config)
        return config
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
