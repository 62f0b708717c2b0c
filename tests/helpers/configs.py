"""Configurations of small runs."""

from dataclasses import fields, is_dataclass
from typing import get_args, get_type_hints

from tokencredit.settings.control import AgentRunConfig, ControlConfig, EpisodesConfig
from tokencredit.settings.model import ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import RunConfig, UpdateConfig


def quiet(folder, iterations=1, save_every=0, samples=2, **options):
    """A run without trackers and without a screen, of few samples, and without a checkpoint unless asked for."""
    options |= {"iterations": iterations, "save_every": save_every, "samples": samples}
    return RunConfig(dir=str(folder), trackers=[], show_every=0, **options)


def quiet_agent(folder, iterations=1, **options):
    """A run of an agent without trackers."""
    return AgentRunConfig(dir=str(folder), iterations=iterations, trackers=[], **options)


def text_config(folder, iterations=1, **groups):
    """A small run of the built-in language model."""
    small = {
        "model": ModelConfig(dtype="float32"),
        "rollout": RolloutConfig(batch_size=8, max_new_tokens=8),
        "ppo": UpdateConfig(epochs=2, minibatches=2),
        "run": quiet(folder, iterations),
    }
    return PPOConfig(**small | groups)


def control_config(folder, iterations=2, **groups):
    """A small run of CartPole."""
    small = {"steps": 16, "eval": EpisodesConfig(episodes=2), "run": quiet_agent(folder, iterations)}
    return ControlConfig(**small | groups)


def keys(kind, prefix=""):
    """Every key of a configuration, groups included."""
    hints, found = get_type_hints(kind), set()
    for field in fields(kind):
        found.add(prefix + field.name)
        for inner in (hints[field.name], *get_args(hints[field.name])):
            if is_dataclass(inner):
                found |= keys(inner, f"{prefix}{field.name}.")
    return found


def as_flags(settings):
    """Settings as the command takes them."""
    return [part for key, value in settings.items() for part in (f"--{key}", str(value))]
