"""The verdict of a comparison: the setting that ends higher, by how much, and if that is more than noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from tokencredit.report.comparison_stats import FEWEST, LEVEL, RESAMPLES, Group, interquartile_mean, last, reward_keys
from tokencredit.report.templating import two_digits

NAMED = 3
"""Most keys named in a sentence."""
EXCHANGES = 10_000
"""Exchanges of runs between two groups in a test; it is exact if there are no more."""


LOSSES = ("loss", "perplexity")
"""Metrics of which less is better, with those that end in them, such as eval/loss and value_loss."""


def verdict(groups: Sequence[Group], metric: str) -> list[str]:
    """Sentences on the two groups that end highest, a loss lowest, or on the only group; first, if rewards differ, so.

    A run ends at its mean over the last iterations, a group at the interquartile mean of its runs. The interval of the
    difference is a percentile bootstrap over the runs of each group; a rank-sum test says if it is noise.
    """
    ends = [(group.label, np.array([last(run, metric) for run in group.runs], dtype=float)) for group in groups]
    word, sign = ("lower", 1) if metric.endswith(LOSSES) else ("higher", -1)
    (first, best), *others = sorted(ends, key=lambda found: sign * float(interquartile_mean(found[1])))
    if not others:
        runs = f"{len(best)} run" + "s" * (len(best) > 1)
        return [f"{metric} ends at {middle(best)} in {runs} of one setting; there is nothing to compare."]
    second, other = others[0]
    caution = different_rewards(reward_keys(groups, metric))
    if not spread(best, other):
        return [*caution, f"{first} and {second} end at the same {metric}, {middle(best)}."]
    rest = f", the next of {len(ends)} settings" if len(ends) > 2 else ""
    sentence = f"{first} ends at the {word} {metric}: {middle(best)}, against {middle(other)} with {second}{rest}"
    stops = sorted({run.metrics[-1]["iteration"] for group in groups for run in group.runs})
    apart = [f"The runs end at different iterations, {stops[0]} to {stops[-1]}."] if len(stops) > 1 else []
    return [*caution, *compared(sentence, best, other), *apart]


def different_rewards(keys: Sequence[str]) -> list[str]:
    """A sentence on runs whose rewards differ in these keys; none without keys."""
    if not keys:
        return []
    more = f" and {len(keys) - NAMED} more" if len(keys) > NAMED else ""
    return [
        f"The runs have different rewards ({', '.join(keys[:NAMED])}{more}): the higher one is no better result. "
        "Compare by a metric that means the same in all runs, with --metric."
    ]


def compared(sentence: str, best: np.ndarray, other: np.ndarray) -> list[str]:
    """The sentence with the difference of two groups, and one on its uncertainty."""
    difference = float(spread(best, other))
    known = f"{sentence}, a difference of {two_digits(difference)}"
    over = f"{len(best)} and {len(other)} runs"
    if len(best) == len(other) == 1:
        return [f"{known}.", "There is one run per setting: other seeds may reverse the order."]
    if too_few(len(best), len(other)):
        return [
            f"{known}.",
            f"With {over} there are too few seeds to tell it from noise; take at least four per setting.",
        ]
    low, high = interval(best, other)
    chance = rank_p(best, other)
    noise = "more than noise" if chance <= 1 - LEVEL else "not distinguishable from noise"
    return [
        f"{known}, 95 % interval {two_digits(low)} to {two_digits(high)}.",
        f"Over {over} this is {noise} (rank-sum test, p = {two_digits(chance)}).",
    ]


def middle(ends: np.ndarray) -> str:
    """The interquartile mean, as text."""
    return two_digits(float(interquartile_mean(ends)))


def too_few(one: int, other: int) -> bool:
    """True if the rank-sum test cannot reach the level, or a group has no interval."""
    return min(one, other) < FEWEST or 2 / math.comb(one + other, one) > 1 - LEVEL


def spread(one: np.ndarray, other: np.ndarray, axis: int = -1) -> Any:
    """Difference of two interquartile means."""
    return interquartile_mean(one, axis=axis) - interquartile_mean(other, axis=axis)


def interval(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """95 % percentile bootstrap interval of a difference; each side's runs are resampled, so it stays in their range.

    Agarwal et al. (2021), "Deep Reinforcement Learning at the Edge of the Statistical Precipice", section 4.
    """
    options: dict[str, Any] = {"n_resamples": RESAMPLES, "confidence_level": LEVEL, "method": "percentile", "rng": 0}
    found = stats.bootstrap((one, other), spread, vectorized=True, **options).confidence_interval
    return float(found.low), float(found.high)


def rank_p(one: np.ndarray, other: np.ndarray) -> float:
    """Two-sided p-value of Mann and Whitney's rank-sum test, over all exchanges of runs, or many at random.

    Mann and Whitney (1947), "On a Test of Whether one of Two Random Variables is Stochastically Larger than the Other".
    It assumes no distribution. A test of interquartile means would need more runs, because trimming discards some.
    """
    method = stats.PermutationMethod(n_resamples=EXCHANGES, rng=0)
    return float(stats.mannwhitneyu(one, other, method=method).pvalue)
