"""What is read from the runs of a study: figures of a run, their differences over seeds, tables and verdicts."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

HERE = Path(__file__).parent
DATA = HERE / "findings-data"
LATELY = 5
"""Iterations averaged in the study of true credit."""
AUDITED_WELL = "first 20"
"""The variant of worlds.json with large audits."""
LAST = 10
"""Number of final iterations averaged as the result."""
Run = Mapping[str, list[float | None]]
Study = Mapping[str, Mapping[str, Run]]
"""Variants, seeds, metrics."""
Measure = Callable[[Run, str], float]
"""A figure of a run, from one of its metrics."""
Columns = Mapping[str, tuple[Measure, str]]
"""A table column: title, measure of a run, and the metric that it measures."""
Comparison = tuple[str, str, str]
"""First variant, second variant, metric."""


def read(study: str) -> Study:
    """Load a stored study."""
    return json.loads((DATA / f"{study}.json").read_text(encoding="utf-8"))


def end(run: Run, metric: str) -> float:
    """The mean of a metric over the last iterations."""
    return average(run.get(metric, [])[-LAST:])


def whole(run: Run, metric: str) -> float:
    """The mean over all iterations: for the reward, how fast it was learned."""
    return average(run.get(metric, []))


def early(run: Run, metric: str) -> float:
    """The mean over the first quarter of the iterations."""
    return average(run[metric][: len(run[metric]) // 4])


def first(run: Run, metric: str) -> float:
    """The value of the first iteration, before any training."""
    return average(run.get(metric, [])[:1])


def gained(run: Run, metric: str) -> float:
    """The mean over all iterations of the share of the way from the first one's figure to 1."""
    start = first(run, metric)
    return (whole(run, metric) - start) / (1 - start)


def peak(run: Run, metric: str) -> float:
    """The maximum over all iterations."""
    return max((value for value in run.get(metric, []) if value is not None), default=math.nan)


def audited(run: Run, what: str) -> float:
    """A figure of an audit: `20 shown`, the correlation of the shown advantages after iteration 20, or one of the
    critic's or of another estimator's; NaN where it cannot be known."""
    number, _, name = what.partition(" ")
    audit: Any = run["audits"].get(number)  # type: ignore[attr-defined]  # of worlds.json
    if audit is None:
        return math.nan
    shown = {"shown": audit["correlations"][audit["shown"]], "noise": audit["noise"]}
    values = audit["correlations"] | shown | (audit["critic"] or {})
    value = values.get(name)
    return math.nan if value is None else float(value)


def share(run: Run, what: str) -> float:
    """The share of the attainable, the mean of three iterations up to one; NaN where that is not known."""
    at = int(what)
    if len(run["reward"]) < at or "best" not in run:
        return math.nan
    objective = average(run["reward"][at - 3 : at]) - PRICE * average(run["kl"][at - 3 : at])
    return (objective - run["reference"][0]) / (run["best"][0] - run["reference"][0])


def at_kl(run: Run, what: str) -> float:
    """Reward where the KL first reached so many nats per sequence, between iterations by a line; means of three."""
    before = None
    for at in range(3, len(run["kl"]) + 1):
        kl, reward = (average(run[name][at - 3 : at]) for name in ("kl", "reward"))
        if kl >= float(what):
            return reward if before is None else float(np.interp(float(what), *zip(before, (kl, reward), strict=True)))
        before = (kl, reward)
    return math.nan


def fresh(run: Run, metric: str) -> float:
    """A figure of fresh completions of the trained policy; of beside-trl.json."""
    final: Any = run.get("final", {})
    return float(final.get(metric, math.nan))


def pace(run: Run, metric: str) -> float:
    """Seconds per iteration."""
    clock: Any = run.get(metric, [math.nan])
    return float(clock[-1]) / len(clock)


def by_world(worlds: Mapping[str, Any]) -> Study:
    """Each world's variants as one study, each run with its world's best objective and the reference's, if known."""
    return {
        f"{world}, {variant}": {
            seed: run | {key: [study["limit"][key]] for key in ("best", "reference") if "limit" in study}
            for seed, run in runs.items()
        }
        for world, study in worlds.items()
        for variant, runs in study.items()
        if variant != "limit"
    }


def at_ppos_kl(study: Study) -> Study:
    """A study of the whole path, with DPO and IPO at the KL at which each seed's PPO ends.

    Each figure lies on a line over √KL, in which Gao et al. (2022) draw rewards, between the SFT model and the runs of
    each β; a seed whose runs all end below PPO's KL has none.
    """
    found: dict[str, dict[str, Run]] = {}
    for loss, (seed, ppo) in product(("DPO", "IPO"), study["PPO"].items()):
        path = [runs[seed] for name, runs in study.items() if name == "SFT" or name.startswith(loss)]
        path.sort(key=lambda run: run["kl"][0])
        at, *kls = (max(run["kl"][0], 0.0) ** 0.5 for run in (ppo, *path))
        found.setdefault(f"{loss} at PPO's KL", {})[seed] = {
            name: [float(np.interp(at, kls, [run[name][0] for run in path]))] if at <= kls[-1] else [] for name in ppo
        } | {"kl": ppo["kl"]}
    return {**study, **found}


def weighted(runs: Sequence[Run], at: int) -> float:
    """The mean correlation after an iteration, weighted by the parts of the truths' variances that are not noise.

    NaN if no audit can tell.
    """
    pairs = [(audited(run, f"{at} shown"), 1 - audited(run, f"{at} noise")) for run in runs]
    known = [(value, weight) for value, weight in pairs if math.isfinite(value)]
    weights = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / weights if weights else math.nan


def reached(run: Run, what: str) -> float:
    """Iteration at which the reward, a mean over five, first reached a height, such as `0.9`; NaN if it never did."""
    rewards = run["reward"]
    for number in range(LATELY, len(rewards) + 1):
        if average(rewards[number - LATELY : number]) >= float(what):
            return float(number)
    return math.nan


def lately(run: Run, metric: str) -> float:
    """The mean over the last five iterations."""
    return average(run.get(metric, [])[-LATELY:])


def updated(run: Run, what: str) -> float:
    """The mean reward of the policies after so many updates, such as `14 23`; samples are as many updates older as
    their age."""
    first, last = map(int, what.split())
    age = round(end(run, "age_mean")) if "age_mean" in run else 0
    return average(run["reward"][age + first : age + last + 1])


def average(values: Sequence[float | None]) -> float:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else math.nan


def unsteadiness(run: Run, metric: str) -> float:
    """The deviation of a metric's change from an iteration to the next, over the second half of the run."""
    values = np.array([np.nan if value is None else value for value in run[metric]], dtype=float)
    return float(np.nanstd(np.diff(values[len(values) // 2 :])))


def figures(study: Study, variant: str, measure: Measure, metric: str) -> list[float]:
    """A measure of each run of a variant, where defined."""
    values = [measure(run, metric) for run in study[variant].values()]
    return [value for value in values if math.isfinite(value)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its 95 % interval by Student's t."""
    mean = float(np.mean(values)) if values else math.nan
    if len(values) < 2:
        return mean, math.nan
    if np.ptp(values) == 0:  # whose deviation is rounding, or 0
        return mean, 0.0
    return mean, float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


def difference(one: Sequence[float], other: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """The difference of two means with its interval by Welch's t; NaN where one run alone stands on a side."""
    delta = float(np.mean(one) - np.mean(other)) if one and other else math.nan
    if min(len(one), len(other)) < 2:
        return delta, math.nan, math.nan
    if np.ptp(one) == np.ptp(other) == 0:  # equal runs, such as those at the highest return
        return delta, delta, delta
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # one side may be equal runs, whose variance is rounding
        low, high = stats.ttest_ind(one, other, equal_var=False).confidence_interval(level)
    return delta, float(low), float(high)


def number(value: float, digits: int = 3, sign: str = "") -> str:
    """Format with this many digits and no exponent: 0.0123, 1,230."""
    return f"{float(f'{value:.{digits}g}'):{sign},.10g}"


def row(study: Study, variant: str, base: str | None, columns: Columns) -> str:
    """A variant's line of a table: its number of runs, and each figure with its 95 % interval and, if not all runs have
    it, their number."""
    cells, runs = [], len(study[variant])
    for measure, metric in columns.values():
        values = figures(study, variant, measure, metric)
        mean, half = interval(values)
        cell = number(mean) if values else "–"  # no figure without a reference model
        cell += f" ± {number(half, 2)}" if math.isfinite(half) else ""
        cells.append(cell + f" ({len(values)} of {runs})" * (0 < len(values) < runs))
    if base is not None:
        cells.append("" if variant == base else less(study, variant, base, *next(iter(columns.values()))))
    return f"| {variant} | {len(study[variant])} | " + " | ".join(cells) + " |"


def less(study: Study, variant: str, other: str, measure: Measure, metric: str) -> str:
    """Difference of a figure between two variants, with its interval; * marks intervals that exclude 0."""
    delta, low, high = difference(figures(study, variant, measure, metric), figures(study, other, measure, metric))
    if not math.isfinite(delta):
        return "–"
    if not math.isfinite(low):
        return number(delta, sign="+")
    return f"{number(delta, sign='+')} [{number(low, sign='+')}, {number(high, sign='+')}]" + " *" * (low * high > 0)


def table(study: Study, columns: Columns, base: str | None = None, pairs: Sequence[tuple[str, str]] = ()) -> str:
    """All variants, one per line.

    With a base, the last column is the first figure's difference to it; each of `pairs` adds a line, whose every figure
    is the first one's less the second one's.
    """
    titles = ["variant", "runs", *columns] + ([f"{next(iter(columns))}, less {base}'s"] if base else [])
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    lines += [row(study, variant, base, columns) for variant in study]
    for one, other in pairs:
        cells = [less(study, one, other, *column) for column in columns.values()] + [""] * (base is not None)
        lines.append(f"| {one} less {other} | | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def mean_curve(runs: Mapping[str, Run], metric: str) -> np.ndarray:
    """The mean over runs, up to the length of the shortest."""
    shortest = min(len(run[metric]) for run in runs.values())
    return np.mean([np.array(run[metric][:shortest], dtype=float) for run in runs.values()], axis=0)


AUDITED = (5, 10, 20)
"""Iterations after which credit was audited in the study `worlds`."""
PRICE = 0.05
"""`kl.coef` of the study `worlds`."""
Studies = Mapping[str, Study]


def verdict(pairs: Sequence[tuple[Sequence[float], Sequence[float]]], all_run: bool = True) -> str:
    """The verdict on a claim that the mean of each first side is above that of the second.

    It holds if all 95 % intervals of the differences are above 0, and all comparisons were run. It does not hold if one
    is below 0 at the level 1 − 0.05 / k, of k comparisons: one of many is below 0 by chance. Otherwise: cannot tell.
    """
    if any(difference(*pair, level=1 - 0.05 / len(pairs))[2] < 0 for pair in pairs):
        return "**does not hold here**"
    holds = pairs and all_run and all(difference(*pair)[1] > 0 for pair in pairs)
    return "**holds here**" if holds else "cannot tell"


def judged(
    study: Study, measure: Measure, comparisons: Sequence[Comparison]
) -> tuple[str, dict[str, tuple[float, float, float]]]:
    """The verdict on a claim, that the figure of each first variant is larger than that of the second.

    With the differences where both have the figure, by a text of each. A run without the figure counts as not run.
    """
    pairs, shown, missing = [], {}, False
    for one, other, metric in comparisons:
        if one not in study or other not in study:
            missing = True
            continue
        pair = (figures(study, one, measure, metric), figures(study, other, measure, metric))
        missing |= (len(pair[0]), len(pair[1])) != (len(study[one]), len(study[other]))
        pairs.append(pair)
        if all(pair):
            shown[f"{one} less {other}: {less(study, one, other, measure, metric)}"] = difference(*pair)
    return verdict(pairs, all_run=not missing), shown


def there(study: Study, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Pairs of variants that were both run."""
    return [pair for pair in pairs if set(pair) <= set(study)]
