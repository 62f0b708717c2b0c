"""The two kinds of worlds that runs train in: texts, and Gymnasium environments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokencredit.settings.control import ControlConfig
from tokencredit.settings.text import PPOConfig


@dataclass(frozen=True)
class World:
    """Names by which runs of one kind are configured, started and judged."""

    name: str
    """Its name in a sweep's file."""
    command: str
    """The subcommand that trains in it."""
    config: type[PPOConfig] | type[ControlConfig]
    headline: str
    """The metric that says how well a run goes."""
    deviation: str
    """The metric that holds the headline metric's deviation over single completions or episodes."""
    unit: str
    """The metric that counts the samples of an iteration, and the name of one of them in the plural."""
    counted: str
    """The unit on the axis of a curve."""
    length: str
    """The metric that holds the mean length of completions or episodes."""

    @property
    def outcome(self) -> str:
        """The headline metric as a summary names it."""
        return self.headline.rpartition("/")[2]

    @property
    def evaluation(self) -> str:
        """The headline metric of evaluations."""
        return f"eval/{self.outcome}"


TEXT = World(
    name="text",
    command="train",
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
    config=ControlConfig,
    headline="train/average_return",
    deviation="train/std_return",
    unit="steps",
    counted="environment steps",
    length="train/average_length",
)
WORLDS = {world.name: world for world in (TEXT, CONTROL)}


def world_of(config: Mapping[str, Any]) -> World:
    """The world of a configuration in plain dicts."""
    return CONTROL if "env" in config else TEXT
