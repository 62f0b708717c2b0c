"""The true value of states and the true advantage of steps, from returns sampled anew from each state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Truth:
    """Monte-Carlo estimates with their standard errors, `[rows, time]` each, in float64; NaN where nothing is known.

    A row is a completion or an episode.
    """

    values: Tensor
    """V(sₜ), the mean return of continuations from the state before step t."""
    value_errors: Tensor
    advantages: Tensor
    """A(sₜ, aₜ) = Q(sₜ, aₜ) − V(sₜ)."""
    advantage_errors: Tensor


class Samples:
    """Numbers sampled at states, summed as they come: their means with standard errors."""

    def __init__(self, rows: int, time: int):
        """Begin with nothing sampled at any of `[rows, time]` states."""
        self.counts = torch.zeros(rows, time, dtype=torch.float64)
        """`[rows, time]`: samples of each state."""
        self._shift, self._sum, self._squares = torch.zeros(3, rows, time, dtype=torch.float64).unbind()

    def add(self, rows: Tensor, at: int | Tensor, samples: Tensor) -> None:
        """Take in samples `[n, count]` of the states at steps `at` (one, or `[n]`) of rows `[n]`, no state twice."""
        samples = samples.double().cpu()
        # The first sample is taken off, so that squares of small differences are summed.
        self._shift[rows, at] = torch.where(self.counts[rows, at] == 0, samples[:, 0], self._shift[rows, at])
        rest = samples - self._shift[rows, at].unsqueeze(1)
        self._sum[rows, at] += rest.sum(1)
        self._squares[rows, at] += rest.square().sum(1)
        self.counts[rows, at] += samples.shape[1]

    def mean(self) -> Tensor:
        """Means, `[rows, time]`; NaN where there is no sample."""
        means: Tensor = self._shift + self._sum / torch.where(self.counts > 0, self.counts, torch.nan)
        return means

    def with_errors(self) -> tuple[Tensor, Tensor]:
        """Means and their standard errors s / √n, with the sample deviation s; NaN of fewer than two samples."""
        count = torch.where(self.counts >= 2, self.counts, torch.nan)
        rest = self._sum / count
        variance = ((self._squares - self._sum * rest) / (count - 1)).clamp(min=0.0)
        return self._shift + rest, (variance / count).sqrt()


class Returns:
    """Sampled returns from each state, and from the step before it where that step is given.

    Continuations from the state after step t are samples of V(sₜ₊₁) by their return from t + 1 on, and of Q(sₜ, aₜ) by
    their return from t on, which holds the reward of the step itself. That is so where the step decides the state after
    it, as a token does.
    """

    def __init__(self, rows: int, time: int):
        """Begin with nothing sampled.

        Args:
            rows: completions.
            time: tokens of the longest.
        """
        self._values, self._actions = Samples(rows, time + 1), Samples(rows, time)

    @property
    def counts(self) -> Tensor:
        """`[rows, time + 1]`: continuations of each state; the last state is the one after the last step."""
        return self._values.counts

    def add(self, rows: Tensor, at: Tensor, values: Tensor, actions: Tensor) -> None:
        """Take in continuations from the states before steps `at`, no state twice.

        Args:
            rows: `[n]`, the rows whose states they continue.
            at: `[n]`, the steps.
            values: `[n, continuations]`, returns from those steps on.
            actions: the same from the steps before them on; anything where there is none.
        """
        self._values.add(rows, at, values)
        later = at > 0
        self._actions.add(rows[later], at[later] - 1, actions[later])

    def means(self) -> Tensor:
        """Mean return from each state, `[rows, time]`; NaN where none was sampled."""
        return self._values.mean()[:, :-1]

    def truth(self, last_rewards: Tensor, lengths: Tensor) -> Truth:
        """True values and advantages of the states with two continuations or more.

        SE(A)² = SE(Q)² + SE(V)², since Q and V are of continuations of their own. The Q of a row's last step is its
        reward, which is known.

        Args:
            last_rewards: `[rows]`, the return from each row's last step on, with its bootstrap if it has one.
            lengths: `[rows]`, steps of each row.
        """
        means, errors = self._values.with_errors()
        actions, action_errors = self._actions.with_errors()
        everyone = torch.arange(len(lengths))
        actions[everyone, lengths - 1] = last_rewards.double().cpu()
        action_errors[everyone, lengths - 1] = 0.0
        means, errors = means[:, :-1], errors[:, :-1]
        return Truth(means, errors, actions - means, torch.hypot(action_errors, errors))
