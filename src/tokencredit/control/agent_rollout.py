"""Rollouts: an agent steps copies of an environment; all tensors are `[copies, time]`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tokencredit.control.agent import Agent
from tokencredit.control.environment_wrappers import environment_errors, refuse_endless
from tokencredit.control.vector_environments import merged_envs, restore_envs, save_envs
from tokencredit.core.estimators import estimate
from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.learn.experience import Experience
from tokencredit.learn.rng import from_hex, to_hex
from tokencredit.settings.training import AdvantageSettings


class NonFiniteReward(RunStopped):
    """A reward is NaN or infinite; holds the rollout's observations and rewards, `[time, copies, …]`, and episodes."""

    def __init__(self, message: str, observations: np.ndarray, rewards: np.ndarray, episodes: list[tuple[float, int]]):
        super().__init__(message)
        self.observations, self.rewards, self.episodes = observations, rewards, episodes


@dataclass(frozen=True)
class AgentRollout:
    """Steps of several copies of an environment, `[copies, time]`."""

    observations: Tensor
    """`[copies, time, size]`, as the agent received them."""
    actions: Tensor
    """`[copies, time, parts]`, as sampled, before the environment's bounds."""
    mask: Tensor
    """False where a copy was reset, which is not a transition, and after a copy's last whole episode."""
    logprobs: Tensor
    values: Tensor | None
    """None without a critic."""
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    """True where an episode was cut off, by its time limit or by the end of the rollout; a time limit terminates
    instead without `advantage.bootstrap`."""
    bootstrap: Tensor | None
    """Value of the observation after each step; at truncation, of the episode's true last observation."""
    episodes: list[tuple[float, int]]
    """Return and length, before any normalisation, of each episode that ended."""

    def credit(self, args: AdvantageSettings, agent: Agent) -> tuple[Tensor, Tensor]:
        """Advantages and returns, `[copies, time]`; bootstraps truncated episodes, not terminated ones.

        The agent is the one that acted, for an estimator that reads its entropy.
        """
        inputs: dict[str, Tensor | None] = {"logprobs": self.logprobs}
        if "entropy" in args.reads().inputs:
            with torch.no_grad():
                inputs["entropy"] = agent.distribution.entropy(agent.outputs(self.observations))
        return estimate(
            args.estimator,
            self.rewards,
            self.values,
            options=args.options(),
            inputs=inputs,
            mask=self.mask,
            terminated=self.terminated,
            truncated=self.truncated,
            bootstrap=self.bootstrap,
        )

    def experience(self, advantages: Tensor, returns: Tensor) -> Experience:
        """The transitions with their credit, as rows of one step each."""

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


@torch.no_grad()
def rollout_of(
    agent: Agent,
    observations: Sequence[Tensor],
    actions: Sequence[Tensor],
    rewards: Sequence[np.ndarray],
    terminated: Sequence[bool],
) -> AgentRollout:
    """A rollout of whole episodes, a padded row each, which were `terminated` or cut off.

    `observations` have one more entry than there are steps.
    """
    read, acted = (pad_sequence(list(x), batch_first=True) for x in (observations, actions))
    lengths, time = torch.tensor([len(x) for x in actions]).unsqueeze(1), torch.arange(acted.shape[1])
    values, last = agent.values(read), time == lengths - 1
    ended = last & torch.tensor(terminated).unsqueeze(1)
    return AgentRollout(
        observations=read[:, :-1],
        actions=acted,
        mask=time < lengths,
        logprobs=agent.distribution.logprobs(agent.outputs(read[:, :-1]), acted),
        values=None if values is None else values[:, :-1],
        rewards=pad_sequence([torch.from_numpy(x).float() for x in rewards], batch_first=True),
        terminated=ended,
        truncated=last & ~ended,
        bootstrap=None if values is None else values[:, 1:],
        episodes=[],
    )


class Collector:
    """Steps an environment, and keeps its state between rollouts."""

    def __init__(self, envs: VectorEnv, agent: Agent, seed: int, processes: Processes | None = None):
        """Reset all copies; their seeds are `seed`, `seed` + 1, …, counted over all processes.

        Each of several processes has an equal share of the copies, in order. `seed` also seeds the action sampling.
        """
        self.envs, self.agent, self.processes = envs, agent, processes or Processes()
        self.generator = torch.Generator().manual_seed(seed)
        self.number = envs.num_envs * self.processes.count
        """Copies in all processes."""
        self.share = self.processes.share(self.number)
        with self.processes.agreed(RunStopped), environment_errors():  # the others would wait for one that fails
            self.observation, _ = envs.reset(seed=seed + self.share.start)
        self.ended = np.zeros(envs.num_envs, dtype=bool)
        self.taken = 0
        """Steps that the environments of all processes took in the last rollout, without resets."""

    @torch.no_grad()
    def collect(self, steps: int, whole_episodes: bool = False, bootstrap: bool = True) -> AgentRollout:
        """Take `steps` steps with every copy, or at least so many and `whole_episodes`.

        Whole episodes begin in this rollout and end in it. Copies that are done early play on, outside the mask, until
        the others are; then all are reset. Without `bootstrap`, a time limit terminates an episode.

        Raises:
            NonFiniteReward: a reward is not finite; the environments have taken their steps nevertheless.
            RunStopped: an observation is not finite, an environment raised, or an episode does not end.
        """
        distribution = self.agent.distribution
        observations, actions, ended, (acted, rewards, terminated, truncated) = self._play(steps, whole_episodes)
        self.taken = int(self.processes.sum(torch.tensor(int(acted.sum()))))
        episodes = self.gather_episodes(ended)
        if message := self.non_finite_message("an observation", observations):
            raise RunStopped(message)
        if message := self.non_finite_message("a reward", rewards):
            raise NonFiniteReward(message, observations, rewards, episodes)

        # One batched forward pass for the log-probs and values, as in the update; so the ratio starts at exactly 1.
        frames = torch.from_numpy(observations)
        logprobs = distribution.logprobs(self.agent.outputs(frames[:-1]), actions)
        values = self.agent.values(frames)
        if not bootstrap:
            terminated |= truncated
        if not whole_episodes:
            truncated[-1] |= ~terminated[-1]  # the rollout ends here, the episode does not
        flags = (torch.from_numpy(x).T for x in (acted, terminated & acted, truncated & acted))
        mask, ends, cuts = (x.contiguous() for x in flags)
        return AgentRollout(
            observations=frames[:-1].transpose(0, 1),
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

    def _play(
        self, steps: int, whole_episodes: bool
    ) -> tuple[np.ndarray, Tensor, list[tuple[int, float, int]], list[np.ndarray]]:
        """Step all copies: observations, one more than there are steps; actions; step, return and length of episodes
        that ended; and masks, rewards and both flags of ends. All are `[time, copies, …]`."""
        distribution = self.agent.distribution
        seen: list[np.ndarray] = []
        sampled: list[Tensor] = []
        taken: list[tuple[np.ndarray, ...]] = []
        episodes: list[tuple[int, float, int]] = []
        playing, left = np.ones(len(self.observation), dtype=bool), np.full(len(self.observation), steps)
        noise = self._noise(steps)
        agreed, inference = self.processes.agreed(RunStopped), torch.inference_mode()  # cheaper than no_grad
        with agreed, environment_errors(), inference:
            while (t := len(sampled)) < steps or (whole_episodes and playing.any()):
                refuse_endless(t - steps, ", or leave whole_episodes out")
                seen.append(np.array(self.observation, dtype=np.float32))  # environments reuse their array
                acted = playing & ~self.ended
                sampled.append(distribution.sample(self.agent.outputs(torch.from_numpy(seen[t])), next(noise)))
                env_actions = distribution.to_env(sampled[t].numpy())
                self.observation, rewards, terminated, truncated, info = self.envs.step(env_actions)
                self.ended = terminated | truncated
                taken.append((acted, rewards.astype(np.float32), terminated, truncated))
                if "episode" in info:
                    stats = info["episode"]
                    ended = np.flatnonzero(info["_episode"] & playing)
                    episodes += [(t, float(stats["r"][i]), int(stats["l"][i])) for i in ended]
                if whole_episodes:
                    left -= acted
                    playing &= ~self.ended | (left > 0)
            seen.append(np.array(self.observation, dtype=np.float32))
            if whole_episodes:
                self.observation, _ = self.envs.reset()
                self.ended[:] = False
        return np.stack(seen), torch.stack(sampled), episodes, [np.stack(x) for x in zip(*taken, strict=True)]

    def _noise(self, steps: int) -> Iterator[Tensor]:
        """Random numbers for the actions of this process's copies, one step at a time."""
        while True:
            yield from self.agent.distribution.noise((steps, self.number), self.generator)[:, self.share].unbind()

    def non_finite_message(self, name: str, array: np.ndarray) -> str | None:
        """Error message for the first non-finite element of `[time, copies, …]` of any process; None without one."""
        message = None
        if not np.isfinite(array.sum()) and not np.isfinite(array).all():
            step, copy = np.argwhere(~np.isfinite(array))[0][:2]
            message = f"environment {self.share.start + copy} gave {name} that is not finite, at step {step}"
        if self.processes.any(message is not None):
            message = message or f"an environment of another process gave {name} that is not finite"
        return message

    def gather_episodes(self, episodes: Sequence[tuple[int, float, int]]) -> list[tuple[float, int]]:
        """Return and length of the episodes of all processes, by their last step, from (step, return, length)."""
        rows = torch.tensor(episodes, dtype=torch.float64).reshape(-1, 3)
        counts = self.processes.gather(torch.tensor([len(rows)])).tolist()
        everyone = sorted(self.processes.gather_rows(rows, counts).tolist(), key=lambda row: row[0])
        return [(score, int(length)) for _, score, length in everyone]

    def state(self) -> dict[str, Any]:
        """Resumable state, as plain values and arrays that later steps leave as they are."""
        with self.processes.agreed(RunStopped), environment_errors():
            envs = save_envs(self.envs)
        return {
            "generator": to_hex(self.generator.get_state()),
            "observation": self.observation.copy(),
            "ended": self.ended.copy(),
            "envs": envs,
        }

    def load(self, state: dict[str, Any], everyone: Sequence[dict[str, Any]] | None = None) -> list[int]:
        """Restore the result of `state`; returns the copies that could not be restored and start a new episode.

        `everyone` holds the states of all processes if another number of them wrote the state, else None.
        """
        if everyone is not None:
            state = dict(state)
            for name in ("observation", "ended"):
                state[name] = np.concatenate([x[name] for x in everyone])[self.share]
            state["envs"] = merged_envs([x["envs"] for x in everyone], self.share)
        with self.processes.agreed(RunStopped, ConfigError), environment_errors():
            lost = restore_envs(self.envs, state["envs"])
        self.generator.set_state(from_hex(state["generator"]))
        self.observation, self.ended = state["observation"], state["ended"]
        self.ended[lost] = True
        flags = torch.zeros(self.envs.num_envs, dtype=torch.int64)
        flags[lost] = 1
        return self.processes.gather(flags).nonzero().flatten().tolist()
