"""The configuration of a run's folder or of a model by name, and the user code that it would execute."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from tokencredit.errors import ConfigError
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.data import FunctionTerm
from tokencredit.settings.fields import refuse_unused
from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.settings.offline import OfflineSettings
from tokencredit.settings.reader import build, grouped, read_settings
from tokencredit.settings.run_kind import OFFLINE, REWARD_MODEL, RUN_KINDS, RunKind, other_run_kind, run_kind_of
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AdvantageConfig
from tokencredit.settings.yaml import read_yaml

Config = TypeVar("Config", bound=PPOConfig | ControlConfig | OfflineSettings)
MODEL_FILES = ("config.json", "adapter_config.json")


def foreign_code(config: PPOConfig | ControlConfig | OfflineSettings) -> list[str]:
    """Lines on the user code that a run of this configuration executes, each beginning with its key."""
    if isinstance(config, ControlConfig):
        module, colon, _ = config.env.id.rpartition(":")
        return [f"env.id imports the module {module}"] if colon else []
    if isinstance(config, OfflineSettings):
        name = config.model.name
        return [f"model.trust_remote_code runs the code, if there is any, in {name}"] * config.model.trust_remote_code
    lines = [
        f"reward[{number}].function runs {term.function}"
        for number, term in enumerate(config.reward)
        if isinstance(term, FunctionTerm) and ":" in term.function  # a built-in one has a bare name
    ]
    env = config.env
    if env.factory is not None and not env.factory.startswith("builtin:"):
        lines.append(f"env.factory runs {env.factory}")
    if env.gymnasium is not None and ":" in env.gymnasium:
        lines.append(f"env.gymnasium imports the module {env.gymnasium.rpartition(':')[0]}")
    lines += [f"tools[{number}] runs {tool}" for number, tool in enumerate(config.tools)]
    if config.model.trust_remote_code:
        names = [name for name in (config.model.name, config.critic.name) if name is not None]
        lines.append(f"model.trust_remote_code runs the code, if there is any, in {' and '.join(names)}")
    return lines


def refuse_foreign_code(config: PPOConfig | ControlConfig | OfflineSettings) -> None:
    """Raise `ConfigError` if a run of this configuration would execute user code."""
    if lines := foreign_code(config):
        raise ConfigError(f"--no-code, but the configuration executes user code: {'; '.join(lines)}")


def run_config_file(run: Path) -> Path:
    """The path of a run's config.yaml; raises `ConfigError` if the folder is not a run's."""
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{str(run)!r} is not a run's folder: it has no config.yaml")
    return run / "config.yaml"


def read_config(file: Path, kind: type[Config], no_code: bool = False) -> Config:
    """Read a run's own config.yaml.

    Args:
        file: the run's config.yaml.
        kind: class of the configuration.
        no_code: refuse a configuration that would execute user code.

    Raises:
        ConfigError: the file is missing or not a run's configuration of this kind, or user code is refused.
    """
    settings = read_yaml(run_config_file(file.parent))
    command = next(run_kind.command for run_kind in RUN_KINDS.values() if run_kind.config is kind)
    if isinstance(settings, Mapping) and (run_kind := other_run_kind(settings, command)):
        raise ConfigError(
            f"{file}: it is of a run of tokencredit {run_kind.command}, which this command cannot read; use "
            f"tokencredit {run_kind.sampler} {shlex.quote(str(file.parent))}"
        )
    groups = read_settings(kind, file)
    try:
        config = build(kind, groups)
        if no_code:
            refuse_foreign_code(config)
        return config
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


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
        own = {key: value for key, value in settings.items() if key in known}
        return build(PPOConfig, {"model": grouped(ModelConfig, own.items(), "model.")}).model
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def configure(run_kind: RunKind, settings: Mapping[str, Any], no_code: bool = False) -> dict[str, Any]:
    """The whole configuration of a sweep's run in plain dicts, for a command, which has no rows from Python.

    Raises:
        ConfigError: a key or value is refused, or user code is.
    """
    config = run_kind.config.from_dict(settings)
    if no_code:
        refuse_foreign_code(config)
    refuse_unused(config, rows=())
    return asdict(config)
