"""Rollouts: an agent steps copies of an environment, and everything comes back as `[copies, time]`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from tokencredit.control.agent import Agent
from tokencredit.control.environments import EnvironmentRaised, follow_trails, leave_trails
from tokencredit.core.advantages import estimate
from tokencredit.errors import RunStopped
from tokencredit.learn.experience import Experience
from tokencredit.learn.rng import from_text, to_text
from tokencredit.settings.training import AdvantageConfig


class NonFiniteReward(RunStopped):
    """A reward that is NaN or infinite, with the rollout's observations and rewards, `[time, copies, …]`."""

    def __init__(self, wrong: str, observations: np.ndarray, rewards: np.ndarray):
        super().__init__(wrong)
        self.observations, self.rewards = observations, rewards


@dataclass(frozen=True)
class Rollout:
    """Steps of several copies, `[copies, time]`, each with what it was decided on."""

    observations: Tensor
    """`[copies, time, size]`, as the agent saw them."""
    actions: Tensor
    """`[copies, time, parts]`, as drawn, before the environment's bounds."""
    mask: Tensor
    """False where a copy was reset: that step is no transition."""
    logprobs: Tensor
    values: Tensor | None
    """None without a critic."""
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    """Where an episode was cut off: by its time limit, or because the rollout ended before it did."""
    bootstrap: Tensor | None
    """The value of the observation after each step; of the true last one where an episode was cut off."""
    episodes: list[tuple[float, int]]
    """Return and length, before any normalisation, of each episode that ended."""

    def credit(self, args: AdvantageConfig) -> tuple[Tensor, Tensor]:
        """Advantages and returns, `[copies, time]`; what was cut off is worth its bootstrap, what ended is worth 0."""
        return estimate(
            args.estimator,
            self.rewards,
            self.values,
            options=args.options(),
            mask=self.mask,
            terminated=self.terminated,
            truncated=self.truncated,
            bootstrap=self.bootstrap,
        )

    def experience(self, advantages: Tensor, returns: Tensor) -> Experience:
        """The steps that are transitions, a row of one step each, with their credit."""

        def rows(x: Tensor) -> Tensor:
            return x[self.mask].unsqueeze(1)

        count = int(self.mask.sum())
        return Experience(
            inputs={"observations": rows(self.observations), "actions": rows(self.actions)},
            mask=torch.ones(count, 1, dtype=torch.bool),
            lengths=torch.ones(count, dtype=torch.int64),
            logprobs=rows(self.logprobs),
            values=None if self.values is None else rows(self.values),
            advantages=rows(advantages),
            returns=rows(returns),
        )


class Collector:
    """Steps an environment, and remembers where it stands between rollouts."""

    def __init__(self, envs: VectorEnv, agent: Agent, seed: int):
        """Reset all copies; their seeds are `seed`, `seed` + 1, ….

        Args:
            envs: with flat float32 observations, resetting on the step after an episode's end.
            agent: whose actions are taken.
            seed: of the environments and of the actions.

        Raises:
            RunStopped: an environment raised.
        """
        self.envs, self.agent = envs, agent
        self.generator = torch.Generator().manual_seed(seed)
        with blamed():
            self.observation, _ = envs.reset(seed=seed)
        self.ended = np.zeros(envs.num_envs, dtype=bool)

    @torch.no_grad()
    def collect(self, steps: int) -> Rollout:
        """Take `steps` steps with every copy.

        Raises:
            NonFiniteReward: a reward is not finite; the environments have made their steps all the same.
            RunStopped: an observation is not finite, or an environment raised.
        """
        copies, size = self.observation.shape
        distribution = self.agent.distribution
        observations = np.empty((steps + 1, copies, size), dtype=np.float32)
        rewards = np.zeros((steps, copies), dtype=np.float32)
        acted, terminated, truncated = (np.zeros((steps, copies), dtype=bool) for _ in range(3))
        noise = distribution.noise((steps, copies), self.generator)
        seen = torch.from_numpy(observations)
        drawn, episodes = [], []
        with blamed(), torch.inference_mode():  # which costs less than no_grad
            for t, (frame, chance) in enumerate(zip(seen[:-1].unbind(), noise.unbind(), strict=True)):
                observations[t] = self.observation
                acted[t] = ~self.ended
                drawn.append(distribution.sample(self.agent.outputs(frame), chance))
                taken = distribution.to_env(drawn[t].numpy())
                self.observation, rewards[t], terminated[t], truncated[t], info = self.envs.step(taken)
                self.ended = terminated[t] | truncated[t]
                if "episode" in info:
                    told = info["episode"]
                    episodes += [(float(told["r"][i]), int(told["l"][i])) for i in np.flatnonzero(info["_episode"])]
        observations[steps] = self.observation
        actions = torch.stack(drawn)
        if wrong := not_finite("an observation", observations):
            raise RunStopped(wrong)
        if wrong := not_finite("a reward", rewards):
            raise NonFiniteReward(wrong, observations, rewards)

        # One pass over everything for what sampling did not need; so the ratio starts at exactly 1.
        logprobs = distribution.logprobs(self.agent.outputs(seen[:-1]), actions)
        values = self.agent.values(seen)
        truncated[-1] |= ~terminated[-1]  # the rollout ends here, the episode does not
        flags = (torch.from_numpy(x).T for x in (acted, terminated & acted, truncated & acted))
        mask, ends, cuts = (x.contiguous() for x in flags)
        return Rollout(
            observations=seen[:-1].transpose(0, 1),
            actions=actions.transpose(0, 1),
            mask=mask,
            logprobs=logprobs.T,
            values=None if values is None else values[:-1].T,
            rewards=torch.from_numpy(rewards).T,
            terminated=ends,
            truncated=cuts,
            bootstrap=None if values is None else values[1:].T,
            episodes=episodes,
        )

    def state(self) -> dict[str, Any]:
        """Where it stands, as plain values and arrays."""
        return {
            "generator": to_text(self.generator.get_state()),
            "observation": self.observation,
            "ended": self.ended,
            "envs": leave_trails(self.envs),
        }

    def load(self, state: dict[str, Any]) -> list[int]:
        """Go on from what `state` gave; returns the copies that could not be brought back, and begin an episode."""
        with blamed():
            lost = follow_trails(self.envs, state["envs"])
        self.generator.set_state(from_text(state["generator"]))
        self.observation, self.ended = state["observation"], state["ended"]
        self.ended[lost] = True
        return lost


def not_restored(lost: Sequence[int]) -> str:
    """What to say of copies that a resumed run could not bring back."""
    return (
        f"environments {', '.join(map(str, lost))} could not be brought back to where they were (what they do does not "
        "follow from seed and actions alone); they begin a new episode"
    )


def not_finite(name: str, array: np.ndarray) -> str | None:
    """Which copy gave, at which step, something of `[time, copies, …]` that is not finite, in words."""
    if np.isfinite(array.sum()) or np.isfinite(array).all():
        return None
    step, copy = np.argwhere(~np.isfinite(array))[0][:2]
    return f"environment {copy} gave {name} that is not finite, at step {step} of the rollout"


@contextmanager
def blamed() -> Iterator[None]:
    """Turn what an environment raised, or the end of its process, into one message."""
    try:
        yield
    except EnvironmentRaised as error:
        raise RunStopped(str(error)) from error
    except (EOFError, ConnectionError) as error:
        raise RunStopped("a process that ran an environment has ended; was it killed?") from error
