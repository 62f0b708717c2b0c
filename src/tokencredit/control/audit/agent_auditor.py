"""The audit of an agent's credit: true values of fresh episodes, compared with every estimator."""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from tokencredit.audit.agreement import judge
from tokencredit.audit.estimates import variants
from tokencredit.audit.truth import FIRST_ROUND, STREAM, Means, Samples, Truth, generator, rounds, spread
from tokencredit.control.agent import Agent
from tokencredit.control.agent_rollout import AgentRollout, rollout_of
from tokencredit.control.audit.replays import COPIES, Replays, Start, Trajectory
from tokencredit.control.environment_wrappers import environment_errors
from tokencredit.control.vector_environments import base_env, scaled_rewards
from tokencredit.core.estimator_table import AGENT_ESTIMATORS
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.learn.rng import isolated
from tokencredit.runs.folder import AUDIT
from tokencredit.runs.loop import AT_END, audit_at_end
from tokencredit.runs.recorder import RunRecord
from tokencredit.runs.summary import WINDOW, History, Summary, mean
from tokencredit.settings.control import AgentAuditConfig, ControlConfig

MAX_BOOTSTRAP_WEIGHT = 0.05
"""Continuations run past the time limit until the critic's value has at most this weight in the return."""
MAX_STEPS_PAST_LIMIT = 3000
"""Continuations stop at the time limit if reaching that weight would take more steps than this."""


class PairedReturns:
    """Returns of pairs of continuations with common random numbers: q starts with the episode's action, v with another.

    For a single discrete action, v samples among the other actions, and with p = π(a|s) the pair is a sample of
    V(s) = p q + (1 − p) v and of A(s, a) = (1 − p) (q − v). For continuous actions p is 0. The difference of the two
    returns has less variance than that of independent ones, and a nearly certain action, whose advantage is nearly 0,
    is measured as such.
    """

    def __init__(self, rollout: AgentRollout, choices: bool):
        """Start without samples; `choices`: an action is a single discrete choice, whose probability is known."""
        logprobs = rollout.logprobs.double()
        self.probabilities = logprobs.exp() if choices else torch.zeros_like(logprobs)
        """π(a|s) of the episodes' actions."""
        self.values: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        """Samples by episode and step."""
        self.differences: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        """Samples of q − v."""
        self.weights: list[float] = []
        """Weights of the critic's value in the samples of `values`."""
        self._unpaired: dict[tuple[int, int, int], tuple[float, float]] = {}

    def add(self, start: Start, value: float, weight: float) -> None:
        """Add the return of a continuation, and the weight of the critic's value in it."""
        state, pair = (start.row, start.at), (start.row, start.at, start.number)
        if pair not in self._unpaired:
            self._unpaired[pair] = value, weight
            return
        (v, v_weight), (q, q_weight) = (value, weight), self._unpaired.pop(pair)
        if start.keeps_action:
            (v, v_weight), (q, q_weight) = (q, q_weight), (v, v_weight)
        p = float(self.probabilities[state])
        self.values[state].append(p * q + (1 - p) * v)
        self.differences[state].append(q - v)
        self.weights.append(p * q_weight + (1 - p) * v_weight)

    def truth(self) -> Truth:
        """True values and advantages of the states with at least two pairs."""
        # Errors are pooled before the factor 1 − p, which differs from state to state and is known.
        others, (mean, error, noise) = 1 - self.probabilities, self._means(self.differences)
        return Truth(*self._means(self.values), others * mean, others * error, others.square() * noise)

    def _means(self, samples_by_state: Mapping[tuple[int, int], list[float]]) -> Means:
        samples = Samples(*self.probabilities.shape)
        for (row, at), numbers in samples_by_state.items():
            samples.add(torch.tensor([row]), at, torch.tensor([numbers], dtype=torch.float64))
        return samples.with_errors()


class AgentAuditor:
    """Measures the true credit of episodes of the current agent, with the run's normalisation and discount.

    Transitions may be stochastic, so Q(s, a) is measured by continuations from s itself that take a first. A time limit
    is not part of the environment, and training bootstraps from the critic there: continuations run past it until the
    rest of the return has little weight, and only then bootstrap from the critic.
    """

    def __init__(self, args: ControlConfig, agent: Agent, training: VectorEnv):
        """Check, if audits are due in training, that the environment can be audited.

        `training` are the training environments, which hold the normalisation statistics; they are not changed.
        """
        self.args, self.agent, self.training = args, agent, training
        if args.audit.every:
            try:
                with self._replays(2) as replays:
                    replays.check(args.seed)
            except RunStopped as error:
                raise ConfigError(f"audit.every is {args.audit.every}, and {error}") from error

    def audit(self, number: int, settings: AgentAuditConfig) -> dict[str, Any]:
        """Audit fresh episodes, seeded by the iteration `number`.

        Returns the contents of audit.json: as for text, but without samples, and with `bootstrapped`, the mean weight
        of the critic's values in the true ones. Raises `RunStopped` if the environment fails or cannot be replayed.
        """
        started, random = time.perf_counter(), generator(STREAM, self.args.seed, number)
        deadline = None if settings.seconds is None else started + settings.seconds
        with self._replays() as replays:
            episodes = self.episodes(replays, settings.episodes, random)
            rollout = self.rollout(replays, episodes, random)
            returns = PairedReturns(rollout, replays.choices)
            self.play(replays, returns, starts(episodes, settings, random, deadline))
        continuations = len(returns.weights) / len(returns.values)
        ended = settings.seconds is not None and continuations < settings.continuations
        return {
            "iteration": number,
            "settings": {name: getattr(settings, name) for name in ("episodes", "continuations", "states")},
            **judge(returns.truth(), rollout.values, dict(self.estimates(rollout))),
            "continuations": continuations,
            "limits": {"seconds": settings.seconds} if ended else {},
            "bootstrapped": fmean(returns.weights),
            "seconds": time.perf_counter() - started,
            "samples": [],
        }

    def measure(self, number: int, record: RunRecord) -> dict[str, float]:
        """Audit during training: writes audit.json and returns metrics; skips the audit if the environment fails."""
        try:
            audit = self.audit(number, self.args.audit)
        except RunStopped as error:
            record.event(f"an audit is skipped: {error}")
            return {}
        record.folder.write_json(AUDIT, audit)
        return {**audit["metrics"], "seconds/audit": audit["seconds"]}

    def at_end(
        self, summary: Summary, record: RunRecord, by_main: Callable[[Callable[[], dict[str, Any]]], dict[str, Any]]
    ) -> None:
        """Audit the final agent in the main process, as `runs.loop.audit_at_end` allows."""

        def audit(episodes: int, seconds: float) -> dict[str, Any]:
            size = AgentAuditConfig(0, AT_END.continuations, AT_END.states, seconds, episodes=episodes)
            return by_main(lambda: self.audit(summary.iterations, size))

        audit_at_end(record, summary, self.args.audit, lambda: self.cost(record.history), audit)

    def cost(self, history: History) -> float:
        """Seconds per episode of an audit at the end: it is played and replayed, and each continuation replays half of
        it and plays the other half, or past the time limit, at the speed of the run's last rollouts."""
        last = history[-WINDOW:]
        seconds, steps, length = (
            mean(row.get(name) for row in last) or 0.0 for name in ("seconds/rollout", "steps", "train/average_length")
        )
        spec = base_env(self.training).spec
        limit = self.args.env.kwargs.get("max_episode_steps", spec and spec.max_episode_steps) or -1
        # At most this share of the episodes can have reached the limit, with this mean length.
        limited = min(1.0, length / limit) if limit > 0 else 0.0
        continued = length + limited * max(0.0, self._min_steps() - length / 2)
        played = 2 * length + 2 * FIRST_ROUND * (AT_END.states or 0) * continued
        return played * seconds / max(steps, 1.0)

    @contextmanager
    def _replays(self, number: int = COPIES) -> Iterator[Replays]:
        """Copies of the environment, closed at the end; preserves the global RNG state."""
        with isolated(), environment_errors():
            replays = Replays(self.args, self.agent, self.training, number)
            try:
                yield replays
            finally:
                replays.close()

    def episodes(self, replays: Replays, count: int, random: torch.Generator) -> list[Trajectory]:
        """Play whole episodes, and check that each can be replayed."""
        played = replays.play(Start(new_seed(random), row) for row in range(count))
        episodes = [trajectory for _, trajectory in sorted(played, key=lambda pair: pair[0].row)]
        for episode in episodes:
            replays.follow(replays.envs[-1], episode, len(episode.rewards))
        return episodes

    def play(self, replays: Replays, returns: PairedReturns, begin: Iterator[Start]) -> None:
        """Play continuations from these states."""
        for start, trajectory in replays.play(begin, self._min_steps()):
            returns.add(start, *self._return(replays, trajectory))

    def _min_steps(self) -> int:
        """Steps of a continuation before which the time limit does not end it."""
        gamma = self.args.advantage.gamma
        if self.agent.critic_head is None or gamma == 1 or not self.args.advantage.bootstrap:
            return 0
        steps = 1 if gamma == 0 else math.ceil(math.log(MAX_BOOTSTRAP_WEIGHT) / math.log(gamma))
        return steps if steps <= MAX_STEPS_PAST_LIMIT else 0

    @torch.no_grad()
    def _return(self, replays: Replays, trajectory: Trajectory) -> tuple[float, float]:
        """Discounted return of a continuation, and the weight of the bootstrap value in it."""
        gamma, rewards = self.args.advantage.gamma, self._scaled(trajectory)
        total = float(rewards @ gamma ** np.arange(len(rewards), dtype=np.float64))
        last_observation = replays.normalized(trajectory.observations[-1:])
        ended = trajectory.terminated or not self.args.advantage.bootstrap
        bootstrap = None if ended else self.agent.values(last_observation)
        if bootstrap is None:
            return total, 0.0
        weight = gamma ** len(rewards)
        return total + weight * float(bootstrap), weight

    def rollout(self, replays: Replays, episodes: Sequence[Trajectory], random: torch.Generator) -> AgentRollout:
        """Pad episodes into a rollout, truncated as in training: after `steps` steps of a copy, or not at all."""
        rollout = rollout_of(
            self.agent,
            [replays.normalized(episode.observations) for episode in episodes],
            [torch.stack(episode.actions) for episode in episodes],
            [self._scaled(episode) for episode in episodes],
            [episode.terminated or not self.args.advantage.bootstrap for episode in episodes],
        )
        offset = torch.randint(self.args.steps, (len(episodes), 1), generator=random)
        step = torch.arange(rollout.mask.shape[1]) + offset + 1
        cut = (step % self.args.steps == 0) & rollout.mask & (not self.args.whole_episodes)
        return replace(rollout, truncated=(rollout.truncated | cut) & ~rollout.terminated)

    def _scaled(self, trajectory: Trajectory) -> np.ndarray:
        return scaled_rewards(trajectory.rewards, self.training, self.args.env.clip)

    def estimates(self, rollout: AgentRollout) -> Iterator[tuple[str, Tensor]]:
        """Advantages of each estimator by label, before whitening."""
        args, has_critic = self.args.advantage, rollout.values is not None
        by_label = variants(args.estimator, args.options(), values=has_critic, texts=False, groups=False)
        for label, variant in by_label.items():
            if isinstance(variant.name, str) and variant.name not in AGENT_ESTIMATORS:
                continue
            variant_rollout = rollout if variant.critic else replace(rollout, values=None, bootstrap=None)
            estimator = replace(args, **{**variant.options, "estimator": variant.name})
            yield label, variant_rollout.credit(estimator, self.agent)[0]


def starts(
    episodes: Sequence[Trajectory], settings: AgentAuditConfig, random: torch.Generator, deadline: float | None
) -> Iterator[Start]:
    """Starts of paired continuations from states of episodes, until there are enough or time is up."""
    states = [(row, at) for row, x in enumerate(episodes) for at in spread(len(x.rewards), settings.states, random)]
    states = [states[i] for i in torch.randperm(len(states), generator=random)]
    started, numbers = 0, itertools.count()
    for count in rounds(settings.continuations, limited=deadline is not None):
        for row, at in states:
            # Started continuations run to their end: dropping them would favour short ones.
            if deadline is not None and started > 1 and time.perf_counter() > deadline:
                return
            started += 1
            for _ in range(count):
                seed, number = new_seed(random), next(numbers)
                for keeps_action in (False, True):
                    yield Start(seed, row, episodes[row], at, keeps_action, number)


def new_seed(random: torch.Generator) -> int:
    """A random seed in the range that environments accept."""
    return int(torch.randint(2**31 - 1, (), generator=random))
