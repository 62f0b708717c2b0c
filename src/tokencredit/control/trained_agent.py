"""A trained agent that acts on one observation at a time: `tokencredit.load` of an agent's run."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import VectorObservationWrapper
from gymnasium.vector.utils import concatenate, create_empty_array
from torch import Tensor

from tokencredit.control.agent_evaluation import EpisodesUnfinished, choose_actions, chosen, endless, load_agent
from tokencredit.control.agent_rollout import AgentRollout
from tokencredit.control.environment_wrappers import MAX_REPLAY_STEPS, environment_errors, to_space
from tokencredit.control.vector_environments import (
    expected_warnings,
    make_copies,
    make_envs,
    share_statistics,
    statistics,
    wrappers,
)
from tokencredit.errors import ConfigError
from tokencredit.report.notebook import drawn
from tokencredit.report.templating import fill
from tokencredit.runs.summary import count, figure
from tokencredit.settings.control import ControlConfig
from tokencredit.user_code.parts import load_parts


@dataclass(frozen=True, repr=False)
class PlayedEpisode:
    """An episode with the credit of its steps; lists have an entry per step. A notebook draws it."""

    observations: list[list[float]]
    """As the agent read them: flat, and normalised if the run's are."""
    actions: list[Any]
    rewards: list[float]
    """As the environment gave them."""
    values: list[float] | None
    """The critic's values of the states before the actions; None without a critic."""
    advantages: list[float]
    """By the run's estimator, in units of its rewards, which `env.normalize_rewards` scales."""
    terminated: bool
    """The episode ended in a terminal state, and not by a time limit."""

    def __repr__(self) -> str:
        return f"<PlayedEpisode: return {figure(sum(self.rewards))} in {len(self.rewards)} steps, {self.ending}>"

    @property
    def ending(self) -> str:
        """What ended the episode, in words."""
        return "a terminal state" if self.terminated else "a time limit"

    def _repr_html_(self) -> str:
        steps = list(range(1, 1 + len(self.rewards)))
        charts = {"advantage of each step": self.advantages, "value before each step": self.values}
        return fill(
            "notebook.html",
            name="episode",
            story=[("return", figure(sum(self.rewards))), ("steps", str(len(steps))), ("ended by", self.ending)],
            charts=[
                drawn({"title": title, "lines": [{"name": title, "x": steps, "y": numbers}]})
                for title, numbers in (charts | {"reward of each step": self.rewards}).items()
                if numbers is not None
            ],
        )


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

    @torch.no_grad()
    def play(self, *, seed: int = 1, greedy: bool = True) -> PlayedEpisode:
        """Play an episode in the run's environment, with the credit that training would give its steps.

        Raises:
            RunStopped: the environment raises, or the episode does not end.
        """
        config, agent, generator = self.config, self.agent, torch.Generator().manual_seed(seed)
        stack, rewards = config.agent.observations(), list[float]()
        with expected_warnings(config.env), environment_errors():
            envs = make_envs(config.env, 1, config.advantage.gamma, stack=stack, training=False)
            share_statistics(envs, self.training)
            try:
                observation, _ = envs.reset(seed=seed)
                frames, actions, ended = [torch.tensor(observation)], list[Tensor](), False
                while not ended:
                    if len(rewards) >= MAX_REPLAY_STEPS:
                        raise EpisodesUnfinished(endless())
                    actions.append(chosen(agent, frames[-1], greedy, generator))
                    taken = agent.distribution.to_env(actions[-1].numpy())
                    observation, reward, terminated, truncated, _ = envs.step(taken)
                    rewards.append(float(reward[0]))
                    frames.append(torch.tensor(observation))
                    ended = bool(terminated[0] | truncated[0])
            finally:
                envs.close()
        read, acted, last = torch.stack(frames, 1), torch.stack(actions, 1), torch.zeros(1, len(rewards))
        last[0, -1] = 1
        values = agent.values(read)
        ends = last.bool() & (bool(terminated[0]) or not config.advantage.bootstrap)
        rollout = AgentRollout(
            observations=read[:, :-1],
            actions=acted,
            mask=torch.ones_like(last, dtype=torch.bool),
            logprobs=agent.distribution.logprobs(agent.outputs(read[0, :-1]), acted[0])[None],
            values=None if values is None else values[:, :-1],
            rewards=self._scaled(torch.tensor([rewards])),
            terminated=ends,
            truncated=last.bool() & ~ends,
            bootstrap=None if values is None else values[:, 1:],
            episodes=[],
        )
        advantages, _ = rollout.credit(load_parts(config).advantage, agent)
        return PlayedEpisode(
            observations=read[0, :-1].tolist(),
            actions=[agent.distribution.to_env(action.numpy())[0] for action in actions],
            rewards=rewards,
            values=None if values is None else values[0, :-1].tolist(),
            advantages=advantages[0].tolist(),
            terminated=bool(terminated[0]),
        )

    def _scaled(self, rewards: Tensor) -> Tensor:
        """Rewards as the critic learned them."""
        scale = statistics(self.training).get("rewards")
        if scale is None:
            return rewards
        clip = self.config.env.clip
        return (rewards / math.sqrt(float(scale.var) + 1e-8)).clamp(-clip, clip)

    def _batch(self, observation: Any) -> Any:
        """A batch of this observation, or of the last ones of the episode, the oldest first."""
        if self.history.maxlen == 1:
            empty: Any = create_empty_array(self.space, 1)
            return concatenate(self.space, [observation], empty)
        flat = np.asarray(spaces.flatten(self.space, observation))
        self.history.extend([flat] * (1 if self.history else self.history.maxlen or 1))
        return np.stack(self.history)[None]
