"""Prompts: texts to token ids, in an order that a run can be asked for again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokencredit.runs.errors import ConfigError


class Prompts:
    """A list of prompts that batches go through in turn, beginning anew at its end."""

    def __init__(
        self,
        texts: Sequence[str] | str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        add_bos: bool | None = None,
        max_length: int | None = None,
    ):
        """Tokenize once.

        Args:
            texts: the prompts, or the one prompt.
            tokenizer: the policy's.
            add_bos: whether a beginning-of-sequence token comes first; None leaves that to the tokenizer.
            max_length: the most tokens that leave room for a completion.

        Raises:
            ConfigError: a prompt without a token, one that is too long, or no beginning-of-sequence token to add.
        """
        if add_bos and tokenizer.bos_token_id is None:
            raise ConfigError("prompts.add_bos is true, but the tokenizer has no beginning-of-sequence token")
        self.texts = [texts] if isinstance(texts, str) else list(texts)
        self.ids = [encode(text, tokenizer, add_bos) for text in self.texts]
        self.pad_id = next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)
        for number, (text, ids) in enumerate(zip(self.texts, self.ids, strict=True)):
            if not ids:
                raise ConfigError(
                    f"prompts.text[{number}] is {text!r}, which has no token; write a text or set prompts.add_bos"
                )
            if max_length is not None and len(ids) > max_length:
                raise ConfigError(
                    f"prompts.text[{number}] has {len(ids)} tokens, but beside rollout.max_new_tokens the context "
                    f"has room for {max_length}; shorten the prompt or lower rollout.max_new_tokens"
                )

    def batch(self, first: int, size: int, repeat: int = 1) -> tuple[list[str], Tensor, Tensor]:
        """Rows `first` to `first + size − 1` of the endless sequence in which each prompt stands `repeat` times.

        Returns:
            their texts, their token ids `[size, prompt]` padded on the left, and the bool mask of what is no padding.
        """
        chosen = [(first + i) // repeat % len(self.ids) for i in range(size)]
        width = max(len(self.ids[i]) for i in chosen)
        ids = torch.tensor([[self.pad_id] * (width - len(self.ids[i])) + self.ids[i] for i in chosen])
        mask = torch.tensor([[False] * (width - len(self.ids[i])) + [True] * len(self.ids[i]) for i in chosen])
        return [self.texts[i] for i in chosen], ids, mask


def encode(text: str, tokenizer: PreTrainedTokenizerBase, add_bos: bool | None) -> list[int]:
    """Token ids of a prompt; see `Prompts` for `add_bos`."""
    if add_bos is None:
        return tokenizer(text)["input_ids"]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [tokenizer.bos_token_id, *ids] if add_bos else ids
