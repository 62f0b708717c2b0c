"""The two kinds of runs: language models, and agents in Gymnasium environments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokencredit.settings.control import ControlConfig
from tokencredit.settings.text import PPOConfig


@dataclass(frozen=True)
class World:
    """Names of a kind of run: configuration, command and metrics."""

    name: str
    """Name in a sweep file."""
    command: str
    """Subcommand that trains."""
    sampler: str
    """Subcommand that samples from the trained policy."""
    config: type[PPOConfig] | type[ControlConfig]
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

    @property
    def outcome(self) -> str:
        """The headline metric's name in a summary."""
        return self.headline.rpartition("/")[2]

    @property
    def evaluation(self) -> str:
        """The headline metric of evaluations."""
        return f"eval/{self.outcome}"


TEXT = World(
    name="text",
    command="train",
    sampler="generate",
    config=PPOConfig,
    headline="reward",
    deviation="reward_std",
    unit="tokens",
    counted="tokens sampled",
    length="length",
)
CONTROL = World(
    name="control",
    command="control",
    sampler="play",
    config=ControlConfig,
    headline="train/average_return",
    deviation="train/std_return",
    unit="steps",
    counted="environment steps",
    length="train/average_length",
)
WORLDS = {world.name: world for world in (TEXT, CONTROL)}


def world_of(config: Mapping[str, Any]) -> World:
    """The kind of run of a configuration in plain dicts."""
    return CONTROL if "env" in config else TEXT


def other_world(config: Mapping[str, Any], command: str) -> World | None:
    """The kind of run of a configuration if it is not this command's; None if it is, or is not clear."""
    markers = {"env": CONTROL, "model": TEXT}
    return next((world for key, world in markers.items() if key in config and world.command != command), None)
