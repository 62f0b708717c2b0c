"""Evaluate an agent on whole episodes, and record videos."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokencredit.control.agent import Agent
from tokencredit.control.environment_wrappers import EpisodesUnfinished, environment_errors, refuse_endless
from tokencredit.control.vector_environments import (
    current_folder,
    environment_part,
    evaluation_envs,
    expected_warnings,
    make_envs,
    statistics,
)
from tokencredit.errors import ConfigError
from tokencredit.learn.rng import preserved
from tokencredit.provenance.parts import label
from tokencredit.runs.folder import read_parts
from tokencredit.settings.control import ControlConfig, EpisodesConfig

COPIES = 10
"""Episodes that are played in parallel."""
AGENT_FILE = "agent.safetensors"
MOMENTS = ("mean", "var", "count")


class Player:
    """Plays episodes with an agent; normalises observations with the training statistics, which it does not change."""

    def __init__(
        self, args: ControlConfig, agent: Agent, training: VectorEnv, overdue: Callable[[], bool] = lambda: False
    ):
        """Store the arguments; `training` are the environments whose statistics are used.

        `overdue` is true some seconds after a signal that is to stop the run.
        """
        self.args, self.agent, self.training, self.overdue = args, agent, training, overdue

    def measure(self, settings: EpisodesConfig, seed: int) -> dict[str, float]:
        """Returns and lengths of `settings.episodes` episodes, as metrics; raises `EpisodesUnfinished`."""
        count = settings.episodes
        return episode_metrics("eval", self._play(min(count, COPIES), count, settings.greedy, seed))

    def record(self, settings: EpisodesConfig, seed: int, folder: Path, prefix: str) -> None:
        """Play `settings.videos` further episodes, and record a video of each in the folder."""
        with no_display():
            self._play(1, settings.videos, settings.greedy, seed, videos=folder, prefix=prefix)

    def _play(self, copies: int, count: int, greedy: bool, seed: int, **videos: Any) -> list[tuple[float, int]]:
        with evaluation_envs(self.args, copies, self.training, **videos) as envs:
            return play(envs, self.agent, count, greedy, seed, self.overdue)


@torch.no_grad()
def play(
    envs: VectorEnv, agent: Agent, count: int, greedy: bool, seed: int, overdue: Callable[[], bool] = lambda: False
) -> list[tuple[float, int]]:
    """Returns and lengths of `count` episodes, an equal number per copy so that short ones are not favoured.

    Raises `EpisodesUnfinished` if an episode does not end within `MAX_REPLAY_STEPS`, or `overdue` becomes true.
    """
    generator = torch.Generator().manual_seed(seed)
    quota = [count // envs.num_envs + (i < count % envs.num_envs) for i in range(envs.num_envs)]
    episodes: list[list[tuple[float, int]]] = [[] for _ in quota]
    lengths, unfinished = np.zeros(envs.num_envs, dtype=int), np.array(quota) > 0
    with environment_errors():
        observation, _ = envs.reset(seed=seed)
        while unfinished.any():
            if overdue():
                raise EpisodesUnfinished("a signal came before its episodes had ended")
            refuse_endless(lengths[unfinished].max(), ", or eval.episodes to 0")
            observation, _, _, _, info = envs.step(choose_actions(agent, observation, greedy, generator))
            lengths += 1
            for copy in np.flatnonzero(info["_episode"]) if "episode" in info else ():
                lengths[copy] = 0
                if len(episodes[copy]) < quota[copy]:
                    episodes[copy].append((float(info["episode"]["r"][copy]), int(info["episode"]["l"][copy])))
                    unfinished[copy] = len(episodes[copy]) < quota[copy]
    return [episode for done in episodes for episode in done]


@torch.no_grad()
def choose_actions(agent: Agent, observations: np.ndarray, greedy: bool, generator: torch.Generator) -> np.ndarray:
    """The agent's most likely or sampled actions for observations `[copies, size]`, in the environment's format."""
    return agent.distribution.to_env(chosen(agent, torch.from_numpy(observations), greedy, generator).numpy())


def chosen(agent: Agent, observations: Tensor, greedy: bool, generator: torch.Generator) -> Tensor:
    """The same in the agent's format."""
    distribution, outputs = agent.distribution, agent.outputs(observations)
    if greedy:
        return distribution.greedy(outputs)
    return distribution.sample(outputs, distribution.noise((len(observations),), generator))


def episode_metrics(prefix: str, episodes: list[tuple[float, int]]) -> dict[str, float]:
    """Mean and standard deviation of returns, and mean length; NaN without episodes."""
    if not episodes:
        return {f"{prefix}/{name}": math.nan for name in ("average_return", "std_return", "average_length")}
    returns, lengths = zip(*episodes, strict=True)
    return {
        f"{prefix}/average_return": float(np.mean(returns)),
        f"{prefix}/std_return": float(np.std(returns)),
        f"{prefix}/average_length": float(np.mean(lengths)),
    }


@contextmanager
def no_display() -> Iterator[None]:
    """Let pygame render without a display, unless the user has set a video driver."""
    name, user_set = "SDL_VIDEODRIVER", "SDL_VIDEODRIVER" in os.environ
    os.environ.setdefault(name, "dummy")
    try:
        yield
    finally:
        if not user_set:
            del os.environ[name]


def check_videos(args: ControlConfig, key: str = "eval.videos") -> None:
    """Raise `ConfigError`, before hours of training, if the environment cannot be recorded."""
    try:
        import moviepy  # noqa: F401

        with no_display(), current_folder(), preserved():  # it may draw from the global generators
            env = gym.make(args.env.id, render_mode="rgb_array", **args.env.kwargs)
            env.reset(seed=0)
            frame = env.render()
            env.close()
    except (ImportError, gym.error.DependencyNotInstalled) as error:
        raise ConfigError(f"{key}: {error}; pip install tokencredit[video]") from error
    except NotImplementedError:  # without a message, by Gymnasium
        frame = None
    except Exception as error:  # graphics libraries without a display raise errors of many types
        raise ConfigError(f"{key}: {args.env.id} could not be drawn: {type(error).__name__}: {error}") from error
    if not isinstance(frame, np.ndarray):
        advice = f"give it render() with that mode in metadata['render_modes'], or leave out {key}"
        raise ConfigError(f"{key}: {args.env.id} draws no pictures in the mode rgb_array; {advice}")


def save_agent(folder: Path, agent: Agent, envs: VectorEnv) -> None:
    """Write the agent's weights and its environments' statistics; the run's config.yaml holds the architecture."""
    folder.mkdir(exist_ok=True)
    tensors = {f"agent.{name}": value.contiguous() for name, value in agent.state_dict().items()}
    for name, rms in statistics(envs).items():
        tensors |= {f"{name}.{part}": torch.as_tensor(np.array(getattr(rms, part))) for part in MOMENTS}
    save_file(tensors, folder / AGENT_FILE)


def load_agent(folder: Path, args: ControlConfig) -> tuple[Agent, VectorEnv]:
    """Load the result of `save_agent`, or raise `ConfigError`: the agent, and an environment with the statistics."""
    env = replace(args.env, processes=False)  # it holds statistics, and needs no worker process
    envs = make_envs(env, 1, args.advantage.gamma, stack=args.agent.observations())
    with preserved():  # the weights drawn here are replaced
        agent = Agent(envs.single_observation_space, envs.single_action_space, args.agent, args.critic.kind)
    try:
        tensors = load_file(folder / AGENT_FILE)
        agent.load_state_dict({k.removeprefix("agent."): v for k, v in tensors.items() if k.startswith("agent.")})
        for name, rms in statistics(envs).items():
            for part in MOMENTS:
                setattr(rms, part, tensors[f"{name}.{part}"].numpy())
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot load an agent from {folder / AGENT_FILE}: {error}") from error
    except (RuntimeError, KeyError) as error:
        raise ConfigError(f"{folder / AGENT_FILE} holds another agent than the configuration describes") from error
    return agent, envs


def play_run(run: Path, args: ControlConfig, settings: EpisodesConfig, seed: int) -> dict[str, float]:
    """Play episodes with a run's trained agent and print the mean return; videos go to the run's folder."""
    with expected_warnings(args.env):
        if settings.videos:
            check_videos(args, "--videos")
        agent, envs = load_agent(run / "policy", args)
        before, now = read_parts(run).get("env.id"), environment_part(envs)
        if before and now and now["digest"] != before["digest"]:
            print(f"the environment is {label(now)}; the agent was trained in {label(before)}")
        player = Player(args, agent, envs)
        metrics = player.measure(settings, seed)
        print(
            f"return {metrics['eval/average_return']:.1f} ± {metrics['eval/std_return']:.1f} "
            f"({settings.episodes} episodes, mean length {metrics['eval/average_length']:.0f})"
        )
        if settings.videos:
            player.record(settings, seed, run / "videos", f"play-{seed}")
            print(f"videos in {run / 'videos'}")
        envs.close()
    return metrics
