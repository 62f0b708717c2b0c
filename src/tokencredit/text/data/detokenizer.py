"""Detokenize completions in the context of their prompts, and find stop strings in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Decoded form of an incomplete UTF-8 sequence."""
MAX_TOKENS = 8
"""Tokens that may make up one character: four bytes, and some invalid ones before them."""
STOP_CONTEXT = 16
"""Tokens before a completion that are decoded with it in the search; decoding depends on few."""


class Detokenizer:
    """Decodes the completions of one prompt.

    SentencePiece decoders drop the space before the first word, and WordPiece decoders treat the first token
    specially. A completion is therefore decoded together with its prompt, and the prompt's text is cut off.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ):
        """Decode the prompt, given without padding; texts leave out special tokens if `skip_special_tokens`."""
        self.tokenizer, self.prompt_ids, self.skip_special_tokens = tokenizer, list(prompt_ids), skip_special_tokens
        self.prompt = self._decode(self.prompt_ids)

    def text(self, ids: Sequence[int]) -> str:
        """The text of a completion.

        A character that begins in the prompt's last bytes belongs to the completion. If the completion changes how
        the prompt decodes, beyond a trailing space, the completion is decoded alone.
        """
        both = self._decode([*self.prompt_ids, *ids])
        if both.startswith(self.prompt):
            return both[len(self.prompt) :]
        start = shared_start(self.prompt, both)
        return self._decode(list(ids)) if self.prompt[start:].strip(INCOMPLETE + " ") else both[start:]

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """The text of each token, special tokens spelt out; joined, they are the completion.

        A character of several tokens belongs to the last of them; the others are empty.
        """
        texts: list[str] = []
        pending: list[int] = []
        detokenizer, unfinished = self, ""
        for token in ids:
            text = detokenizer.text([*pending, token])
            if text == unfinished and (name := self._special(token)):
                texts.append(name)
                continue
            pending.append(token)
            if not text or (text.endswith(INCOMPLETE) and len(pending) < MAX_TOKENS):
                texts.append("")
                unfinished = text
                continue
            if unfinished and text.startswith(unfinished):  # invalid bytes
                texts[-1] = unfinished + texts[-1]
                text = text[len(unfinished) :]
            texts.append(text)
            # The prompt holds the character's first bytes.
            before = detokenizer.prompt_ids if detokenizer.prompt.endswith(INCOMPLETE) else []
            detokenizer = Detokenizer(self.tokenizer, before + pending, skip_special_tokens=self.skip_special_tokens)
            pending, unfinished = [], ""
        if unfinished:
            texts[-1] = unfinished + texts[-1]
        return texts

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens))

    def _special(self, token: int) -> str:
        """The name of a special token; empty for any other token."""
        if self.tokenizer.decode([token], skip_special_tokens=True):
            return ""
        return str(self.tokenizer.decode([token]))


def shared_start(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the longest beginning that two texts or token sequences share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


class StopSearch:
    """Finds the first stop string in a completion that grows; it may be a special token."""

    def __init__(
        self, stops: Sequence[str], tokenizer: PreTrainedTokenizerBase, context: Sequence[int], searched: int = 0
    ):
        """Search after the tokens of `context`; the first `searched` tokens of the completion end it nowhere."""
        self.stops, self.searched = stops, searched
        self.detokenizer = Detokenizer(tokenizer, context[-STOP_CONTEXT:], skip_special_tokens=False)

    def end(self, ids: Sequence[int], shortest: int = 0) -> int | None:
        """Number of tokens, at least `shortest`, at which the first stop string is complete; None without one.

        Tokens of an earlier call are not searched again.
        """
        first, self.searched = max(self.searched + 1, shortest), len(ids)
        for length in range(first, len(ids) + 1):
            text = self.detokenizer.text(ids[:length])
            if any(stop in text for stop in self.stops):
                return length
        return None
