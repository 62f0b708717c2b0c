"""Statistics of a comparison: groups of runs, differing settings, estimates over seeds, and their test."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from tokencredit.core.estimator_table import ESTIMATORS, SETTINGS
from tokencredit.errors import ConfigError, importing
from tokencredit.provenance.parts import label, parameters
from tokencredit.report.reading import Run
from tokencredit.report.templating import two_digits
from tokencredit.runs.jsonl import PRICED, is_number, same_score, scored_anew
from tokencredit.runs.summary import attained_share, final_mean, finite
from tokencredit.settings.data import KINDS
from tokencredit.settings.fields import flat
from tokencredit.settings.foreign_names import misspelt, suggestion
from tokencredit.settings.run_kind import PARTS, TEXT, RunKind, run_kind_of

POINTS = 500
"""Maximum points per curve."""
RESAMPLES = 2000
"""Resamples of a bootstrap interval, as in rliable for curves."""
LEVEL = 0.95
FEWEST = 3
"""Smallest number of runs with an interval."""
SEED = "seed"
"""The key in which repetitions differ, beside those of files."""
NUMBERS = ("run.iterations", "run.shard")
"""Settings of `run` that change numbers."""
REWARD = r"(python\.(reward_funcs|environment_factory)|reward|env\.(factory|kwargs))(\[|\.|$)"
"""Beginning of the keys of rewards, and of environments, which have rewards of their own."""
LABEL = 60
"""Maximum characters of a curve's name made from settings."""
MISSING, UNREAD = "not set", "not read"
EXCHANGES = 10_000
"""Exchanges of runs between two groups in a test; it is exact if there are no more."""


@dataclass(frozen=True)
class RunGroup:
    """Runs that form one curve."""

    label: str
    runs: list[Run]
    settings: list[dict[str, str]]
    """Settings of each run, by dotted key."""


@dataclass(frozen=True)
class Estimate:
    """Estimate over several runs, at one point or many; without an interval for fewer than `FEWEST`."""

    middle: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


@dataclass(frozen=True)
class Curve:
    """A group's curve and those of its runs, each to its own end: pairs of x and y."""

    x: np.ndarray
    y: Estimate
    runs: list[tuple[np.ndarray, np.ndarray]]


def axes(runs: Sequence[Run]) -> dict[str, str]:
    """Possible x axes, by name and title: only those that every run has in each iteration."""
    titles = {"iteration": "iterations", "seconds": "seconds"}
    run_kind = run_kind_of(runs[0].config)
    titles[run_kind.unit] = run_kind.counted
    rows = [row for run in runs for row in run.metrics]
    return {name: title for name, title in titles.items() if all(is_number(row.get(name)) for row in rows)}


def names(paths: Sequence[Path]) -> list[str]:
    """Display names of runs: their folders' names if distinct, else paths within the common folder."""
    whole = [path.resolve() for path in paths]
    short = [path.name for path in whole]
    if len(set(short)) == len(short):
        return short
    shared = os.path.commonpath([path.parent for path in whole])
    return [str(path.relative_to(shared)) for path in whole]


def texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Settings of a configuration as text, by whole key; 1 and 1.0 are the same number."""
    pairs = ((k, int(v) if isinstance(v, float) and v.is_integer() else v) for k, v in flat(config).items())
    return {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False, default=str) for k, v in pairs}


def settings_of(run: Run) -> dict[str, str]:
    """Settings of a run as text, `UNREAD` if its estimator or `data.epochs` leaves it out; parts have a digest.

    An estimator, critic or loss has its name, arguments and digest: one setting, from a file or from Python.
    """
    settings = texts(run.config)
    if (known := ESTIMATORS.get(settings.get("advantage.estimator", ""))) is not None:
        read: Collection[str] = known.settings
    else:
        read = parameters(run.parts.get("advantage.estimator", {})) or SETTINGS
    unread = {f"advantage.{key}" for key in SETTINGS if key not in read}
    unread |= {"run.iterations"} if run.setting("data.epochs") else set()
    settings |= dict.fromkeys(unread & settings.keys(), UNREAD)
    for key, part in run.parts.items():
        if key in PARTS:
            listed = (f"python.{key}", f"{key.partition('.')[0]}.kwargs.")
            settings = {name: x for name, x in settings.items() if not name.startswith(listed)}
            settings[key] = label({name: x for name, x in part.items() if name != "file"})
        elif not run.python.keys() & {key, key.partition("[")[0]}:  # whose labels have it
            settings[key] = f"{settings.get(key, part.get('name', MISSING))} ({part['digest'][:8]})"
    return settings


def without_seed(settings: Mapping[str, str]) -> dict[str, str]:
    """Settings without the seed, and without those that change no number: of `run`, all but its length."""
    return {key: x for key, x in settings.items() if key != SEED and (key in NUMBERS or not key.startswith("run."))}


def group_runs(runs: Sequence[Run], key: str | None = None) -> list[RunGroup]:
    """Groups of runs, in the order given, by a dotted key's value; None for those that differ in seed and folder only.

    Raises:
        ConfigError: no run has such a key.
    """
    settings = [settings_of(run) for run in runs]
    if key is not None and not any(key in found for found in settings):
        known = dict.fromkeys(name for found in settings for name in found)
        raise ConfigError(f"no run has the key {key}; {suggestion(key, known, 'see config.yaml of a run')}")
    parts: dict[Any, list[int]] = {}
    for number, found in enumerate(settings):
        same = found.get(key, MISSING) if key is not None else tuple(sorted(without_seed(found).items()))
        parts.setdefault(same, []).append(number)
    members = list(parts.values())
    differ = differing([[settings[i] for i in part] for part in members]) if key is None else [key]
    shown = [{k: settings[part[0]].get(k, MISSING) for k in differ} for part in members]
    labels = [", ".join(f"{k} {x}" for k, x in found.items() if x != UNREAD) for found in shown]
    if not all(labels) or max(map(len, labels)) > LABEL:
        labels = called([[runs[i].path for i in part] for part in members])
    return [
        RunGroup(label, [runs[i] for i in part], [settings[i] for i in part])
        for label, part in zip(labels, members, strict=True)
    ]


def called(members: Sequence[Sequence[Path]]) -> list[str]:
    """A name per group of folders: the sweep's variant whose `seed-N` they are, or the first one and how many more."""
    homes = [{path.parent if re.fullmatch(r"seed-\d+", path.name) else path for path in part} for part in members]
    if all(len(home) == 1 for home in homes) and len(set().union(*homes)) == len(homes):
        return names([next(iter(home)) for home in homes])
    paths = [path for part in members for path in part]
    shown = dict(zip(paths, names(paths), strict=True))
    return [shown[part[0]] + (f" and {len(part) - 1} more" if len(part) > 1 else "") for part in members]


def values(settings: Sequence[Mapping[str, str]], key: str) -> list[str]:
    """Distinct values of a key among the runs of a group, sorted."""
    return sorted({found.get(key, MISSING) for found in settings})


def differing(groups: Sequence[Sequence[Mapping[str, str]]]) -> list[str]:
    """Keys whose values differ between the groups that read them, without seed and folder; `groups` are settings."""
    keys = dict.fromkeys(key for settings in groups for found in settings for key in without_seed(found))
    return [key for key in keys if len({tuple(x) for part in groups if (x := values(part, key)) != [UNREAD]}) > 1]


def reward_keys(groups: Sequence[RunGroup], metric: str) -> list[str]:
    """Keys in which the rewards of language-model runs differ, if the metric is their reward; sources come first."""
    if metric not in (TEXT.headline, TEXT.evaluation):
        return []
    settings = [found for group in groups for found in group.settings]
    keys = dict.fromkeys(key for found in settings for key in found if re.match(REWARD, key))
    other = [key for key in keys if not same_score(key) and len(values(settings, key)) > 1]
    return sorted(other, key=lambda key: key.rpartition(".")[2] not in KINDS)


def varying(group: RunGroup) -> list[str]:
    """Keys in which runs of one group differ, besides seed and folder; only possible when grouping by a key."""
    return differing([[settings] for settings in group.settings])


def repeated(group: RunGroup) -> Iterator[tuple[str, str]]:
    """Duplicate runs: pairs of names with identical settings and seed."""
    pairs = zip(group.runs, group.settings, strict=True)
    for (one, a), (two, b) in combinations(pairs, 2):
        if without_seed(a) == without_seed(b) and a.get(SEED) == b.get(SEED):
            yield str(one.path), str(two.path)


def kinds_of(runs: Sequence[Run]) -> dict[RunKind, str]:
    """The kinds of runs, each with one of them in words."""
    kinds = {run_kind_of(run.config): run for run in runs}
    return {kind: f"{str(run.path)!r} is a run of tokencredit {kind.command}" for kind, run in kinds.items()}


def choose_metric(runs: Sequence[Run], metric: str | None = None) -> str:
    """The metric to compare by: the given one, or the headline metric.

    Raises:
        ConfigError: kinds of runs are mixed without a metric, or a run has no number for the metric.
    """
    kinds = kinds_of(runs)
    units = {run_kind.unit for run_kind in kinds}
    if len(kinds) > 1 and (metric is None or len(units) > 1):
        advice = ", or give --metric" * (len(units) == 1)
        raise ConfigError(f"{' and '.join(kinds.values())}; their metrics differ: compare runs of one kind{advice}")
    wanted = metric or run_kind_of(runs[0].config).headline
    found = [{k for row in run.metrics for k, v in row.items() if is_number(v) and k != "iteration"} for run in runs]
    lacking = [repr(str(run.path)) for run, known in zip(runs, found, strict=True) if wanted not in known]
    if not lacking:
        return wanted
    if wanted in NOISY and any("audit/noise" in known and wanted not in known for known in found):
        raise ConfigError(
            f"no {wanted} in {', '.join(lacking)}: noise may explain such an audit; audit with more --continuations"
        )
    common = sorted(set.intersection(*found))
    near = misspelt(wanted, common)
    raise ConfigError(
        f"no number for the metric {wanted} in {', '.join(lacking)}; "
        + (f"did you mean {near[0]}? " if near else "")
        + (f"all runs have {', '.join(common)}" if common else "the runs have no metric in common")
    )


def estimate(samples: np.ndarray) -> Estimate:
    """The estimate over runs, with a 95 % interval from three runs on.

    The interquartile mean, without the ⌊n / 4⌋ lowest and highest runs, and a percentile bootstrap interval over the
    runs: Agarwal et al. (2021), "Deep Reinforcement Learning at the Edge of the Statistical Precipice", section 4.
    Their strata are tasks; here there is one, so runs are resampled from all. Resampled means stay within the range of
    the runs, and so within a metric's bounds, which Student's interval leaves; with two runs that range would
    be all that a bootstrap shows.
    Deterministic: the same numbers give the same interval.

    Args:
        samples: [runs, points], all finite.
    """
    if len(samples) < FEWEST or not samples.shape[1]:
        return Estimate(samples.mean(axis=0))
    return Estimate(interquartile_mean(samples), *bootstrap(interquartile_mean, samples, axis=0))


NOISY = ("audit/correlation", "audit/correlation_low", "audit/correlation_high", "audit/trust", "audit/advantage_error")
"""Metrics that an audit lacks where noise may explain it."""


def scipy_stats() -> Any:
    """`scipy.stats`; raises `NotInstalled` without it."""
    with importing("a comparison", "SciPy", "tokencredit[compare]"):
        from scipy import stats
    return stats


def bootstrap(statistic: Callable[..., Any], *samples: np.ndarray, axis: int = -1) -> tuple[Any, Any]:
    """95 % percentile bootstrap interval of a statistic; each sample's runs are resampled."""
    options: dict[str, Any] = {"n_resamples": RESAMPLES, "confidence_level": LEVEL, "method": "percentile"}
    options["batch"] = 200 if len(samples) == 1 else None  # of one sample there may be many points
    result = scipy_stats().bootstrap(samples, statistic, axis=axis, vectorized=True, rng=0, **options)
    low, high = result.confidence_interval
    return low, high


def interquartile_mean(samples: np.ndarray, axis: int = 0) -> np.ndarray:
    """The mean without the lowest and highest quarter of the values, rounded down."""
    result: np.ndarray = scipy_stats().trim_mean(samples, 0.25, axis=axis)
    return result


def thinned(x: np.ndarray) -> np.ndarray:
    """Indices of at most `POINTS` entries, evenly spread, with the first and the last."""
    return np.unique(np.linspace(0, len(x) - 1, min(POINTS, len(x))).round().astype(int))


def series(run: Run, metric: str, axis: str, smooth: int) -> tuple[np.ndarray, np.ndarray]:
    """A metric of one run over iterations, or over the running sum of `axis`; rows without a number are left out.

    Each point is the mean of the last `smooth` numbers, fewer at the start. A run with more numbers than `POINTS` has
    a window of at least the distance between two points.
    """
    rows = list({row["iteration"]: row for row in run.metrics}.values())
    x = np.array([row[axis] + (row.get(f"pretrain/{axis}") or 0) for row in rows], dtype=float)
    x = x if axis == "iteration" else x.cumsum()
    present = np.array([is_number(row.get(metric)) for row in rows])
    x, y = x[present], np.array([row[metric] for row, kept in zip(rows, present, strict=True) if kept], dtype=float)
    width = max(smooth, math.ceil(len(y) / POINTS))
    kept = thinned(x)
    return x[kept], np.array([y[max(0, end - width) : end].mean() for end in kept + 1])


def curve(runs: Sequence[Run], metric: str, axis: str, smooth: int = 1) -> Curve:
    """The curve of a group: the estimate over all its runs at each point, up to the end of the shortest run.

    Runs are interpolated linearly onto common points, which changes nothing over iterations. Runs without a common
    range give a curve without points.
    """
    lines = [series(run, metric, axis, smooth) for run in runs]
    start, end = max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines)
    grid = np.unique(np.concatenate([x for x, _ in lines]))
    grid = grid[(grid >= start) & (grid <= end)]
    grid = grid[thinned(grid)] if len(grid) else grid
    return Curve(grid, estimate(np.stack([np.interp(grid, x, y) for x, y in lines])), lines)


def measures(run: Run, metric: str) -> dict[str, Callable[[Run], float | None]]:
    """Measures of a run's outcome by name, for runs of this run's kind."""
    kind = run_kind_of(run.config)
    best = min if kind.lower else max
    return {
        f"{metric}_first": lambda run: next(iter(column(run, metric)), None),
        f"{metric}_last": lambda run: last(run, metric),
        f"{kind.evaluation}_best": lambda run: best(run.evaluations(kind.evaluation), default=None),
        "kl_last": lambda run: final_mean(run.scored, "kl"),
        "attainable_last": lambda run: None if scored_anew(run.changes, PRICED) else attained_share(run.metrics),
        "log_ratio_last": lambda run: final_mean(run.scored, "log_ratio"),
        f"{kind.length}_last": lambda run: final_mean(run.scored, kind.length),
        "seconds": lambda run: run.seconds,
        "iterations": lambda run: len(run.metrics),
    }


def outcomes(groups: Sequence[RunGroup], metric: str) -> dict[str, list[list[float | None]]]:
    """Outcomes by the names of `measures`, a list per group with a number per run; measures without any are left out.

    A metric that is also a measure of its own, such as `kl`, counts once.
    """
    table = {
        name: [list(map(measure, group.runs)) for group in groups]
        for name, measure in measures(groups[0].runs[0], metric).items()
    }
    return {name: found for name, found in table.items() if any(x is not None for numbers in found for x in numbers)}


def stopped_by(run: Run) -> str:
    """The reason why a run ended."""
    return str(run.summary.get("stopped_by", "not known")) if run.summary else "not finished"


def last(run: Run, metric: str) -> float | None:
    """A metric's mean over the last iterations, or its last number if it has none there, as with rare audits."""
    final = final_mean(run.scored, metric)
    return next(reversed(column(run, metric)), None) if final is None else final


def column(run: Run, metric: str) -> list[float]:
    """The finite numbers of a metric since the last change of what is scored, or all if there are none since."""
    since, all_rows = ([*finite(row.get(metric) for row in rows)] for rows in (run.scored, run.metrics))
    return since or all_rows


def estimated(found: Sequence[float | None]) -> Estimate | None:
    """The estimate of one number over runs, without those that have none; None without any."""
    numbers = [x for x in found if x is not None]
    return estimate(np.array(numbers, dtype=float)[:, None]) if numbers else None


def cell(found: Sequence[float | None]) -> str:
    """A table cell over runs: the estimate, its interval or two runs' values, and how many runs have a number."""
    result = estimated(found)
    if result is None:
        return ""
    numbers = [x for x in found if x is not None]
    text = two_digits(result.middle.item())
    if result.low is not None and result.high is not None:
        ends = two_digits(result.low.item()), two_digits(result.high.item())
        text += "" if ends == (text, text) else f" [{', '.join(ends)}]"
    elif len(set(values := [two_digits(x) for x in numbers])) > 1:
        text += f" ({' and '.join(values)})"
    return text + (f" ({len(numbers)} of {len(found)} runs)" if len(numbers) < len(found) else "")


def too_few(one: int, other: int) -> bool:
    """True if the rank-sum test cannot reach the level, or a group has no interval."""
    return min(one, other) < FEWEST or 2 / math.comb(one + other, one) > 1 - LEVEL


def spread(one: np.ndarray, other: np.ndarray, axis: int = -1) -> Any:
    """Difference of two interquartile means."""
    return interquartile_mean(one, axis=axis) - interquartile_mean(other, axis=axis)


def rank_p(one: np.ndarray, other: np.ndarray) -> float:
    """Two-sided p-value of Mann and Whitney's rank-sum test, over all exchanges of runs, or many at random.

    Mann and Whitney (1947), "On a Test of Whether one of Two Random Variables is Stochastically Larger than the Other".
    It assumes no distribution. A test of interquartile means would need more runs, because trimming discards some.
    """
    stats = scipy_stats()
    method = stats.PermutationMethod(n_resamples=EXCHANGES, rng=0)
    return float(stats.mannwhitneyu(one, other, method=method).pvalue)
