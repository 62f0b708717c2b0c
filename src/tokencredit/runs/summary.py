"""Metrics of all iterations of a run, their means and the run's summary; formatting of numbers and times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from tokencredit.errors import cut
from tokencredit.runs.folder import setting_of
from tokencredit.runs.jsonl import is_number
from tokencredit.settings.run_kind import CONTROL, RunKind

OPEN_END = 1_000_000
"""`run.iterations` of a run whose script decides on its end; no number of iterations is shown."""
WINDOW = 5
"""Most iterations averaged at either end of a run."""
EPISODES = 100
"""Most recent training episodes that an agent's average return is over."""
CONFIDENT = 1.96
"""Half the width of a 95 % interval, in standard errors."""
SHAPED = "shaped_reward"
"""Mean reward after the clip and penalties of `score`, in runs that have some."""
UNSHAPED = "reward before score's clip and penalties"
"""Words before such a run's plain reward."""
PRETRAINING = "pretrain/tokens"
"""Tokens sampled before the first iteration, to pretrain the critic."""
Row = Mapping[str, float]


class History(list[Row]):
    """Rows of metrics, in which NaN stands for None."""

    since = 0
    """Rows before the last change of what is scored."""
    priced = 0
    """Rows before the last change of what the attainable depends on."""
    evaluated = 0
    """Rows before the last change of what evaluations measure."""

    def append(self, row: Mapping[str, float | None]) -> None:
        """Add a row."""
        super().append({name: math.nan if value is None else value for name, value in row.items()})

    def values(self, name: str) -> list[float]:
        """The finite numbers of a metric, in all rows."""
        return list(finite(row.get(name) for row in self))


def finite(values: Iterable[Any]) -> Iterator[float]:
    """The finite numbers among the values."""
    return (float(value) for value in values if is_number(value))


def mean(values: Iterable[Any]) -> float | None:
    """Mean of the finite numbers among the values; None if there are none."""
    numbers = list(finite(values))
    return sum(numbers) / len(numbers) if numbers else None


def final_window(iterations: int) -> int:
    """Number of final iterations averaged: `WINDOW`, or half of a run shorter than twice that, without its start."""
    return min(WINDOW, max(1, iterations // 2))


def final_mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """A metric's mean over the last `final_window` iterations; None if it has no finite number there."""
    return mean(row.get(name) for row in rows[-final_window(len(rows)) :])


def ends(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[float | None, float | None]:
    """A metric in the first iteration that has it, and as `final_mean`."""
    return next(finite(row.get(name) for row in rows), None), final_mean(rows, name)


def headline(rows: Sequence[Mapping[str, Any]], run_kind: RunKind) -> tuple[str, str]:
    """The metric that shows how well a run does, and that of its standard deviation.

    Where `score` clips or penalizes, it is the reward after that, which the policy is trained on.
    """
    shaped = any(SHAPED in row for row in rows)
    return (SHAPED, f"{SHAPED}_std") if shaped else (run_kind.headline, run_kind.deviation)


def rise_in_words(
    rows: Sequence[Mapping[str, Any]],
    run_kind: RunKind,
    config: Mapping[str, Any],
    number: Callable[[float | None], str] | None = None,
) -> str:
    """The headline metric's rise from the first iteration to the mean of the last ones, with its 95 % interval.

    Empty where a standard error is unknown. The completions of one prompt count as one, since they share its
    difficulty. Averages over recent episodes share episodes, so that their mean is no more exact than one of them.
    """
    number, agent = number or figure, run_kind is CONTROL
    name, deviation = headline(rows, run_kind)
    per_prompt = setting_of(config, "rollout.per_prompt") or 1
    played = accumulate(row.get("episodes") or 0 for row in rows)
    known = []  # the iterations that have a value, with the square of its standard error
    for place, (row, episodes) in enumerate(zip(rows, played, strict=True)):
        tokens, length = row.get("tokens"), row.get(run_kind.length)
        size = min(episodes, EPISODES) if agent else tokens / length / per_prompt if tokens and length else 0
        variance = next(finite([row.get(deviation)]), math.nan) ** 2
        square = variance / (size - 1) if size > 1 else math.nan
        known += [(place, row[name], square)] if is_number(row.get(name)) else []
    end = [entry for entry in known[1:] if entry[0] >= len(rows) - final_window(len(rows))]
    if not end:
        return ""
    rise = sum(value for _, value, _ in end) / len(end) - known[0][1]
    error = sum(square for *_, square in end) / len(end) ** (1 if agent else 2)
    half = CONFIDENT * math.sqrt(known[0][2] + error)
    chance = ": within chance" if abs(rise) <= half else ""
    return f"{'+' * (rise >= 0)}{number(rise)} ± {number(half)} at 95 %{chance}" if half > 0 else ""


def attained_share(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Share of the attainable over the last of a run's iterations; None where it is not known, as above 100 %."""
    share = final_mean(rows, "attainable")
    return None if share is None or round(100 * share) > 100 else share


def attained(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Share of the attainable over the last of a run's iterations, in words; None where it is not known."""
    share = final_mean(rows, "attainable")
    if share is None:
        return None
    few, pooled = (bool(rows[0].get(f"limit/{name}")) for name in ("few", "pooled"))
    words = of_attainable(share, few=few, pooled=pooled)
    if attained_share(rows) is None:
        return words
    return f"{words}, after {in_iterations(len(rows))}{' and still rising' * _rises(rows, 'attainable')}"


def _rises(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    """True if a metric's mean over the last iterations is above that of as many before, beyond their spread."""
    size = final_window(len(rows))
    before, after = (list(finite(row.get(name) for row in part)) for part in (rows[-2 * size : -size], rows[-size:]))
    if min(len(before), len(after)) < 2:
        return False
    error = math.sqrt(sum(variance(part) / len(part) for part in (before, after)))
    return fmean(after) - fmean(before) > CONFIDENT * error


def of_attainable(share: float, *, few: bool, pooled: bool) -> str:
    """A share of the attainable in words; `few` and `pooled` as in `core.rewards.Attainable`."""
    if (percent := round(100 * share)) < 0:  # whatever the limit is
        return "nothing of what this reward allows at this KL price: reward less price is below the start's"
    if percent > 100:  # no policy exceeds the limit itself
        return (
            "an unknown share of what this reward allows at this KL price: samples of the reference with such rewards "
            "are too few to estimate the limit (tokencredit limit takes more)"
        )
    bound = "about " if few and pooled else "at most " if few else "at least " if pooled else ""
    reasons = ["too few samples of the reference have such rewards, so that its limit is a lower bound"] * few
    reasons += ["its prompts have too few samples each and count as one, so that its limit is an upper bound"] * pooled
    why = f" ({'; '.join(reasons)}; tokencredit limit takes more)" if reasons else ""
    return f"{bound}{percent} % of what this reward allows at this KL price{why}"


@dataclass(frozen=True, eq=False)
class Summary(Mapping[str, Any]):
    """The outcome of a run.

    Also the mapping in summary.json: `summary["reward_last"]` of a language model, or
    `summary["average_return_last"]` of an agent, is `summary.last`.
    """

    folder: Path
    """Folder of the run."""
    first: float | None
    """Mean reward, or an agent's average return, in the first iteration that has one."""
    last: float | None
    """The same averaged over the last five iterations, in a run of fewer than ten over its last half; None
    without an iteration."""
    kl_last: float | None
    """Mean KL to the reference over the same iterations, in nats per sequence. None without a reference, or with
    filters such as top_p, whose samples do not estimate it."""
    iterations: int
    seconds: float
    """Wall-clock time of training, all resumptions included."""
    per_second: float
    """Tokens sampled, or environment steps, per second."""
    stopped_by: str
    """`iterations`, the key of a rule under `stop`, a signal, or a short reason."""
    run_kind: RunKind = field(repr=False)
    """The kind of run, which names the keys of the mapping."""
    since: int = 0
    """Iterations before the reward or the prompts changed, which `first` and `last` leave out."""
    attainable_last: float | None = None
    """Share of the attainable over the same iterations as `last`; None where it is not known (docs/training.md)."""
    attained: str | None = field(default=None, repr=False)
    """The same in words, with its bound."""
    rise: str = field(default="", repr=False)
    """`last` − `first` in words, or that of the shaped reward, with its 95 % interval; empty where that is not
    known."""
    shaped: tuple[float | None, float | None] | None = None
    """`first` and `last` of the reward after the clip and penalties of `score`; None in a run without."""
    environment: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Versions, machine, command, repository and dates (docs/training.md)."""

    def __getitem__(self, key: str) -> Any:
        return self._entries()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries())

    def __len__(self) -> int:
        return len(self._entries())

    def _entries(self) -> dict[str, Any]:
        name = self.run_kind.outcome
        return {
            f"{name}_first": self.first,
            f"{name}_last": self.last,
            **({f"{SHAPED}_first": self.shaped[0], f"{SHAPED}_last": self.shaped[1]} if self.shaped else {}),
            "kl_last": self.kl_last,
            "attainable_last": self.attainable_last,
            "iterations": self.iterations,
            "seconds": self.seconds,
            f"{self.run_kind.unit}_per_second": self.per_second,
            "stopped_by": self.stopped_by,
            **({"since": self.since} if self.since else {}),
            **({"environment": self.environment} if self.environment else {}),
        }


def summarise(
    history: History, run_kind: RunKind, config: Mapping[str, Any], folder: Path, seconds: float, stopped_by: str
) -> Summary:
    """The summary of a run with these metrics and this configuration, in plain dicts."""
    comparable = history[history.since :]
    first, last = ends(comparable, run_kind.headline)
    return Summary(
        folder=folder,
        first=first,
        last=last,
        kl_last=final_mean(comparable, "kl"),
        iterations=len(history),
        seconds=seconds,
        per_second=sum((*history.values(run_kind.unit), *history.values(PRETRAINING))) / seconds,
        stopped_by=stopped_by,
        run_kind=run_kind,
        since=history.since,
        attainable_last=None if history.priced else attained_share(history),
        attained=None if history.priced else attained(history),
        rise=rise_in_words(comparable, run_kind, config),
        shaped=ends(comparable, SHAPED) if headline(comparable, run_kind)[0] == SHAPED else None,
    )


def averaged(iterations: int, since: int = 0) -> str:
    """The final iterations whose mean counts as a run's end, in words; `since` as in `Summary`."""
    count = final_window(iterations - since)
    changed = f", after what is scored changed in iteration {since + 1}" if since else ""
    return ("in the last iteration" if count == 1 else f"mean of the last {count} iterations") + changed


def figure(value: float | None) -> str:
    """Format a number with three digits, such as `0.914`, `-12.7` or `2,309`."""
    return "none" if value is None else f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def count(number: int) -> str:
    """Format a whole number in words, such as `4,288`, `1.9 million` or `7.62 billion`."""
    if number < 1_000_000:
        return f"{number:,}"
    return f"{number / 1e6:.3g} million" if number < 999.5e6 else f"{number / 1e9:.3g} billion"


def in_iterations(count: int) -> str:
    """A number of iterations in words."""
    return f"{count} iteration{'' if count == 1 else 's'}"


def shortened(text: str, length: int) -> str:
    """A text in one line of at most `length` characters."""
    return cut(" ".join(text.split()), length)


def duration(seconds: float) -> str:
    """Format a time with its unit, such as `40 s`, `10 min` or `5.6 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
