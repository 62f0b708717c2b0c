"""What follows a run and steers it with one number: the KL coefficient, and the running mean of scores."""

import math

import torch
from torch import Tensor

from tokencredit.core.checks import require_fraction, require_not_negative, require_positive
from tokencredit.core.masked import Reduce, moments


class FixedKL:
    """A KL coefficient that stays what it is.

    Attributes:
        coef: β, reward per nat.
    """

    def __init__(self, coef: float) -> None:
        require_not_negative("kl_coef", coef)
        self.coef = coef

    def update(self, kl: float, sequences: int) -> None:
        """Take part like `AdaptiveKL`, and change nothing."""

    def state_dict(self) -> dict[str, float]:
        """What `load_state_dict` needs to go on from here."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what `state_dict` gave."""
        self.coef = state["coef"]


class AdaptiveKL:
    """A KL coefficient that grows while the KL is above its target, and shrinks while it is below.

    After n sequences with a mean KL: e = clip(KL / target − 1, −c, c), and coef ← coef · (1 + e · n / horizon), held
    within bounds. Ziegler et al. 2019 (arXiv 1909.08593), section 2.2, where c = 0.2 and n / horizon = 0.1.

    Attributes:
        coef: β, reward per nat.
    """

    def __init__(
        self,
        coef: float,
        *,
        target: float,
        horizon: float,
        error_clip: float = 0.2,
        bounds: tuple[float, float] = (1e-5, 10.0),
    ) -> None:
        """Start from a coefficient.

        Args:
            coef: β at the beginning, within the bounds.
            target: the KL to hold, in nats a sequence, above 0.
            horizon: in sequences, above 0: at the largest error, coef changes by about e^±c over one horizon.
            error_clip: c, the largest relative error that counts, above 0.
            bounds: the least and the largest coefficient; the least is above 0, from which no factor leads away.

        Raises:
            ValueError: a number is out of its range.
        """
        require_positive("kl target", target)
        require_positive("kl horizon", horizon)
        require_positive("error_clip", error_clip)
        low, high = bounds
        require_positive("the lower of bounds", low)
        if not low <= coef <= high:
            raise ValueError(f"kl_coef is {coef}; it must lie within its bounds, {low} to {high}")
        self.coef, self.target, self.horizon = coef, target, horizon
        self.error_clip, self.bounds = error_clip, bounds

    def update(self, kl: float, sequences: int) -> None:
        """Follow the mean KL, in nats a sequence, of this many new sequences (of all processes).

        Raises:
            ValueError: the KL is NaN or infinite.
        """
        if not math.isfinite(kl):
            raise ValueError(f"kl is {kl}; it must be finite")
        error = min(max(kl / self.target - 1, -self.error_clip), self.error_clip)
        low, high = self.bounds
        self.coef = min(max(self.coef * (1 + error * sequences / self.horizon), low), high)

    def state_dict(self) -> dict[str, float]:
        """What `load_state_dict` needs to go on from here."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what `state_dict` gave."""
        self.coef = state["coef"]


class RunningMoments:
    """Mean and deviation of a stream of numbers that arrives in batches, such as scores.

    Two sets of numbers are joined by their counts, means and sums of squares about the mean (Chan, Golub and LeVeque
    1983, the updating formula); with a decay below 1, what came before counts less with each batch.

    Attributes:
        count: how many numbers the mean stands for.
        mean: their mean; 0 before the first.
    """

    def __init__(self, decay: float = 1.0) -> None:
        """Start empty.

        Args:
            decay: the weight that everything seen so far keeps when a batch arrives, in [0, 1]. 1 remembers all alike.

        Raises:
            ValueError: `decay` lies outside [0, 1].
        """
        require_fraction("decay", decay)
        self.decay = decay
        self.count = self.mean = self._squares = 0.0

    @property
    def deviation(self) -> float:
        """The standard deviation, of the population; 0 before the first number."""
        return math.sqrt(self._squares / self.count) if self.count else 0.0

    def update(self, x: Tensor, mask: Tensor | None = None, reduce: Reduce | None = None) -> None:
        """Take in a batch.

        Args:
            x: any shape.
            mask: bool of the same shape; what is false does not count.
            reduce: sums a tensor over processes; all of them then end with the same moments.

        Raises:
            ValueError: the mask has no true element, or a number that counts is NaN or infinite.
        """
        mask = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
        count, mean, variance = torch.stack(moments(x.detach(), mask, reduce)).tolist()
        if not math.isfinite(mean + variance):
            raise ValueError("x holds NaN or an infinity; it must be finite")
        before, apart = self.decay * self.count, mean - self.mean
        self.count = before + count
        self.mean += apart * count / self.count
        self._squares = self.decay * self._squares + variance * count + apart**2 * before * count / self.count

    def state_dict(self) -> dict[str, float]:
        """What `load_state_dict` needs to go on from here."""
        return {"count": self.count, "mean": self.mean, "squares": self._squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from what `state_dict` gave."""
        self.count, self.mean, self._squares = state["count"], state["mean"], state["squares"]
