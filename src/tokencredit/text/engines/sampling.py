"""Rollouts: completions decoded with a key-value cache, each token with its log-probability and value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    PreTrainedTokenizerBase,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tokencredit.settings.training import SamplingConfig
from tokencredit.text.engines.cache import sampling_cache
from tokencredit.text.models.actor_critic import ActorCritic, positions


@dataclass
class Rollout:
    """Prompts and what was sampled after them; `[batch, prompt]`, `[batch, time]` and `[batch]`."""

    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    mask: Tensor
    """True at sampled tokens, the end-of-sequence token included."""
    logprobs: Tensor
    """Of each token under the policy at its temperature, nats; filters such as top_p do not enter."""
    values: Tensor
    """Of the state before each token; 0 until `passes` asks a critic that has a trunk of its own."""
    truncated: Tensor
    """`[batch]`, true where the length limit came before an end."""

    def inputs(self) -> dict[str, Tensor]:
        """What `ActorCritic` needs to evaluate these responses again."""
        return {
            "prompt_ids": self.prompt_ids,
            "prompt_mask": self.prompt_mask,
            "response_ids": self.response_ids,
            "mask": self.mask,
        }

    def head(self, count: int) -> Rollout:
        """The first rows."""
        return Rollout(*(getattr(self, field.name)[:count] for field in fields(self)))

    def lengths(self) -> Tensor:
        """Tokens of each prompt and its response."""
        return self.prompt_mask.sum(1) + self.mask.sum(1)

    def columns(self, ref_logprobs: Tensor | None) -> dict[str, list[Any]]:
        """What reward functions may ask for beside the texts: the tokens, and what the reference thinks of them."""
        rows = list(self.mask)
        columns = {"completion_ids": [ids[acted].tolist() for ids, acted in zip(self.response_ids, rows, strict=True)]}
        if ref_logprobs is not None:
            columns["ref_logprobs"] = [x[acted].tolist() for x, acted in zip(ref_logprobs, rows, strict=True)]
        return columns

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
    settings: SamplingConfig,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int],
    per_prompt: int = 1,
) -> Rollout:
    """Sample a completion for each prompt, by inverse transform of one uniform number a token.

    The random numbers come from outside, one for each row and step whether it is used or not: what a row says depends
    on its own numbers alone, not on how the batch was cut or on which rows ended before it.

    Args:
        model: the policy and its critic.
        prompt_ids: `[batch, prompt]`, padded on the left.
        prompt_mask: `[batch, prompt]`, true at the prompt's own tokens.
        uniforms: `[batch, settings.max_new_tokens]`, in [0, 1).
        settings: how to draw and when to stop.
        tokenizer: reads what was written so far, where a text may end it.
        end_ids: tokens that end a completion.
        per_prompt: how many rows in a row have the same prompt, which is then read once; it divides `batch`.

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
    truncated = torch.ones(batch, dtype=torch.bool, device=device)
    warpers = logits_warpers(settings)

    rows = torch.arange(batch, device=device)  # those still going; the others have left the batch and its cache
    cache = sampling_cache(model.lm.config)
    width = prompt_ids.shape[1]
    inputs = prompt_ids
    for step in range(limit):
        if step == 0:
            each = slice(None, None, per_prompt)
            hidden = model.hidden(prompt_ids[each], prompt_mask[each], position_ids[each, :width], cache)[:, -1]
            if per_prompt > 1:
                hidden = hidden.repeat_interleave(per_prompt, dim=0)
                cache.batch_repeat_interleave(per_prompt)
        else:
            end = width + step
            hidden = model.hidden(inputs, attention_mask[rows, :end], position_ids[rows, end - 1 : end], cache)[:, -1]
        distribution = torch.log_softmax(model.logits(hidden) / settings.temperature, dim=-1)
        allowed = distribution
        if step < settings.min_new_tokens:
            allowed = allowed.index_fill(-1, ends, -torch.inf)
        for warper in warpers:
            allowed = warper(inputs, allowed)
        tokens = draw(allowed, uniforms[rows, step])
        response_ids[rows, step] = tokens
        mask[rows, step] = True
        logprobs[rows, step] = distribution.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        if model.critic is None:
            values[rows, step] = model.values(hidden)

        ended = torch.isin(tokens, ends) if settings.stop_at_eos else torch.zeros_like(tokens, dtype=torch.bool)
        if settings.stop and step + 1 >= settings.min_new_tokens:
            ended |= says_any(settings.stop, response_ids[rows, : step + 1], tokenizer)
        if ended.any():
            truncated[rows[ended]] = False
            rows, tokens = rows[~ended], tokens[~ended]
            if len(rows) == 0:
                break
            cache.batch_select_indices((~ended).nonzero().squeeze(-1))
        inputs = tokens.unsqueeze(-1)

    length = int(mask.sum(1).max())
    return Rollout(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        response_ids=response_ids[:, :length],
        mask=mask[:, :length],
        logprobs=logprobs[:, :length],
        values=values[:, :length],
        truncated=truncated,
    )


def logits_warpers(settings: SamplingConfig) -> list[LogitsProcessor]:
    """Transformers' own filters for the settings that are on."""
    warpers: list[LogitsProcessor] = []
    if settings.top_k is not None:
        warpers.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p is not None:
        warpers.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p is not None:
        warpers.append(MinPLogitsWarper(settings.min_p))
    return warpers


def says_any(stops: Sequence[str], ids: Tensor, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Which rows of token ids contain one of the texts."""
    texts = tokenizer.batch_decode(ids)
    return torch.tensor([any(stop in text for stop in stops) for text in texts], device=ids.device)


def draw(distribution: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens from unnormalised log-distributions `[batch, vocabulary]`: the first whose cumulated share is larger."""
    cumulated = distribution.exp().cumsum(-1)
    tokens = torch.searchsorted(cumulated, (uniforms.unsqueeze(-1) * cumulated[:, -1:]), right=True)
    return tokens.squeeze(-1).clamp(max=distribution.shape[-1] - 1)
