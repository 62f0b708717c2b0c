"""The kinds of runs, the configuration of a run's folder or of a model by name, and the user code it would execute."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from tokencredit.errors import ConfigError
from tokencredit.provenance.parts import Part, location
from tokencredit.settings.control import ControlConfig, EnvConfig
from tokencredit.settings.data import PACKAGED, FunctionTerm
from tokencredit.settings.fields import refuse_unused, settings_of
from tokencredit.settings.model import CriticConfig, ModelConfig, ShardingConfig
from tokencredit.settings.offline import DPOConfig, OfflineSettings, RewardModelConfig, SFTConfig
from tokencredit.settings.parts import PYTHON, is_own, name_of, with_kwargs
from tokencredit.settings.reader import build, read_settings, read_yaml
from tokencredit.settings.rollout import EngineName, OffPolicyConfig, RolloutConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AdvantageConfig

Config = TypeVar("Config", bound=PPOConfig | ControlConfig | OfflineSettings)
PARTS = ("advantage.estimator", "ppo.loss", "critic.kind")
"""Settings that take a part of a user."""
TRAINERS = {PPOConfig: "PPOTrainer", ControlConfig: "ControlTrainer"}
MODEL_FILES = ("config.json", "adapter_config.json")


@dataclass(frozen=True)
class RunKind:
    """Names of a kind of run: configuration, command and metrics."""

    name: str
    """Name in a sweep file."""
    command: str
    """Subcommand that trains."""
    config: type[PPOConfig] | type[ControlConfig] | type[OfflineSettings]
    headline: str
    """Metric that shows how well a run does."""
    deviation: str
    """Metric with the headline metric's standard deviation over single completions or episodes."""
    trains: str
    """Object of the command's description: it trains …."""
    sampler: str = "generate"
    """Subcommand that samples from the trained policy; empty if it samples nothing."""
    unit: str = "tokens"
    """Metric that counts the samples of an iteration, and their name in the plural."""
    counted: str = "tokens read"
    """Axis title of curves over that count."""
    length: str = "sequence_length"
    """Metric with the mean length of completions or episodes."""
    saved: str = "policy"
    """Folder of the trained model, inside the run's."""
    lower: bool = False
    """The headline metric is a loss, of which less is better."""

    @property
    def outcome(self) -> str:
        """The headline metric's name in a summary."""
        return self.headline.rpartition("/")[2]

    @property
    def evaluation(self) -> str:
        """The headline metric of evaluations."""
        return f"eval/{self.outcome}"


TEXT = RunKind(
    name="text",
    command="train",
    config=PPOConfig,
    headline="reward",
    deviation="reward_std",
    length="length",
    counted="tokens sampled",
    trains="a language model with PPO",
)
CONTROL = RunKind(
    name="control",
    command="control",
    sampler="play",
    config=ControlConfig,
    headline="train/average_return",
    deviation="train/std_return",
    unit="steps",
    counted="environment steps",
    length="train/average_length",
    trains="an agent in a Gymnasium environment",
)
SFT = RunKind(
    name="sft",
    command="sft",
    config=SFTConfig,
    headline="loss",
    deviation="loss_std",
    lower=True,
    trains="a language model on completions (supervised fine-tuning)",
)
REWARD_MODEL = RunKind(
    name="reward-model",
    command="reward-model",
    sampler="",
    config=RewardModelConfig,
    headline="accuracy",
    deviation="accuracy_std",
    saved="reward_model",
    trains="a reward model on preferences",
)
DPO = RunKind(
    name="dpo",
    command="dpo",
    config=DPOConfig,
    headline="accuracy",
    deviation="accuracy_std",
    trains="a language model on preferences (direct preference optimization)",
)
OFFLINE = (SFT, REWARD_MODEL, DPO)
"""Kinds of runs that learn from a data set."""
RUN_KINDS = {run_kind.name: run_kind for run_kind in (TEXT, CONTROL, *OFFLINE)}
MARKERS = {
    **{f"env.{item.name}": CONTROL for item in fields(EnvConfig) if item.name != "kwargs"},
    **dict.fromkeys(("agent.", "algorithm", "steps"), CONTROL),
    **{"sft.": SFT, "reward_model.": REWARD_MODEL, "dpo.": DPO, "env.": TEXT, "rollout.": TEXT, "model.": TEXT},
}
"""Kinds of runs by keys of their configurations, groups with a dot at the end; the first that a configuration has
counts."""


def run_kind_of(config: Mapping[str, Any]) -> RunKind:
    """The kind of run of a configuration in plain dicts."""
    keys = keys_of(config)
    return next((run_kind for key, run_kind in MARKERS.items() if key in keys), TEXT)


def other_run_kind(config: Mapping[str, Any], kind: type) -> RunKind | None:
    """The kind of run of a configuration if it is not of this class; None if it is, or is not clear."""
    own = settings_of(kind)
    keys = {key for key in keys_of(config) if key.removesuffix(".") not in own}
    return next((run_kind for key, run_kind in MARKERS.items() if key in keys), None)


def keys_of(config: Mapping[str, Any]) -> set[str]:
    """The keys of a configuration and of its groups, dotted; those of groups with a dot at the end."""
    inner = {f"{key}.{name}" for key, group in config.items() if isinstance(group, Mapping) for name in group}
    whole = {f"{key}." if isinstance(value, Mapping) else str(key) for key, value in config.items()}
    return whole | {f"{key.partition('.')[0]}." for key in whole if "." in key} | inner


def own_parts(config: PPOConfig | ControlConfig) -> dict[str, Any]:
    """The parts of a user, by key."""
    kind: Any = type(config)
    parts = {key: attrgetter(key)(config) for key in PARTS if key in settings_of(kind)}
    return {key: part for key, part in parts.items() if is_own(part)}


def foreign_code(config: PPOConfig | ControlConfig | OfflineSettings) -> list[str]:
    """Lines on the user code that a run of this configuration executes, each beginning with its key."""
    if isinstance(config, OfflineSettings):
        name = config.model.name
        return [f"model.trust_remote_code runs the code, if there is any, in {name}"] * config.model.trust_remote_code
    own = {}
    for key in own_parts(config):
        group, _, name = key.partition(".")
        part = with_kwargs(getattr(config, group), name)
        own[key] = part if isinstance(part, str) else name_of(part)
    lines = [f"{key} runs {name.removeprefix(PYTHON)}" for key, name in own.items()]
    if isinstance(config, ControlConfig):
        module, colon, _ = config.env.id.rpartition(":")
        return lines + [f"env.id imports the module {module}"] * bool(colon)
    lines += [
        f"reward[{number}].function runs {term.function}"
        for number, term in enumerate(config.reward)
        if isinstance(term, FunctionTerm) and ":" in term.function  # a built-in one has a bare name
    ]
    kind, _, name = (config.env.factory or "builtin").partition(":")
    if kind not in PACKAGED:
        lines.append(f"env.factory runs {config.env.factory}")
    if kind == "gymnasium" and ":" in name:
        lines.append(f"env.factory imports the module {name.rpartition(':')[0]}")
    lines += [f"tools[{number}] runs {tool}" for number, tool in enumerate(config.tools)]
    if config.model.trust_remote_code:
        names = [name for name in (config.model.name, config.critic.name) if name is not None]
        lines.append(f"model.trust_remote_code runs the code, if there is any, in {' and '.join(names)}")
    return lines


def refuse_foreign_code(config: PPOConfig | ControlConfig | OfflineSettings, no_code: bool) -> None:
    """Raise `ConfigError` if a run of this configuration would execute user code, and `--no-code` is given."""
    if no_code and (lines := foreign_code(config)):
        raise ConfigError(f"--no-code, but the configuration executes user code: {'; '.join(lines)}")


def refuse_python(
    config: PPOConfig | ControlConfig | OfflineSettings,
    file: str,
    given: Collection[str] = (),
    parts: Mapping[str, Part] | None = None,
    resume: bool = False,
) -> None:
    """Raise `ConfigError` for parts from Python that a configuration names and that are not given.

    `file` is the configuration's in the message, `given` are arguments that are given, and `parts` descriptions of the
    run's parts: a command can name those that are functions of a file. With `resume` the run is to be continued.
    """
    named = {key: part if isinstance(part, list) else [part] for key, part in config.python.items() if key not in given}
    if missing := {k: x for k, x in named.items() if "." not in k or str(attrgetter(k)(config)).startswith(PYTHON)}:
        listed = "; ".join(f"{key}: {', '.join(map(str, part))}" for key, part in missing.items())
        kind, trainer = type(config).__name__, TRAINERS.get(type(config), "OfflineTrainer")
        keys = "".join(f"args.{key} = …; " for key in missing if "." in key)
        arguments = "".join(f", {key}=…" for key in missing if "." not in key)
        flags = [_flag(key, (parts or {}).get(key)) for key in missing]
        by_file = "" if None in flags else f", or name the file, which is then run: {' '.join(map(str, flags))}"
        script = "run its script again, with resume_from_checkpoint=True, or " * resume
        call = f"{trainer}(args=args{arguments}).train({'resume_from_checkpoint=True' * resume})"
        raise ConfigError(
            f"a part of this run was given as an object of Python, which no configuration holds ({listed}); {script}"
            f"give it in Python: args = {kind}.from_yaml({file!r}); {keys}{call}{by_file}"
        )


def refuse_by_command(config: PPOConfig | ControlConfig | OfflineSettings) -> None:
    """Raise `ConfigError` for settings that no command trains: those without an effect, or no data set to learn."""
    refuse_unused(config, rows=())
    if isinstance(config, OfflineSettings) and config.data.dataset is None:
        raise ConfigError("data.dataset is missing; give a .jsonl, .json, .csv or .parquet file, a folder or a hub id")


def _flag(key: str, part: Part | None) -> str | None:
    """The flags that name a part in place of its object; None if it is no setting, or no function of a file."""
    if part is None or key not in PARTS or (found := location(part)) is None:
        return None
    name, kwargs = found
    more = f" --{key.partition('.')[0]}.kwargs {shlex.quote(json.dumps(kwargs))}" if kwargs else ""
    return f"--{key} {shlex.quote(name)}{more}"


def lacking(folder: Path, files: str) -> str:
    """The reason that a folder is no run's or model's: it is not there, or has none of the files."""
    return f"it has {files}" if folder.is_dir() else "there is no such folder"


def run_config_file(run: Path) -> Path:
    """The path of a run's config.yaml; raises `ConfigError` if the folder is not a run's."""
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{str(run)!r} is not a run's folder: {lacking(run, 'no config.yaml')}")
    return run / "config.yaml"


def read_config(file: Path, kind: type[Config], no_code: bool = False) -> Config:
    """Read a run's own config.yaml; `no_code` refuses one that would execute user code.

    Raises:
        ConfigError: the file is missing or not a run's configuration of this kind, or user code is refused.
    """
    settings = read_yaml(run_config_file(file.parent))
    if run_kind := other_run_kind(settings, kind):
        use = f"; use tokencredit {run_kind.sampler} {shlex.quote(str(file.parent))}" if run_kind.sampler else ""
        raise ConfigError(
            f"{file}: it is of a run of tokencredit {run_kind.command}, which this command cannot read{use}"
        )
    groups = read_settings(kind, file)
    try:
        config = build(kind, groups)
        refuse_foreign_code(config, no_code)
        return config
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


@dataclass(frozen=True)
class ModelSource:
    """A model to sample from."""

    name: str
    """Folder of a run or a model, or a hub id."""
    config: PPOConfig
    """The run's configuration; without a run of `tokencredit train`, one in which only `model` is set."""
    run: Path | None = None
    """Folder of the run; None for a model."""
    scored: bool = False
    """True if the configuration has the prompts and rewards of a run of `tokencredit train`."""

    def lacks(self, part: str, flags: str) -> ConfigError:
        """The error that this source has no prompts or reward, which flags give."""
        here = self.name.startswith("builtin:") or Path(self.name).expanduser().exists()
        whose = "" if here else "is no folder here, and as a model of the hub it "
        return ConfigError(f"{self.name!r} {whose}has no {part} of its own; give {flags}")


def is_path(name: str) -> bool:
    """True for the name of a model that is a folder, whether it exists or not, and no hub id."""
    return Path(name).exists() or Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1


def read_source(name: str, no_code: bool = False) -> ModelSource:
    """The source of a run's or a model's folder, or of a hub id; nothing is loaded. `no_code` as in `read_config`.

    Raises:
        ConfigError: the folder holds neither a run of a language model nor a model, or its configuration is refused.
    """
    folder = Path(name).expanduser()
    if not name:
        raise ConfigError("the name of the model is empty; give the folder of a run or a model, or a hub id")
    if not (folder / "config.yaml").is_file():
        if is_path(name) and not any((folder / file).is_file() for file in MODEL_FILES):
            reason = lacking(folder, f"neither config.yaml nor {' or '.join(MODEL_FILES)}")
            raise ConfigError(f"{name!r} is neither a run's folder nor a model's: {reason}")
        return ModelSource(name, plain(ModelConfig(name=name)))
    run_kind = run_kind_of(read_yaml(folder / "config.yaml"))
    if run_kind is REWARD_MODEL:
        raise ConfigError(
            f"{name!r} is a run of tokencredit reward-model, which writes no texts; as a reward it is "
            f"{{reward_model: {folder / REWARD_MODEL.saved}}}"
        )
    if run_kind in OFFLINE:
        offline: Any = read_config(folder / "config.yaml", run_kind.config, no_code)
        return ModelSource(name, plain(ModelConfig(**vars(offline.model))), folder)
    return ModelSource(name, read_config(folder / "config.yaml", PPOConfig, no_code), folder, scored=True)


def plain(model: ModelConfig) -> PPOConfig:
    """The configuration of a model without critic, prompts and rewards of its own."""
    return PPOConfig(model=model, critic=CriticConfig(kind="none"), advantage=AdvantageConfig(estimator="reward_to_go"))


def with_engine(
    config: PPOConfig, engine: EngineName = "local", server: str | None = None, folder: str | None = None
) -> PPOConfig:
    """The configuration with another sampling engine, without corrections or shards: nothing is trained with it.

    `server` and `folder` are `rollout.server` and `rollout.server_folder`. Those of the configuration are dropped: a
    run may still train with that server.
    """
    own = config.rollout
    if (engine, server, folder) == (own.engine, own.server, own.server_folder):
        return config
    changed: dict[str, Any] = {"engine": engine, "engine_memory": None, "cache": "auto"}
    changed |= {"server": server, "server_folder": folder}
    changed |= {"server_timeout": RolloutConfig().server_timeout, "max_age": 0}
    rollout, whole = replace(own, **changed), replace(config.run, shard="none")
    return replace(config, rollout=rollout, off_policy=OffPolicyConfig(), run=whole, sharding=ShardingConfig())
