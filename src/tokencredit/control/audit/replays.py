"""Replay episodes to any of their states, and continue from there with fresh randomness."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv, VectorEnv
from gymnasium.wrappers.vector import NormalizeObservation
from torch import Tensor

from tokencredit.audit.fresh_randomness import NotReplayed, redraw
from tokencredit.control.actions import Categorical
from tokencredit.control.agent import Agent
from tokencredit.control.environment_wrappers import ReplayWrapper, refuse_endless
from tokencredit.control.vector_environments import base_env, make_envs, wrappers
from tokencredit.errors import RunStopped
from tokencredit.settings.control import ControlConfig

COPIES = 16
"""Environments that are stepped in parallel."""
CHUNK = 32
"""Steps whose random numbers are sampled at once."""
CHECKED = 100
"""Steps that are played twice to check that an environment can be audited."""


@dataclass
class Trajectory:
    """Steps of one environment, from the start of an episode or from one of its states."""

    seed: int
    """Seed of all its randomness."""
    noise: Iterator[Tensor]
    """Random numbers of the next actions."""
    observations: list[np.ndarray]
    """Flat observations before normalisation, one more than there are steps."""
    actions: list[Tensor] = field(default_factory=list)
    """`[parts]` each, as sampled, before the environment's bounds."""
    env_actions: list[Any] = field(default_factory=list)
    """The actions in the environment's format."""
    rewards: list[float] = field(default_factory=list)
    """Rewards before any normalisation."""
    terminated: bool = False


class Start(NamedTuple):
    """The state at which a trajectory starts."""

    seed: int
    """Seed of a new episode, or of all randomness from the state on."""
    row: int = 0
    """Index of the episode."""
    episode: Trajectory | None = None
    """Start at a state of this episode; None starts a new one."""
    at: int = 0
    """Steps of the episode before that state."""
    keeps_action: bool = False
    """Start with the episode's action; if false, sample another one."""
    number: int = 0
    """Index of the pair of trajectories from this state that share a seed."""


class Replays:
    """Copies of an agent's environment, brought to any state of an episode by its seed and actions.

    Observations are normalised with the current training statistics.
    """

    def __init__(self, args: ControlConfig, agent: Agent, training: VectorEnv, number: int = COPIES):
        """Make the copies; the training environments hold the statistics."""
        self.args, self.agent = args, agent
        envs = make_envs(args.env, number, args.advantage.gamma, stack=args.agent.observations(), training=False)
        inner = base_env(envs)
        assert isinstance(inner, SyncVectorEnv)
        self.vector, self.envs = envs, [env for env in inner.envs if isinstance(env, ReplayWrapper)]
        spec = self.envs[0].spec
        self.limit = None if spec is None else spec.max_episode_steps
        """The time limit of `gymnasium.make`; None for none."""
        self.choices = isinstance(agent.distribution, Categorical) and agent.distribution.parts == 1
        """An action is a single discrete choice, whose probability is known."""
        self.observation_layer = next((x for x in wrappers(training) if isinstance(x, NormalizeObservation)), None)

    def close(self) -> None:
        """Close the copies."""
        self.vector.close()

    def normalized(self, observations: Sequence[np.ndarray]) -> Tensor:
        """Flat observations as the agent receives them, `[count, size]`."""
        flat = np.stack(observations).astype(np.float32)
        if (layer := self.observation_layer) is not None:
            normal = (flat - layer.obs_rms.mean) / np.sqrt(layer.obs_rms.var + layer.epsilon)
            flat = np.clip(normal, -self.args.env.clip, self.args.env.clip).astype(np.float32)
        return torch.from_numpy(flat)

    @torch.no_grad()
    def play(self, starts: Iterable[Start], min_steps: int = 0) -> Iterator[tuple[Start, Trajectory]]:
        """Play from each state to the end, on free copies; yields trajectories in the order in which they end.

        `starts` are consumed as copies become free. The time limit of `gymnasium.make` ends no trajectory before
        `min_steps`. Raises `RunStopped` if an environment diverges from the episode, gives numbers that are not finite,
        or does not end.
        """
        waiting, free = iter(starts), list(self.envs)
        active: list[tuple[ReplayWrapper, Start, Trajectory]] = []
        while True:
            while free and (start := next(waiting, None)) is not None:
                active.append((free[-1], start, self._begin(free.pop(), start)))
            if not active:
                return
            actions, env_actions = self._act(active)
            unfinished = []
            for number, (env, start, trajectory) in enumerate(active):
                if self._step(env, trajectory, actions[number], env_actions[number], min_steps):
                    free.append(env)
                    yield start, trajectory
                else:
                    unfinished.append((env, start, trajectory))
            active = unfinished

    @torch.no_grad()
    def check(self, seed: int) -> None:
        """Play the start of an episode in one copy and replay it in another; raises `NotReplayed` if they differ."""
        env, other = self.envs[:2]
        start = Start(seed)
        trajectory = self._begin(env, start)
        for _ in range(CHECKED):
            actions, env_actions = self._act([(env, start, trajectory)])
            if self._step(env, trajectory, actions[0], env_actions[0], min_steps=0):
                break
        self.follow(other, trajectory, len(trajectory.rewards))

    def _begin(self, env: ReplayWrapper, start: Start) -> Trajectory:
        """Bring a copy to the start state, with fresh randomness from there on."""
        if start.episode is None:
            env.reset(seed=start.seed)
        else:
            self.follow(env, start.episode, start.at)
            redraw(env, start.seed)
        return Trajectory(start.seed, action_noise(self.agent, start.seed), [env.flat_observation()])

    def follow(self, env: ReplayWrapper, episode: Trajectory, steps: int) -> None:
        """Replay the first steps of an episode; raises `NotReplayed` if an observation, a reward or the end differs."""
        env.reset(seed=episode.seed)
        for step in range(steps + 1):
            if not np.array_equal(env.flat_observation(), episode.observations[step], equal_nan=True):
                raise self._not_replayed("an observation", step)
            if step == steps:
                return
            _, reward, terminated, _, _ = env.step(episode.env_actions[step])
            if float(reward) != episode.rewards[step]:
                raise self._not_replayed("a reward", step)
            if bool(terminated) != (episode.terminated and step == len(episode.rewards) - 1):
                raise self._not_replayed("an end", step)

    def _act(self, active: Sequence[tuple[ReplayWrapper, Start, Trajectory]]) -> tuple[Tensor, np.ndarray]:
        """The next actions, as sampled and in the environment's format."""
        distribution = self.agent.distribution
        observations = self.normalized([trajectory.observations[-1] for _, _, trajectory in active])
        noise = torch.stack([next(trajectory.noise) for _, _, trajectory in active])
        outputs = self.agent.outputs(observations)
        kept: dict[int, Tensor] = {}
        for number, (_, start, trajectory) in enumerate(active):
            if start.episode is None or trajectory.actions:
                continue
            if start.keeps_action:
                kept[number] = start.episode.actions[start.at]
            elif self.choices:
                outputs[number, start.episode.actions[start.at]] = -torch.inf
        actions = distribution.sample(outputs, noise)
        for number, action in kept.items():
            actions[number] = action
        return actions, distribution.to_env(actions.numpy())

    def _step(
        self, env: ReplayWrapper, trajectory: Trajectory, action: Tensor, env_action: Any, min_steps: int
    ) -> bool:
        """Take a step and record it; returns true if the trajectory ends."""
        _, reward, terminated, truncated, _ = env.step(env_action)
        trajectory.actions.append(action)
        trajectory.env_actions.append(env_action)
        trajectory.rewards.append(float(reward))
        trajectory.observations.append(env.flat_observation())
        trajectory.terminated = bool(terminated)
        steps = len(trajectory.rewards)
        for name, x in (("a reward", reward), ("an observation", trajectory.observations[-1])):
            if not np.isfinite(x).all():
                raise RunStopped(f"env.id {self.args.env.id} gave {name} that is not finite, in step {env.steps}")
        refuse_endless(env.steps, "; an audit needs episodes that end")
        by_limit = self.limit is not None and env.steps >= self.limit
        return bool(terminated or (truncated and (steps >= min_steps or not by_limit)))

    def _not_replayed(self, name: str, step: int) -> NotReplayed:
        return NotReplayed(
            f"env.id {self.args.env.id} cannot be audited: replayed with an episode's seed and actions, it gave {name} "
            f"in step {step} that differs from the episode's; an audit replays episodes, so reset(seed=…) must "
            "determine all randomness"
        )


def action_noise(agent: Agent, seed: int) -> Iterator[Tensor]:
    """Random numbers for sampling a trajectory's actions, one step at a time."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from agent.distribution.noise((CHUNK,), generator).unbind()
