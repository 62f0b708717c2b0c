"""A trained agent that acts on one observation at a time: `tokencredit.load` of an agent's run."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import VectorObservationWrapper
from gymnasium.vector.utils import concatenate, create_empty_array

from tokencredit.control.agent_evaluation import choose_actions, load_agent
from tokencredit.control.environment_wrappers import to_space
from tokencredit.control.played_episode import PlayedEpisode, play_episode
from tokencredit.control.vector_environments import expected_warnings, make_copies, share_statistics, wrappers
from tokencredit.errors import ConfigError
from tokencredit.runs.summary import count
from tokencredit.settings.control import ControlConfig
from tokencredit.user_code.parts import AGENT_INPUTS, load_estimator


class TrainedAgent:
    """The agent of a run, with the statistics that normalised its observations in training."""

    def __init__(self, run: Path, config: ControlConfig, seed: int = 1):
        """Load the agent of a run's folder; `seed` is that of sampled actions."""
        with expected_warnings(config.env):
            self.agent, envs = load_agent(run / "policy", config)
            plain = make_copies(config.env, num_envs=1, vectorization_mode="sync")
        share_statistics(envs, envs)
        self.config, self.training = config, envs
        self.layers = [x.observations for x in wrappers(envs) if isinstance(x, VectorObservationWrapper)][::-1]
        """From a batch of observations to what the agent reads, as in training."""
        self.space = plain.single_observation_space
        for each in (plain, envs):
            each.close()
        self.run, self.name, self.generator = run, config.env.id, torch.Generator().manual_seed(seed)
        self.history: deque[np.ndarray] = deque(maxlen=config.agent.observations())

    def __repr__(self) -> str:
        parameters = count(sum(x.numel() for x in self.agent.parameters()))
        return f"<TrainedAgent {self.run}: {self.name}, {parameters} parameters>"

    def reset(self) -> None:
        """Begin an episode: forget the observations of the one before, of which only a transformer reads more."""
        self.history.clear()

    def act(self, observation: Any, *, greedy: bool = True) -> Any:
        """The action for the next observation of an episode, as the environment's `step` takes it.

        With `greedy` it is the most likely one, else it is sampled as in training.
        """
        try:
            batch = self._batch(to_space(self.space, observation))
        except (ValueError, TypeError, LookupError) as error:
            raise ConfigError(f"the observation does not fit {self.name}, which has {self.space}: {error}") from error
        for layer in self.layers:
            batch = layer(batch)
        return choose_actions(self.agent, batch, greedy, self.generator)[0]

    def play(self, *, seed: int = 1, greedy: bool = True) -> PlayedEpisode:
        """Play an episode in the run's environment, with the credit that training would give its steps.

        Raises:
            RunStopped: the environment raises, or the episode does not end.
        """
        advantage = load_estimator(self.config.advantage, AGENT_INPUTS)
        with expected_warnings(self.config.env):
            return play_episode(self.config, advantage, self.agent, self.training, seed=seed, greedy=greedy)

    def _batch(self, observation: Any) -> Any:
        """A batch of this observation, or of the last ones of the episode, the oldest first."""
        if self.history.maxlen == 1:
            empty: Any = create_empty_array(self.space, 1)
            return concatenate(self.space, [observation], empty)
        flat = np.asarray(spaces.flatten(self.space, observation))
        self.history.extend([flat] * (1 if self.history else self.history.maxlen or 1))
        return np.stack(self.history)[None]
