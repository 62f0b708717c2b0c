"""Episodes that are played again: from any of their states, with other randomness, as often as wanted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Env, Wrapper
from gymnasium.vector import SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TimeLimit
from gymnasium.wrappers.vector import NormalizeObservation
from torch import Tensor

from tokencredit.control.actions import Categorical
from tokencredit.control.agent import Agent
from tokencredit.control.audit.randomness import redraw
from tokencredit.control.environments import LONGEST, Witness, copies, make_envs, wrappers
from tokencredit.control.reward_scale import ScaleReward
from tokencredit.errors import RunStopped
from tokencredit.settings.control import ControlConfig

COPIES = 16
"""Environments that are stepped beside one another."""
CHUNK = 32
"""Steps whose random numbers are drawn at once."""
CHECKED = 100
"""Steps that are played twice to see whether an environment can be audited."""


class NotReplayed(RunStopped):
    """An environment that took another course with the same seed and actions."""


@dataclass
class Trajectory:
    """Steps of one environment, from the beginning of an episode or from a state of one."""

    seed: int
    """Of all its randomness."""
    noise: Iterator[Tensor]
    """Random numbers of the actions to come."""
    observations: list[np.ndarray]
    """Flat, as the environment gave them, one more than there are steps."""
    actions: list[Tensor] = field(default_factory=list)
    """`[parts]` each, as drawn, before the environment's bounds."""
    taken: list[Any] = field(default_factory=list)
    """The same as the environment took them."""
    rewards: list[float] = field(default_factory=list)
    """Before any normalisation."""
    terminated: bool = False


class Start(NamedTuple):
    """The state that a trajectory begins at."""

    seed: int
    """Of a new episode, or of all randomness from the state on."""
    row: int = 0
    """Number of the episode."""
    episode: Trajectory | None = None
    """Begin at a state of this episode; None begins a new one."""
    at: int = 0
    """Steps of the episode before that state."""
    own: bool = False
    """The first action is the episode's; if not, another one is drawn."""
    number: int = 0
    """Of the pair of trajectories from this state that share a seed."""


class Replays:
    """Copies of an agent's environment, brought to any state of an episode by its seed and actions.

    Observations are normalised, and rewards scaled and clipped, by the training's statistics as they stand.
    """

    def __init__(self, args: ControlConfig, agent: Agent, training: VectorEnv, number: int = COPIES):
        """Make the copies.

        Args:
            args: the environment and how it is read.
            agent: whose actions are taken, drawn as in training.
            training: the environments that know the statistics.
            number: of copies.
        """
        self.args, self.agent = args, agent
        envs = make_envs(args.env, number, args.advantage.gamma, stack=args.agent.observations(), training=False)
        inner = copies(envs)
        assert isinstance(inner, SyncVectorEnv)
        self.vector, self.envs = envs, [env for env in inner.envs if isinstance(env, Witness)]
        self.limit = time_limit(self.envs[0])
        self.choices = isinstance(agent.distribution, Categorical) and agent.distribution.parts == 1
        """An action is one choice, whose probability is known."""
        self.observation_layer = next((x for x in wrappers(training) if isinstance(x, NormalizeObservation)), None)
        self.reward_layer = next((x for x in wrappers(training) if isinstance(x, ScaleReward)), None)

    def close(self) -> None:
        """Close the copies."""
        self.vector.close()

    def seen(self, observations: Sequence[np.ndarray]) -> Tensor:
        """Flat observations as the agent sees them, `[count, size]`."""
        flat = np.stack(observations).astype(np.float32)
        if (layer := self.observation_layer) is not None:
            normal = (flat - layer.obs_rms.mean) / np.sqrt(layer.obs_rms.var + layer.epsilon)
            flat = np.clip(normal, -self.args.env.clip, self.args.env.clip).astype(np.float32)
        return torch.from_numpy(flat)

    def paid(self, rewards: Sequence[float]) -> np.ndarray:
        """Rewards as the run counts them, float64."""
        given = np.asarray(rewards, dtype=np.float64)
        if (layer := self.reward_layer) is not None:
            scaled = given / np.sqrt(layer.return_rms.var + layer.epsilon)
            given = np.clip(scaled, -self.args.env.clip, self.args.env.clip)
        return given

    @torch.no_grad()
    def play(self, starts: Iterable[Start], least: int = 0) -> Iterator[tuple[Start, Trajectory]]:
        """Play from each state to the end, as copies become free; in the order in which they end.

        Args:
            starts: asked for the next one whenever a copy is free.
            least: steps before which the time limit of `gymnasium.make` ends nothing.

        Raises:
            NotReplayed: an environment took another course than in the episode.
            RunStopped: a reward or observation is not finite, or an episode does not end.
        """
        waiting, free = iter(starts), list(self.envs)
        going: list[tuple[Witness, Start, Trajectory]] = []
        while True:
            while free and (start := next(waiting, None)) is not None:
                going.append((free[-1], start, self._begin(free.pop(), start)))
            if not going:
                return
            actions, taken = self._act(going)
            unfinished = []
            for number, (env, start, trajectory) in enumerate(going):
                if self._step(env, trajectory, actions[number], taken[number], least):
                    free.append(env)
                    yield start, trajectory
                else:
                    unfinished.append((env, start, trajectory))
            going = unfinished

    @torch.no_grad()
    def check(self, seed: int) -> None:
        """Play the beginning of an episode in one copy, and again in another.

        Raises:
            NotReplayed: they differ.
        """
        env, other = self.envs[:2]
        start = Start(seed)
        trajectory = self._begin(env, start)
        for _ in range(CHECKED):
            actions, taken = self._act([(env, start, trajectory)])
            if self._step(env, trajectory, actions[0], taken[0], least=0):
                break
        self.follow(other, trajectory, len(trajectory.rewards))

    def _begin(self, env: Witness, start: Start) -> Trajectory:
        """Bring a copy to the state, with randomness of its own from there on."""
        if start.episode is None:
            env.reset(seed=start.seed)
        else:
            self.follow(env, start.episode, start.at)
            redraw(env, start.seed)
        return Trajectory(start.seed, action_noise(self.agent, start.seed), [env.flat_observation()])

    def follow(self, env: Witness, episode: Trajectory, steps: int) -> None:
        """Take the first steps of an episode again.

        Raises:
            NotReplayed: an observation, a reward or the end differs.
        """
        env.reset(seed=episode.seed)
        for step in range(steps + 1):
            if not np.array_equal(env.flat_observation(), episode.observations[step], equal_nan=True):
                raise self._not_replayed("an observation", step)
            if step == steps:
                return
            _, reward, terminated, _, _ = env.step(episode.taken[step])
            if float(reward) != episode.rewards[step]:
                raise self._not_replayed("a reward", step)
            if bool(terminated) != (episode.terminated and step == len(episode.rewards) - 1):
                raise self._not_replayed("an end", step)

    def _act(self, going: Sequence[tuple[Witness, Start, Trajectory]]) -> tuple[Tensor, np.ndarray]:
        """The next actions, as drawn and as the environment takes them."""
        distribution = self.agent.distribution
        seen = self.seen([trajectory.observations[-1] for _, _, trajectory in going])
        noise = torch.stack([next(trajectory.noise) for _, _, trajectory in going])
        outputs = self.agent.outputs(seen)
        own: dict[int, Tensor] = {}
        for number, (_, start, trajectory) in enumerate(going):
            if start.episode is None or trajectory.actions:
                continue
            if start.own:
                own[number] = start.episode.actions[start.at]
            elif self.choices:
                outputs[number, start.episode.actions[start.at]] = -torch.inf
        drawn = distribution.sample(outputs, noise)
        for number, action in own.items():
            drawn[number] = action
        return drawn, distribution.to_env(drawn.numpy())

    def _step(self, env: Witness, trajectory: Trajectory, action: Tensor, taken: Any, least: int) -> bool:
        """Take a step and write it down; returns whether the trajectory ends with it."""
        _, reward, terminated, truncated, _ = env.step(taken)
        trajectory.actions.append(action)
        trajectory.taken.append(taken)
        trajectory.rewards.append(float(reward))
        trajectory.observations.append(env.flat_observation())
        trajectory.terminated = bool(terminated)
        steps = len(trajectory.rewards)
        for name, x in (("a reward", reward), ("an observation", trajectory.observations[-1])):
            if not np.isfinite(x).all():
                raise RunStopped(f"env.id {self.args.env.id} gave {name} that is not finite, in step {env.steps}")
        if env.steps >= LONGEST:
            raise RunStopped(
                f"an episode of env.id {self.args.env.id} has not ended after {LONGEST} steps; an audit needs episodes "
                "that end, such as env.kwargs: {max_episode_steps: 1000} gives"
            )
        by_limit = self.limit is not None and env.steps >= self.limit
        return bool(terminated or (truncated and (steps >= least or not by_limit)))

    def _not_replayed(self, name: str, step: int) -> NotReplayed:
        return NotReplayed(
            f"env.id {self.args.env.id} cannot be audited: with the seed and the actions of an episode it gave {name} "
            f"in step {step} that differs from the episode's; an audit plays episodes again, so all randomness must "
            "follow from reset(seed=…)"
        )


def action_noise(agent: Agent, seed: int) -> Iterator[Tensor]:
    """Random numbers that a trajectory's actions are drawn with, one step after another."""
    random = torch.Generator().manual_seed(seed)
    while True:
        yield from agent.distribution.noise((CHUNK,), random).unbind()


def time_limit(env: Env[Any, Any]) -> int | None:
    """Steps after which `gymnasium.make` cuts episodes; None for no such limit."""
    layer: Any = env
    while isinstance(layer, Wrapper):
        if isinstance(layer, TimeLimit):
            return None if layer.spec is None else layer.spec.max_episode_steps
        layer = layer.env
    return None
