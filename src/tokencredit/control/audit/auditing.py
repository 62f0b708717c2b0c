"""The audit of an agent's credit: fresh episodes, their true values, and every estimator beside them."""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tokencredit.audit.agreement import judge_credit, judge_critic
from tokencredit.audit.estimates import variants
from tokencredit.audit.record import audit_metrics
from tokencredit.audit.sampling import STREAM, generator, rounds, spread
from tokencredit.audit.truth import Samples, Truth
from tokencredit.control.agent import Agent
from tokencredit.control.audit.replays import COPIES, Replays, Start, Trajectory
from tokencredit.control.rollout import Rollout, blamed
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.learn.rng import preserved
from tokencredit.runs.folder import write_audit
from tokencredit.runs.recorder import RunRecord
from tokencredit.settings.control import AgentAuditConfig, ControlConfig

REST = 0.05
"""Weight of the critic's value in a return below which a continuation need not go on past the time limit."""
MOST = 3000
"""Steps of a continuation beyond which it does not go on past the time limit to reach that weight."""


class Measured:
    """Returns of pairs of continuations: q begins with the episode's action, v with another, all else is drawn alike.

    Where an action is one choice of several, v draws it among the others, and with p = π(a|s) the pair is a sample of
    V(s) = p q + (1 − p) v and of A(s, a) = (1 − p) (q − v). Where actions are continuous p is 0. So the difference
    of two returns has less variance than that of independent ones, and an action that is nearly certain, whose
    advantage is nearly 0, is known to be so.
    """

    def __init__(self, rollout: Rollout, choices: bool):
        """Begin with nothing measured.

        Args:
            rollout: the episodes.
            choices: an action is one choice, whose probability is known.
        """
        logprobs = rollout.logprobs.double()
        self.shares = logprobs.exp() if choices else torch.zeros_like(logprobs)
        """π(a|s) of the episodes' actions."""
        self.values: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        """Samples by episode and step."""
        self.advantages: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        self.weights: list[float] = []
        """Of the critic's values in the samples of `values`."""
        self._unpaired: dict[tuple[int, int, int], tuple[float, float]] = {}

    def add(self, start: Start, value: float, weight: float) -> None:
        """Take in the return of a continuation, and the weight of the critic's value in it."""
        state, pair = (start.row, start.at), (start.row, start.at, start.number)
        if pair not in self._unpaired:
            self._unpaired[pair] = value, weight
            return
        (v, of_v), (q, of_q) = (value, weight), self._unpaired.pop(pair)
        if start.own:
            (v, of_v), (q, of_q) = (q, of_q), (v, of_v)
        share = float(self.shares[state])
        self.values[state].append(share * q + (1 - share) * v)
        self.advantages[state].append((1 - share) * (q - v))
        self.weights.append(share * of_q + (1 - share) * of_v)

    def truth(self) -> Truth:
        """True values and advantages of the states with two pairs or more."""
        return Truth(*self._means(self.values), *self._means(self.advantages))

    def _means(self, found: Mapping[tuple[int, int], list[float]]) -> tuple[Tensor, Tensor]:
        samples = Samples(*self.shares.shape)
        for (row, at), numbers in found.items():
            samples.add(torch.tensor([row]), at, torch.tensor([numbers], dtype=torch.float64))
        return samples.with_errors()


class Auditor:
    """Measures the true credit of episodes that an agent plays as it is, counted as the run counts.

    The state after an action may be a matter of chance, so Q(s, a) is of continuations from s itself that take a first.
    A time limit is no part of the environment, and training bootstraps from the critic there: continuations go on past
    it, until what is left weighs little, and only then the critic's value stands for it.
    """

    def __init__(self, args: ControlConfig, agent: Agent, training: VectorEnv):
        """Make sure, if audits are due in training, that the environment can be audited.

        Args:
            args: the run's.
            agent: whose actions are drawn as in training.
            training: the environments that the agent is trained in, which know the statistics; they stay as they are.

        Raises:
            ConfigError: the environment cannot be brought to the same state twice, or raises.
        """
        self.args, self.agent, self.training = args, agent, training
        if args.audit.every:
            try:
                with self._replays(2) as replays:
                    replays.check(args.seed)
            except RunStopped as error:
                raise ConfigError(f"audit.every is {args.audit.every}, and {error}") from error

    def audit(self, number: int, settings: AgentAuditConfig) -> dict[str, Any]:
        """Audit fresh episodes; those of another iteration, `number`, are others.

        Returns:
            The contents of audit.json: as that of texts, but without samples, and with `bootstrapped`, the mean weight
            of the critic's own values in the true ones.

        Raises:
            NotReplayed: the environment cannot be brought to the same state twice.
            RunStopped: it raised, gave a number that is not finite, or an episode that does not end.
        """
        started, random = time.perf_counter(), generator(STREAM, self.args.seed, number)
        deadline = None if settings.seconds is None else started + settings.seconds
        with self._replays() as replays:
            episodes = self.episodes(replays, settings.episodes, random)
            rollout = self.rollout(replays, episodes, random)
            measured = Measured(rollout, replays.choices)
            self.play(replays, measured, starts(episodes, settings, random, deadline))
        found = measured.truth()
        credit = judge_credit(found, dict(self.estimates(rollout)))
        critic = None if rollout.values is None else judge_critic(found, rollout.values)
        return {
            "iteration": number,
            "settings": {name: getattr(settings, name) for name in ("episodes", "continuations", "states")},
            "credit": credit,
            "critic": critic,
            "metrics": audit_metrics(credit, critic),
            "continuations": len(measured.weights) / len(measured.values),
            "bootstrapped": fmean(measured.weights),
            "seconds": time.perf_counter() - started,
            "samples": [],
        }

    def measure(self, number: int, record: RunRecord) -> dict[str, float]:
        """Audit while training: writes audit.json, returns metrics; nothing where the environment is in the way."""
        try:
            audit = self.audit(number, self.args.audit)
        except RunStopped as error:
            record.event(f"an audit is left out: {error}")
            return {}
        write_audit(record.folder, audit)
        return {**audit["metrics"], "seconds/audit": audit["seconds"]}

    @contextmanager
    def _replays(self, number: int = COPIES) -> Iterator[Replays]:
        """Copies of the environment, closed at the end; the global generators stay as they are."""
        with preserved(), blamed():
            replays = Replays(self.args, self.agent, self.training, number)
            try:
                yield replays
            finally:
                replays.close()

    def episodes(self, replays: Replays, count: int, random: torch.Generator) -> list[Trajectory]:
        """Whole episodes, each of which was played again to see whether that can be done."""
        played = replays.play(Start(new_seed(random), row) for row in range(count))
        episodes = [trajectory for _, trajectory in sorted(played, key=lambda pair: pair[0].row)]
        for episode in episodes:
            replays.follow(replays.envs[-1], episode, len(episode.rewards))
        return episodes

    def play(self, replays: Replays, measured: Measured, begin: Iterator[Start]) -> None:
        """Play continuations from these states."""
        for start, trajectory in replays.play(begin, self._least()):
            measured.add(start, *self._return(replays, trajectory))

    def _least(self) -> int:
        """Steps of a continuation before which a time limit does not end it."""
        gamma = self.args.advantage.gamma
        if self.agent.critic_head is None or gamma == 1:
            return 0
        steps = 1 if gamma == 0 else math.ceil(math.log(REST) / math.log(gamma))
        return steps if steps <= MOST else 0

    @torch.no_grad()
    def _return(self, replays: Replays, trajectory: Trajectory) -> tuple[float, float]:
        """Discounted return of a continuation, and the weight of the critic's value at its end in it."""
        gamma, paid = self.args.advantage.gamma, replays.paid(trajectory.rewards)
        total = float(paid @ gamma ** np.arange(len(paid), dtype=np.float64))
        after = None if trajectory.terminated else self.agent.values(replays.seen(trajectory.observations[-1:]))
        if after is None:
            return total, 0.0
        weight = gamma ** len(paid)
        return total + weight * float(after), weight

    @torch.no_grad()
    def rollout(self, replays: Replays, episodes: Sequence[Trajectory], random: torch.Generator) -> Rollout:
        """Episodes as rollouts have them, cut off, like those of training, after every `steps` steps of a copy."""
        lengths = torch.tensor([len(episode.rewards) for episode in episodes])
        seen = pad_sequence([replays.seen(episode.observations) for episode in episodes], batch_first=True)
        actions = pad_sequence([torch.stack(episode.actions) for episode in episodes], batch_first=True)
        rewards = [torch.from_numpy(replays.paid(episode.rewards)).float() for episode in episodes]
        time = torch.arange(int(lengths.max()))
        mask, last = time < lengths.unsqueeze(1), time == lengths.unsqueeze(1) - 1
        begun = torch.randint(self.args.steps, (len(episodes), 1), generator=random)
        cut = ((time + begun + 1) % self.args.steps == 0) & mask
        ended = last & torch.tensor([[episode.terminated] for episode in episodes])
        values = self.agent.values(seen)
        return Rollout(
            observations=seen[:, :-1],
            actions=actions,
            mask=mask,
            logprobs=self.agent.distribution.logprobs(self.agent.outputs(seen[:, :-1]), actions),
            values=None if values is None else values[:, :-1],
            rewards=pad_sequence(rewards, batch_first=True),
            terminated=ended,
            truncated=(cut | last) & ~ended,
            bootstrap=None if values is None else values[:, 1:],
            episodes=[],
        )

    def estimates(self, rollout: Rollout) -> Iterator[tuple[str, Tensor]]:
        """The advantages of each estimator, before any whitening, by its label."""
        args, there = self.args.advantage, rollout.values is not None
        chosen = variants(args.estimator, args.options(), values=there, texts=False, groups=False)
        for label, variant in chosen.items():
            judged = rollout if variant.critic else replace(rollout, values=None, bootstrap=None)
            yield label, judged.credit(replace(args, **{**variant.options, "estimator": variant.name}))[0]


def starts(
    episodes: Sequence[Trajectory], settings: AgentAuditConfig, random: torch.Generator, deadline: float | None
) -> Iterator[Start]:
    """Pairs of continuations from states of episodes, until there are enough or the time is up."""
    states = [(row, at) for row, x in enumerate(episodes) for at in spread(len(x.rewards), settings.states, random)]
    states = [states[i] for i in torch.randperm(len(states), generator=random)]
    begun, numbers = 0, itertools.count()
    for count in rounds(settings.continuations, limited=deadline is not None):
        for row, at in states:
            # Whatever has begun is played to its end: to drop it would favour short continuations.
            if deadline is not None and begun > 1 and time.perf_counter() > deadline:
                return
            begun += 1
            for _ in range(count):
                seed, number = new_seed(random), next(numbers)
                for own in (False, True):
                    yield Start(seed, row, episodes[row], at, own, number)


def new_seed(random: torch.Generator) -> int:
    """A seed, within what environments accept."""
    return int(torch.randint(2**31 - 1, (), generator=random))
