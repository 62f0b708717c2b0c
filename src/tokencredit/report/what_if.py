"""Advantages of a completion under other estimators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tokencredit.core.advantages import EpisodeBounds, estimate
from tokencredit.core.estimator_table import ESTIMATORS

LAMBDAS = (0.5, 0.9, 0.95)
ALTERNATIVES = {
    "td (gae, λ = 0)": ("td", None),
    **{f"gae, λ = {lam:g}": ("gae", lam) for lam in LAMBDAS},
    "monte_carlo (gae, λ = 1)": ("monte_carlo", None),
    "uniform": ("uniform", None),
}
"""Estimators by label, each with its λ."""


def what_if(sample: Mapping[str, Any], gamma: float) -> dict[str, list[float]]:
    """Advantages per token under each of `ALTERNATIVES`, from the sample's rewards and values.

    Without values, alternatives that need a critic are left out. A truncated completion of a run with
    `advantage.bootstrap` ends with its `bootstrap` value. Advantages are before whitening. `uniform` has no baseline,
    which would be the mean of a batch that was not kept.
    """
    rewards = torch.tensor([sample["rewards"]], dtype=torch.float64)
    values = torch.tensor([sample["values"]], dtype=torch.float64) if "values" in sample else None
    where: EpisodeBounds = {}
    if "bootstrap" in sample:
        last = torch.arange(rewards.shape[1]) == rewards.shape[1] - 1
        where = {"truncated": last[None], "bootstrap": torch.full_like(rewards, sample["bootstrap"])}
    results = {}
    for label, (name, lam) in ALTERNATIVES.items():
        if values is None and ESTIMATORS[name].critic == "required":
            continue
        options = {"gamma": gamma, "baseline": 0.0} | ({} if lam is None else {"lam": lam})
        advantages, _ = estimate(name, rewards, values, options=options, **where)
        results[label] = advantages[0].tolist()
    return results
