"""Settings of off-policy corrections: tokens whose engine drew them with other log-probs than those of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokencredit.errors import ConfigError
from tokencredit.settings.fields import setting
from tokencredit.settings.rollout import RolloutConfig

FIXED = "proximal: not interpolated"
"""The condition of weights that do not change within an update."""


@dataclass
class OffPolicyConfig:
    """Corrections for tokens drawn with other log-probs than those of training: by filters such as top_p, by a pass in
    bfloat16, or by another engine."""

    proximal: Literal["recomputed", "behavior", "interpolated"] = "recomputed"
    """Policy around which the update clips: recomputed takes log-probs of a full forward pass of the trained model,
    behavior the log-probs with which the engine drew the tokens, interpolated those between them and the present
    ones, by the age of each token (A-3PO)."""
    correct: Literal["none", "clip", "mask"] = setting("none", needs="proximal: recomputed, interpolated")
    """Importance weights on the policy loss, proximal over behavior probability: none, clip bounds them by low and
    high, mask sets those outside to 0. mask with level: geometric gives the others the weight 1."""
    level: Literal["token", "sequence", "geometric"] = setting("token", needs=("correct: not none", FIXED))
    """Weights of single tokens, of the product over a completion's tokens, or of its geometric mean."""
    low: float = setting(0.0, needs="correct: not none", at_least=0)
    """Lower bound of the weights."""
    high: float = setting(2.0, needs="correct: not none", above=0)
    """Upper bound of the weights."""

    support: Literal["full", "truncated"] = setting(
        "full", needs=("rollout.engine: local", "rollout.top_k", "proximal: behavior")
    )
    """Tokens over which the update normalises the policy: the whole vocabulary, or those that the filters left when the
    token was drawn, so that its ratio begins at 1. They are kept with it, at most rollout.top_k."""

    def check(self, rollout: RolloutConfig, dtype: str) -> None:
        """Raise `ConfigError` for bounds out of order, or for settings that can change nothing.

        Args:
            rollout: sampling settings of the run.
            dtype: `model.dtype`; at set-up the one that `auto` has chosen.
        """
        if self.correct != "none" and self.high <= self.low:
            raise ConfigError(f"off_policy.high is {self.high:g}; it must be above off_policy.low, {self.low:g}")
        if self.proximal == "interpolated" and not rollout.max_age:
            raise ConfigError(
                "off_policy.proximal is interpolated, by the age of tokens, and rollout.max_age is 0, so that all are "
                "of age 0; set rollout.max_age with rollout.engine: continuous, or leave it out"
            )
        if self.proximal == "interpolated" and self.correct != "none" and rollout.max_age == 1:
            raise ConfigError(
                f"off_policy.correct is {self.correct}, and rollout.max_age is 1: the interpolated proximal policy of "
                "tokens of age 0 and 1 is the one that drew them, so that all weights are 1; leave it out"
            )
        for key, default in (("proximal", "recomputed"), ("correct", "none")):
            value = getattr(self, key)
            if value != default and not differs_from_training(rollout, dtype):
                raise ConfigError(
                    f"off_policy.{key} is {value}, and tokens are drawn with the log-probs of training: "
                    f"rollout.engine is {rollout.engine}, without filters, and the dtype of its passes (model.dtype) "
                    f"{dtype}; leave it out"
                )


def differs_from_training(rollout: RolloutConfig, dtype: str) -> bool:
    """True if the engine may draw tokens with other log-probs than training's, so that rollouts hold both."""
    return bool(rollout.filters()) or dtype != "float32" or rollout.engine != "local"
