"""Activation patching: which parts carry the change of the log-odds from the base to the tuned model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokencredit.tools.inspect.attribution import log_odds
from tokencredit.tools.inspect.parts import Part, Parts
from tokencredit.tools.inspect.question import SMALL_CHANGE, Question, Text, choose, predict
from tokencredit.tools.inspect.recording import Edits, Record, edited_states

UNEMBEDDING = Part("unembedding")
"""Final norm and output projection."""
TOP = 5


def candidates(parts: Parts) -> list[Part]:
    """Parts that are patched: the components, whole attentions, and the unembedding.

    A head is patched before its attention's output projection, whose own change only the whole attention carries.
    """
    attentions = [Part("attention", number) for number in range(1, len(parts.layers) + 1)]
    return [*parts.components(), *attentions, UNEMBEDDING]


@torch.no_grad()
def patch(
    base: Parts, tuned: Parts, seen: Record, ids: Tensor, question: Question, rows: Sequence[set[Part]]
) -> list[float]:
    """Log-odds of the base model with the tuned model's outputs in place of its own, at all positions.

    `seen` are the tuned model's outputs in the text with token ids `[time]`; each set of `rows` is replaced together.
    """
    text = ids[: question.position + 1]
    edits: list[Edits] = [
        {part: seen.output(part, base.heads)[: len(text)] for part in row if part != UNEMBEDDING} for row in rows
    ]
    states = edited_states(base, text, edits)
    by_base, by_tuned = (log_odds(x, states, question.up, question.down).tolist() for x in (base, tuned))
    return [theirs if UNEMBEDDING in row else ours for row, ours, theirs in zip(rows, by_base, by_tuned, strict=True)]


def odds_of(models: Sequence[Parts], records: Sequence[Record], question: Question) -> tuple[float, float]:
    """Log-odds of the question: base, tuned."""
    base, tuned = (
        float(log_odds(parts, seen.states[-1][question.position], question.up, question.down))
        for parts, seen in zip(models, records, strict=True)
    )
    return base, tuned


def repeat(
    models: tuple[Parts, Parts],
    records: tuple[Record, Record],
    text: Text,
    up: Sequence[int],
    down: Sequence[int],
    parts: Sequence[Part],
) -> list[float | None]:
    """The shares of some parts in another text, with the question that it asks; None where too little changed.

    Models and records are base and tuned; `up` and `down` are chosen token ids, empty to choose them.
    """
    if not text.positions:
        return [None] * len(parts)
    question = choose(predict(models, records, text), text, up, down)
    base, tuned = odds_of(models, records, question)
    if abs(tuned - base) < SMALL_CHANGE:
        return [None] * len(parts)
    values = patch(*models, records[1], text.ids, question, [{part} for part in parts])
    return [share(value, base, tuned) for value in values]


@torch.no_grad()
def ablate(tuned: Parts, means: Edits, ids: Tensor, question: Question) -> dict[Part, float]:
    """Log-odds of the tuned model with each part's output replaced by its mean, at all positions."""
    text = ids[: question.position + 1]
    rows: list[Edits] = [{part: mean.expand(len(text), -1)} for part, mean in means.items()]
    values = log_odds(tuned, edited_states(tuned, text, rows), question.up, question.down)
    return dict(zip(means, values.tolist(), strict=True))


def means(parts: Parts, records: Sequence[Record]) -> dict[Part, Tensor]:
    """The mean output of each head, MLP and of the embedding over all tokens of some texts."""
    outputs = {part: [seen.output(part, parts.heads) for seen in records] for part in parts.components()}
    return {part: torch.cat(each).mean(0) for part, each in outputs.items()}


def share(value: float, start: float, end: float) -> float | None:
    """The share of the way from `start` to `end` at which a value lies; None if they are equal."""
    return None if start == end else (value - start) / (end - start)


def strongest(patched: dict[Part, float], base: float, tuned: float) -> list[Part]:
    """The five parts that carry the largest shares of the change; of an attention and its heads, whichever leads."""
    sign = 1 if tuned >= base else -1
    chosen: list[Part] = []
    for part in sorted(patched, key=lambda part: sign * patched[part], reverse=True):
        related = [other for other in chosen if part.layer and other.layer == part.layer and part.kind != other.kind]
        if not any({part.kind, other.kind} == {"head", "attention"} for other in related):
            chosen.append(part)
    return chosen[:TOP]
