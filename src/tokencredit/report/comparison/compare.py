"""Compare runs from Python: curves, intervals, differences and a verdict as plain objects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from tokencredit.errors import ConfigError
from tokencredit.report.comparison.stats import (
    LEVEL,
    SEED,
    Curve,
    RunGroup,
    axes,
    bootstrap,
    choose_metric,
    curve,
    differing,
    estimated,
    group_runs,
    interquartile_mean,
    last,
    outcomes,
    rank_p,
    reward_keys,
    spread,
    stopped_by,
    too_few,
    values,
)
from tokencredit.report.reading import NoIteration, Run, read_run
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


@dataclass(frozen=True)
class Comparison:
    """A comparison of runs; runs that differ only in seed and folder form one setting."""

    metric: str
    smooth: int
    groups: list[RunGroup]
    """Settings, with their runs."""
    axes: dict[str, str]
    """X axes that all runs have, by name and title."""
    curves: dict[str, list[Curve]]
    """By axis, one curve per setting: x, the estimate with its interval, and the curve of each run."""
    verdict: list[str]
    """Sentences, with untrusted text."""

    @cached_property
    def outcomes(self) -> dict[str, list[list[float | None]]]:
        """Outcomes by name, such as `reward_last`: a list per setting, with a number per run."""
        return outcomes(self.groups, self.metric)

    @cached_property
    def differences(self) -> list[Difference]:
        """Differences of all pairs of settings at the end of their runs."""
        return [difference(one, other, self.metric) for one, other in combinations(self.groups, 2)]

    @cached_property
    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """The comparison as lists of rows, for `pandas.DataFrame`, JSON and CSV.

        Returns:
            `settings`: per setting the keys that differ, its number of runs, and each outcome with its interval;
            `runs`: per run these keys, its seed and each outcome; `curves`: per point of a curve its setting, its run
            (None for the estimate over all), axis, x, value and interval; `differences`: per pair of settings, as
            `Difference`. Intervals are None where there are too few runs.
        """
        return {
            "settings": list(self._settings()),
            "runs": list(self._runs()),
            "curves": list(self._curves()),
            "differences": [asdict(found) for found in self.differences],
        }

    def _named(self, group: RunGroup) -> dict[str, Any]:
        """The first columns of a setting's rows: its label, and its values of the keys that differ."""
        keys = differing([other.settings for other in self.groups])
        return {"setting": group.label} | {key: ", ".join(values(group.settings, key)) for key in keys}

    def _settings(self) -> Iterator[dict[str, Any]]:
        for number, group in enumerate(self.groups):
            row = self._named(group) | {"runs": len(group.runs)}
            for name, found in self.outcomes.items():
                estimate = estimated(found[number])
                numbers = (None,) * 3 if estimate is None else (estimate.middle, estimate.low, estimate.high)
                for ending, value in zip(("", "_low", "_high"), numbers, strict=True):
                    row[name + ending] = None if value is None else value.item()
            yield row

    def _runs(self) -> Iterator[dict[str, Any]]:
        for number, group in enumerate(self.groups):
            for place, run in enumerate(group.runs):
                row = self._named(group) | {"run": str(run.path), "seed": run.config.get(SEED)}
                row |= {name: found[number][place] for name, found in self.outcomes.items()}
                yield row | {"stopped_by": stopped_by(run)}

    def _curves(self) -> Iterator[dict[str, Any]]:
        for axis, lines in self.curves.items():
            for group, line in zip(self.groups, lines, strict=True):
                names = {"setting": group.label, "run": None, "axis": axis}
                yield from points(names, line.x, line.y.middle, line.y.low, line.y.high)
                for run, (x, y) in zip(group.runs, line.runs, strict=True):
                    yield from points(names | {"run": str(run.path)}, x, y)


def points(
    names: dict[str, Any], x: np.ndarray, y: np.ndarray, low: np.ndarray | None = None, high: np.ndarray | None = None
) -> Iterator[dict[str, Any]]:
    """The rows of a curve's points; `names` begin each row."""
    columns = [[None] * len(x) if found is None else found.tolist() for found in (x, y, low, high)]
    for numbers in zip(*columns, strict=True):
        yield names | dict(zip(("x", "value", "low", "high"), numbers, strict=True))


def compare(
    runs: Sequence[str | Path | Run], *, metric: str | None = None, group_by: str | None = None, smooth: int = 1
) -> Comparison:
    """Compare runs: curves over seeds, outcomes with intervals, differences between settings, and a verdict.

    Args:
        runs: folders of runs, or results of `read_run`, all of language models or all of agents; a run that is named
            twice counts once.
        metric: metric to compare; None for the reward, or an agent's return.
        group_by: dotted key whose value groups runs into one curve; None for all keys but seed and folder.
        smooth: window of each run's running mean.

    Raises:
        ConfigError: a folder is not a run's, or the runs cannot be compared.
    """
    if isinstance(runs, str | Path) or not runs:
        raise ConfigError(
            "no run to compare; give a list of folders" if not runs else f"runs is {str(runs)!r}; give a list"
        )
    if smooth < 1:
        raise ConfigError(f"smooth is {smooth}; it must be at least 1")
    loaded, empty = dict[Path, Run](), list[NoIteration]()
    for run in runs:
        path = run.path if isinstance(run, Run) else Path(run).expanduser()
        try:
            read = run if isinstance(run, Run) else read_run(path, samples=False)
            if not read.scored:
                raise NoIteration(f"{str(path)!r} has no finished iteration since what is scored changed")
            loaded.setdefault(path.resolve(), read)
        except NoIteration as error:
            empty.append(error)
    if not loaded:
        raise empty[0]
    found = list(loaded.values())
    metric = choose_metric(found, metric)
    groups, titles = group_runs(found, group_by), axes(found)
    curves = {axis: [curve(group.runs, metric, axis, smooth) for group in groups] for axis in titles}
    sentences = [*(f"left out: {error}" for error in dict.fromkeys(map(str, empty))), *verdict(groups, metric)]
    return Comparison(metric, smooth, groups, titles, curves, sentences)


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
