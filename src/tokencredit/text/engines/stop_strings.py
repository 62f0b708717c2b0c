"""The search for stop strings in completions."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from tokencredit.text.data.detokenizer import Detokenizer
from tokencredit.text.data.prompts import PromptBatch

STOP_CONTEXT = 16
"""Prompt tokens that are decoded again at each step of a search for stop strings."""


def stop_detokenizers(prompts: PromptBatch, tokenizer: PreTrainedTokenizerBase) -> list[Detokenizer]:
    """A detokenizer per row for the search for stop strings, which may be special tokens.

    Decoding depends on a few tokens before, so the prompt's last ones are enough and each step stays cheap.
    """
    rows = zip(prompts.ids, prompts.mask, strict=True)
    return [Detokenizer(tokenizer, ids[mask][-STOP_CONTEXT:].tolist(), skip_special_tokens=False) for ids, mask in rows]


def contains_stop(stops: Sequence[str], ids: Sequence[int], detokenizer: Detokenizer) -> bool:
    """True if the text of these token ids contains a stop string."""
    text = detokenizer.text(ids)
    return any(stop in text for stop in stops)
