"""Activation patching: which parts carry the change of the log-odds from the base to the tuned model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tokencredit.inspect.attribution import log_odds
from tokencredit.inspect.parts import Part, Parts
from tokencredit.inspect.question import Question
from tokencredit.inspect.recording import Edits, Record, edited_states, record

UNEMBEDDING = Part("unembedding")
"""Final norm and output projection."""
TOP = 5


class Patched(NamedTuple):
    """Log-odds of a question with one part changed, by part."""

    patched: dict[Part, float]
    """Of the base model with the part's output, or the module of `unembedding`, replaced by the tuned model's."""
    ablated: dict[Part, float]
    """Of the tuned model with the part's output replaced by its mean; not of the unembedding, which is no output."""


def candidates(parts: Parts) -> list[Part]:
    """Parts that are patched: the unembedding, and the parts whose outputs the others are sums of."""
    return [*parts.components(), UNEMBEDDING]


@torch.no_grad()
def patch(
    base: Parts, tuned: Parts, seen: Record, ids: Tensor, question: Question, rows: Sequence[set[Part]]
) -> list[float]:
    """Log-odds of the base model with the tuned model's outputs in place of its own, at all positions.

    Args:
        base: the base model.
        tuned: the tuned model.
        seen: the tuned model's outputs in the text.
        ids: token ids `[time]`.
        question: the question.
        rows: sets of parts, each replaced together.
    """
    text = ids[: question.position + 1]
    edits: list[Edits] = [
        {part: seen.output(part, base.heads)[: len(text)] for part in row if part != UNEMBEDDING} for row in rows
    ]
    states = edited_states(base, text, edits)
    by_base, by_tuned = (log_odds(x, states, question.up, question.down).tolist() for x in (base, tuned))
    return [theirs if UNEMBEDDING in row else ours for row, ours, theirs in zip(rows, by_base, by_tuned, strict=True)]


@torch.no_grad()
def ablate(tuned: Parts, means: Edits, ids: Tensor, question: Question) -> dict[Part, float]:
    """Log-odds of the tuned model with each part's output replaced by its mean, at all positions."""
    text = ids[: question.position + 1]
    rows: list[Edits] = [{part: mean.expand(len(text), -1)} for part, mean in means.items()]
    values = log_odds(tuned, edited_states(tuned, text, rows), question.up, question.down)
    return dict(zip(means, values.tolist(), strict=True))


@torch.no_grad()
def mean_outputs(name: str, parts: Parts, texts: Sequence[Tensor]) -> dict[Part, Tensor]:
    """The mean output of each head, MLP and of the embedding over all tokens of some texts.

    Args:
        name: the model's name in messages.
        parts: the model.
        texts: token ids of each text, `[time]`.
    """
    sums: dict[Part, Tensor] = {}
    for ids in texts:
        seen = record(name, parts, ids)
        for part in parts.components():
            sums[part] = sums.get(part, 0) + seen.output(part, parts.heads).sum(0)
    tokens = sum(map(len, texts))
    return {part: x / tokens for part, x in sums.items()}


def share(value: float, start: float, end: float) -> float | None:
    """The share of the way from `start` to `end` at which a value lies; None if they are equal."""
    return None if start == end else (value - start) / (end - start)


def strongest(patched: dict[Part, float], base: float, tuned: float) -> list[Part]:
    """The five parts that carry the largest shares of the change."""
    sign = 1 if tuned >= base else -1
    return sorted(patched, key=lambda part: sign * patched[part], reverse=True)[:TOP]
