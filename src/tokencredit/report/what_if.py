"""Advantages of a completion under other estimators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tokencredit.audit.estimates import LAMBDAS, label
from tokencredit.core.episodes import EpisodeBounds
from tokencredit.core.estimator_table import ESTIMATORS
from tokencredit.core.estimators import Turns, estimate, estimate_by_turn
from tokencredit.runs.transcript import acted, speeches

ALTERNATIVES = {
    label(name, {"lam": lam}): (name, lam)
    for name, lam in (("td", None), *(("gae", lam) for lam in LAMBDAS), ("monte_carlo", None), ("uniform", None))
}
"""Estimators by label, each with its λ."""


def what_if(
    sample: Mapping[str, Any], gamma: float, *, by_turn: bool = False, own: str | None = None
) -> dict[str, list[float]]:
    """Advantages per acted token under each of `ALTERNATIVES`, from the sample's rewards and values.

    `own` is the name of an estimator of the user's, whose advantages are those that the run wrote down.

    Without values, alternatives that need a critic are left out. A truncated completion of a run with
    `advantage.bootstrap` ends with its `bootstrap` value. Advantages are before whitening. `uniform` has no baseline,
    which would be the mean of a batch that was not kept. With `by_turn` the steps that γ and λ count are an episode's
    turns, as with `advantage.unit: turn`.
    """
    kept = acted(sample)
    rewards = torch.tensor([kept["rewards"]], dtype=torch.float64)
    values = torch.tensor([kept["values"]], dtype=torch.float64) if "values" in kept else None
    where: EpisodeBounds = {}
    if "bootstrap" in kept:
        last = torch.arange(rewards.shape[1]) == rewards.shape[1] - 1
        where = {"truncated": last[None], "bootstrap": torch.full_like(rewards, kept["bootstrap"])}
    turns = turns_of(sample) if by_turn and "turns" in sample else None
    results = {} if own is None else {own: list(kept["advantages"])}
    for title, (name, lam) in ALTERNATIVES.items():
        if values is None and ESTIMATORS[name].critic == "required":
            continue
        options = {"gamma": gamma, "baseline": 0.0} | ({} if lam is None else {"lam": lam})
        if turns is None:
            advantages, _ = estimate(name, rewards, values, options=options, **where)
        else:
            advantages, _ = estimate_by_turn(name, rewards, values, turns=turns, options=options, **where)
        results[title] = advantages[0].tolist()
    return results


def turns_of(sample: Mapping[str, Any]) -> Turns:
    """The turns of an episode's acted tokens."""
    ends = torch.zeros(1, sum(sample["mask"]), dtype=torch.bool)
    ends[0, [speech.end - 1 for speech in speeches(sample) if speech.start < speech.end]] = True
    return Turns.of(torch.ones_like(ends), ends)
