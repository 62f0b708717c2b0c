"""The figures and tables of benchmarks/findings.md, from the metrics in benchmarks/findings-data/ (`make findings`).

benchmarks/study.py runs the studies and stores the metrics there.
"""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

HERE = Path(__file__).parent
DATA = HERE / "findings-data"
PAGE = HERE / "findings.md"
FIGURES = HERE.parent / "docs" / "figures"
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
    return average(run[metric][:1])


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
    audit: Any = run["audits"].get(number)  # type: ignore[attr-defined]  # of truth.json
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


def until_share(run: Run, what: str) -> float:
    """Iteration after which the share of the attainable first reached a height, such as `0.8`; NaN if it never did."""
    found = (number for number in range(3, len(run["reward"]) + 1) if share(run, str(number)) >= float(what))
    return float(next(found, math.nan))


def at_kl(run: Run, what: str) -> float:
    """Reward where the KL first reached so many nats per sequence; both are means of three iterations."""
    for at in range(3, len(run["kl"]) + 1):
        if average(run["kl"][at - 3 : at]) >= float(what):
            return average(run["reward"][at - 3 : at])
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


README_ROWS = {
    "default, built-in reviews": "builtin",
    "default, real questions": "trec",
    "default, real sentences about films": "subj",
    "default, built-in reviews by a causal reward model": "pairs",
}
"""Rows of the README's table of true credit, and their worlds."""


def readme_table(worlds: Mapping[str, Any], truth: Study) -> list[str]:
    """The README's table of true credit, means over seeds; a world without runs has no row.

    Correlations are from the runs of 20 iterations, whose audits are larger. An audit counts by the part of its truth's
    variance that is not noise, and one that cannot tell does not.
    """
    lines = [
        "| correlation of shown with true advantages | seeds | after 5 iterations | after 10 | after 20 "
        "| share of the attainable after 15 | after 60 |",
        "|---|---|---|---|---|---|---|",
    ]
    kept = by_world(worlds)
    rows = {
        title: (
            list(kept.get(f"{world}, {AUDITED_WELL}", {}).values()),
            list(kept.get(f"{world}, default", {}).values()),
        )
        for title, world in README_ROWS.items()
    }
    rows["a learned critic alone, built-in reviews"] = (list(truth.get("learned critic", {}).values()), [])
    for title, (audits, whole) in rows.items():
        if not audits:
            continue
        means = [weighted(audits, at) for at in AUDITED[:3]]
        means += [average([share(run, at) for run in whole]) for at in ("15", "60")]
        cells = [f"{mean:.2f}" if math.isfinite(mean) else "" for mean in means]
        lines.append(" | ".join(["| " + title, str(len(audits)), *cells]) + " |")
    return lines


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


def spent(run: Run, what: str) -> float:
    """KL per sequence where the reward first reached a height; both are means over the same five iterations."""
    number = reached(run, what)
    return average(run["kl"][int(number) - LATELY : int(number)]) if math.isfinite(number) else math.nan


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
    return mean, float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


def difference(one: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """The difference of two means with its 95 % interval by Welch's t; NaN where one run alone stands on a side."""
    delta = float(np.mean(one) - np.mean(other)) if one and other else math.nan
    if min(len(one), len(other)) < 2:
        return delta, math.nan, math.nan
    if np.ptp(one) == np.ptp(other) == 0:  # equal runs, such as those at the highest return
        return delta, delta, delta
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # one side may be equal runs, whose variance is rounding
        low, high = stats.ttest_ind(one, other, equal_var=False).confidence_interval(0.95)
    return delta, float(low), float(high)


def number(value: float, digits: int = 3, sign: str = "") -> str:
    """Format with this many digits and no exponent: 0.0123, 1,230."""
    return f"{float(f'{value:.{digits}g}'):{sign},.10g}"


def row(study: Study, variant: str, base: str | None, columns: Columns) -> str:
    """A variant's line of a table: its number of runs, and each figure with its 95 % interval."""
    cells = []
    for measure, metric in columns.values():
        mean, half = interval([x for x in figures(study, variant, measure, metric) if math.isfinite(x)])
        shown = number(mean) if math.isfinite(mean) else "–"  # no figure without a reference model
        cells.append(shown + (f" ± {number(half, 2)}" if math.isfinite(half) else ""))
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


def draw(study: Study, metric: str, name: str, base: str | None, title: str, log: bool = False) -> None:
    """Small multiples, one per variant: a line per run, and the base's mean behind them."""
    variants = [variant for variant in study if variant != base]
    across = min(5, len(variants))
    down = -(-len(variants) // across)
    picture, axes = plt.subplots(
        down, across, figsize=(2.3 * across, 0.9 + 1.5 * down), sharex=True, sharey=True, squeeze=False
    )
    for axis in axes.flat[len(variants) :]:
        axis.set_visible(False)
    for axis, variant in zip(axes.flat, variants, strict=False):
        if base is not None:
            axis.plot(mean_curve(study[base], metric), color="#999999", linewidth=2.5, label=base)
        for run in study[variant].values():
            axis.plot(np.array(run[metric], dtype=float), color="#0072B2", linewidth=0.9)
        axis.set_title(variant, fontsize=8, parse_math=False)
        axis.tick_params(labelsize=7, labelbottom=True)
        if log:
            axis.set_yscale("log")
    picture.suptitle(title, fontsize=9)
    picture.supxlabel("iteration", fontsize=8)
    picture.tight_layout()
    picture.savefig(FIGURES / f"findings-{name}.png", dpi=110)
    plt.close(picture)


def mean_curve(runs: Mapping[str, Run], metric: str) -> np.ndarray:
    """The mean over runs, up to the length of the shortest."""
    shortest = min(len(run[metric]) for run in runs.values())
    return np.mean([np.array(run[metric][:shortest], dtype=float) for run in runs.values()], axis=0)


def fill(page: str, tables: Mapping[str, str]) -> str:
    """Insert each table, or text within a line, between its two comments in the page."""
    for name, text in tables.items():
        pattern = re.compile(rf"(<!-- table {name} -->(\n?)).*?(<!-- end -->)", re.DOTALL)
        page, places = pattern.subn(lambda found, text=text: f"{found[1]}{text}{found[2]}{found[3]}", page)
        if places != 1:
            raise SystemExit(f"{PAGE} has {places} places for the table {name}")
    return page


AUDITED = (5, 10, 20, 40)
"""Iterations after which the credit of the study `truth` was audited."""
PRICE = 0.05
"""`kl.coef` of the study `worlds`."""
WITHOUT_CRITIC = ("grpo", "rloo", "dr-grpo", "reinforce++")
"""Variants of the study `reasoning` without a critic, as published."""
RESAMPLED = "grpo-masked,batch_size=80"
"""The variant of the study `reasoning` with as many groups with signal as others have groups."""
LADDER = ("ppo", "value-pretraining", "decoupled", "length-adaptive", "clip-higher", "token-loss", "positive-nll")
LADDER += ("groups",)
"""Rungs of the study `reasoning-ladder`."""
SAO = {
    "dis": "masking by double-sided importance sampling solves more than PPO's clip",
    "faster-critic": "two updates of the critic per update of the policy solve more than one",
    "frozen-attention": "a critic whose attention is frozen solves more",
    "value-pretraining": "a pretrained critic solves more",
    "length-adaptive": "a λ that adapts to the length solves more, with the critic's at 1",
}
"""Rungs of the study `sao` above `single`, and the claim that each makes."""
LEARNED_OR_NONE = ("learned critic", "group_relative", "leave_one_out")
"""Variants without scores of prefixes that were run in three worlds."""
MAIN_VARIANTS = ("learned critic", "true-credit", "group_relative", "leave_one_out")
COLOURS = ("#999999", "#0072B2", "#D55E00", "#009E73")


def was_audited(runs: Mapping[str, Run]) -> bool:
    """True for runs with audits, which are those with a critic."""
    return all(run["audits"] for run in runs.values())


def draw_truth(study: Study) -> None:
    """Correlation of shown with true advantages after some iterations, and reward over time; every run, and means."""
    picture, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    for name, colour in zip(MAIN_VARIANTS, COLOURS, strict=True):
        if name not in study:
            continue
        means = [interval(figures(study, name, audited, f"{at} shown"))[0] for at in AUDITED]
        if was_audited(study[name]):
            left.plot(range(len(AUDITED)), means, color=colour, linewidth=2)
        for run in study[name].values():
            if was_audited(study[name]):
                shown = [audited(run, f"{at} shown") for at in AUDITED]
                left.plot(range(len(AUDITED)), shown, ".", color=colour, markersize=5, alpha=0.6)
            right.plot(range(1, len(run["reward"]) + 1), smooth(run["reward"]), color=colour, linewidth=0.8, alpha=0.8)
    left.set_xticks(range(len(AUDITED)), [str(at) for at in AUDITED])
    left.set_ylim(-0.3, 1.1)
    left.set_xlabel("iteration")
    left.set_ylabel("correlation with the true advantages")
    shown = [(name, colour) for name, colour in zip(MAIN_VARIANTS, COLOURS, strict=True) if name in study]
    right.legend([plt.Line2D([], [], color=colour) for _, colour in shown], [name for name, _ in shown], fontsize=8)
    right.set_xlabel("iteration")
    right.set_ylabel("reward")
    picture.tight_layout()
    picture.savefig(FIGURES / "findings-truth.png", dpi=110)
    plt.close(picture)


def draw_beside_trl(study: Study) -> None:
    """Reward over KL, means over seeds of running means over five iterations: a panel per world, a line per method."""
    worlds = list(dict.fromkeys(variant.partition(", ")[0] for variant in study))
    picture, axes = plt.subplots(1, len(worlds), figsize=(3.2 * len(worlds), 3.2), squeeze=False)
    for axis, world in zip(axes.flat, worlds, strict=True):
        for method, colour in BESIDE_TRL.items():
            if runs := study.get(f"{world}, {method}"):
                curves = [smooth(mean_curve(runs, metric).tolist()) for metric in ("kl", "reward")]
                axis.plot(*curves, color=colour, linewidth=1.5, label=method)
        axis.set_title(world, fontsize=9)
        axis.set_xlabel("KL, nats per sequence", fontsize=8)
    axes[0, 0].set_ylabel("reward", fontsize=8)
    axes[0, 0].legend(fontsize=8)
    picture.tight_layout()
    picture.savefig(FIGURES / "findings-beside-trl.png", dpi=110)
    plt.close(picture)


def smooth(values: Sequence[float | None]) -> list[float]:
    """Running means over five iterations, fewer at the start."""
    return [average(values[max(0, end - LATELY) : end]) for end in range(1, len(values) + 1)]


PLANTED_LINES = {
    "prefixes": ("scores of prefixes: gae, λ auto (default)", "#009E73", "D"),
    "separate-td": ("separate critic, pretrained: td", "#0072B2", "o"),
    "separate-gae-0.95": ("separate critic, pretrained: gae, λ = 0.95", "#56B4E9", "s"),
    "shared-td": ("shared critic: td", "#D55E00", "o"),
    "shared-gae-0.95": ("shared critic: gae, λ = 0.95", "#E69F00", "s"),
    "group-relative": ("no critic: group_relative, leave_one_out", "#999999", "^"),
}
"""Methods of the planted-credit figure: label, colour and marker; the table has all."""


def read_by_length(study: Study) -> dict[str, dict[int, Mapping[str, Run]]]:
    """The runs of each method of the planted-credit study by the length of its texts."""
    methods: dict[str, dict[int, Mapping[str, Run]]] = {}
    for variant, runs in study.items():
        method, _, length = variant.rpartition("-")
        methods.setdefault(method, {})[int(length)] = runs
    return methods


def exact_shares(study: Study) -> dict[int, list[float]]:
    """The share of the true credit on the deciding word by length: for each seed, the mean over all methods."""
    found: dict[int, dict[str, list[float]]] = {}
    for variant, runs in study.items():
        seeds = found.setdefault(int(variant.rpartition("-")[2]), {})
        for seed, run in runs.items():
            seeds.setdefault(seed, []).append(first(run, "true"))
    return {length: [average(shares) for shares in seeds.values()] for length, seeds in found.items()}


def length_table(study: Study, measure: Measure, metric: str, exact: str | None = None) -> str:
    """A measure of each method, a column per length of the texts; `exact` is the title of a first row, of the truth."""
    methods, truth = read_by_length(study), exact_shares(study)
    rows = {exact: truth} if exact else {}
    for method, lengths in methods.items():
        rows[method] = {length: [measure(run, metric) for run in runs.values()] for length, runs in lengths.items()}
    lines = ["| method | " + " | ".join(f"{length} tokens" for length in truth) + " |", "|" + "---|" * (len(truth) + 1)]
    for method, lengths in rows.items():
        cells = [estimate(lengths[length]) if length in lengths else "" for length in truth]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def estimate(values: Sequence[float]) -> str:
    """A mean, with half the width of its 95 % interval where there are several runs."""
    mean, half = interval(values)
    return number(mean) + (f" ± {number(half, 2)}" if math.isfinite(half) else "")


def draw_planted(study: Study) -> None:
    """The share of the credit on the deciding word by the length of the texts, a line per method."""
    plt.rcParams["svg.hashsalt"] = "planted-credit"  # reproducible file
    picture, axis = plt.subplots(figsize=(7.6, 4.4), layout="constrained")
    methods, truth = read_by_length(study), exact_shares(study)
    exact = [float(np.mean(values)) for values in truth.values()]
    axis.plot(list(truth), exact, "--", color="black", linewidth=1.6, label="exact answer")
    for method, (label, colour, marker) in PLANTED_LINES.items():
        if method not in methods:
            continue
        shares = {x: interval([first(run, "shown") for run in runs.values()]) for x, runs in methods[method].items()}
        means, halves = zip(*shares.values(), strict=True)
        axis.errorbar(
            list(shares),
            means,
            np.nan_to_num(halves),
            color=colour,
            marker=marker,
            markersize=5,
            capsize=3,
            label=label,
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(truth), [str(length) for length in truth])
    axis.set_yscale("log")
    axis.set_yticks([0.001, 0.01, 0.1, 1], ["0.1 %", "1 %", "10 %", "100 %"])
    axis.minorticks_off()
    axis.set_xlabel("tokens of the text")
    axis.set_ylabel("share of the credit on that word")
    axis.set_title("One known word decides the reward. How much of the credit does it get?", fontsize=10.5, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8.5)
    picture.savefig(FIGURES / "planted-credit.svg", metadata={"Date": None})
    plt.close(picture)


def at_equal_tokens(study: Study) -> Study:
    """The study with every run cut to the iterations within the fewest sampled tokens of any run."""
    runs = [run for runs in study.values() for run in runs.values()]
    fewest = min(sum(run["tokens"]) for run in runs)

    def cut(run: Run) -> Run:
        kept = int((np.cumsum(run["tokens"]) <= fewest).sum())
        return {name: values[:kept] for name, values in run.items()}

    return {variant: {seed: cut(run) for seed, run in runs.items()} for variant, runs in study.items()}


def draw_turns(study: Study) -> None:
    """Solved share over sampled tokens: a panel per variant, a line per run, and the mean of token-gae behind them."""
    picture, axes = plt.subplots(1, len(study), figsize=(2.6 * len(study), 2.6), sharex=True, sharey=True)
    base = study["token-gae"]
    for axis, (variant, runs) in zip(axes, study.items(), strict=True):
        tokens = mean_curve(base, "tokens").cumsum() / 1000
        axis.plot(tokens, smooth(list(mean_curve(base, "reward"))), color="#999999", linewidth=2.5)
        for run in runs.values():
            axis.plot(np.cumsum(run["tokens"]) / 1000, smooth(run["reward"]), color="#0072B2", linewidth=0.9)
        axis.set_title(variant, fontsize=8)
        axis.tick_params(labelsize=7)
    picture.suptitle("share of solved episodes, mean of five iterations (grey: mean of token-gae)", fontsize=9)
    picture.supxlabel("sampled tokens, thousands", fontsize=8)
    picture.tight_layout()
    picture.savefig(FIGURES / "findings-turns.png", dpi=110)
    plt.close(picture)


Studies = Mapping[str, Study]


def verdict(differences: Sequence[tuple[float, float, float]]) -> str:
    """The verdict on a claim that each of these differences, with its 95 % interval, is above 0.

    It holds if all intervals are above 0, does not hold if one is below 0, and else nobody can tell.
    """
    if any(high < 0 for _, _, high in differences):
        return "**does not hold here**"
    return "**holds here**" if differences and all(low > 0 for _, low, _ in differences) else "cannot tell"


def judged(
    study: Study, measure: Measure, comparisons: Sequence[Comparison]
) -> tuple[str, dict[str, tuple[float, float, float]]]:
    """The verdict on a claim, that the figure of each first variant is larger than that of the second.

    With the differences of variants that were run, by a text of each.
    """
    shown = {}
    for one, other, metric in comparisons:
        if one in study and other in study:
            sides = [figures(study, variant, measure, metric) for variant in (one, other)]
            shown[f"{one} less {other}: {less(study, one, other, measure, metric)}"] = difference(*sides)
    return verdict([*shown.values()]), shown


RETURN = "train/average_return"
OWN_STEPS = "critic_value_loss"
"""Metric of a critic that learns in steps of its own."""
LAMBDA_CLAIMS: Mapping[str, tuple[Measure, Sequence[Comparison]]] = {
    "λ = 0.95 ends above 0 and 1": (end, [("0.95", "0", RETURN), ("0.95", "1", RETURN)]),
    "0 starts fastest": (early, [("0", "0.95", RETURN), ("0", "1", RETURN)]),
    "1 is least steady": (unsteadiness, [("1", "0", RETURN), ("1", "0.95", RETURN)]),
    "the advantages' deviation grows with λ": (
        whole,
        [("0.95", "0", "advantage_std"), ("1", "0.95", "advantage_std")],
    ),
}
"""Claims on λ: what is measured, and pairs of λ of which the first is above the second if the claim holds."""


def by_lambda(studies: Studies) -> dict[str, Study]:
    """The runs of each λ by environment and, beside the plain policy gradient, algorithm; none of older recipes."""
    sorted_: dict[str, dict[str, Mapping[str, Run]]] = {}
    for name, study in {"HumanoidStandup": studies["humanoid"], "the pendulum": studies["pendulum"]}.items():
        for variant, runs in study.items() if has(study, OWN_STEPS) else ():
            place = f"{name} with PPO" if variant.startswith("algorithm=ppo,") else name
            sorted_.setdefault(place, {})[variant.rpartition("lam=")[2]] = runs
    return sorted_


def lambda_table(studies: Studies) -> str:
    """A line per claim on λ: its verdict and differences in each environment."""
    places = by_lambda(studies)
    lines = ["| claim | " + " | ".join(places) + " |", "|" + "---|" * (len(places) + 1)]
    for text, claim in LAMBDA_CLAIMS.items():
        cells = [f"{words}: {'; '.join(shown)}" for words, shown in (judged(x, *claim) for x in places.values())]
        lines.append(f"| {text} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def lambda_verdict(studies: Studies, claims: Sequence[str]) -> str:
    """The verdicts on some claims on λ in a line."""
    texts = []
    for claim in claims:
        verdicts = {place: judged(study, *LAMBDA_CLAIMS[claim])[0] for place, study in by_lambda(studies).items()}
        texts.append(f"{claim}: " + ", ".join(f"{text} on {place}" for place, text in verdicts.items()))
    return "; ".join(texts)


def has(study: Study, metric: str) -> bool:
    """True if a run of the study has this metric."""
    return any(metric in run for runs in study.values() for run in runs.values())


def older_lambda(studies: Studies) -> str:
    """A note on kept runs from before the critic had steps of its own."""
    places = {"HumanoidStandup": "humanoid", "the pendulum": "pendulum"}
    older = [place for place, name in places.items() if not has(studies[name], OWN_STEPS)]
    if not older:
        return "All runs are of these recipes."
    return (
        f"**The kept runs on {' and '.join(older)} are of an older recipe, and decide nothing.** λ also changed the "
        "targets of the critic, which learned in the policy's one step. Rollouts were cut after 1,000 or 250 steps, "
        "and rewards divided by the deviation of a return that carried on over truncations."
    )


CRITIC_FREE = ("uniform", "group_relative", "leave_one_out")


def trained_critics(text: Study) -> bool:
    """True if kept runs of estimators that read no critic trained one all the same."""
    return any(has({name: text.get(f"estimator={name}", {})}, "value_loss") for name in CRITIC_FREE)


def uniform_verdict(text: Study, cartpole: Study) -> str:
    """The verdict on credit by token against one credit per text, or on CartPole per episode."""
    words, texts = judged(text, whole, [("estimator=gae", "estimator=uniform", "reward")])
    note = ", compared with `uniform` runs that [trained a critic too](#7a-every-estimator)" * trained_critics(text)
    games, episodes = judged(cartpole, whole, [("estimator=gae", "estimator=total_return", RETURN)])
    return (
        f"on texts of at most 24 tokens: {words}, {'; '.join(texts)} of mean reward{note}. On CartPole, beside one "
        f"credit for all steps of an episode: {games}, {'; '.join(episodes)} of mean return"
    ).replace("estimator=", "")


def critic_free_note(text: Study) -> str:
    """A note on kept runs from before `critic.kind: none`."""
    if not trained_critics(text):
        return "`uniform`, `group_relative`, `leave_one_out` and rows with `critic=none` train no critic."
    return (
        "**Runs kept from before `critic.kind: none`.** `uniform`, `group_relative` and `leave_one_out` had a critic "
        "on the shared trunk. They do not use it, but its value loss moved the policy through the trunk, even at a "
        "constant reward. So their rows are not results of training without a critic; the recipe's runs will replace "
        "them."
    )


CONTROL_BY_MAP = "token-gae-8-per-map"


def map_control(study: Study) -> str:
    """How much of the critic's lead is that it sees more maps."""
    if CONTROL_BY_MAP not in study:
        return f"The control with a critic and eight episodes per map, `{CONTROL_BY_MAP}`, has no kept runs yet."
    others = ("group-relative", "leave-one-out")
    words, shown = judged(study, whole, [(CONTROL_BY_MAP, other, "reward") for other in others])
    return f"With eight episodes per map a critic is ahead of both too: {words}, {'; '.join(shown)}."


def studies() -> Studies:
    """All stored studies; `by-world` has the runs of `worlds`, and those of the main job of `truth`."""
    found = {path.stem: read(path.stem) for path in DATA.glob("*.json")}
    limits = {
        world: {"limit": found["worlds"][world]["limit"]} if world in found["worlds"] else {}
        for world in found["beside-trl"]
    }
    main_job = {name: found["truth"][name] for name in MAIN_VARIANTS if name in found["truth"]}
    worlds = found["worlds"] | {"builtin": found["worlds"]["builtin"] | main_job}
    return found | {
        "by-world": by_world(worlds),
        "beside-trl": by_world({world: found["beside-trl"][world] | limits[world] for world in limits}),
    }


class Claim(NamedTuple):
    """A claim on a study, for `judged`."""

    number: str
    text: str
    study: str
    figure: str
    measure: Measure
    comparisons: Sequence[Comparison]


MEAN_REWARD = ("reward, mean of all iterations", whole)
VALUE_LOSS = ("value loss, mean of all iterations", whole)
GAINED = ("share of the way to 1, mean of all iterations", gained)
SOLVED = ("solved greedily at the end", end)
"""Figures of several claims, with their measures."""
BESIDE_TRL = {"ours": "#009E73", "ppo": "#0072B2", "grpo": "#D55E00", "rloo": "#E69F00"}
"""Methods of the study `beside-trl`, with their colours."""
SINGLE = ("base", "prefix", "temperature-2", "clip-0.3", "clip-0.1", "kl-0.5", "kl-0.75", "kl-0.8", "kl-1.0", "gae")
SINGLE += ("kl-adaptive", "entropy-0.02", "max_grad_norm-0.5", "lr-8e-6", "orthogonal-head", "keep-mean")
"""Variants of the study `negative-sentiment` with one change, or none."""
CLAIMS = (
    Claim(
        "1",
        "a lower coefficient with more entropy learns faster than any single change",
        "negative-sentiment",
        *MEAN_REWARD,
        [("kl_ent", other, "reward") for other in SINGLE],
    ),
    Claim("2a", 'removing "really" hinders', "at-kl-0.5", *MEAN_REWARD, [("base", "prefix", "reward")]),
    Claim(
        "2b",
        "temperature 2.0 ruins coherence",
        "at-kl-0.5",
        "at the end",
        end,
        [("base", "temperature-2", "known"), ("base", "temperature-2", "ref_logprob")],
    ),
    Claim(
        "2c",
        "clip 0.3 speeds up, 0.1 slows down",
        "at-kl-0.5",
        *MEAN_REWARD,
        [("clip-0.3", "base", "reward"), ("base", "clip-0.1", "reward")],
    ),
    Claim(
        "3",
        "gentle steps are steadier",
        "at-kl-0.5",
        "unsteadiness of the reward",
        unsteadiness,
        [("base", "gentle", "reward")],
    ),
    Claim(
        "4a",
        "an orthogonal head settles sooner than zeros",
        "at-kl-0.5",
        *VALUE_LOSS,
        [("base", "orthogonal-head", "value_loss")],
    ),
    Claim(
        "4a'",
        "an orthogonal head settles sooner than PyTorch's default",
        "write-up",
        *VALUE_LOSS,
        [("base", "orthogonal-head", "value_loss")],
    ),
    Claim(
        "4b",
        "scores that keep their mean let values drift up",
        "at-kl-0.5",
        "value at the end",
        end,
        [("keep-mean", "base", "value")],
    ),
    Claim("13a", "positive is learned sooner than negative", "claims", *GAINED, [("positive", "base", "reward")]),
    Claim(
        "13b",
        "several objectives at once do not learn: each gains less than alone",
        "claims",
        *GAINED,
        [("base", "both", "reward/NEGATIVE"), ("story", "both", "reward/story")],
    ),
    Claim(
        "13c",
        "a lower temperature makes texts formulaic",
        "claims",
        "distinct pairs of tokens at the end",
        end,
        [("base", "temperature-0.5", "distinct_2")],
    ),
    Claim("13d", "value clipping helps", "claims", *MEAN_REWARD, [("base", "no-value-clip", "reward")]),
    Claim(
        "13e",
        "clipping gradients by L∞ learns faster than by L2",
        "claims",
        *MEAN_REWARD,
        [("max-norm", "l2-norm", "reward")],
    ),
    Claim(
        "15a",
        "with a verifier, PPO with its default critic solves more than each estimator without one",
        "reasoning",
        *SOLVED,
        [("ppo", other, "eval/reward") for other in WITHOUT_CRITIC],
    ),
    Claim(
        "15b",
        "the same of PPO with a critic of its own",
        "reasoning",
        *SOLVED,
        [("ppo-separate", other, "eval/reward") for other in WITHOUT_CRITIC],
    ),
    Claim(
        "15c",
        "the same of PPO with a critic of its own and one completion per problem",
        "reasoning",
        *SOLVED,
        [
            ("ppo-separate,per_prompt=1", other, "eval/reward")
            for other in (*WITHOUT_CRITIC, "reinforce++,per_prompt=1")
        ],
    ),
    Claim(
        "15d",
        "VAPO's changes together, groups aside, solve more than its PPO",
        "reasoning-ladder",
        *SOLVED,
        [("positive-nll", "ppo", "eval/reward")],
    ),
    Claim(
        "15f",
        "groups of eight for an eighth of the problems, VAPO's last change, solve more",
        "reasoning-ladder",
        *SOLVED,
        [("groups", "positive-nll", "eval/reward")],
    ),
    Claim(
        "15e",
        "dynamic sampling, as masked groups of a larger batch, solves more than GRPO",
        "reasoning",
        *SOLVED,
        [(RESAMPLED, "grpo", "eval/reward")],
    ),
    Claim(
        "16a",
        "with samples of old policies, single rollouts with a critic solve more than groups",
        "sao",
        *SOLVED,
        [("single", "grpo", "eval/reward")],
    ),
    *(
        Claim(f"16{letter}", SAO[rung], "sao", *SOLVED, [(rung, below, "eval/reward")])
        for letter, (below, rung) in zip("bcdef", pairwise(["single", *SAO]), strict=True)
    ),
    Claim(
        "16g",
        "SAO's changes together solve more than GRPO",
        "sao",
        *SOLVED,
        [("length-adaptive", "grpo", "eval/reward")],
    ),
    *(
        Claim(
            f"17{letter}",
            f"in the world {world} the default is ahead of TRL's PPO, GRPO and RLOO after {after} iterations",
            "beside-trl",
            f"share of the attainable after {after}",
            share,
            [(f"{world}, ours", f"{world}, {method}", after) for method in list(BESIDE_TRL)[1:]],
        )
        for letter, (world, after) in zip("abcdef", product(("builtin", "subj", "trec"), ("15", "40")), strict=True)
    ),
    *(
        Claim(
            f"18{letter}",
            f"in the world {world} scores of prefixes beat a learned critic and none, after {after} iterations",
            "by-world",
            f"share of the attainable after {after}",
            share,
            [(f"{world}, default", f"{world}, {other}", after) for other in LEARNED_OR_NONE],
        )
        for letter, (world, after) in zip("abcdef", product(("builtin", "subj", "trec"), ("15", "40")), strict=True)
    ),
)
"""Claims whose verdict is that of `judged`."""


def judgements(found: Studies) -> Iterator[tuple[Claim, str, str]]:
    """Each claim whose runs are kept, with its verdict and its least comparison."""
    for claim in CLAIMS:
        words, shown = judged(found.get(claim.study, {}), claim.measure, claim.comparisons)
        if shown:
            yield claim, words, min(shown, key=lambda text: shown[text][0])


def verdicts(found: Studies) -> dict[str, str]:
    """The verdict on each claim whose runs are kept, by its number."""
    return {claim.number: words for claim, words, _ in judgements(found)}


def claim_table(found: Studies) -> str:
    """The claims whose runs are kept, each with its least comparison and its verdict."""
    lines = ["| | claim | figure | least comparison | verdict |", "|---|---|---|---|---|"]
    for claim, words, least in judgements(found):
        lines.append(f"| {claim.number} | {claim.text} | {claim.figure} | {least} | {words} |")
    return "\n".join(lines)


NOT_RUN = "No runs of this study are kept yet."


def table_if_run(
    found: Studies, name: str, columns: Columns, pairs: Sequence[tuple[str, str]], base: str = "base"
) -> str:
    """The table of a study beside its base, if that was run, with those pairs that were; `NOT_RUN` without metrics."""
    if name not in found:
        return NOT_RUN
    study = found[name]
    return table(study, columns, base=base if base in study else None, pairs=there(study, pairs))


def there(study: Study, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Pairs of variants that were both run."""
    return [pair for pair in pairs if set(pair) <= set(study)]


def corrected(study: Study) -> list[tuple[str, str]]:
    """Each variant with a correction, such as `age=2,clip`, and the variant of that age without one."""
    return [(variant, variant.split(",")[0]) for variant in study if "," in variant]


def tables(found: Studies) -> dict[str, str]:
    """The tables of the page, by their names in it."""
    sentiment, learning = found["negative-sentiment"], found["at-kl-0.5"]
    rewards = {
        "reward, mean of all iterations": (whole, "reward"),
        "reward at the end": (end, "reward"),
        "KL at the end, nats a sequence": (end, "kl"),
        "unsteadiness of the reward": (unsteadiness, "reward"),
    }
    language = {
        "known words": (end, "known"),
        "log-probability under the reference, nats a token": (end, "ref_logprob"),
        "entropy, nats a token": (end, "entropy"),
        "length, tokens": (end, "length"),
        "distinct pairs of tokens": (end, "distinct_2"),
    }
    critic = {
        "value loss, mean of all iterations": (whole, "value_loss"),
        "explained variance, mean of all iterations": (whole, "explained_variance"),
        "value at the end": (end, "value"),
    }
    returns = {
        "return, mean of all iterations": (whole, RETURN),
        "return at the end": (end, RETURN),
        "return, mean of the first quarter": (early, RETURN),
        "unsteadiness of the return": (unsteadiness, RETURN),
        "deviation of the advantages": (whole, "advantage_std"),
    }
    explained = returns | {"explained variance, mean of all iterations": (whole, "explained_variance")}
    worlds = {f"correlation after {at}": (audited, f"{at} shown") for at in AUDITED[:3]} | {
        "share of the attainable after 15": (share, "15"),
        "after 60": (share, "60"),
        "reward at 1 nat of KL": (at_kl, "1"),
        "at 2 nats": (at_kl, "2"),
        "at 4 nats": (at_kl, "4"),
        "reward at the end": (lately, "reward"),
        "KL at the end": (lately, "kl"),
    }
    truth = {f"correlation after {at}": (audited, f"{at} shown") for at in AUDITED} | {
        f"explained variance after {at}": (audited, f"{at} explained_variance") for at in AUDITED
    }
    course = {
        "reward at the end": (lately, "reward"),
        "KL at the end": (lately, "kl"),
        "log-probability under the reference": (lately, "ref_logprob"),
        "iterations to a reward of 0.9": (reached, "0.9"),
        "KL at a reward of 0.75": (spent, "0.75"),
        "KL at a reward of 0.9": (spent, "0.9"),
    }
    lambdas = {
        f"λ = {name}": (audited, f"10 {label}")
        for name, label in {
            "0": "td (gae, λ = 0)",
            "0.5": "gae, λ = 0.5",
            "0.9": "gae, λ = 0.9",
            "0.95": "gae, λ = 0.95",
            "1": "monte_carlo (gae, λ = 1)",
        }.items()
    } | {"group_relative": (audited, "10 group_relative"), "leave_one_out": (audited, "10 leave_one_out")}
    trl = {"TRL 1.9.2": found["beside-trl"]["builtin, ppo"]}
    compared = {name: found["truth"][name] for name in MAIN_VARIANTS if name in found["truth"]}
    job = {name: found["by-world"][f"builtin, {name}"] for name in ("default", *compared)}
    job["TRL 1.9.2"] = trl["TRL 1.9.2"]
    shares = {f"share of the attainable after {at}": (share, at) for at in ("10", "15", "40")} | {
        "iterations to a share of 0.8": (until_share, "0.8"),
        "iterations to a reward of 0.9": (reached, "0.9"),
    }
    heads = {name: learning[name] for name in ("base", "orthogonal-head", "keep-mean")}
    solved = {
        "solved, mean of all iterations": (whole, "reward"),
        "solved at the end": (end, "reward"),
        "iterations to 0.9 solved": (reached, "0.9"),
        "turns per episode at the end": (end, "env/turns"),
        "entropy at the end, nats per token": (end, "entropy"),
    }
    aged = {
        "reward after 14 to 23 updates": (updated, "14 23"),
        "reward after 0 to 23 updates": (updated, "0 23"),
        "reward of the samples, mean of all iterations": (whole, "reward"),
        "behavior_kl, nats per token": (whole, "behavior_kl"),
        "clip_fraction": (whole, "clip_fraction"),
    }
    verified = {
        "solved greedily at the end": (end, "eval/reward"),
        "solved, mean of all iterations": (whole, "reward"),
        "solved at the end": (end, "reward"),
        "entropy at the end, nats per token": (end, "entropy"),
        "explained variance": (whole, "explained_variance"),
    }
    price = ("kl_ent", "kl-1.0", "entropy-0.02", "kl-0.5", "kl-0.5-entropy-0.02", "gae", "gae-1.5")
    return {
        "verdicts": claim_table(found),
        "claims": table_if_run(
            found,
            "claims",
            rewards
            | {
                "share of the way to 1": (gained, "reward"),
                "NEGATIVE at the end": (end, "reward/NEGATIVE"),
                "story at the end": (end, "reward/story"),
                "distinct pairs of tokens": (end, "distinct_2"),
                "value loss": (whole, "value_loss"),
            },
            [("positive", "base"), ("both", "base"), ("both", "story"), ("max-norm", "l2-norm")],
        ),
        "write-up": table_if_run(
            found, "write-up", rewards | language | critic, [("orthogonal-head", "base"), ("stop", "kl_ent")]
        ),
        "worlds": table(by_world(found["worlds"]), worlds),
        "truth": table({name: runs for name, runs in found["truth"].items() if was_audited(runs)}, truth),
        "course": table({**compared, **trl}, course, base="learned critic"),
        "shares": table(job, shares),
        "beside-trl": table(
            found["beside-trl"],
            {f"share of the attainable after {at}": (share, at) for at in ("10", "15", "40")}
            | {"reward at 1 nat of KL": (at_kl, "1"), "at 2 nats": (at_kl, "2")}
            | {"reward at the end": (fresh, "reward"), "KL at the end": (fresh, "kl")}
            | {"seconds per iteration": (pace, "clock"), "CPU seconds": (pace, "cpu")},
        ),
        "lambdas": table({name: runs for name, runs in compared.items() if was_audited(runs)}, lambdas),
        "kl": table(sentiment, rewards, base="base", pairs=there(sentiment, [(name, "base") for name in price])),
        "reward": table(learning, rewards, base="base", pairs=[("gentle", "base")]),
        "language": table(learning, language, base="base", pairs=[("gentle", "base"), ("temperature-2", "base")]),
        "critic": table(heads, critic, pairs=[("orthogonal-head", "base"), ("keep-mean", "base")]),
        "spread": table(
            found["spread"],
            {"value loss at the end": (end, "value_loss"), "KL at the end": (end, "kl"), "length": (end, "length")},
            base="terminal",
        ),
        "hacking": table(
            found["hacking"],
            {
                "the classifier's score at the end": (end, "reward/NEGATIVE"),
                "known words": (end, "known"),
                "log-probability under the reference": (end, "ref_logprob"),
                "KL at the end": (end, "kl"),
                "largest KL": (peak, "kl"),
                "its price at the end": (end, "kl_coef"),
                "distinct texts": (end, "distinct"),
                "distinct pairs of tokens": (end, "distinct_2"),
                "length, tokens": (end, "length"),
            },
        ),
        "texts": texts(found["hacking"]),
        "estimators": table(
            found["estimators-text"],
            rewards | {"deviation of the advantages": (whole, "advantage_std")},
            base="estimator=gae",
        ),
        "cartpole": table(found["estimators-cartpole"], returns, base="estimator=gae"),
        "critic-free": critic_free_note(found["estimators-text"]),
        "verdict-7a": uniform_verdict(found["estimators-text"], found["estimators-cartpole"]),
        "humanoid": table(found["humanoid"], explained),
        "lambda": table(found["pendulum"], explained),
        "older-lambda": older_lambda(found),
        "claims-lambda": lambda_table(found),
        "verdict-7b": lambda_verdict(found, list(LAMBDA_CLAIMS)[:3]),
        "verdict-9": lambda_verdict(found, list(LAMBDA_CLAIMS)[3:]),
        "scaling": table(
            found["scaling"],
            {
                "reward at the end": (end, "reward"),
                "reward, first iteration": (first, "reward"),
                "known words at the end": (end, "known"),
                "known words, first iteration": (first, "known"),
                "log-probability under the reference, nats a token": (end, "ref_logprob"),
                "entropy at the end, nats a token": (end, "entropy"),
                "entropy, first iteration": (first, "entropy"),
                "KL at the end, nats a sequence": (end, "kl"),
            },
            pairs=[("large", "tiny")],
        ),
        "turns": table(at_equal_tokens(found["turns"]), solved, base="token-gae"),
        "map-control": map_control(at_equal_tokens(found["turns"])),
        "ages": table(found["ages"], aged, base="age=0", pairs=corrected(found["ages"])),
        "ages-large-steps": table(
            found["ages-large-steps"], aged, base="age=0", pairs=corrected(found["ages-large-steps"])
        ),
        "reasoning": table_if_run(
            found, "reasoning", verified, [("rloo", "grpo"), ("grpo-masked", "grpo"), (RESAMPLED, "grpo")], base="ppo"
        ),
        "reasoning-ladder": table_if_run(
            found, "reasoning-ladder", verified, [pair[::-1] for pair in pairwise(LADDER)], base="ppo"
        ),
        "sao": table_if_run(
            found,
            "sao",
            verified
            | {"age of a token, updates": (end, "age_mean"), "clipped or masked tokens": (whole, "clip_fraction")},
            [pair[::-1] for pair in pairwise(["single", *SAO])],
            base="grpo",
        ),
        "planted": length_table(found["planted-credit"], first, "shown", exact="exact answer"),
        "planted-squared": length_table(found["planted-credit"], first, "shown_squared"),
        "planted-reward": length_table(found["planted-credit"], whole, "reward"),
        "planted-kinds": table(
            found["planted-kinds"],
            {
                "share of the credit": (first, "shown"),
                "exact answer": (first, "true"),
                "reward, mean of all iterations": (whole, "reward"),
            },
        ),
    }


def main() -> int:
    """Draw all figures and fill in all tables."""
    found = studies()
    draw_truth(found["truth"])
    draw_beside_trl(found["beside-trl"])
    draw(found["negative-sentiment"], "reward", "kl", "base", "reward (grey: mean of base)")
    draw(found["at-kl-0.5"], "reward", "reward", "base", "reward at a price of KL of 0.5 (grey: mean of base)")
    draw(found["spread"], "value_loss", "spread", None, "value loss", log=True)
    draw(found["hacking"], "known", "hacking", "kl-0.05", "known words (grey: mean of kl-0.05)")
    draw(found["estimators-text"], "reward", "estimators", "estimator=gae", "reward (grey: mean of gae)")
    draw(
        found["estimators-cartpole"],
        RETURN,
        "cartpole",
        "estimator=gae",
        "return of CartPole-v1 (grey: mean of gae)",
    )
    draw(found["humanoid"], RETURN, "humanoid", None, "return of HumanoidStandup-v5")
    draw(found["pendulum"], RETURN, "lambda", None, "return of InvertedPendulum-v5")
    draw(found["scaling"], "reward", "scaling", None, "reward of each size")
    draw_planted(found["planted-credit"])
    draw_turns(found["turns"])
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), tables(found)), encoding="utf-8")
    return 0


def texts(study: Study) -> str:
    """The last stored completion of each run; as code, since nobody has checked them."""
    rows = ["| variant | the last completion of each seed |", "|---|---|"]
    for variant, runs in study.items():
        last = [run["last_text"] for run in runs.values()]
        shown = [text.replace("`", "'").replace("|", "/").replace("\n", " ") for text in last]
        rows.append(f"| {variant} | " + "<br>".join(f"`{text}`" for text in shown) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
