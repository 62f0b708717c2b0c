import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Memory(gym.Env):
    """Shows a bit at each of 20 steps; the reward is 1 for an action that is the bit seen two steps before."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.bits = self.np_random.integers(2, size=23)
        self.time = 2
        return self.observe(), {}

    def observe(self):
        return self.bits[self.time, None].astype(np.float32)

    def step(self, action):
        reward = float(action == self.bits[self.time - 2])
        self.time += 1
        return self.observe(), reward, self.time == 22, False, {}


gym.register("Memory-v0", Memory)
