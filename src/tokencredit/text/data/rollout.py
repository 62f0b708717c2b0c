"""What an engine returns: prompts and sampled completions as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from tokencredit.core.masked import extents
from tokencredit.text.data.detokenizer import Detokenizer


@dataclass
class Rollout:
    """Prompts `[batch, prompt]` and sampled completions `[batch, time]`, with per-token numbers."""

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    mask: Tensor
    """True at sampled tokens, the end-of-sequence token included. A row's tokens run without gaps to its last sampled
    one; those in between that are false are an environment's."""
    logprobs: Tensor
    """Log-prob of each token under the policy at its temperature, in nats, before filters such as top_p. Under the
    policy that drew it, of an earlier update, if it has an `age` and no `behavior_logprobs`."""
    truncated: Tensor
    """`[batch]`, true if the completion reached the length limit, or the episode was cut off."""
    values: Tensor | None = None
    """Value of the state before each token; None if the engine did not compute it."""
    entropy: Tensor | None = None
    """Entropy of the distribution behind each log-prob, in nats; None without filters, where −log-prob estimates it."""
    turn_ends: Tensor | None = None
    """True at the last token of each turn; None if completions are single turns."""
    behavior_logprobs: Tensor | None = None
    """Log-prob with which the engine drew each token, by its own arithmetic and after filters such as top_p; None where
    that is `logprobs`."""
    versions: Tensor | None = None
    """Version of the weights that drew each token, −1 elsewhere; None if they did not change while it was sampled."""
    age: Tensor | None = None
    """Updates of the policy since each token was drawn, 0 elsewhere; None if there were none."""
    support: Tensor | None = None
    """`[batch, time, top_k]`, int32: ids of the tokens that filters left when each token was drawn, padded with −1;
    None if they are not kept."""

    def inputs(self) -> dict[str, Tensor]:
        """Inputs of `ActorCritic` for evaluating these responses again."""
        return {name: getattr(self, name) for name in ("prompt_ids", "prompt_mask", "response_ids", "mask")}

    def head(self, count: int) -> Rollout:
        """The first rows."""
        rows: dict[str, Any] = {name: None if x is None else x[:count] for name, x in vars(self).items()}
        return Rollout(**rows)

    def lengths(self) -> Tensor:
        """Lengths of each prompt and of its response, in tokens, `[batch, 2]`."""
        return torch.stack([self.prompt_mask.sum(1), extents(self.mask)], dim=1)

    def response_lengths(self) -> Tensor:
        """Length of each response in tokens, those of an environment between turns included, `[batch]`."""
        return extents(self.mask)

    def by_response(self, x: Tensor) -> list[list[Any]]:
        """Entries of `x` `[batch, time]` at each response's tokens, an environment's between turns included."""
        rows = zip(x.cpu(), self.response_lengths().tolist(), strict=True)
        return [row[:length].tolist() for row, length in rows]

    def columns(self, ref_logprobs: Tensor | None) -> dict[str, list[Any]]:
        """Extra columns for reward functions.

        `prompt_ids` and `completion_ids`, the token ids of the prompt and after it; `completion_mask`, 1 at sampled
        tokens and 0 at an environment's; `ref_logprobs`, log-probs of sampled tokens under the reference model, if
        there is one.
        """
        prompt_ids = unpadded(self.prompt_ids, self.prompt_mask)
        columns = {"completion_ids": self.by_response(self.response_ids), "prompt_ids": prompt_ids}
        columns["completion_mask"] = self.by_response(self.mask.int())
        if ref_logprobs is not None:
            columns["ref_logprobs"] = unpadded(ref_logprobs, self.mask)
        return columns

    def texts(self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = True) -> list[str]:
        """The completions, detokenized after their prompts, by default without special tokens."""
        prompts = list(map(tuple, unpadded(self.prompt_ids, self.prompt_mask)))
        options = {"skip_special_tokens": skip_special_tokens}
        detokenizers = {ids: Detokenizer(tokenizer, ids, **options) for ids in dict.fromkeys(prompts)}
        rows = zip(prompts, self.by_response(self.response_ids), strict=True)
        return [detokenizers[prompt].text(ids) for prompt, ids in rows]

    def stopped(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> Tensor:
        """True for each completion that contains one of these strings, which may be a special token, `[batch]`."""
        texts = self.texts(tokenizer, skip_special_tokens=False)
        return torch.tensor([any(stop in text for stop in stops) for text in texts], device=self.mask.device)

    def tokens(self, row: int, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """The text of each token of a completion, special tokens included."""
        prompt = self.prompt_ids[row][self.prompt_mask[row]].tolist()
        return Detokenizer(tokenizer, prompt).tokens(self.response_ids[row, : self.response_lengths()[row]].tolist())


def unpadded(x: Tensor, mask: Tensor) -> list[list[Any]]:
    """Entries of each row where the mask is true; one transfer from the device per tensor, not per row."""
    return [row[true].tolist() for row, true in zip(x.cpu(), mask.cpu(), strict=True)]


def padded(rows: Sequence[Any], dtype: torch.dtype, value: float = 0, side: str = "right") -> Tensor:
    """Rows of different lengths as one tensor, `[rows, longest]`, padded on one side."""
    tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)
