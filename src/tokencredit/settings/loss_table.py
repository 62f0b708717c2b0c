"""Table of policy losses and the settings that they read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from tokencredit.settings.parts import OWN


class PolicyLoss(NamedTuple):
    """A policy loss of ours."""

    settings: tuple[str, ...]
    """Settings under `ppo` that it reads."""
    objective: str
    """Name of its class in `learn.objective`."""
    options: Mapping[str, Any] = {}
    """Fields of the class."""


LOSSES = {
    "clip": PolicyLoss(("clip", "clip_high", "dual_clip"), "Objective"),
    "gspo": PolicyLoss(("clip", "clip_high"), "SequenceObjective"),
    "cispo": PolicyLoss(("clip", "clip_high"), "WeightedObjective", {"outside": "clip"}),
    "sao": PolicyLoss(("clip", "clip_high"), "WeightedObjective", {"outside": "mask"}),
    "dppo_tv": PolicyLoss(("divergence_limit",), "WeightedObjective", {"divergence": "tv", "divergence_limit": 0.15}),
    "dppo_kl": PolicyLoss(("divergence_limit",), "WeightedObjective", {"divergence": "kl", "divergence_limit": 0.05}),
}
"""Policy losses by name. The limits of a divergence are those of verl's example of DPPO."""
if TYPE_CHECKING:
    LossName: TypeAlias = str
else:
    LossName = Literal[tuple(LOSSES)]


def of_loss(key: str) -> str:
    """The condition that the loss reads this key."""
    own = [OWN] * (key != "divergence_limit")
    return f"loss: {', '.join([*(name for name, loss in LOSSES.items() if key in loss.settings), *own])}"
