"""Curves of a run's metrics: sections of charts, one scale per chart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tokencredit.report.meanings import meaning
from tokencredit.report.templating import rounded
from tokencredit.runs.summary import mean
from tokencredit.runs.untrusted import visible
from tokencredit.settings.control import HOMEWORK_TAGS

POINTS = 1000
"""Maximum points per curve; longer ones show means of neighbours."""
SECTIONS = {
    "Reward": ("reward", "objective", "attainable", "average_return", "std_return"),
    "Distance from the reference": ("kl", "log_ratio", "ref_logprob"),
    "Exploration": ("entropy", "distinct", "repetition"),
    "Ratio and clipping": ("clip_fraction", "approx_kl", "ratio", "first_ratio", "behavior", "weight"),
    "Losses": ("loss", "policy_loss", "value_loss", "perplexity", "token_accuracy"),
    "Preferences": ("accuracy", "margin", "score", "chosen", "rejected"),
    "Critic and advantages": ("explained_variance", "value_mean", "advantage"),
    "Audit of the credit": ("audit/",),
    "Audit of the critic": tuple(
        f"audit/{name}" for name in ("explained", "slope", "bias", "spread", "ranking", "value")
    ),
    "Turns": ("env/",),
    "Length": ("length", "sequence_length", "truncated", "masked", "average_length", "episodes"),
    "Optimizer and steps": ("grad_norm", "lr", "steps", "bad_steps", "critic_steps"),
    "Time": ("seconds", "tokens", "tokens_per_second", "steps_per_second", "total_steps"),
}
"""Sections of charts, by prefixes of the charts' names; the others come last."""
NO_CURVE = ("iteration", "limit/", *HOMEWORK_TAGS)
"""Beginnings of names without a curve; the estimate of the attainable stands in one iteration."""
SHARED = {
    "best": "reward",
    "shaped_reward": "reward",
    "shaped_reward_std": "reward_std",
    "distinct_2": "distinct",
    "repetition": "distinct",
    "approx_kl_k1": "approx_kl",
    "approx_kl_k3": "approx_kl",
    "critic_value_loss": "value_loss",
    "rejected_log_ratio": "chosen_log_ratio",
    "rejected_logprob": "chosen_logprob",
    "score_min": "score_mean",
    "score_max": "score_mean",
    "entropy_in_update": "entropy",
    "value_lr": "lr",
    "trunk_lr": "lr",
    "audit/lower_lam": "audit/raise_lam",
    "env/calls": "env/turns",
    "env/failed": "env/malformed",
    "env/timeout": "env/malformed",
    "env/cut": "env/malformed",
}
"""Metrics on the chart of another name, in the same unit."""
FAMILIES = ("seconds", "reward_corr", "env/ending")
"""Families `NAME/…` on one chart."""
UNITS = {
    "objective": "reward − KL price · KL",
    "attainable": "share of what the reward allows at the KL price",
    "kl": "nats per sequence",
    "log_ratio": "nats per sequence",
    "ref_logprob": "nats per token",
    "entropy": "nats",
    "approx_kl": "nats per token or step",
    "behavior_kl": "nats per token",
    "distinct": "shares of texts and token pairs",
    "clip_fraction": "share of tokens or steps",
    "accuracy": "share of pairs",
    "token_accuracy": "share of tokens",
    "chosen_log_ratio": "nats per sequence",
    "chosen_logprob": "nats per sequence",
    "truncated": "share of completions",
    "env/turns": "turns and tool calls per episode",
    "env/ending": "share of episodes",
    "env/malformed": "share of turns with a problem",
    "length": "tokens",
    "sequence_length": "tokens",
    "average_length": "steps",
    "lr": "learning rates",
    "seconds": "seconds per iteration",
}
"""Units of charts, for their titles."""


def sections(metrics: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Charts by section and name, each with `title` and `lines` of `name`, `meaning`, `x` and `y`, at most `POINTS`.

    None stands for missing values. A metric that equals its total has no line: a reward's only term, the best of one
    completion per prompt.
    """
    names = dict.fromkeys(name for row in metrics for name in row if not name.startswith(NO_CURVE))
    width = math.ceil(len(metrics) / POINTS)
    blocks = [metrics[start : start + width] for start in range(0, len(metrics), width)]
    x = [block[-1]["iteration"] for block in blocks]
    lines = {name: [rounded(mean([row.get(name) for row in block])) for block in blocks] for name in names}
    found: dict[str, dict[str, dict[str, Any]]] = {title: {} for title in (*SECTIONS, "Other")}
    for name, y in lines.items():
        if all(value is None for value in y) or ((whole := total(name)) and lines.get(whole) == y):
            continue
        chart = chart_of(name)
        unit = f" ({UNITS[chart]})" if chart in UNITS else ""
        drawn = found[section_of(chart)].setdefault(chart, {"title": visible(chart) + unit, "lines": []})
        drawn["lines"].append({"name": visible(name), "meaning": meaning(name), "x": x, "y": y})
    return {title: charts for title, charts in found.items() if charts}


def total(name: str) -> str | None:
    """The metric that this one is a part of: `reward` for `reward/NAME`; None for a whole one."""
    if name == "eval/best":
        return "eval/reward"
    parts = name.split("/")
    whole = "/".join(parts[: 2 if parts[0] == "eval" else 1])
    return None if whole == name else whole


def constant(chart: Mapping[str, Any]) -> float | None:
    """The value of a chart's only metric if it has the same one in several iterations; None if it varies."""
    values = [value for line in chart["lines"] for value in line["y"]]
    same = len(values) > 1 and len(set(values)) == 1 and len(chart["lines"]) == 1
    return values[0] if same else None


def chart_of(name: str) -> str:
    """Name of the chart of a metric: evaluation and training share one, as do intervals and their middle."""
    for prefix in ("eval/", "train/"):
        name = name.removeprefix(prefix)
    if name.startswith("audit/"):
        name = name.removesuffix("_low").removesuffix("_high")
    family = name.rpartition("/")[0] if name.startswith("env/") else name.partition("/")[0]
    return family if family in FAMILIES else SHARED.get(name, name)


def section_of(chart: str) -> str:
    """The section with the longest matching prefix of a chart's name."""
    fits = [(len(start), title) for title, starts in SECTIONS.items() for start in starts if chart.startswith(start)]
    return max(fits)[1] if fits else "Other"
