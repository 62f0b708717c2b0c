"""A model to sample from: a run's policy, or a model by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tokencredit.errors import ConfigError
from tokencredit.settings.code_policy import refuse_foreign_code
from tokencredit.settings.fields import values
from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.settings.run_file import read_config, run_config_file
from tokencredit.settings.run_kind import OFFLINE, REWARD_MODEL, run_kind_of
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AdvantageConfig
from tokencredit.settings.yaml import read_yaml

MODEL_FILES = ("config.json", "adapter_config.json")


@dataclass(frozen=True)
class Source:
    """A model to sample from."""

    name: str
    """Folder of a run or a model, or a hub id."""
    config: PPOConfig
    """The run's configuration; without a run of `tokencredit train`, one in which only `model` is set."""
    run: Path | None = None
    """Folder of the run; None for a model."""
    scored: bool = False
    """True if the configuration has the prompts and rewards of a run of `tokencredit train`."""


def read_source(name: str, no_code: bool = False) -> Source:
    """The source of this name; nothing is loaded.

    Args:
        name: folder of a run or a model, or a hub id.
        no_code: refuse a run's configuration that would execute user code.

    Raises:
        ConfigError: the folder holds neither a run of a language model nor a model, or its configuration is refused.
    """
    folder = Path(name)
    if not name:
        raise ConfigError("the name of the model is empty; give the folder of a run or a model, or a hub id")
    if not (folder / "config.yaml").is_file():
        if folder.exists() and not any((folder / file).is_file() for file in MODEL_FILES):
            raise ConfigError(
                f"{name!r} is neither a run's folder nor a model's: it has neither config.yaml nor "
                f"{' or '.join(MODEL_FILES)}"
            )
        return Source(name, plain(ModelConfig(name=name)))
    settings = read_yaml(folder / "config.yaml")
    run_kind = run_kind_of(settings) if isinstance(settings, Mapping) else None
    if run_kind is REWARD_MODEL:
        raise ConfigError(
            f"{name!r} is a run of tokencredit reward-model, which writes no texts; as a reward it is "
            f"{{reward_model: {folder / REWARD_MODEL.saved}}}"
        )
    if isinstance(settings, Mapping) and run_kind in OFFLINE:
        config = plain(started_model(folder / "config.yaml", settings.get("model") or {}))
        if no_code:
            refuse_foreign_code(config)
        return Source(name, config, folder)
    return Source(name, read_config(folder / "config.yaml", PPOConfig, no_code), folder, scored=True)


def read_policy_config(run: Path, no_code: bool = False) -> PPOConfig:
    """The configuration with which a run's policy is read: its own, or one of its model for a run on a data set.

    Raises:
        ConfigError: it is not the folder of a run that trained a policy, or its configuration is refused.
    """
    run_config_file(run)
    return read_source(str(run), no_code).config


def plain(model: ModelConfig) -> PPOConfig:
    """The configuration of a model without critic, prompts and rewards of its own."""
    return PPOConfig(model=model, critic=CriticConfig(kind="none"), advantage=AdvantageConfig(estimator="reward_to_go"))


def started_model(file: Path, settings: Any) -> ModelConfig:
    """The model that a run started from, by the settings that PPO has too."""
    try:
        if not isinstance(settings, Mapping):
            raise ConfigError("model holds no keys")
        known = {item.name for item in fields(ModelConfig)}
        return ModelConfig(**values(ModelConfig(), {k: v for k, v in settings.items() if k in known}, (), "model."))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
