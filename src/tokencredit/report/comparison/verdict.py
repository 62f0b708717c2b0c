"""Differences between settings at the end of their runs, and the verdict in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokencredit.report.comparison.stats import (
    LEVEL,
    RunGroup,
    bootstrap,
    interquartile_mean,
    last,
    rank_p,
    reward_keys,
    spread,
    too_few,
)
from tokencredit.report.templating import two_digits

LOSSES = ("loss", "perplexity")
"""Metrics of which less is better, with those that end in them, such as eval/loss and value_loss."""
NAMED = 3
"""Most keys named in a sentence."""
ONE_RUN, FEW, NOISE, MORE = "one run per setting", "too few seeds", "not distinguishable from noise", "more than noise"


@dataclass(frozen=True)
class Difference:
    """Difference between two settings: the interquartile mean of the first one's ends, less that of the other's."""

    setting: str
    other: str
    """Labels of the settings."""
    difference: float
    low: float | None
    high: float | None
    """95 % bootstrap interval; None with too few runs."""
    p: float | None
    """Two-sided p-value of the rank-sum test, not corrected for the number of pairs; None with too few runs."""
    verdict: str
    """`one run per setting`, `too few seeds`, `not distinguishable from noise` or `more than noise`."""


def ends(group: RunGroup, metric: str) -> np.ndarray:
    """Where each run of a group ends: its mean over the last iterations."""
    return np.array([last(run, metric) for run in group.runs], dtype=float)


def difference(group: RunGroup, other: RunGroup, metric: str) -> Difference:
    """The difference between two groups.

    Its interval is a percentile bootstrap over the runs of each group; a rank-sum test says if it is noise.
    """
    one, two = ends(group, metric), ends(other, metric)
    found = group.label, other.label, float(spread(one, two))
    if too_few(len(one), len(two)):
        return Difference(*found, None, None, None, ONE_RUN if len(one) == len(two) == 1 else FEW)
    # In one order of the two, whose random resamples give the reverse difference the mirror image.
    if group.label <= other.label:
        low, high = bootstrap(spread, one, two)
    else:
        high, low = (-bound for bound in bootstrap(spread, two, one))
    chance = rank_p(one, two)
    return Difference(*found, float(low), float(high), chance, MORE if chance <= 1 - LEVEL else NOISE)


def verdict(groups: Sequence[RunGroup], metric: str) -> list[str]:
    """Sentences on the two groups that end highest, a loss lowest, or on the only group; first, if rewards differ, so.

    A group ends at the interquartile mean of its runs.
    """
    middles = [float(interquartile_mean(ends(group, metric))) for group in groups]
    word, sign = ("lower", 1) if metric.endswith(LOSSES) else ("higher", -1)
    best, *others = sorted(range(len(groups)), key=lambda number: sign * middles[number])
    first, end = groups[best], two_digits(middles[best])
    if not others:
        runs = f"{len(first.runs)} run" + "s" * (len(first.runs) > 1)
        return [f"{metric} ends at {end} in {runs} of one setting; there is nothing to compare."]
    second, other_end = groups[others[0]], two_digits(middles[others[0]])
    caution, keys = [], reward_keys(groups, metric)
    if keys:
        more = f" and {len(keys) - NAMED} more" if len(keys) > NAMED else ""
        caution = [
            f"The runs have different rewards ({', '.join(keys[:NAMED])}{more}): the higher one is no better result. "
            "Compare by a metric that means the same in all runs, with --metric."
        ]
    if middles[best] == middles[others[0]]:
        return [*caution, f"{first.label} and {second.label} end at the same {metric}, {end}."]
    rest = f", the next of {len(groups)} settings" if len(groups) > 2 else ""
    sentence = f"{first.label} ends at the {word} {metric}: {end}, against {other_end} with {second.label}{rest}"
    stops = sorted({run.metrics[-1]["iteration"] for group in groups for run in group.runs})
    apart = [f"The runs end at different iterations, {stops[0]} to {stops[-1]}."] if len(stops) > 1 else []
    over = f"{len(first.runs)} and {len(second.runs)} runs"
    return [*caution, *in_words(sentence, difference(first, second, metric), over), *apart]


def in_words(sentence: str, found: Difference, over: str) -> list[str]:
    """The sentence with a difference, and one on its uncertainty; `over` are the numbers of runs, in words."""
    known = f"{sentence}, a difference of {two_digits(found.difference)}"
    if found.verdict == ONE_RUN:
        return [f"{known}.", "There is one run per setting: other seeds may reverse the order."]
    if found.verdict == FEW:
        return [
            f"{known}.",
            f"With {over} there are too few seeds to tell it from noise; take at least four per setting.",
        ]
    return [
        f"{known}, 95 % interval {two_digits(found.low)} to {two_digits(found.high)}.",
        f"Over {over} this is {found.verdict} (rank-sum test, p = {two_digits(found.p)}).",
    ]
