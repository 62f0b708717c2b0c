"""Monte-Carlo estimates of the true value of states and the true advantage of steps, from fresh continuations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

STREAM = 2_000_003
"""First entropy word of an audit's generators; separates them from those of training and evaluation."""
PRIOR = 8.0
"""Degrees of freedom that the pooled variance counts as in a state's; benchmarks/RESULTS.md has the coverage."""
FIRST_ROUND = 4
"""Continuations of every state before any state gets more, if time is limited."""


@dataclass(frozen=True)
class Truth:
    """Monte-Carlo estimates with their standard errors, `[rows, time]` each, in float64; NaN where unknown.

    A row is a completion or an episode.
    """

    values: Tensor
    """V(sₜ), the mean return of continuations from the state before step t."""
    value_errors: Tensor
    value_noise: Tensor
    """Unbiased estimate of the squared error, which is subtracted where it is averaged."""
    advantages: Tensor
    """A(sₜ, aₜ) = Q(sₜ, aₜ) − V(sₜ)."""
    advantage_errors: Tensor
    advantage_noise: Tensor


class Means(NamedTuple):
    """Means of samples, `[rows, time]` each; NaN for fewer than two samples."""

    means: Tensor
    errors: Tensor
    """Standard errors, from pooled variances."""
    noise: Tensor
    """Unbiased estimates s² / n of the squared errors."""


def pooled_variances(variances: Tensor, counts: Tensor, weight: float = PRIOR) -> Tensor:
    """Variances of states, each shrunk towards the mean over all.

    A state whose few samples all miss a rare reward has s² = 0, which does not make its mean exact. With dᵢ = nᵢ − 1
    degrees of freedom of a state, and a scaled inverse-χ² prior of d₀ = `weight` about the pooled variance s₀²
    (Smyth 2004, "Linear models and empirical Bayes methods for assessing differential expression"; d₀ is fixed):

        s₀² = Σ dᵢ sᵢ² / Σ dᵢ          s̃ᵢ² = (d₀ s₀² + dᵢ sᵢ²) / (d₀ + dᵢ)

    Args:
        variances: sample variances sᵢ²; NaN where unknown, which takes no part.
        counts: numbers of samples nᵢ.
        weight: d₀.

    Returns:
        s̃ᵢ²; NaN everywhere if no sample differs from the others of its state, since then nothing is known of errors.
    """
    freedom = torch.where(variances.isfinite(), counts - 1, 0.0)
    pooled = (freedom * variances.nan_to_num()).sum() / freedom.sum().clamp(min=1.0)
    return (weight * torch.where(pooled > 0, pooled, torch.nan) + freedom * variances) / (weight + freedom)


class Samples:
    """Online means and standard errors of samples at states."""

    def __init__(self, rows: int, time: int):
        """Start without samples at any of `[rows, time]` states."""
        self.counts = torch.zeros(rows, time, dtype=torch.float64)
        """`[rows, time]`: number of samples of each state."""
        self._shift, self._sum, self._squares = torch.zeros(3, rows, time, dtype=torch.float64).unbind()

    def add(self, rows: Tensor, at: int | Tensor, samples: Tensor) -> None:
        """Add samples `[n, count]` of the states at steps `at` (one, or `[n]`) of rows `[n]`, no state twice."""
        samples = samples.double().cpu()
        # Shifted by the first sample, so that the squares summed are those of small differences.
        self._shift[rows, at] = torch.where(self.counts[rows, at] == 0, samples[:, 0], self._shift[rows, at])
        shifted = samples - self._shift[rows, at].unsqueeze(1)
        self._sum[rows, at] += shifted.sum(1)
        self._squares[rows, at] += shifted.square().sum(1)
        self.counts[rows, at] += samples.shape[1]

    def with_errors(self) -> Means:
        """Means with their standard errors s̃ / √n, of `pooled_variances`."""
        count = torch.where(self.counts >= 2, self.counts, torch.nan)
        shifted_mean = self._sum / count
        variance = ((self._squares - self._sum * shifted_mean) / (count - 1)).clamp(min=0.0)
        errors = (pooled_variances(variance, count) / count).sqrt()
        return Means(self._shift + shifted_mean, errors, variance / count)


class Returns:
    """Sampled returns from each state, and from the step that leads to it.

    A continuation from the state after step t is a sample of V(sₜ₊₁) by its return from t + 1 on, and of Q(sₜ, aₜ) by
    its return from t on, which includes the reward of the step itself. This requires deterministic transitions, as with
    tokens. Where an environment answers step t, continuations that begin before the answer sample Q(sₜ, aₜ) alone, and
    those that begin after it sample the next state's V alone.
    """

    def __init__(self, mask: Tensor):
        """Start without samples; the mask `[rows, time]` is true at the policy's steps."""
        rows, time = mask.shape
        self._acted = torch.nn.functional.pad(mask.cpu(), (0, 1))  # false after the last step, and before the first
        self._values, self._actions = Samples(rows, time + 1), Samples(rows, time)

    @property
    def counts(self) -> Tensor:
        """`[rows, time + 1]`: number of continuations of each state; the last state is the one after the last step."""
        return self._values.counts

    def add(self, rows: Tensor, at: Tensor, values: Tensor, actions: Tensor) -> None:
        """Add continuations from the states before steps `at` `[n]` of rows `[n]`, no state twice.

        `values` are the returns `[n, continuations]` from those steps on, `actions` those from the preceding steps on,
        where they are the policy's.
        """
        acted, has_action = self._acted[rows, at], self._acted[rows, at - 1]
        self._values.add(rows[acted], at[acted], values[acted])
        self._actions.add(rows[has_action], at[has_action] - 1, actions[has_action])

    def truth(self, last_rewards: Tensor, lengths: Tensor) -> Truth:
        """True values and advantages of the states with at least two continuations.

        SE(A)² = SE(Q)² + SE(V)², since Q and V come from independent continuations. The Q of a row's last step is its
        return `last_rewards` `[rows]`, with a bootstrap, which is known exactly, or NaN if chance is part of it;
        `lengths` `[rows]` are steps.
        """
        values = Means(*(x[:, :-1] for x in self._values.with_errors()))
        actions = self._actions.with_errors()
        known = last_rewards.cpu().isfinite()
        last = torch.arange(len(lengths))[known], lengths[known] - 1
        actions.means[last] = last_rewards.double().cpu()[known]
        actions.errors[last] = actions.noise[last] = 0.0
        errors = torch.hypot(actions.errors, values.errors)
        return Truth(*values, actions.means - values.means, errors, actions.noise + values.noise)


def generator(*numbers: int) -> torch.Generator:
    """An RNG seeded by these numbers, such as a stream, a seed and an iteration; different numbers are independent."""
    entropy = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(entropy[0]))


def spread(time: int, count: int | None, random: torch.Generator) -> list[int]:
    """Stratified sample of steps: one from each of `count` equal parts of the time axis, shuffled; None for all."""
    parts = time if count is None else min(count, time)
    edges = torch.arange(parts + 1) * time // parts
    positions = edges[:-1] + (torch.rand(parts, generator=random) * edges.diff()).long()
    return [int(positions[i]) for i in torch.randperm(parts, generator=random)]


def rounds(continuations: int, *, limited: bool) -> Iterator[int]:
    """Continuations of each state per round: all at once, or in doubling rounds if time is limited."""
    done = 0
    while done < continuations:
        count = min(max(done, FIRST_ROUND), continuations - done) if limited else continuations
        yield count
        done += count
