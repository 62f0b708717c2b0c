"""Rollouts: completions decoded with a key-value cache, each token with its log-probability and value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase

from tokencredit.text.models import ActorCritic, positions


@dataclass
class Rollout:
    """Prompts and what was sampled after them; `[batch, prompt]`, `[batch, time]` and `[batch]`."""

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    mask: Tensor
    """True at sampled tokens, the end-of-sequence token included."""
    logprobs: Tensor
    """Of each token under the distribution it was drawn from, nats."""
    values: Tensor
    """Of the state before each token."""
    truncated: Tensor
    """`[batch]`, true where the length limit came before an end-of-sequence token."""

    def inputs(self) -> dict[str, Tensor]:
        """What `ActorCritic` needs to evaluate these responses again."""
        return {
            "prompt_ids": self.prompt_ids,
            "prompt_mask": self.prompt_mask,
            "response_ids": self.response_ids,
            "mask": self.mask,
        }

    def texts(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """The completions without special tokens."""
        return [
            tokenizer.decode(ids[mask], skip_special_tokens=True)
            for ids, mask in zip(self.response_ids, self.mask, strict=True)
        ]


@torch.no_grad()
def sample(
    model: ActorCritic,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    uniforms: Tensor,
    *,
    temperature: float,
    end_ids: Sequence[int],
) -> Rollout:
    """Sample a completion for each prompt, by inverse transform of one uniform number a token.

    The random numbers come from outside, one for each row and step whether it is used or not: what a row says depends
    on its own numbers alone, not on how the batch was cut or on which rows ended before it.

    Args:
        model: the policy and its critic.
        prompt_ids: `[batch, prompt]`, padded on the left.
        prompt_mask: `[batch, prompt]`, true at the prompt's own tokens.
        uniforms: `[batch, max_new_tokens]`, in [0, 1).
        temperature: divides the logits.
        end_ids: tokens that end a completion.

    Returns:
        The rollout, its time axis as long as the longest completion.
    """
    batch, limit = uniforms.shape
    device = prompt_ids.device
    ends = torch.tensor(list(end_ids), device=device)
    attention_mask, position_ids = positions(prompt_mask, limit)
    response_ids = torch.full((batch, limit), int(ends[0]), device=device)
    mask = torch.zeros(batch, limit, dtype=torch.bool, device=device)
    logprobs = torch.zeros(batch, limit, device=device)
    values = torch.zeros(batch, limit, device=device)

    rows = torch.arange(batch, device=device)  # those still going; the others have left the batch and its cache
    cache = DynamicCache(config=model.lm.config)
    inputs, width = prompt_ids, prompt_ids.shape[1]
    for step in range(limit):
        seen = attention_mask[rows, : width + step]
        places = position_ids[rows, width + step - inputs.shape[1] : width + step]
        hidden = model.hidden(inputs, seen, places, cache)[:, -1]
        distribution = torch.log_softmax(model.logits(hidden) / temperature, dim=-1)
        tokens = draw(distribution, uniforms[rows, step])
        response_ids[rows, step] = tokens
        mask[rows, step] = True
        logprobs[rows, step] = distribution.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        values[rows, step] = model.values(hidden)

        going = ~torch.isin(tokens, ends)
        if not going.all():
            rows, tokens = rows[going], tokens[going]
            if len(rows) == 0:
                break
            cache.batch_select_indices(going.nonzero().squeeze(-1))
        inputs = tokens.unsqueeze(-1)

    length = int(mask.sum(1).max())
    ended = (torch.isin(response_ids, ends) & mask).any(1)
    return Rollout(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        response_ids=response_ids[:, :length],
        mask=mask[:, :length],
        logprobs=logprobs[:, :length],
        values=values[:, :length],
        truncated=~ended,
    )


def draw(distribution: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens from log-distributions `[batch, vocabulary]`: the first whose cumulated probability exceeds the number."""
    cumulated = distribution.exp().cumsum(-1)
    tokens = torch.searchsorted(cumulated, (uniforms.unsqueeze(-1) * cumulated[:, -1:]), right=True)
    return tokens.squeeze(-1).clamp(max=distribution.shape[-1] - 1)
