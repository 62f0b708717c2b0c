"""Wrappers of environments: replays for resuming, running statistics over all copies, and named exceptions."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.wrappers.vector import NormalizeObservation, NormalizeReward

from tokencredit.distributed.processes import Processes, restored
from tokencredit.errors import RunStopped

MAX_REPLAY_STEPS = 100_000
"""Recorded steps per episode; a longer episode restarts when a run is resumed."""

Gather = Callable[[np.ndarray], np.ndarray]
"""Rows of all processes from those of this one, in the order of the copies."""


class EnvironmentRaised(RuntimeError):
    """An exception raised by an environment, as text, since it may come from another process."""


class EpisodesUnfinished(RunStopped):
    """Episodes did not end."""


def refuse_endless(steps: int, advice: str = "") -> None:
    """Raise `EpisodesUnfinished` for an episode that has taken `MAX_REPLAY_STEPS` steps."""
    if steps >= MAX_REPLAY_STEPS:
        raise EpisodesUnfinished(
            f"an episode has not ended after {MAX_REPLAY_STEPS:,} steps; set a limit, such as env.kwargs: "
            f"{{max_episode_steps: 1000}}{advice}"
        )


@contextmanager
def environment_errors() -> Iterator[None]:
    """Turn an environment's exception, or the death of its process, into `RunStopped`; restore what it may change."""
    try:
        with restored():
            yield
    except EnvironmentRaised as error:
        stopped = RunStopped(str(error))
        stopped.parts = "env.id"
        raise stopped from error
    except (EOFError, ConnectionError) as error:
        raise RunStopped("a process that ran an environment has ended; was it killed?") from error


def to_space(space: spaces.Space[Any], observation: Any) -> Any:
    """An observation with the types of its space; raises `ValueError` for one that does not fit.

    Gymnasium itself warns, and then broadcasts it, takes another category, or fails without naming the environment.
    """
    if isinstance(space, spaces.Dict):
        return {name: to_space(part, observation[name]) for name, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(to_space(part, value) for part, value in zip(space, observation, strict=True))
    array = np.asarray(observation)
    if array.shape != space.shape:
        raise ValueError(f"an observation has the shape {array.shape}; its space has {space.shape}")
    made = array.astype(space.dtype, copy=False)
    same = made is array or made.dtype.kind == "f" or np.array_equal(made, array)
    if not same or not (isinstance(space, spaces.Box) or space.contains(made)):
        raise ValueError(f"the observation {observation} does not fit its space, {space}")
    return made


class ReplayWrapper(gym.Wrapper):
    """Outermost wrapper of one environment, which records how to replay the current episode.

    An environment's state cannot be saved directly. Instead, another copy is seeded as the episode was and replays its
    actions. The wrapper also reports in which environment and step an exception was raised.

    It drops `info`, which nothing here reads: gathering a few of MuJoCo's numbers from all copies at each step takes as
    long as the step itself.
    """

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.seed: int | None = None
        self.steps = 0
        self.initial_rng: dict[str, Any] = {}
        self.actions: list[Any] = []
        self.observation: Any = None
        self.ended = self.must_reset = False
        self.saved_state: dict[str, Any] = {}
        """State for `restore`."""

    def save_state(self) -> dict[str, Any]:
        """The state for `restore`: seed, initial RNG state and actions of the episode."""
        if self.ended:  # only the randomness of later episodes is left
            return {"seed": self.seed, "ended": True, "began": self._rng(None)}
        position = {"steps": self.steps, "observation": self.flat_observation()}
        actions = np.array(self.actions)
        return {"seed": self.seed, "ended": False, "began": self.initial_rng, "actions": actions} | position

    def restore(self) -> bool:
        """Replay to `saved_state`; False on failure. The next step is then a reset, as after an episode's end."""
        state, rng = self.saved_state, self.saved_state["began"]
        self.ended = self.must_reset = True
        if rng["seed"] is None and rng["random"] is None:
            return False
        if rng["random"] is not None:
            self.unwrapped.np_random.bit_generator.state = rng["random"]
        if state["ended"]:
            self.seed = state["seed"]
            return True
        self.reset(seed=rng["seed"])
        for action in state["actions"]:
            self.step(action)
        self.seed = state["seed"]
        same = self.steps == state["steps"] and np.array_equal(self.flat_observation(), state["observation"])
        self.ended = self.must_reset = not same
        return same

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset, and record the seed or RNG state that the episode starts with."""
        self.seed, self.steps = self.seed if seed is None else seed, 0
        self.initial_rng, self.actions, self.ended, self.must_reset = self._rng(seed), [], False, False
        try:
            observation, _ = self.env.reset(seed=seed, options=options)
            self.observation = to_space(self.env.observation_space, observation)
        except (Exception, SystemExit) as error:
            raise self._raised(error) from None
        return self.observation, {}

    def step(self, action: Any) -> Any:
        """Step, and record the action."""
        if self.must_reset:
            return self.reset()[0], 0.0, False, False, {}
        self.steps += 1
        if self.steps <= MAX_REPLAY_STEPS:
            self.actions.append(action)
        try:
            observation, reward, terminated, truncated, _ = self.env.step(copy(action))  # it may change it in place
            self.observation = to_space(self.env.observation_space, observation)
            reward = float(reward)
        except (Exception, SystemExit) as error:
            raise self._raised(error) from None
        self.ended = bool(terminated or truncated)
        return self.observation, reward, terminated, truncated, {}

    def _rng(self, seed: int | None) -> dict[str, Any]:
        """The randomness of an episode that starts now with this seed: the seed, or the RNG state without one."""
        generator = getattr(self.unwrapped, "np_random", None)
        state = generator.bit_generator.state if seed is None and isinstance(generator, np.random.Generator) else None
        return {"seed": seed, "random": state}

    def flat_observation(self) -> np.ndarray:
        """The last observation, flattened."""
        return np.asarray(spaces.flatten(self.env.observation_space, self.observation))

    def _raised(self, error: BaseException) -> EnvironmentRaised:
        lost = self.observation is not None and not np.isfinite(self.flat_observation()).all()
        before = "gave an observation that is not finite, and then " * lost
        return EnvironmentRaised(
            f"the environment with seed {self.seed} {before}raised {type(error).__name__}: {error}, in step "
            f"{self.steps} of an episode\n{traceback.format_exc().rstrip()}"
        )


class ScaleReward(NormalizeReward):
    """Divide rewards by the running standard deviation of the discounted return, which restarts with each episode.

    As in OpenAI's baselines (`VecNormalize`): R ← γ R + r over the steps of an episode, including its last one, however
    it ends. Gymnasium's own wrapper carries R across truncations, and after a termination starts with the last step's
    reward.
    """

    def __init__(self, env: VectorEnv, gamma: float, gather: Gather | None = None):
        """Wrap the copies of this process; `gather` collects rows of all."""
        super().__init__(env, gamma=gamma)
        self.gather = gather

    def step(self, actions: Any) -> Any:
        """Step all copies; the step after an episode's end is a reset and does not count."""
        observation, reward, terminated, truncated, info = self.env.step(actions)
        reset = self._prev_dones.astype(bool)
        self.accumulated_reward[:] = np.where(reset, 0.0, self.gamma * self.accumulated_reward + reward)
        returns = self.accumulated_reward
        if self.gather is not None:
            returns, was_reset = self.gather(np.stack([returns, reset], axis=1)).T
            reset = was_reset.astype(bool)
        counted = ~reset & np.isfinite(returns)  # one NaN would stay in the statistics for good
        if counted.any():
            self.return_rms.update(returns[counted])  # type: ignore[no-untyped-call]
        self._prev_dones = np.logical_or(terminated, truncated).astype(np.float32)
        return observation, reward / np.sqrt(self.return_rms.var + self.epsilon), terminated, truncated, info


class NormalizeAllObservations(NormalizeObservation):
    """Gymnasium's normalisation, with the statistics of the copies of all processes, without rows that are not finite.

    One NaN would stay in the statistics for good.
    """

    def __init__(self, env: VectorEnv, gather: Gather | None = None):
        """Wrap the copies of this process; `gather` collects rows of all."""
        super().__init__(env)
        self.gather = gather

    def observations(self, observations: np.ndarray) -> np.ndarray:
        """Normalise a step's observations, `[copies, size]`, after an update of the statistics with all copies'."""
        if self.update_running_mean:
            rows = observations if self.gather is None else self.gather(observations)
            finite = np.isfinite(rows).all(axis=1)
            if finite.any():
                self.obs_rms.update(rows[finite])  # type: ignore[no-untyped-call]
        deviation = np.sqrt(self.obs_rms.var + self.epsilon)
        return ((observations - self.obs_rms.mean) / deviation).astype(np.float32)


class AgreedSteps(VectorWrapper):
    """Raises `RunStopped` in all processes if an environment of one raises: they would wait for its numbers."""

    def __init__(self, env: VectorEnv, processes: Processes):
        """Wrap the copies of this process."""
        super().__init__(env)
        self.processes = processes

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset this process's copies."""
        with self.processes.agreed(RunStopped), environment_errors():
            return self.env.reset(seed=seed, options=options)

    def step(self, actions: Any) -> Any:
        """Step this process's copies."""
        with self.processes.agreed(RunStopped), environment_errors():
            return self.env.step(actions)


def gather_copies(processes: Processes, rows: np.ndarray) -> np.ndarray:
    """A step's rows of all copies from those of this process's, in the order of the copies."""
    return processes.gather(torch.from_numpy(np.ascontiguousarray(rows))).numpy()
