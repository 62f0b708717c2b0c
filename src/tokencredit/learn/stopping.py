"""Stopping rules: the target KL of an update, plateau detection, early stopping of a run."""

import math

from tokencredit.core.argument_checks import require_positive


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
    the goal is reached.
    """

    def __init__(self, *, reward: float | None = None, kl: float | None = None, patience: int = 1) -> None:
        """Start without history.

        Args:
            reward: threshold of the mean reward; None for no threshold.
            kl: threshold of the mean KL to the reference, in nats per sequence; None for no threshold.
            patience: number of checks in a row, at least 1.

        Raises:
            ValueError: `patience` is below 1, or `kl` is not above 0.
        """
        if patience < 1:
            raise ValueError(f"patience is {patience}; it must be at least 1")
        if kl is not None:
            require_positive("the kl that stops", kl)
        self.patience = patience
        self._thresholds = {"kl": kl, "reward": reward}
        self.reset()

    def reset(self) -> None:
        """Forget all checks."""
        self._above = {"kl": 0, "reward": 0}

    def update(self, *, reward: float, kl: float) -> str | None:
        """Record one check; returns the reason to stop, "kl" or "reward", or None. NaN is never above a threshold."""
        for name, value in (("kl", kl), ("reward", reward)):
            threshold = self._thresholds[name]
            self._above[name] = self._above[name] + 1 if threshold is not None and value > threshold else 0
        return next((name for name, checks in self._above.items() if checks >= self.patience), None)

    def state_dict(self) -> dict[str, int]:
        """The state, for `load_state_dict`: for how many checks in a row each value has been above its threshold."""
        return dict(self._above)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the result of `state_dict`."""
        self._above = {name: state[name] for name in self._above}
