"""The search for stop strings in completions."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from tokencredit.text.data.detokenizer import Detokenizer

STOP_CONTEXT = 16
"""Tokens before a completion that are decoded with it in the search; decoding depends on few."""


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
