"""Gymnasium's vector environments, made as a configuration asks, with flat observations."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers.vector import (
    DtypeObservation,
    FlattenObservation,
    NormalizeObservation,
    NormalizeReward,
    RecordEpisodeStatistics,
    TransformObservation,
    TransformReward,
)

from tokencredit.runs.control_config import EnvConfig
from tokencredit.runs.errors import ConfigError


def make_envs(args: EnvConfig, number: int, gamma: float, *, training: bool = True) -> VectorEnv:
    """Copies of the environment that reset on the step after an episode's end, which is Gymnasium's default.

    Inside out: the episodes' own returns are recorded, observations become flat float32, and observations and rewards
    are normalised if asked for, rewards only in training.

    Raises:
        ConfigError: no such environment, something that it needs is missing, or observations that are not supported.
    """
    try:
        envs = gym.make_vec(
            args.id,
            num_envs=number,
            vectorization_mode="async" if args.processes and training else "sync",
            vector_kwargs={"autoreset_mode": AutoresetMode.NEXT_STEP},
            **args.kwargs,
        )
    except gym.error.DependencyNotInstalled as error:
        raise ConfigError(
            f"env.id {args.id} needs what is not installed ({error}): pip install tokencredit[control]"
        ) from error
    except (gym.error.UnregisteredEnv, gym.error.DeprecatedEnv, gym.error.VersionNotFound) as error:
        near = difflib.get_close_matches(args.id, gym.registry, n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise ConfigError(f"env.id is {args.id!r}, which is not registered{hint}") from error
    except ModuleNotFoundError as error:
        raise ConfigError(f"env.id is {args.id!r}: {error}") from error
    except (TypeError, gym.error.Error) as error:
        raise ConfigError(
            f"env.id is {args.id!r}, which cannot be made with env.kwargs {args.kwargs}: {error}"
        ) from error
    if not isinstance(envs.single_observation_space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.Dict):
        envs.close()
        raise ConfigError(
            f"env.id: its observations are {envs.single_observation_space}; "
            "Box, Discrete, MultiDiscrete and Dict are supported"
        )
    envs = RecordEpisodeStatistics(envs, buffer_length=1)
    if not isinstance(envs.single_observation_space, spaces.Box) or len(envs.single_observation_space.shape) != 1:
        envs = FlattenObservation(envs)
    if envs.single_observation_space.dtype != np.float32:
        envs = DtypeObservation(envs, np.float32)
    if args.normalize_observations:
        envs = NormalizeObservation(envs)
        envs = TransformObservation(envs, lambda x: np.clip(x, -args.clip, args.clip).astype(np.float32))
    if args.normalize_rewards and training:
        envs = NormalizeReward(envs, gamma=gamma)
        envs = TransformReward(envs, lambda x: np.clip(x, -args.clip, args.clip))
    return envs


def statistics(envs: VectorEnv) -> dict[str, Any]:
    """The running statistics of the normalising wrappers, by name."""
    found = {}
    for layer in wrappers(envs):
        if isinstance(layer, NormalizeObservation):
            found["observations"] = layer.obs_rms
        if isinstance(layer, NormalizeReward):
            found["rewards"] = layer.return_rms
    return found


def share_statistics(envs: VectorEnv, source: VectorEnv) -> None:
    """Let one environment normalise observations with the statistics of another, without changing them."""
    for layer in wrappers(envs):
        if isinstance(layer, NormalizeObservation):
            layer.obs_rms = statistics(source)["observations"]
            layer.update_running_mean = False


def wrappers(envs: VectorEnv) -> Iterator[VectorEnv]:
    """The environment's wrappers from the outside in, and at last the environment."""
    layer = envs
    while layer is not None:
        yield layer
        layer = getattr(layer, "env", None)
