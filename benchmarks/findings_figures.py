"""The figures of benchmarks/findings.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from findings_measures import (
    HERE,
    LATELY,
    Run,
    Study,
    average,
    first,
    interval,
    mean_curve,
)

FIGURES = HERE.parent / "docs" / "figures"


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


def draw_beside_trl(study: Study) -> None:
    """Reward over KL, means over seeds of running means over five iterations: a panel per world, a line per method."""
    worlds = list(dict.fromkeys(variant.partition(", ")[0] for variant in study))
    across = min(len(worlds), 4)
    down = math.ceil(len(worlds) / across)
    picture, axes = plt.subplots(down, across, figsize=(3.2 * across, 3.2 * down), squeeze=False)
    for axis in axes.flat[len(worlds) :]:
        axis.remove()
    for axis, world in zip(axes.flat, worlds, strict=False):
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


BESIDE_TRL = {"ours": "#009E73", "ppo": "#0072B2", "grpo": "#D55E00", "rloo": "#E69F00"}
"""Methods of the study `beside-trl`, with their colours."""
