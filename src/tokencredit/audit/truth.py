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


class Returns:
    """Sampled returns, summed as they come: from each state, and from the step before it where that step is given.

    Continuations from the state after step t are samples of V(sₜ₊₁) by their return from t + 1 on, and of Q(sₜ, aₜ) by
    their return from t on, which holds the reward of the step itself.
    """

    def __init__(self, rows: int, time: int):
        """Begin with nothing sampled.

        Args:
            rows: completions or episodes.
            time: steps of the longest.
        """
        zeros = torch.zeros(rows, time + 1, dtype=torch.float64)
        self.counts = zeros.clone()
        """`[rows, time + 1]`: continuations of each state; the last state is the one after the last step."""
        self._shifts = {name: zeros.clone() for name in ("values", "actions")}
        self._sums = {name: (zeros.clone(), zeros.clone()) for name in ("values", "actions")}

    def add(self, rows: Tensor, at: int, values: Tensor, actions: Tensor | None) -> None:
        """Take in continuations from the states before step `at`.

        Args:
            rows: `[n]`, the rows whose states they continue.
            at: the step.
            values: `[n, continuations]`, returns from step `at` on.
            actions: the same from step `at` − 1 on; None where `at` is 0.
        """
        first = self.counts[rows, at] == 0
        for name, returns in (("values", values), ("actions", actions)):
            if returns is None:
                continue
            returns = returns.double().cpu()
            shift = self._shifts[name]  # of the first return, so that squares of small differences are summed
            shift[rows, at] = torch.where(first, returns[:, 0], shift[rows, at])
            rest = returns - shift[rows, at].unsqueeze(1)
            for total, part in zip(self._sums[name], (rest, rest.square()), strict=True):
                total[rows, at] += part.sum(1)
        self.counts[rows, at] += values.shape[1]

    def means(self) -> Tensor:
        """Mean return from each state, `[rows, time]`; NaN where none was sampled."""
        count = torch.where(self.counts > 0, self.counts, torch.nan)
        return (self._shifts["values"] + self._sums["values"][0] / count)[:, :-1]

    def truth(self, last_rewards: Tensor, lengths: Tensor) -> Truth:
        """True values and advantages of the states with two continuations or more.

        SE(V) = s / √n with the sample deviation s of n returns; SE(A)² = SE(Q)² + SE(V)², since Q and V are of
        continuations of their own. The Q of a row's last step is its reward, which is known.

        Args:
            last_rewards: `[rows]`, the return from each row's last step on, with its bootstrap if it has one.
            lengths: `[rows]`, steps of each row.
        """
        values, value_errors = self._means("values")
        actions, action_errors = (x[:, 1:].clone() for x in self._means("actions"))
        everyone = torch.arange(len(lengths))
        actions[everyone, lengths - 1] = last_rewards.double().cpu()
        action_errors[everyone, lengths - 1] = 0.0
        values, value_errors = values[:, :-1], value_errors[:, :-1]
        return Truth(values, value_errors, actions - values, torch.hypot(action_errors, value_errors))

    def _means(self, name: str) -> tuple[Tensor, Tensor]:
        """Means and their standard errors, `[rows, time + 1]`; NaN of fewer than two returns."""
        total, squares = self._sums[name]
        count = torch.where(self.counts >= 2, self.counts, torch.nan)
        mean = total / count
        variance = ((squares - total * mean) / (count - 1)).clamp(min=0.0)
        return self._shifts[name] + mean, (variance / count).sqrt()
