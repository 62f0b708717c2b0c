"""The credit that other estimators would have given the same completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tokencredit.core.advantages import estimate

LAMBDAS = (0.5, 0.9, 0.95)
ALTERNATIVES = {
    "one_step (gae, λ = 0)": ("one_step", None),
    **{f"gae, λ = {lam:g}": ("gae", lam) for lam in LAMBDAS},
    "monte_carlo (gae, λ = 1)": ("monte_carlo", None),
    "uniform": ("uniform", None),
}
"""What is shown, by its label: an estimator, and the λ it is given."""


def what_if(sample: Mapping[str, Any], gamma: float) -> dict[str, list[float]]:
    """Advantages of each token under each of `ALTERNATIVES`, from the sample's own rewards and values.

    They are as the estimators give them, before any whitening over the batch. `uniform` spreads the completion's
    whole reward, without a baseline, since that was the mean of a batch that is not here.
    """
    rewards, values = (torch.tensor([sample[name]], dtype=torch.float64) for name in ("rewards", "values"))
    results = {}
    for label, (name, lam) in ALTERNATIVES.items():
        options = {"gamma": gamma, "baseline": 0.0} | ({} if lam is None else {"lam": lam})
        advantages, _ = estimate(name, rewards, values, options=options)
        results[label] = advantages[0].tolist()
    return results
