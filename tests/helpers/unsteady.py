"""An environment whose rewards differ between processes; one training copy raises in the third iteration."""

import os

import gymnasium as gym
import numpy as np
from gymnasium import spaces

STEPS = 16
"""Of a rollout."""


class Unsteady(gym.Env):
    """Episodes of 8 steps; rewards rise from episode to episode in process 1, and fall in process 0."""

    observation_space = spaces.Box(0, 8, (1,), np.float32)
    action_space = spaces.Discrete(2)
    episodes = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.raises, self.total = seed == 4, 0  # the last of four copies
        Unsteady.episodes += 1
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.time += 1
        self.total += 1
        if self.raises and self.total > 2 * STEPS:
            raise RuntimeError("a wheel came off")
        reward = float(Unsteady.episodes) * (1 if os.environ.get("RANK") == "1" else -1)
        return np.full(1, self.time, np.float32), reward, self.time == 8, False, {}


gym.register("Unsteady-v0", Unsteady)
