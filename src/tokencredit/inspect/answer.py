"""The answer in a sentence, made from the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokencredit.inspect.parts import Part

SMALL_CHANGE = 0.05
"""Change of the log-odds, in nats, below which training changed too little to look for its cause."""
SMALL_SHARE = 0.2
"""Share of the change below which no part stands out."""
WEAK = 0.25
"""Direct contribution before training, relative to that after it, below which a part was not there before."""


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
    together: float | None
    """Share of the change that the strongest carry together."""


def sentence(numbers: Numbers, up: Sequence[str], down: Sequence[str], unchanged: bool) -> str:
    """The answer: which part carries the change, how much of it, and how much of it was there before."""
    if unchanged:
        return "No weight changed: the two models are the same."
    asked = f"the log-odds of {_words(up)} against {_words(down)}"
    change = numbers.tuned - numbers.base
    if abs(change) < SMALL_CHANGE:
        return (
            f"Training hardly changed {asked}, from {numbers.base:.2f} to {numbers.tuned:.2f} nats, so no part of the "
            "model stands out."
        )
    first = numbers.top[0]
    largest = numbers.shares[first] or 0.0
    together = f"the five strongest parts together carry {_percent(numbers.together)}"
    if largest < SMALL_SHARE:
        return (
            f"No part stands out: training moved {asked} from {numbers.base:.2f} to {numbers.tuned:.2f} nats, the "
            f"strongest part, {first.name}, carries {_percent(largest)} of that, and {together}."
        )
    return (
        f"{_title(first)} carries {_percent(largest)} of the change: put into the base model, it moves {asked} from "
        f"{numbers.base:.2f} to {numbers.patched[first]:.2f} nats (tuned: {numbers.tuned:.2f}); "
        f"{_before(first, numbers)}; {together}."
    )


def _before(part: Part, numbers: Numbers) -> str:
    """Whether a part pushed the same way before training, by its direct contribution."""
    if part not in numbers.direct[1]:
        return "it is the way in which all other parts are read"
    base, tuned = (contributions[part] for contributions in numbers.direct)
    figures = f"its direct contribution was {base:+.2f} before and is {tuned:+.2f} now"
    towards = 1 if numbers.tuned > numbers.base else -1
    if towards * tuned <= 0 or towards * (tuned - base) <= 0:
        return f"it works through later parts: {figures}"
    if towards * base >= WEAK * towards * tuned:
        return f"it was there before, and training strengthened it: {figures}"
    return f"it was not there before: {figures}"


def _title(part: Part) -> str:
    name = "final norm and unembedding" if part.kind == "unembedding" else part.name
    return name[0].upper() + name[1:].replace("mlp", "MLP")


def _words(tokens: Sequence[str]) -> str:
    return ", ".join(map(repr, tokens))


def _percent(value: float | None) -> str:
    return "an unknown share" if value is None else f"{100 * value:.0f} %"


def record(numbers: Numbers, text: str) -> dict[str, Any]:
    """The answer as in inspect.json."""
    top = [
        {
            "name": part.name,
            "share": numbers.shares[part],
            "base": numbers.direct[0].get(part),
            "tuned": numbers.direct[1].get(part),
        }
        for part in numbers.top
    ]
    return {"sentence": text, "top": top}
