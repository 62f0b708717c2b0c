"""The question: at which position, and which tokens against which, training changed a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokencredit.errors import ConfigError

TOKENS = 5
"""Tokens in each set of a question that the models choose."""


class Question(NamedTuple):
    """Two sets of tokens at a position: the log-odds of `up` against `down` as the next token."""

    position: int
    """Position that is read; the token asked about follows it."""
    up: Tensor
    """Token ids `[n]`."""
    down: Tensor
    """Token ids `[m]`."""
    source: str
    """How they were chosen, as text."""


def most_changed(base: Tensor, tuned: Tensor) -> int:
    """Index of the position with the largest KL(tuned ‖ base), of log-probs `[positions, vocabulary]`."""
    return int((tuned.exp() * (tuned - base)).sum(-1).argmax())


def gains(base: Tensor, tuned: Tensor) -> Tensor:
    """How much each token gained, `[vocabulary]`: (p + q)/2 · (log p − log q), p the tuned model's and q the base's.

    The sum over the vocabulary is half the symmetric KL, (KL(p ‖ q) + KL(q ‖ p)) / 2, but for the term of each token:
    a token counts by its probability and by the factor of its change.
    """
    return (tuned.exp() + base.exp()) / 2 * (tuned - base)


def choose(
    base: Tensor, tuned: Tensor, first: int, up: Sequence[int], down: Sequence[int], words: str = "--up and --down"
) -> Question:
    """The question at the position where two models differ most.

    Args:
        base: log-probs `[positions, vocabulary]` of the base model at the positions that predict the completion.
        tuned: those of the tuned model.
        first: the position of the first row in the text.
        up: chosen token ids; empty for the tokens that gained most.
        down: chosen token ids; empty for the tokens that lost most.
        words: name of the origin of chosen tokens.
    """
    row = most_changed(base, tuned)
    change = gains(base[row], tuned[row])
    if up or down:  # a token in one set must not be chosen for the other
        change[list(up) + list(down)] = 0
    gained, lost = (change * sign for sign in (1, -1))
    sets = [list(up) or _top(gained), list(down) or _top(lost)]
    sources = [
        words.split(" and ")[0] if up else f"up: the {len(sets[0])} tokens that gained most",
        words.split(" and ")[-1] if down else f"down: the {len(sets[1])} tokens that lost most",
    ]
    if not sets[0] or not sets[1]:  # no token changed
        likely = [i for i in tuned[row].topk(min(3, tuned.shape[-1])).indices.tolist() if i not in {*up, *down}]
        sets = [sets[0] or likely[:1], sets[1] or likely[1:2]]
        sources.append("no token's probability moved: the most likely tokens")
    up_ids, down_ids = (torch.tensor(x, device=tuned.device) for x in sets)
    source = (
        "the position of the completion with the largest KL between the tuned model and the base; "
        + "; ".join(sources)
        + " (log-probability weighted by probability)" * (not (up and down))
    )
    return Question(first + row, up_ids, down_ids, source)


def _top(change: Tensor) -> list[int]:
    """Ids of the tokens with the largest positive changes."""
    values, ids = change.topk(min(TOKENS, len(change)))
    chosen: list[int] = ids[values > 0].tolist()
    return chosen


def token_ids(tokenizer: PreTrainedTokenizerBase, option: str, words: Sequence[str]) -> list[int]:
    """Ids of words that are one token each; a word is also tried with a space before it, which comes first.

    Raises:
        ConfigError: a word is several tokens.
    """
    found = []
    for word in words:
        spellings = [word] if word.startswith(" ") else [f" {word}", word]
        ids = [tokenizer(x, add_special_tokens=False)["input_ids"] for x in spellings]
        single = next((x[0] for x in ids if len(x) == 1), None)
        if single is None:
            parts = ", ".join(repr(tokenizer.decode([i])) for i in ids[0])
            raise ConfigError(f"{option} {word!r} is not one token of the model's: {parts or 'none'}; give one of them")
        found.append(single)
    return found


def refuse_overlap(up: Sequence[int], down: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ConfigError` if a token is in both sets."""
    if both := set(up) & set(down):
        raise ConfigError(f"{tokenizer.decode([min(both)])!r} is in both --up and --down; give it to one of them")
