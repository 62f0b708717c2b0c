"""What steers a run from its metrics: KL-coefficient controllers, running moments of scores, stopping rules."""

import math

import torch
from torch import Tensor

from tokencredit.core.argument_checks import require_not_negative, require_positive
from tokencredit.core.masked import Reduce, moments


class KLController:
    """The KL coefficient: constant or, with a target, one that grows while the KL is above it and shrinks while below.

    After n sequences with a mean KL: e = clip(KL / target − 1, −c, c), and coef ← coef · (1 + e · n / horizon), clamped
    to bounds. Ziegler et al. 2019 (arXiv 1909.08593), section 2.2, where c = 0.2 and n / horizon = 0.1.

    Attributes:
        coef: β, reward per nat.
    """

    def __init__(
        self,
        coef: float,
        *,
        target: float | None = None,
        horizon: float = 10_000.0,
        error_clip: float = 0.2,
        bounds: tuple[float, float] = (1e-5, 10.0),
    ) -> None:
        """Start from `coef`, at least 0 and, with a target, within the bounds; `ValueError` for one out of its range.

        `target` is a KL in nats per sequence, above 0; at the largest error c, `error_clip`, coef changes by about e^±c
        over one `horizon` of sequences. The lower bound is above 0, since no factor changes a 0.
        """
        require_not_negative("kl_coef", coef)
        if target is not None:
            require_positive("kl target", target)
            require_positive("kl horizon", horizon)
            require_positive("kl error_clip", error_clip)
            low, high = bounds
            require_positive("the lower of bounds", low)
            if not low <= coef <= high:
                raise ValueError(f"kl_coef is {coef}; it must lie within its bounds, {low} to {high}")
        self.coef, self.target, self.horizon, self.bounds = coef, target, horizon, bounds
        self.error_clip = error_clip

    def update(self, kl: float, sequences: int) -> None:
        """Follow the mean KL, nats per sequence, of new sequences; with a target `ValueError` if it is not finite."""
        if self.target is None:
            return
        if not math.isfinite(kl):
            raise ValueError(f"kl is {kl}; it must be finite")
        error = min(max(kl / self.target - 1, -self.error_clip), self.error_clip)
        low, high = self.bounds
        self.coef = min(max(self.coef * (1 + error * sequences / self.horizon), low), high)

    def state_dict(self) -> dict[str, float]:
        """The state, for `load_state_dict`."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the result of `state_dict`."""
        self.coef = state["coef"]


class RunningMoments:
    """Running mean and standard deviation of batches of numbers, such as scores.

    Batches are merged by their counts, means and sums of squares about the mean (Chan, Golub and LeVeque 1983, the
    updating formula).

    Attributes:
        count: number of samples.
        mean: their mean; 0 before the first.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.count = self.mean = self._squares = 0.0

    @property
    def deviation(self) -> float:
        """Population standard deviation; 0 before the first number."""
        return math.sqrt(self._squares / self.count) if self.count else 0.0

    def update(self, x: Tensor, reduce: Reduce | None = None) -> None:
        """Add a batch of any shape, summed over processes by `reduce`; `ValueError` if an element is not finite."""
        every = torch.ones_like(x, dtype=torch.bool)
        count, mean, variance = torch.stack(moments(x.detach(), every, reduce)).tolist()
        if not math.isfinite(mean + variance):
            raise ValueError("x holds NaN or an infinity; it must be finite")
        old_count, difference = self.count, mean - self.mean
        self.count = old_count + count
        self.mean += difference * count / self.count
        self._squares += variance * count + difference**2 * old_count * count / self.count

    def state_dict(self) -> dict[str, float]:
        """The state, for `load_state_dict`."""
        return {"count": self.count, "mean": self.mean, "squares": self._squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the result of `state_dict`."""
        self.count, self.mean, self._squares = state["count"], state["mean"], state["squares"]


class Plateau:
    """Detects a plateau: `patience` checks in a row without a rise of more than `min_delta` above the best so far."""

    def __init__(self, *, patience: int, min_delta: float) -> None:
        """Start without history."""
        self.patience, self.min_delta = patience, min_delta
        self.best, self.since = -math.inf, 0

    def update(self, number: float) -> bool:
        """Record one check; returns true on a plateau. NaN counts as no rise."""
        if number > self.best + self.min_delta:
            self.best, self.since = number, 0
        else:
            self.since += 1
        return self.since >= self.patience


class EarlyStopping:
    """Stops a run once the KL or the reward has been above its threshold for `patience` checks in a row.

    A KL above its threshold means that the policy has drifted from the reference; a reward above its threshold, that
    the goal is reached. Both share one count: a check counts if either is above.
    """

    def __init__(self, *, reward: float | None = None, kl: float | None = None, patience: int = 1) -> None:
        """Start without history; None for no threshold. `kl` is the mean KL to the reference, in nats per sequence."""
        self.patience = patience
        self._thresholds = {"kl": kl, "reward": reward}
        self.reset()

    def reset(self) -> None:
        """Forget all checks."""
        self._checks = 0

    def update(self, *, reward: float, kl: float) -> str | None:
        """Record one check; returns the reason to stop, "kl" or "reward", or None. NaN is never above a threshold."""
        above, reason = self._above(reward, kl), self.reached(reward=reward, kl=kl)
        self._checks = self._checks + 1 if above else 0
        return reason

    def reached(self, *, reward: float, kl: float) -> str | None:
        """What `update` would return, without recording it."""
        above = self._above(reward, kl)
        return above[0] if above and self._checks + 1 >= self.patience else None

    def _above(self, reward: float, kl: float) -> list[str]:
        values = {"kl": kl, "reward": reward}
        return [name for name, limit in self._thresholds.items() if limit is not None and values[name] > limit]
