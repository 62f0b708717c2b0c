"""The page of `tokencredit inspect`: one self-contained HTML file, without network, server or Plotly."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from statistics import median
from typing import Any

from tokencredit.errors import cut
from tokencredit.report.templating import fill, readable, two_digits
from tokencredit.runs.summary import duration
from tokencredit.runs.untrusted import visible

LONGEST = 40
"""Maximum characters of a token on the page."""
WORDS = 6
"""Maximum tokens of each set of the question in its short form."""
LISTED = 10
"""Rows of a ranking above its fold."""
COLUMNS = 120
"""Maximum positions of a map, so that the page of a long text stays small and fast."""


def render(inspect: Mapping[str, Any]) -> str:
    """The page as HTML, from the contents of inspect.json."""
    question = inspect["question"]
    return fill(
        "inspect.html",
        name=visible(inspect["run"]),
        inspect=inspect,
        up=listed(question["up"]),
        down=listed(question["down"]),
        why=[first(question[key]) for key in ("up", "down")],
        text=text(inspect),
        facts=facts(inspect),
        top=(inspect["answer"]["top"], Scale.of(both(inspect["answer"]["top"]))),
        attribution=attribution(inspect["attribution"]),
        patching=patching(inspect["patching"]),
        weights=ranking(inspect["weights"]["modules"], "relative_norm"),
        moved=moved(inspect["weights"]),
        data=views(inspect),
        columns=COLUMNS,
        percent=percent,
        spread=spread,
        sentence=sentence,
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


def both(rows: Iterable[Mapping[str, Any]]) -> list[float | None]:
    """Numbers of the base and the tuned model."""
    return [row[model] for row in rows for model in ("base", "tuned")]


def percent(share: float | None) -> str:
    """Format a share: `41 %`, `0.35 %`, `none`."""
    if share is None:
        return "none"
    size = abs(100 * share)
    return f"{100 * share:,.0f} %" if 1 <= size < 1e6 else f"{two_digits(100 * share)} %"


def spread(shares: Sequence[float | None]) -> str:
    """Median and range of the known shares: `31 % (12 to 45 %)`; `none` without one."""
    known = [share for share in shares if share is not None]
    if not known:
        return "none"
    return f"{percent(median(known))} ({percent(min(known)).removesuffix(' %')} to {percent(max(known))})"


def sentence(words: str) -> str:
    """A clause as a sentence, with escaped unprintable characters."""
    return visible(words[:1].upper() + words[1:].removesuffix(".")) + "."


def short(token: str) -> str:
    """A token on one line, with escaped unprintable characters and at most `LONGEST` characters."""
    return cut(visible(token), LONGEST)


def word(token: str) -> str:
    """A token in a sentence: as `short`, without the spaces around it."""
    return short(token).strip() or short(token)


def listed(tokens: Sequence[str]) -> str:
    """Tokens in quotation marks; of more than `WORDS` the first ones, and the number of the others."""
    words = list(dict.fromkeys(map(word, tokens)))
    rest = len(words) - WORDS
    return ", ".join(f"“{name}”" for name in words[:WORDS]) + (f" and {rest} more" if rest > 0 else "")


def first(tokens: Sequence[str]) -> str:
    """The first of several tokens, in quotation marks."""
    return ", ".join([*(f"“{word(token)}”" for token in tokens[:1]), *("…" for _ in tokens[1:2])])


def text(inspect: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pieces of the text, each with its kind: prompt, completion, and the token after which the question is asked."""
    tokens, start, asked = inspect["tokens"], inspect["prompt_length"], inspect["question"]["position"]
    kinds = ["asked" if i == asked else "prompt" if i < start else "completion" for i in range(len(tokens))]
    groups = groupby(zip(tokens, kinds, strict=True), key=itemgetter(1))
    return [(readable("".join(token for token, _ in group)), kind) for kind, group in groups]


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
    """Rows of the attribution by depth, each with the parts that are folded under it, and the charts' scales.

    Under a layer's attention are its heads and the bias of its output projection, which add up to it.
    """
    components = found["components"]
    folded: dict[int, list[Mapping[str, Any]]] = {row["layer"]: [] for row in components if row["kind"] == "attention"}
    groups = []
    for row in components:
        if row["kind"] in ("head", "bias") and row["layer"] in folded:
            folded[row["layer"]].append(row)
        else:
            groups.append((row, folded[row["layer"]] if row["kind"] == "attention" else []))
    return {
        "groups": groups,
        "scale": Scale.of(both(components)),
        "change": Scale.of(row["difference"] for row in components),
    }


def patching(found: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of patching and ablation, the largest share first, and the charts' scales."""
    rows = found["components"]
    return {**ranking(rows, "share"), "ablated": Scale.of(row["ablated_share"] for row in rows)}


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
    """The page's data: what its script draws, with short tokens, at the positions nearest to the question."""
    asked = inspect["question"]["position"]
    lens, attention, critic = inspect["lens"], inspect["attention"], inspect["critic"]
    kept = near(lens["positions"], asked)
    models = {
        model: {
            "token": [list(map(short, row)) for row in columns(lens[model]["token"], kept)],
            **{key: columns(lens[model][key], kept) for key in ("probability", "rank")},
        }
        for model in ("base", "tuned")
    }
    read, after = near(attention["to"], asked), near(range(len(inspect["tokens"])), asked)
    return {
        "tokens": list(map(short, inspect["tokens"])),
        "asked": asked,
        "lens": {
            "layers": list(map(short, lens["layers"])),
            "positions": lens["positions"][kept],
            **models,
            "kl": columns(lens["kl"], kept),
        },
        "attention": {
            "from": attention["from"],
            "to": attention["to"][read],
            "heads": [{**head, **side(head, read)} for head in attention["heads"]],
            "input_gradient": side(attention["input_gradient"], read),
        },
        "critic": critic
        and {
            "layers": list(map(short, critic["layers"])),
            "positions": list(range(len(inspect["tokens"])))[after],
            "values": columns(critic["values"], after),
            "final": critic["final"][after],
            "score": critic["score"],
        },
    }


def near(positions: Sequence[int], asked: int) -> slice:
    """At most `COLUMNS` of ascending positions, around one of them."""
    start = max(0, min(bisect(positions, asked) - COLUMNS // 2, len(positions) - COLUMNS))
    return slice(start, start + COLUMNS)


def columns(table: Sequence[Sequence[Any]], kept: slice) -> list[Sequence[Any]]:
    """These columns of a table."""
    return [row[kept] for row in table]


def side(lists: Mapping[str, Any], kept: slice) -> dict[str, Any]:
    """These entries of the base and the tuned model's lists."""
    return {model: lists[model][kept] for model in ("base", "tuned")}
