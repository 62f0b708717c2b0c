"""The page of `tokencredit inspect`: one self-contained HTML file, without network, server or Plotly."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokencredit.report.templating import fill, readable, two_digits
from tokencredit.runs.summary import duration
from tokencredit.runs.untrusted import visible

NAME = "inspect.html"
LONGEST = 40
"""Maximum characters of a token on the page."""
WORDS = 6
"""Maximum tokens of each set of the question in its short form."""
LISTED = 10
"""Rows of a ranking above its fold."""


def render(inspect: Mapping[str, Any]) -> str:
    """The page as HTML, from the contents of inspect.json."""
    question = inspect["question"]
    return fill(
        "inspect.html",
        name=visible(inspect["run"]),
        inspect=inspect,
        up=listed(question["up"]),
        down=listed(question["down"]),
        asked=word(inspect["tokens"][question["position"]]),
        chances=[percent(chance(question[model])) for model in ("base", "tuned")],
        text=text(inspect),
        facts=facts(inspect),
        top=(inspect["answer"]["top"], Scale.of(both(inspect["answer"]["top"]))),
        attribution=attribution(inspect["attribution"]),
        patching=patching(inspect["patching"]),
        weights=ranking(inspect["weights"]["modules"], "relative_norm"),
        moved=moved(inspect["weights"]),
        data=views(inspect),
        percent=percent,
    )


@dataclass(frozen=True)
class Scale:
    """Range of a bar chart, with 0 in it."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Scale:
        """The range from the smallest to the largest value and 0; 0 to 1 if all are 0 or unknown."""
        known = [0.0, *(x for x in values if x is not None)]
        low, high = min(known), max(known)
        return cls(low, high if high > low else 1.0)

    def at(self, value: float) -> float:
        """A value's distance from the left end, in percent of the chart's width."""
        return 100 * (value - self.low) / (self.high - self.low)

    def bar(self, value: float | None) -> str:
        """CSS of a bar from 0 to the value; it has no width if the value is unknown."""
        left, right = sorted((self.at(0.0), self.at(value or 0.0)))
        return f"left: {left:.2f}%; width: {right - left:.2f}%"


def both(rows: Iterable[Mapping[str, Any]]) -> list[float]:
    """Numbers of the base and the tuned model."""
    return [row[model] for row in rows for model in ("base", "tuned")]


def percent(share: float | None) -> str:
    """Format a share: `41 %`, `0.35 %`, `none`."""
    if share is None:
        return "none"
    size = abs(100 * share)
    return f"{100 * share + 0.0:,.0f} %" if size >= 1 or size == 0 else f"{two_digits(100 * share)} %"


def chance(log_odds: float) -> float:
    """Probability of the first of two sets of tokens, given that the next token is in one of them: the sigmoid of
    their log-odds."""
    return 1 / (1 + math.exp(-log_odds)) if log_odds > 0 else 1 - 1 / (1 + math.exp(max(log_odds, -700.0)))


def short(token: str) -> str:
    """A token on one line, with escaped unprintable characters and at most `LONGEST` characters."""
    text = visible(token)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def word(token: str) -> str:
    """A token in a sentence: as `short`, without the spaces around it."""
    return short(token).strip() or short(token)


def listed(tokens: Sequence[str]) -> str:
    """Tokens in quotation marks; of more than `WORDS` the first ones, and the number of the others."""
    words = list(dict.fromkeys(map(word, tokens)))
    rest = len(words) - WORDS
    return ", ".join(f"“{name}”" for name in words[:WORDS]) + (f" and {rest} more" if rest > 0 else "")


def text(inspect: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pieces of prompt and completion, each with its kind: the prompt, the completion around the asked token, and
    that token."""
    tokens, start, asked = inspect["tokens"], inspect["prompt_length"], inspect["question"]["position"]
    kinds = ["asked" if i == asked else "prompt" if i < start else "completion" for i in range(len(tokens))]
    pieces: list[tuple[str, str]] = []
    for token, kind in zip(tokens, kinds, strict=True):
        if pieces and pieces[-1][1] == kind:
            token = pieces.pop()[0] + token
        pieces.append((token, kind))
    return [(readable(piece), kind) for piece, kind in pieces]


def facts(inspect: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was compared, and the cost: pairs of a label and a text."""
    model = inspect["model"]
    shape = f"{model['family']}, {model['layers']} layers, {model['heads']} heads, width {model['width']:,}"
    return [
        ("base", visible(inspect["base"])),
        ("tuned", visible(inspect["tuned"])),
        ("model", visible(f"{shape}, {model['parameters']:,} parameters")),
        ("seed of the completion", str(inspect["seed"])),
        ("time", duration(inspect["seconds"])),
    ]


def attribution(found: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of the attribution by depth, each with the heads that are folded under it, and the charts' scales."""
    components = found["components"]
    heads: dict[int, list[Mapping[str, Any]]] = {}
    for row in components:
        if row["kind"] == "head":
            heads.setdefault(row["layer"], []).append(row)
    groups = [
        (row, heads.get(row["layer"], []) if row["kind"] == "attention" else [])
        for row in components
        if row["kind"] != "head"
    ]
    return {
        "groups": groups,
        "scale": Scale.of(both(components)),
        "change": Scale.of(row["difference"] for row in components),
    }


def patching(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Rows of patching and ablation, the largest share first, and the charts' scales."""
    return found and {
        **ranking(found["components"], "share"),
        "ablated": Scale.of(row["ablated_share"] for row in found["components"]),
    }


def ranking(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """Rows by the size of a number, the first `LISTED` and the others, and the number's scale."""
    ranked = sorted(rows, key=lambda row: -abs(row[key] or 0.0))
    return {"first": ranked[:LISTED], "rest": ranked[LISTED:], "scale": Scale.of(row[key] for row in rows)}


def moved(weights: Mapping[str, Any]) -> list[tuple[str, list[dict[str, Any]], Scale]]:
    """Tokens that became more and less probable: a title, rows and the chart's scale of each."""
    return [
        (title, [{**row, "token": short(row["token"])} for row in weights[key]], Scale.of(both(weights[key])))
        for title, key in (("More probable", "tokens_up"), ("Less probable", "tokens_down"))
    ]


def views(inspect: Mapping[str, Any]) -> dict[str, Any]:
    """The page's data: what its script draws, with short texts."""
    return {key: shortened(inspect[key]) for key in ("tokens", "question", "lens", "attention", "critic")}


def shortened(value: Any) -> Any:
    """The same lists and objects with short texts."""
    if isinstance(value, Mapping):
        return {key: shortened(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return list(map(shortened, value))
    return short(value) if isinstance(value, str) else value
