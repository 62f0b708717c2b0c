"""Token ids to text: a completion as it reads after its prompt."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

PART = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes the bytes of an unfinished character to."""
MOST_TOKENS = 8
"""Of one character: four bytes, and some that belong to none."""


class Detokenizer:
    """Reads the completions of one prompt.

    Decoders like SentencePiece's drop the space before a text's first word, and WordPiece's reads a first token in a
    way of its own. So a completion is decoded together with its prompt, and the prompt's text is cut off.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ):
        """Read the prompt.

        Args:
            tokenizer: the policy's.
            prompt_ids: what stands before each completion, without padding.
            skip_special_tokens: leave special tokens out of the texts.
        """
        self.tokenizer, self.prompt_ids, self.skip_special_tokens = tokenizer, list(prompt_ids), skip_special_tokens
        self.prompt = self._decode(self.prompt_ids)

    def text(self, ids: Sequence[int]) -> str:
        """A completion.

        A character whose first bytes the prompt has belongs to the completion. A decoder that reads the prompt in
        another way when something follows it, beyond a last space, decodes the completion alone.
        """
        both = self._decode([*self.prompt_ids, *ids])
        if both.startswith(self.prompt):
            return both[len(self.prompt) :]
        pairs = enumerate(zip(self.prompt, both, strict=False))
        start = next((place for place, (own, now) in pairs if own != now), len(both))
        return self._decode(list(ids)) if self.prompt[start:].strip(PART + " ") else both[start:]

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """The text of each token: all of them in a row are the completion, with its special tokens spelt out.

        A character of several tokens stands at the last of them, and the others are empty.
        """
        texts: list[str] = []
        pending: list[int] = []
        reader, unfinished = self, ""
        for token in ids:
            text = reader.text([*pending, token])
            if text == unfinished and (name := self._special(token)):
                texts.append(name)
                continue
            pending.append(token)
            if not text or (text.endswith(PART) and len(pending) < MOST_TOKENS):
                texts.append("")
                unfinished = text
                continue
            if unfinished and text.startswith(unfinished):  # bytes that no character came of
                texts[-1] = unfinished + texts[-1]
                text = text[len(unfinished) :]
            texts.append(text)
            before = reader.prompt_ids if reader.prompt.endswith(PART) else []  # the character's first bytes
            reader = Detokenizer(self.tokenizer, before + pending, skip_special_tokens=self.skip_special_tokens)
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
