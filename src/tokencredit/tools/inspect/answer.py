"""The answer in a sentence, made from the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from tokencredit.tools.inspect.parts import Part
from tokencredit.tools.inspect.question import SMALL_CHANGE

SMALL_SHARE = 0.2
"""Share of the change below which no part stands out."""
WEAK = 0.25
"""Direct contribution in the base model, relative to that in the tuned one, below which it hardly pushed there."""


class Numbers(NamedTuple):
    """What the answer is made from."""

    base: float
    """Log-odds of the question: base model."""
    tuned: float
    patched: Mapping[Part, float]
    shares: Mapping[Part, float | None]
    """Share of the change that each part carries, patched into the base model."""
    direct: tuple[Mapping[Part, float], Mapping[Part, float]]
    """Direct contributions to the log-odds: base, tuned; none of the unembedding."""
    top: Sequence[Part]
    """The strongest parts, first the strongest."""
    together: float
    """Log-odds with the strongest patched together."""
    others: Sequence[Sequence[float | None]]
    """Shares of each of the strongest in other completions; None where training changed too little."""


def sentence(
    numbers: Numbers, up: Sequence[str], down: Sequence[str], unchanged: bool, before: str = "before training"
) -> str:
    """The answer in a few sentences: which part carries the change, how much of it, and whether it did so before.

    `before` says where the base model's numbers are from.
    """
    if unchanged:
        return "No weight changed: the two models are the same."
    base, tuned, first = numbers.base, numbers.tuned, numbers.top[0]
    asked = f"The log-odds of {_words(up)} against {_words(down)}"
    if abs(tuned - base) < SMALL_CHANGE:
        return f"{asked} hardly changed: {base:.2f} nats {before}, {tuned:.2f} now. No part stands out."
    moved = f"{asked} were {base:.2f} nats {before}, and are {tuned:.2f} now."
    largest = numbers.shares[first] or 0.0
    together = f"The five strongest parts together carry {_percent((numbers.together - base) / (tuned - base))}."
    title = _title(first)
    if largest < SMALL_SHARE:
        return f"No part stands out. {moved} The strongest part, {title}, carries {_percent(largest)}. {together}"
    carries = (
        f"{title[0].upper()}{title[1:]} carries {_percent(largest)} of the change: patched in alone, it "
        f"brings them to {numbers.patched[first]:.2f}."
    )
    return " ".join(filter(None, [moved, carries, _before(first, numbers, before), _elsewhere(numbers), together]))


def _before(part: Part, numbers: Numbers, before: str) -> str:
    """Whether a part pushed the same way in the base model, by its direct contribution."""
    if part not in numbers.direct[1]:
        return ""
    base, tuned = (contributions[part] for contributions in numbers.direct)
    figures = f"its direct contribution was {base:+.2f} and is {tuned:+.2f} nats"
    towards = 1 if numbers.tuned > numbers.base else -1
    if towards * tuned <= 0 or towards * (tuned - base) <= 0:
        return f"It works through later parts: {figures}."
    if towards * base >= WEAK * towards * tuned:
        return f"It pushed the same way {before}, less strongly: {figures}."
    pushed = "pushed the other way" if towards * base < 0 else "hardly did so"
    return f"It {pushed} {before}: {figures}."


def _elsewhere(numbers: Numbers) -> str:
    """The share of the strongest part in other completions, and the part that is the strongest there."""
    columns = [[x for x in column if x is not None] for column in numbers.others]
    if not columns or not columns[0]:
        return ""
    medians = [median(column) for column in columns]
    low, high = min(columns[0]), max(columns[0])
    other = numbers.top[medians.index(max(medians))]
    more = "" if max(medians) == medians[0] else f"; {_title(other)} carries more there, {_percent(max(medians))}"
    return (
        f"In {len(columns[0])} other completions it carries {_percent(medians[0])} in the median, from {_percent(low)} "
        f"to {_percent(high)}{more}."
    )


def _title(part: Part) -> str:
    name = "final norm and unembedding" if part.kind == "unembedding" else part.name
    return name.replace("mlp", "MLP")


def _words(tokens: Sequence[str]) -> str:
    return ", ".join(map(repr, tokens))


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def record(numbers: Numbers, text: str) -> dict[str, Any]:
    """The answer as in inspect.json."""
    others = numbers.others or [[] for _ in numbers.top]
    top = [
        {
            "name": part.name,
            "share": numbers.shares[part],
            "base": numbers.direct[0].get(part),
            "tuned": numbers.direct[1].get(part),
            "others": list(elsewhere),
        }
        for part, elsewhere in zip(numbers.top, others, strict=True)
    ]
    return {"sentence": text, "top": top}
