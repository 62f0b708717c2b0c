"""Tokenization of untrusted texts: what they spell never becomes an added token of the tokenizer."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

MARK = "\ufdd0"
"""A noncharacter, which no text holds. Inside an untrusted text it splits the names of added tokens."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
NO_TEXT = re.compile(f"[\ud800-\udfff{MARK}]")
"""Characters that are no text: lone surrogates, which tokenizers reject, and the mark."""


class Encoder:
    """Tokenizes rendered templates, in which only the template's own added tokens become tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str = ""):
        """Collect the added tokens that an untrusted text must not become.

        Args:
            tokenizer: the policy's.
            template: source of the chat template; added tokens in it are protected even if they are not special.
        """
        self.tokenizer = tokenizer
        self.protected = {
            token.content: index
            for index, token in tokenizer.added_tokens_decoder.items()
            if token.special or (token.content.strip() and token.content in template)
        }
        """Names and ids of the protected tokens."""
        tokens = tokenizer.added_tokens_decoder
        self._special = [name for name, index in self.protected.items() if not tokens[index].rstrip][:1]
        names = "|".join(re.escape(name) for name in sorted(self.protected, key=len, reverse=True))
        self._begins = re.compile(f"(?=(?:{names}))(.)", re.DOTALL) if names else None

    def guarded(self, value: Any) -> Any:
        """An untrusted text, list or mapping with marks that keep it from becoming protected tokens."""
        if isinstance(value, str):
            return self._guarded_text(value)
        if isinstance(value, Mapping):
            return {self.guarded(key): self.guarded(item) for key, item in value.items()}
        return [self.guarded(item) for item in value] if isinstance(value, list | tuple) else value

    def ids(self, text: str) -> list[int]:
        """Token ids of a rendered text without its marks; the tokenizer adds no special tokens."""
        if MARK not in text:
            return self._encode(self.tokenizer, text)
        marked, mark = self._with_mark
        return [index for index in self._encode(marked, text) if index != mark]

    def continuation(self, text: str) -> list[int]:
        """Token ids of a text that follows others.

        SentencePiece puts a space before the first word of a text. Where it does, the text is tokenized after another
        one, so that the ids decode to the text alone.
        """
        lead, written = self.ids("."), text.replace(MARK, "")
        before = str(self.tokenizer.decode(lead))
        for start in ("", *self._special, "\n", "."):
            begun, both = self.ids(start), self.ids(start + text)
            ids = both[len(begun) :]
            if both[: len(begun)] == begun and self.tokenizer.decode([*lead, *ids]) == before + written:
                return ids
        return self.ids(text)

    def first(self, text: str) -> str | None:
        """The name of the protected token that a text begins with; None if it begins with another text."""
        names = (name for name in self.protected if text.startswith(name))
        return max(names, key=len, default=None)

    def find(self, text: str, names: Collection[str], most: int) -> int | None:
        """Position of the first of these tokens that begins in `text[: most + 1]`; None if none does."""
        found = (text.find(name, 0, most + len(name)) for name in names)
        return min((at for at in found if at >= 0), default=None)

    def _guarded_text(self, text: str) -> str:
        text = NO_TEXT.sub(REPLACEMENT, text)
        broken = self._begins.sub(rf"\1{MARK}", text) if self._begins else text
        if not self._forged(broken):
            return broken
        # A name of one character, or characters that the tokenizer's normalizer turns into a name.
        return MARK.join(REPLACEMENT if self._forged(character) else character for character in text)

    def _forged(self, text: str) -> bool:
        return not set(self.protected.values()).isdisjoint(self.ids(text))

    @cached_property
    def _with_mark(self) -> tuple[PreTrainedTokenizerBase, int]:
        """The tokenizer with the mark as a special token, which splits texts and is then left out; and its id."""
        marked = copy.deepcopy(self.tokenizer)
        marked.add_tokens([AddedToken(MARK, special=True, normalized=False)], special_tokens=True)
        return marked, marked.added_tokens_encoder[MARK]

    @staticmethod
    def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        encoded = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return list(encoded["input_ids"])
