"""Running statistics over all copies of an environment, those of other processes included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.wrappers.vector import NormalizeObservation, NormalizeReward

from tokencredit.control.environment_failures import environment_errors
from tokencredit.distributed.processes import Processes
from tokencredit.errors import RunStopped

Gather = Callable[[np.ndarray], np.ndarray]
"""Rows of all processes from those of this one, in the order of the copies."""


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
        if not reset.all():
            self.return_rms.update(returns[~reset])  # type: ignore[no-untyped-call]
        self._prev_dones = np.logical_or(terminated, truncated).astype(np.float32)
        return observation, reward / np.sqrt(self.return_rms.var + self.epsilon), terminated, truncated, info


class NormalizeAllObservations(NormalizeObservation):
    """Gymnasium's normalisation, with the statistics of the copies of all processes."""

    def __init__(self, env: VectorEnv, gather: Gather):
        """Wrap the copies of this process; `gather` collects rows of all."""
        super().__init__(env)
        self.gather = gather

    def observations(self, observations: np.ndarray) -> np.ndarray:
        """Normalise a step's observations, `[copies, size]`, after an update of the statistics with all copies'."""
        self.obs_rms.update(self.gather(observations))  # type: ignore[no-untyped-call]
        deviation = np.sqrt(self.obs_rms.var + self.epsilon)
        normalized: np.ndarray = ((observations - self.obs_rms.mean) / deviation).astype(np.float32)
        return normalized


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
    gathered: np.ndarray = processes.gather(torch.from_numpy(np.ascontiguousarray(rows))).numpy()
    return gathered
