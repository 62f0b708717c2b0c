"""Reward scaling by the running standard deviation of the discounted return."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.wrappers.vector import NormalizeReward


class ScaleReward(NormalizeReward):
    """Divide rewards by the running standard deviation of the discounted return, which restarts with each episode.

    As in OpenAI's baselines (`VecNormalize`): R ← γ R + r over the steps of an episode, including its last one, however
    it ends. Gymnasium's own wrapper carries R across truncations, and after a termination starts with the last step's
    reward.
    """

    def step(self, actions: Any) -> Any:
        """Step all copies; the step after an episode's end is a reset and does not count."""
        observation, reward, terminated, truncated, info = self.env.step(actions)
        reset = self._prev_dones.astype(bool)
        self.accumulated_reward[:] = np.where(reset, 0.0, self.gamma * self.accumulated_reward + reward)
        if not reset.all():
            self.return_rms.update(self.accumulated_reward[~reset])  # type: ignore[no-untyped-call]
        self._prev_dones = np.logical_or(terminated, truncated).astype(np.float32)
        return observation, reward / np.sqrt(self.return_rms.var + self.epsilon), terminated, truncated, info
