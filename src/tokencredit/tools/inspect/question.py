"""The question: at which position, and which tokens against which, training changed a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokencredit.errors import ConfigError
from tokencredit.tools.inspect.parts import Parts
from tokencredit.tools.inspect.recording import Record

TOKENS = 5
"""Tokens in each set of a question that the models choose."""
SMALL_CHANGE = 0.2
"""Change of the log-odds, in nats, below which training changed too little to look for its cause."""


class Text(NamedTuple):
    """A prompt and its completion."""

    ids: Tensor
    """Token ids `[time]`."""
    prompt_length: int
    """Number of the prompt's tokens."""

    @property
    def positions(self) -> list[int]:
        """Positions that predict the completion's tokens."""
        return list(range(self.prompt_length - 1, len(self.ids) - 1))

    def apart(self, other: Text) -> Text:
        """The text, with its common beginning with another counted as prompt, so that no position has the same past."""
        size = min(len(self.ids), len(other.ids))
        same = int((self.ids[:size] == other.ids[:size]).cumprod(0).sum())
        return Text(self.ids, max(self.prompt_length, same + 1))


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


Prediction = tuple[Tensor, Tensor]
"""Next-token log-probs of base and tuned model, `[positions, vocabulary]`, at the positions of a text's completion."""


@torch.no_grad()
def predict(models: Sequence[Parts], records: Sequence[Record], text: Text) -> Prediction:
    """The predictions of base and tuned model, from their outputs in a text."""
    at = torch.tensor(text.positions, device=text.ids.device)
    base, tuned = (parts.logprobs(seen.normed[at]) for parts, seen in zip(models, records, strict=True))
    return base, tuned


def most_changed(seen: Prediction, up: Sequence[int], down: Sequence[int]) -> int:
    """Index of the position where training moved the predictions most.

    By KL(tuned ‖ base); with chosen tokens, by how much those of `up` gained and those of `down` lost, in sum.
    """
    base, tuned = seen
    if not up and not down:
        return int((tuned.exp() * (tuned - base)).sum(-1).argmax())
    change = gains(base, tuned)
    return int((change[:, [*up]].sum(-1) - change[:, [*down]].sum(-1)).abs().argmax())


def gains(base: Tensor, tuned: Tensor) -> Tensor:
    """How much each token gained, `[..., vocabulary]`: (p + q)/2 · (log p − log q), p tuned and q base.

    The change of a token's log-prob, weighted by its probability: what is likely to neither model does not count.
    """
    return (tuned.exp() + base.exp()) / 2 * (tuned - base)


def choose(seen: Prediction, text: Text, up: Sequence[int], down: Sequence[int]) -> Question:
    """The question at the position of a completion where two models differ most.

    `up` and `down` are chosen token ids; empty for the tokens that gained and lost most.
    """
    base, tuned = seen
    row = most_changed(seen, up, down)
    change = gains(base[row], tuned[row])
    change[[*up, *down]] = 0  # a token in one set is not chosen for the other
    sets = [list(up) or _top(change), list(down) or _top(-change)]
    chosen = [
        "up: chosen" if up else "up: the tokens that gained most",
        "down: chosen" if down else "down: the tokens that lost most",
    ]
    if not all(sets):  # no probability moved
        likely = [i for i in tuned[row].argsort(descending=True).tolist() if i not in {*up, *down}]
        sets = [sets[0] or likely[:1], sets[1] or likely[1:2]]
        chosen = ["no probability moved, so the most likely tokens are asked about"]
    ids = [torch.tensor(x, device=change.device) for x in sets]
    most = "the chosen words moved most" if up or down else "KL(tuned ‖ base) is largest"
    where = f"the position of the completion where {most}"
    return Question(text.prompt_length - 1 + row, ids[0], ids[1], "; ".join([where, *chosen]))


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
        spellings = [word] if word.startswith(" ") or not word else [f" {word}", word]
        ids = [tokenizer(x, add_special_tokens=False)["input_ids"] for x in spellings]
        single = next((x[0] for x in ids if len(x) == 1), None)
        if single is None:
            parts = ", ".join(repr(tokenizer.decode([i])) for i in ids[0])
            raise ConfigError(f"{option} {word!r} is {len(ids[0])} tokens ({parts}); give words of one token each")
        found.append(single)
    return list(dict.fromkeys(found))


def refuse_overlap(up: Sequence[int], down: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ConfigError` if a token is in both sets."""
    if both := set(up) & set(down):
        raise ConfigError(f"{tokenizer.decode([min(both)])!r} is in both --up and --down; give it to one of them")
