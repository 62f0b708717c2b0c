"""When to stop: an update that has moved far enough, a run with nothing more to win, a number that no longer rises."""

import math

from tokencredit.core.checks import require_positive


def past_target_kl(kl: float, target: float | None, slack: float = 1.0) -> bool:
    """Whether an update should end, the policy being too far from the one that made the rollout: KL > slack · target.

    Args:
        kl: the approximate KL between the two, in nats a token, such as `RatioStats.metrics()["approx_kl_k3"]`. NaN
            counts as too far.
        target: in nats a token; None never ends an update.
        slack: how many times the target is still accepted. Spinning Up and Stable-Baselines3 use 1.5.

    Raises:
        ValueError: `target` or `slack` is not above 0.
    """
    if target is None:
        return False
    require_positive("target_kl", target)
    require_positive("slack", slack)
    return not kl <= slack * target


class Plateau:
    """Tells when a number no longer rises: `patience` checks in a row, none of them `least` above the best before."""

    def __init__(self, *, patience: int, least: float) -> None:
        """Start with nothing seen."""
        self.patience, self.least = patience, least
        self.best, self.since = -math.inf, 0

    def update(self, number: float) -> bool:
        """Take in one check; returns true once the number no longer rises. NaN is no rise."""
        if number > self.best + self.least:
            self.best, self.since = number, 0
        else:
            self.since += 1
        return self.since >= self.patience


class EarlyStopping:
    """Stops a run when the KL, or the reward, has been above its threshold for `patience` checks in a row.

    KL above its threshold means that the policy has left the reference behind; reward above its own, that the aim is
    reached.
    """

    def __init__(self, *, reward: float | None = None, kl: float | None = None, patience: int = 1) -> None:
        """Start with nothing seen.

        Args:
            reward: the threshold of the mean reward; None never stops for it.
            kl: the threshold of the mean KL to the reference, in nats a sequence; None never stops for it.
            patience: how many checks in a row, at least 1.

        Raises:
            ValueError: `patience` is below 1, or `kl` is not above 0.
        """
        if patience < 1:
            raise ValueError(f"patience is {patience}; it must be at least 1")
        if kl is not None:
            require_positive("the kl that stops", kl)
        self.patience = patience
        self._thresholds = {"kl": kl, "reward": reward}
        self._above = {"kl": 0, "reward": 0}

    def update(self, *, reward: float, kl: float) -> str | None:
        """Take in one check; return what stops the run, "kl" or "reward", or None to go on. NaN is above nothing."""
        for name, seen in (("kl", kl), ("reward", reward)):
            threshold = self._thresholds[name]
            self._above[name] = self._above[name] + 1 if threshold is not None and seen > threshold else 0
        return next((name for name, checks in self._above.items() if checks >= self.patience), None)

    def state_dict(self) -> dict[str, int]:
        """What `load_state_dict` needs to go on from here: for how many checks each has been above its threshold."""
        return dict(self._above)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from what `state_dict` gave."""
        self._above = {name: state[name] for name in self._above}
