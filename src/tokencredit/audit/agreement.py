"""How far a critic's values and estimators' advantages agree with the truth, with intervals over rows.

The truth is itself measured: x̂ = x + e, with a known standard error of each e. Noise in it makes no correlation
stronger and no error smaller, so what is measured against x̂ understates; with m = mean SE², the corrected figures are

- Var x = Var x̂ − m, and with it corr(a, x) = cov(a, x̂) / √(Var a · (Var x̂ − m)) (Spearman 1904, the correction for
  attenuation, of the truth alone: the noise of what is judged is its own fault);
- explained variance = 1 − (Var(x̂ − v) − m) / (Var x̂ − m), mean squared error = mean (v − x̂)² − m;
- slope cov(v, x̂) / Var v of the truth on the values, which noise in the truth does not bias.

All hold because e is independent of what is judged: continuations are sampled for the truth alone. Intervals are 95 %
bootstrap intervals: whole rows are drawn again (Efron 1979), since the states of one row depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tokencredit.audit.truth import Truth

RESAMPLES = 1000
LEVEL = 0.95
BINS = 8
"""Of the reliability diagram."""
PAIRED = 1500
"""States whose pairs are ranked, at most."""
CLEAR = 2.0
"""Standard errors beyond which a difference in the truth counts as known."""
Figure = dict[str, float | None]
"""`value`, and `low` and `high` of its interval; None for what cannot be known."""
Sums = dict[str, Tensor]
"""Sums over the states of each row, `[rows]`, or of each bootstrap sample, `[samples]`."""


class Resampling:
    """Bootstrap samples of rows: one figure per sample, from sums over the states of rows."""

    def __init__(self, rows: int, seed: int = 0):
        """Draw the samples; the first is the rows themselves."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(rows, (RESAMPLES, rows), generator=generator)
        counts = torch.zeros(RESAMPLES, rows, dtype=torch.float64).scatter_add_(
            1, drawn, torch.ones(RESAMPLES, rows, dtype=torch.float64)
        )
        self.counts = torch.cat([torch.ones(1, rows, dtype=torch.float64), counts])

    def samples(self, sums: Sums, formula: Callable[[Sums], Tensor]) -> Tensor:
        """The figure of each sample, `[1 + RESAMPLES]`; NaN where it is not defined."""
        return formula({name: self.counts @ x for name, x in sums.items()})

    def figure(self, sums: Sums, formula: Callable[[Sums], Tensor]) -> Figure:
        """The figure with its interval."""
        return interval(self.samples(sums, formula))


def interval(samples: Tensor) -> Figure:
    """The first of the samples, and the interval of the others; None where most of them are not defined."""
    value, others = float(samples[0]), samples[1:][samples[1:].isfinite()]
    if not math.isfinite(value):
        return {"value": None, "low": None, "high": None}
    if len(others) < RESAMPLES / 2:
        return {"value": value, "low": None, "high": None}
    tail = (1 - LEVEL) / 2
    low, high = torch.quantile(others, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return {"value": value, "low": low, "high": high}


def row_sums(known: Tensor, truth: Tensor, errors: Tensor, judged: Tensor) -> Sums:
    """Sums over the known states of each row, from which the figures of this module follow.

    Args:
        known: bool `[rows, time]`, states that count.
        truth: x̂.
        errors: its standard errors.
        judged: a or v.
    """
    x, e, v = (torch.where(known, y.double(), 0.0) for y in (truth, errors, judged))
    parts = {"n": known.double(), "x": x, "v": v, "xx": x * x, "vv": v * v, "xv": x * v, "m": e * e}
    return {name: part.sum(1) for name, part in parts.items()}


def correlation(sums: Sums) -> Tensor:
    """corr(a, x), corrected for the noise of the truth; NaN where that noise explains all of the truth's variance."""
    cov, var_x, var_v, noise = _moments(sums)
    return _positive(cov, var_x - noise, var_v)


def explained_variance(sums: Sums) -> Tensor:
    """1 − (Var(x̂ − v) − m) / (Var x̂ − m): 1 for a perfect critic, 0 for a constant, below 0 for a worse one."""
    cov, var_x, var_v, noise = _moments(sums)
    true = var_x - noise
    left = var_x - 2 * cov + var_v - noise
    return torch.where(true > 0, 1 - left / true, torch.nan)


def slope(sums: Sums) -> Tensor:
    """cov(v, x̂) / Var v: by how much the truth rises where values rise by 1."""
    cov, _, var_v, _ = _moments(sums)
    return torch.where(var_v > 0, cov / var_v, torch.nan)


def spread(sums: Sums) -> Tensor:
    """Deviation of the values over that of the truth: near 0 for a critic that is flat where values are not."""
    _, var_x, var_v, noise = _moments(sums)
    return torch.where(var_x > noise, (var_v / (var_x - noise)).clamp(min=0.0).sqrt(), torch.nan)


def rmse(sums: Sums) -> Tensor:
    """Root of mean (v − x)²."""
    return ((sums["xx"] - 2 * sums["xv"] + sums["vv"] - sums["m"]) / sums["n"]).clamp(min=0.0).sqrt()


def constant_rmse(sums: Sums) -> Tensor:
    """The same of the best constant: the deviation of the truth."""
    _, var_x, _, noise = _moments(sums)
    return (var_x - noise).clamp(min=0.0).sqrt()


def bias(sums: Sums) -> Tensor:
    """Mean of v − x."""
    return (sums["v"] - sums["x"]) / sums["n"]


def noise_share(sums: Sums) -> Tensor:
    """Share of the measured truth's variance that is its noise."""
    _, var_x, _, noise = _moments(sums)
    return torch.where(var_x > 0, noise / var_x, torch.nan)


def _moments(sums: Sums) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """cov(v, x̂), Var x̂, Var v and m."""
    n = sums["n"]
    x, v = sums["x"] / n, sums["v"] / n
    var_x, var_v = sums["xx"] / n - x * x, sums["vv"] / n - v * v
    return sums["xv"] / n - x * v, var_x.clamp(min=0.0), var_v.clamp(min=0.0), sums["m"] / n


def _positive(cov: Tensor, var_x: Tensor, var_v: Tensor) -> Tensor:
    both = var_x * var_v
    return torch.where((var_x > 0) & (var_v > 1e-20), cov / both.clamp(min=1e-300).sqrt(), torch.nan)


def judge_critic(truth: Truth, values: Tensor) -> dict[str, Any]:
    """A critic's values, `[rows, time]`, against the truth.

    Returns:
        Figures `explained_variance`, `rmse`, `constant_rmse`, `bias`, `slope`, `spread`, `ranking` (share of pairs of
        states, of those that differ by over two standard errors, that the critic puts in the right order),
        `ranking_within` (pairs of one row) and `noise`; `states`, how many; and `reliability`, a list of bins of equal
        size with the means `predicted` and `true` and the interval of the latter.
    """
    known = truth.values.isfinite()
    # No figure depends on where values lie together, and sums of squares lose fewer digits near 0.
    centre = truth.values[known].mean()
    sums = row_sums(known, truth.values - centre, truth.value_errors, values.double() - centre)
    resampling = Resampling(len(known))
    formulas = {
        "explained_variance": explained_variance,
        "rmse": rmse,
        "constant_rmse": constant_rmse,
        "bias": bias,
        "slope": slope,
        "spread": spread,
        "noise": noise_share,
    }
    figures: dict[str, Any] = {name: resampling.figure(sums, formula) for name, formula in formulas.items()}
    right, total = ranked_pairs(known, truth.values, truth.value_errors, values)
    weights = resampling.counts
    figures["ranking"] = interval(((weights @ right) * weights).sum(1) / ((weights @ total) * weights).sum(1))
    figures["ranking_within"] = interval((weights @ right.diagonal()) / (weights @ total.diagonal()))
    return figures | {"states": int(known.sum()), "reliability": reliability(known, truth, values, resampling)}


def ranked_pairs(known: Tensor, truth: Tensor, errors: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of states that differ by over two standard errors: those in the right order, and all.

    Returns:
        `[rows, rows]` each, by the rows of the two states; ties of the critic count half.
    """
    rows, time = known.nonzero(as_tuple=True)
    if len(rows) > PAIRED:
        kept = torch.linspace(0, len(rows) - 1, PAIRED).long()
        rows, time = rows[kept], time[kept]
    x, e, v = (y.double()[rows, time] for y in (truth, errors, values))
    apart = x.unsqueeze(1) - x.unsqueeze(0)
    clear = apart > CLEAR * torch.hypot(e.unsqueeze(1), e.unsqueeze(0))
    order = (v.unsqueeze(1) - v.unsqueeze(0)).sign()
    count = len(known)
    where = (rows.unsqueeze(1) * count + rows.unsqueeze(0))[clear]
    right, total = torch.zeros(2, count * count, dtype=torch.float64)
    right.index_add_(0, where, (order[clear] + 1) / 2)
    total.index_add_(0, where, torch.ones(len(where), dtype=torch.float64))
    return right.view(count, count), total.view(count, count)


def reliability(known: Tensor, truth: Truth, values: Tensor, resampling: Resampling) -> list[dict[str, float | None]]:
    """Bins of equal size by the critic's values: mean value, mean truth with its interval, and number of states."""
    predicted = values.double()[known]
    if len(predicted) == 0:
        return []
    edges = torch.quantile(predicted, torch.linspace(0, 1, BINS + 1, dtype=torch.float64)[1:-1])
    bins = torch.bucketize(values.double().contiguous(), edges.unique())
    found: list[dict[str, float | None]] = []
    for number in bins[known].unique().tolist():
        inside = known & (bins == number)
        sums = row_sums(inside, truth.values, truth.value_errors, values)
        true = resampling.figure(sums, lambda s: s["x"] / s["n"])
        count = float(sums["n"].sum())
        found.append(
            {
                "predicted": float(sums["v"].sum()) / count,
                "true": true["value"],
                "low": true["low"],
                "high": true["high"],
                "states": count,
            }
        )
    return found


def judge_credit(truth: Truth, advantages: Mapping[str, Tensor]) -> dict[str, Any]:
    """Estimators' advantages, `[rows, time]` each by label, against the truth; the first is the one that is shown.

    Returns:
        `tokens`, how many are known; `noise`, the share of the truth's variance that is its own noise; `shown`; and
        `estimators`: of each the figures `correlation`, `sign_agreement` (share of tokens whose true advantage is over
        two standard errors from 0 that have its sign) and `gain`, the correlation less that of `shown`.
    """
    known = truth.advantages.isfinite()
    resampling = Resampling(len(known))
    sums = {
        label: row_sums(known, truth.advantages, truth.advantage_errors, judged) for label, judged in advantages.items()
    }
    shown = next(iter(advantages))
    of_shown = resampling.samples(sums[shown], correlation)
    clear = known & (truth.advantages.abs() > CLEAR * truth.advantage_errors)
    estimators = {}
    for label, judged in advantages.items():
        samples = resampling.samples(sums[label], correlation)
        agree = clear & (judged.double().sign() == truth.advantages.sign())
        signs = {"right": agree.double().sum(1), "all": clear.double().sum(1)}
        estimators[label] = {
            "correlation": interval(samples),
            "sign_agreement": resampling.figure(signs, lambda s: s["right"] / s["all"]),
            "gain": interval(samples - of_shown),
        }
    return {
        "tokens": int(known.sum()),
        "noise": resampling.figure(sums[shown], noise_share),
        "shown": shown,
        "estimators": estimators,
    }


def share_real(correlation: float | None) -> float | None:
    """The trust score: the share of the shown advantages' variance that the true ones explain, r² where r > 0."""
    return None if correlation is None else min(max(correlation, 0.0), 1.0) ** 2
