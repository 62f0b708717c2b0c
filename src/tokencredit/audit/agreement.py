"""Agreement of a critic's values and estimators' advantages with the truth, with bootstrap intervals over rows.

The truth is itself measured: x̂ = x + e, with a known variance of each e. Noise in it only weakens correlations and
inflates errors, so that agreement with x̂ understates agreement with x. With m, the mean of unbiased estimates of these
variances, the corrected figures are

- Var x = Var x̂ − m, and with it corr(a, x) = cov(a, x̂) / √(Var a · (Var x̂ − m)) (Spearman 1904, the correction for
  attenuation, applied to the truth only: noise in the estimate counts against the estimate);
- explained variance = 1 − (Var(x̂ − v) − m) / (Var x̂ − m), mean squared error = mean (v − x̂)² − m;
- slope cov(v, x̂) / Var v of the truth on the values, which noise in the truth does not bias.

All hold because e is independent of the estimates: the continuations serve only the truth. Intervals are 95 % bootstrap
intervals that resample whole rows (Efron 1979), since the states of one row depend on each other; fewer than six rows
give none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tokencredit.audit.estimates import MONTE_CARLO, TD
from tokencredit.audit.truth import Truth
from tokencredit.audit.verdict import MIN_ROWS, SIGNIFICANT, unknown

RESAMPLES = 1000
LEVEL = 0.95
BINS = 8
"""Bins of the reliability diagram."""
MAX_RANKED = 1500
"""Most states whose pairs are ranked."""
NEGLIGIBLE = 1e-3
"""Share of the mean true value below which the truth's deviation and the critic's RMSE give no verdict. Measured: 2e-7
and 2e-5 in CartPole, solved, with an explained variance of -6657."""
DECIMALS = 6
"""Decimals of true values and advantages in files."""
Figure = dict[str, float | None]
"""`value`, and the bounds `low` and `high` of its interval; None where undefined."""
Sums = dict[str, Tensor]
"""Sums over the states of each row, `[rows]`, or of each bootstrap sample, `[samples]`."""


class Resampling:
    """Bootstrap over rows: one figure per sample, from sums over the states of each row."""

    def __init__(self, rows: int):
        """Draw the samples; the first one is the original rows, and the only one if there are too few for intervals."""
        self.counts = torch.ones(1, rows, dtype=torch.float64)
        if rows < MIN_ROWS:
            return
        indices = torch.randint(rows, (RESAMPLES, rows), generator=torch.Generator().manual_seed(0))
        counts = torch.zeros(RESAMPLES, rows, dtype=torch.float64).scatter_add_(
            1, indices, torch.ones(RESAMPLES, rows, dtype=torch.float64)
        )
        self.counts = torch.cat([self.counts, counts])

    def samples(self, sums: Sums, formula: Callable[[Sums], Tensor]) -> Tensor:
        """The figure of each sample, `[1 + RESAMPLES]`, or `[1]` for few rows; NaN where undefined."""
        return formula({name: self.counts @ x for name, x in sums.items()})

    def figure(self, sums: Sums, formula: Callable[[Sums], Tensor]) -> Figure:
        """The figure with its interval."""
        return interval(self.samples(sums, formula))


def interval(samples: Tensor) -> Figure:
    """The first sample as the value, and the percentile interval of the others; None if most are undefined."""
    value, resampled = float(samples[0]), samples[1:][samples[1:].isfinite()]
    if not math.isfinite(value):
        return {"value": None, "low": None, "high": None}
    if len(resampled) < RESAMPLES / 2:
        return {"value": value, "low": None, "high": None}
    tail = (1 - LEVEL) / 2
    low, high = torch.quantile(resampled, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return {"value": value, "low": low, "high": high}


def row_sums(known: Tensor, truth: Tensor, noise: Tensor, estimate: Tensor) -> Sums:
    """Sums over the known states of each row: sufficient statistics of the figures in this module.

    The arguments are `[rows, time]`: states that count, x̂, variances of its errors, and the estimate a or v.
    """
    x, m, v = (torch.where(known, y.double(), 0.0) for y in (truth, noise, estimate))
    parts = {"n": known.double(), "x": x, "v": v, "xx": x * x, "vv": v * v, "xv": x * v, "m": m}
    return {name: part.sum(1) for name, part in parts.items()}


def correlation(sums: Sums) -> Tensor:
    """corr(a, x), corrected for the noise of the truth; NaN where noise explains all of the truth's variance."""
    cov, var_x, var_v, noise = _moments(sums)
    true = var_x - noise
    return torch.where((true > 0) & (var_v > 1e-20), cov / (true * var_v).clamp(min=1e-300).sqrt(), torch.nan)


def explained_variance(sums: Sums) -> Tensor:
    """1 − (Var(x̂ − v) − m) / (Var x̂ − m): 1 for a perfect critic, 0 for a constant, below 0 for a worse one."""
    cov, var_x, var_v, noise = _moments(sums)
    true = var_x - noise
    residual = var_x - 2 * cov + var_v - noise
    return torch.where(true > 0, 1 - residual / true, torch.nan)


def slope(sums: Sums) -> Tensor:
    """cov(v, x̂) / Var v: the rise of the truth per unit of value."""
    cov, _, var_v, _ = _moments(sums)
    return torch.where(var_v > 0, cov / var_v, torch.nan)


def spread(sums: Sums) -> Tensor:
    """Standard deviation of the values over that of the truth; near 0 for a critic that is too flat."""
    _, var_x, var_v, noise = _moments(sums)
    return torch.where(var_x > noise, (var_v / (var_x - noise)).clamp(min=0.0).sqrt(), torch.nan)


def rmse(sums: Sums) -> Tensor:
    """Root mean squared error, √ mean (v − x)²."""
    return ((sums["xx"] - 2 * sums["xv"] + sums["vv"] - sums["m"]) / sums["n"]).clamp(min=0.0).sqrt()


def constant_rmse(sums: Sums) -> Tensor:
    """RMSE of the best constant: the standard deviation of the truth."""
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


def judge_critic(truth: Truth, values: Tensor) -> dict[str, Any]:
    """Compare a critic's values, `[rows, time]`, with the truth.

    Values that are NaN take no part. Where the true values and the critic's errors hardly vary, for their size, the
    figures relative to the truth's variance are undefined.

    Returns:
        Figures `explained_variance`, `rmse`, `constant_rmse`, `bias`, `slope`, `spread`, `ranking` (share of pairs of
        states that the critic orders correctly, among pairs that differ by over two standard errors), `ranking_within`
        (pairs within a row) and `noise`; `states`, their number; and `reliability`, a list of bins of equal size with
        the means `predicted` and `true` and the interval of the latter.
    """
    known = truth.values.isfinite() & values.isfinite()
    # Every figure is invariant to a common shift, and sums of squares lose fewer digits near 0.
    centre = truth.values[known].mean()
    sums = row_sums(known, truth.values - centre, truth.value_noise, values.double() - centre)
    resampling = Resampling(len(known))
    formulas = (explained_variance, rmse, constant_rmse, bias, slope, spread)
    figures: dict[str, Any] = {formula.__name__: resampling.figure(sums, formula) for formula in formulas}
    if all((figures[name]["value"] or 0.0) < NEGLIGIBLE * abs(centre) for name in ("rmse", "constant_rmse")):
        undefined = dict.fromkeys(("value", "low", "high"))
        figures |= dict.fromkeys(("explained_variance", "slope", "spread"), undefined)
    figures["noise"] = resampling.figure(sums, noise_share)
    right, total = ranked_pairs(known, truth.values, truth.value_errors, values)
    weights = resampling.counts
    figures["ranking"] = interval(((weights @ right) * weights).sum(1) / ((weights @ total) * weights).sum(1))
    figures["ranking_within"] = interval((weights @ right.diagonal()) / (weights @ total.diagonal()))
    return figures | {"states": int(known.sum()), "reliability": reliability(known, truth, values, resampling)}


def ranked_pairs(known: Tensor, truth: Tensor, errors: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Count pairs of states that differ by over two standard errors: correctly ordered ones, and all.

    Returns:
        `[rows, rows]` each, by the rows of the two states; ties of the critic count half.
    """
    rows, time = known.nonzero(as_tuple=True)
    if len(rows) > MAX_RANKED:
        kept = torch.linspace(0, len(rows) - 1, MAX_RANKED).long()
        rows, time = rows[kept], time[kept]
    x, e, v = (y.double()[rows, time] for y in (truth, errors, values))
    difference = x.unsqueeze(1) - x.unsqueeze(0)
    significant = difference > SIGNIFICANT * torch.hypot(e.unsqueeze(1), e.unsqueeze(0))
    order = (v.unsqueeze(1) - v.unsqueeze(0)).sign()
    count = len(known)
    pairs = (rows.unsqueeze(1) * count + rows.unsqueeze(0))[significant]
    right, total = torch.zeros(2, count * count, dtype=torch.float64)
    right.index_add_(0, pairs, (order[significant] + 1) / 2)
    total.index_add_(0, pairs, torch.ones(len(pairs), dtype=torch.float64))
    return right.view(count, count), total.view(count, count)


def reliability(known: Tensor, truth: Truth, values: Tensor, resampling: Resampling) -> list[dict[str, float | None]]:
    """Reliability diagram: equal-size bins by value, each with mean value, mean truth and interval, and state count."""
    predicted = values.double()[known]
    if len(predicted) == 0:
        return []
    edges = torch.quantile(predicted, torch.linspace(0, 1, BINS + 1, dtype=torch.float64)[1:-1])
    bins = torch.bucketize(values.double().contiguous(), edges.unique())
    diagram: list[dict[str, float | None]] = []
    for number in bins[known].unique().tolist():
        inside = known & (bins == number)
        sums = row_sums(inside, truth.values, truth.value_noise, values)
        true = resampling.figure(sums, lambda s: s["x"] / s["n"])
        count = float(sums["n"].sum())
        predicted_mean = float(sums["v"].sum()) / count
        bounds = {"low": true["low"], "high": true["high"]}
        diagram.append({"predicted": predicted_mean, "true": true["value"], **bounds, "states": count})
    return diagram


def judge_credit(truth: Truth, advantages: Mapping[str, Tensor], scaled: bool = False) -> dict[str, Any]:
    """Compare estimators' advantages, `[rows, time]` each by label, with the truth; the first is the one shown.

    Returns:
        `tokens`, the number of known ones; `significant`, the number of those whose true advantage is over two standard
        errors from 0; `noise`, the share of the truth's variance that is noise; `shown`; `error`, the root mean squared
        error of its advantages, not known if they are `scaled` to other units; and `estimators`, each with the figures
        `correlation`, `sign_agreement` (share of the significant tokens with the correct sign) and `gain`, the
        correlation minus that of `shown`.
    """
    known = truth.advantages.isfinite()
    resampling = Resampling(len(known))
    sums = {
        label: row_sums(known, truth.advantages, truth.advantage_noise, estimate)
        for label, estimate in advantages.items()
    }
    shown = next(iter(advantages))
    error = resampling.figure(sums[shown], rmse)
    shown_samples = resampling.samples(sums[shown], correlation)
    significant = known & (truth.advantages.abs() > SIGNIFICANT * truth.advantage_errors)
    estimators = {}
    for label, estimate in advantages.items():
        samples = resampling.samples(sums[label], correlation)
        agree = significant & (estimate.double().sign() == truth.advantages.sign())
        signs = {"right": agree.double().sum(1), "all": significant.double().sum(1)}
        estimators[label] = {
            "correlation": interval(samples),
            "sign_agreement": resampling.figure(signs, lambda s: s["right"] / s["all"]),
            "gain": interval(samples - shown_samples),
        }
    return {
        "tokens": int(known.sum()),
        "significant": int(significant.sum()),
        "noise": resampling.figure(sums[shown], noise_share),
        "shown": shown,
        "error": dict.fromkeys(error) if scaled else error,
        "estimators": estimators,
    }


def share_real(correlation: float | None) -> float | None:
    """The trust score: share of the shown advantages' variance that the true ones explain, r² where r > 0."""
    return None if correlation is None else min(max(correlation, 0.0), 1.0) ** 2


def judge(
    truth: Truth, values: Tensor | None, advantages: Mapping[str, Tensor], scaled: bool = False
) -> dict[str, Any]:
    """The findings of an audit: `credit`, `critic` (None without values) and their `metrics`.

    `scaled`: the shown advantages are in deviations of their group, and so have no error in units of the reward.
    """
    credit = judge_credit(truth, advantages, scaled)
    critic = None if values is None else judge_critic(truth, values)
    return {"credit": credit, "critic": critic, "metrics": audit_metrics(credit, critic)}


def audit_metrics(credit: Mapping[str, Any], critic: Mapping[str, Any] | None) -> dict[str, float]:
    """The metrics of an audit, without undefined figures, and without a correlation whose verdict is unknown.

    Returns:
        `audit/correlation` of the shown advantages with the true ones, with the bounds of its interval
        (`audit/correlation_low`, `audit/correlation_high`), and `audit/trust`, the share of their variance that is
        real; `audit/advantage_error`, their root mean squared error, unless it is lost in the noise;
        `audit/sign_agreement` over `audit/significant_tokens`; `audit/noise` of the truth; `audit/raise_lam` and
        `audit/lower_lam`, lower bounds of the gain in correlation with λ = 1 and λ = 0. For the critic:
        `audit/explained_variance` and its upper bound `audit/explained_variance_high`, `audit/slope`, `audit/bias`,
        `audit/spread` and its upper bound, `audit/ranking`, and `audit/value_noise`, the share of noise in the true
        values.
    """
    estimators, shown = credit["estimators"], credit["estimators"][credit["shown"]]
    correlation = dict.fromkeys(shown["correlation"]) if unknown(credit) else shown["correlation"]
    figures: dict[str, float | None] = {
        "correlation": correlation["value"],
        "correlation_low": correlation["low"],
        "correlation_high": correlation["high"],
        "trust": share_real(correlation["value"]),
        "advantage_error": credit["error"]["value"] or None,
        "sign_agreement": shown["sign_agreement"]["value"],
        "significant_tokens": credit["significant"],
        "noise": credit["noise"]["value"],
    }
    for name, label in {"raise_lam": MONTE_CARLO, "lower_lam": TD}.items():
        if label in estimators and label != credit["shown"]:
            figures[name] = estimators[label]["gain"]["low"]
    if critic is not None:
        figures["value_noise"] = critic["noise"]["value"]
        names = ("explained_variance", "slope", "bias", "spread", "ranking")
        figures |= {name: critic[name]["value"] for name in names}
        figures |= {f"{name}_high": critic[name]["high"] for name in ("explained_variance", "spread")}
    return {f"audit/{name}": value for name, value in figures.items() if value is not None}


def true_numbers(truth: Truth, row: int, length: int) -> dict[str, list[float | None]]:
    """True values and advantages of a row's steps, with standard errors; None where unknown."""
    kept = ("values", "value_errors", "advantages", "advantage_errors")
    numbers = {f"true_{name}": getattr(truth, name)[row, :length].tolist() for name in kept}
    return {name: [round(x, DECIMALS) if math.isfinite(x) else None for x in xs] for name, xs in numbers.items()}
