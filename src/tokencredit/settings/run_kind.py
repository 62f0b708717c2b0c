"""The kinds of runs: PPO of language models and of agents, and what learns from a data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tokencredit.settings.control import ControlConfig, EnvConfig
from tokencredit.settings.offline import DPOConfig, OfflineSettings, RewardModelConfig, SFTConfig
from tokencredit.settings.text import PPOConfig


@dataclass(frozen=True)
class RunKind:
    """Names of a kind of run: configuration, command and metrics."""

    name: str
    """Name in a sweep file."""
    command: str
    """Subcommand that trains."""
    sampler: str
    """Subcommand that samples from the trained policy."""
    config: type[PPOConfig] | type[ControlConfig] | type[OfflineSettings]
    headline: str
    """Metric that shows how well a run does."""
    deviation: str
    """Metric with the headline metric's standard deviation over single completions or episodes."""
    unit: str
    """Metric that counts the samples of an iteration, and their name in the plural."""
    counted: str
    """Axis title of curves over that count."""
    length: str
    """Metric with the mean length of completions or episodes."""
    trains: str
    """Object of the command's description: it trains …."""
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
    sampler="generate",
    config=PPOConfig,
    headline="reward",
    deviation="reward_std",
    unit="tokens",
    counted="tokens sampled",
    length="length",
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
    sampler="generate",
    config=SFTConfig,
    headline="loss",
    deviation="loss_std",
    unit="tokens",
    counted="tokens read",
    length="sequence_length",
    trains="a language model on completions (supervised fine-tuning)",
    lower=True,
)
REWARD_MODEL = RunKind(
    name="reward-model",
    command="reward-model",
    sampler="evaluate",
    config=RewardModelConfig,
    headline="accuracy",
    deviation="accuracy_std",
    unit="tokens",
    counted="tokens read",
    length="sequence_length",
    trains="a reward model on preferences",
    saved="reward_model",
)
DPO = RunKind(
    name="dpo",
    command="dpo",
    sampler="generate",
    config=DPOConfig,
    headline="accuracy",
    deviation="accuracy_std",
    unit="tokens",
    counted="tokens read",
    length="sequence_length",
    trains="a language model on preferences (direct preference optimization)",
)
OFFLINE = (SFT, REWARD_MODEL, DPO)
"""Kinds of runs that learn from a data set."""
RUN_KINDS = {run_kind.name: run_kind for run_kind in (TEXT, CONTROL, *OFFLINE)}
MARKERS = {
    **{f"env.{item.name}": CONTROL for item in fields(EnvConfig) if item.name != "kwargs"},
    **dict.fromkeys(("agent", "algorithm", "steps"), CONTROL),
    **{"sft": SFT, "reward_model": REWARD_MODEL, "dpo": DPO, "env": TEXT, "rollout": TEXT, "model": TEXT},
}
"""Kinds of runs by keys of their configurations; the first that a configuration has counts."""


def run_kind_of(config: Mapping[str, Any]) -> RunKind:
    """The kind of run of a configuration in plain dicts."""
    keys = keys_of(config)
    return next((run_kind for key, run_kind in MARKERS.items() if key in keys), TEXT)


def other_run_kind(config: Mapping[str, Any], command: str) -> RunKind | None:
    """The kind of run of a configuration if it is not this command's; None if it is, or is not clear."""
    own = next((keys_of(asdict(x.config())) for x in RUN_KINDS.values() if x.command == command), set())
    return next((run_kind for key, run_kind in MARKERS.items() if key in keys_of(config) - own), None)


def keys_of(config: Mapping[str, Any]) -> set[str]:
    """The keys of a configuration and of its groups, dotted."""
    inner = {f"{key}.{name}" for key, group in config.items() if isinstance(group, Mapping) for name in group}
    return {*map(str, config), *inner}
