"""Sampling with a KV cache: a token per step, each with its log-probability and, from a shared trunk, its value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

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
from tokencredit.text.data.prompts import PromptBatch
from tokencredit.text.engines.cache import sampling_cache
from tokencredit.text.engines.detokenizer import Detokenizer
from tokencredit.text.engines.engine import Rollout
from tokencredit.text.models.actor_critic import ActorCritic, positions
from tokencredit.text.models.critic import Critic

CONTEXT = 16
"""Tokens of a prompt that are read again at each step, to look for stop strings."""


class Decoding:
    """Completions that grow by a token per step, and the rows that are still going."""

    def __init__(
        self,
        uniforms: Tensor,
        started: Sequence[Tensor],
        settings: SamplingConfig,
        ends: Tensor,
        readers: Sequence[Detokenizer],
    ):
        """Begin with nothing drawn.

        Args:
            uniforms: `[batch, time]`, the randomness of at most so many tokens.
            started: the tokens of each completion that stand already.
            settings: how to draw and when to stop.
            ends: tokens that end a completion.
            readers: of each completion, if texts can end it.
        """
        (batch, self.limit), device = uniforms.shape, ends.device
        shape = uniforms.shape
        self.uniforms = uniforms
        self.settings, self.ends, self.readers = settings, ends, readers
        self.response_ids = torch.full(shape, int(ends[0]), device=device)
        self.mask = torch.zeros(shape, dtype=torch.bool, device=device)
        self.lengths = torch.tensor([len(tokens) for tokens in started], device=device)
        self.mask |= torch.arange(shape[1], device=device) < self.lengths.unsqueeze(1)
        self.response_ids[self.mask] = torch.cat(list(started))
        self.logprobs = torch.zeros(shape, device=device)
        self.values: Tensor | None = None
        self.entropy = torch.zeros(shape, device=device) if settings.filters() else None
        self.truncated = torch.ones(batch, dtype=torch.bool, device=device)
        self.rows = torch.arange(batch, device=device)
        self.warpers = logits_warpers(settings)

    def draw(self, logits: Tensor, inputs: Tensor, values: Tensor | None) -> Tensor:
        """Draw a token for each row that is still going, and write it down.

        Args:
            logits: `[rows, vocabulary]`.
            inputs: the tokens that were read, for filters.
            values: `[rows]`, of the states before the tokens, if they are known.

        Returns:
            The tokens, `[rows]`.
        """
        settings, rows = self.settings, self.rows
        steps = self.lengths[rows]
        distribution = torch.log_softmax(logits / settings.temperature, dim=-1)
        allowed = distribution
        if settings.min_new_tokens:
            early = (steps < settings.min_new_tokens).unsqueeze(-1)
            allowed = torch.where(early, allowed.index_fill(-1, self.ends, -torch.inf), allowed)
        for warper in self.warpers:
            allowed = warper(inputs, allowed)
        tokens = draw(allowed, self.uniforms[rows, steps])
        self.response_ids[rows, steps] = tokens
        self.mask[rows, steps] = True
        self.logprobs[rows, steps] = distribution.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        if self.entropy is not None:
            self.entropy[rows, steps] = torch.special.entr(distribution.exp()).sum(-1)
        if values is not None:
            self.values = torch.zeros_like(self.logprobs) if self.values is None else self.values
            self.values[rows, steps] = values
        self.lengths[rows] += 1
        return tokens

    def going(self, tokens: Tensor) -> Tensor:
        """Which of the rows go on after these tokens, just drawn, and do not end with them."""
        settings, rows = self.settings, self.rows
        lengths = self.lengths[rows]
        ended = torch.isin(tokens, self.ends) if settings.stop_at_eos else torch.zeros_like(tokens, dtype=torch.bool)
        if settings.stop:
            readers = [self.readers[row] for row in rows.tolist()]
            drawn = zip(self.response_ids[rows].tolist(), lengths.tolist(), strict=True)
            texts = [ids[:length] for ids, length in drawn]
            said = torch.tensor(says_any(settings.stop, texts, readers), device=ended.device)
            ended |= said & (lengths >= settings.min_new_tokens)
        self.truncated[rows] = ~ended
        return ~ended & (lengths < self.limit)

    def rollout(self, prompts: PromptBatch) -> Rollout:
        """What was drawn, its time axis as long as the longest completion."""
        length = int(self.mask.sum(1).max())
        return Rollout(
            prompt_ids=prompts.ids,
            prompt_mask=prompts.mask,
            response_ids=self.response_ids[:, :length],
            mask=self.mask[:, :length],
            logprobs=self.logprobs[:, :length],
            values=None if self.values is None else self.values[:, :length],
            truncated=self.truncated,
            entropy=None if self.entropy is None else self.entropy[:, :length],
        )


class CachedSteps:
    """Hidden states of completions that grow by a token per step, from a KV cache."""

    def __init__(self, model: ActorCritic, prompt_mask: Tensor, limit: int):
        """Begin before prompts with this mask, `[batch, prompt]`, and at most `limit` tokens after them."""
        self.model, self.end = model, prompt_mask.shape[1]
        self.attention_mask, self.position_ids = positions(prompt_mask, limit)
        self.cache = sampling_cache(model.lm.config)
        self.rows = torch.arange(len(prompt_mask), device=prompt_mask.device)

    def prompts(self, prompt_ids: Tensor, per_prompt: int) -> Tensor:
        """Read the prompts, each once for `per_prompt` consecutive rows; returns the states after them."""
        each, end = self.rows[::per_prompt], self.end
        mask, position_ids = self.attention_mask[each, :end], self.position_ids[each, :end]
        hidden = self.model.hidden(prompt_ids[each], mask, position_ids, self.cache)[:, -1]
        if per_prompt == 1:
            return hidden
        self._take(torch.arange(len(hidden), device=hidden.device).repeat_interleave(per_prompt))
        return hidden.repeat_interleave(per_prompt, dim=0)

    def next(self, tokens: Tensor) -> Tensor:
        """Read a token `[rows, 1]` of each row that is still going; returns the states after them, `[rows, width]`."""
        self.end += 1
        mask, position_ids = self.attention_mask[:, : self.end], self.position_ids[:, self.end - 1 : self.end]
        return self.model.hidden(tokens, mask[self.rows], position_ids[self.rows], self.cache)[:, -1]

    def keep(self, kept: Tensor) -> None:
        """Go on with some of the rows that are still going; `kept` is true for them."""
        self.rows = self.rows[kept]
        self._take(kept.nonzero().squeeze(-1))

    def _take(self, rows: Tensor) -> None:
        """Let the cache hold these of its rows."""
        # Layers with a recurrent state have neither `batch_repeat_interleave` nor `batch_select_indices`.
        self.cache.reorder_cache(cast(torch.LongTensor, rows))


@torch.no_grad()
def sample(
    model: ActorCritic,
    prompts: PromptBatch,
    uniforms: Tensor,
    settings: SamplingConfig,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int],
    per_prompt: int = 1,
    started: Sequence[Tensor] | None = None,
) -> Rollout:
    """Sample a completion for each prompt, by inverse-CDF sampling with one uniform number per token.

    The random numbers come from outside, one for each row and step whether it is used or not: what a row says depends
    on its own numbers alone, not on how the batch was cut or on which rows ended before it.

    Args:
        model: the policy and its critic; a critic on its last hidden states gives values on the way.
        prompts: on the model's device.
        uniforms: `[batch, settings.max_new_tokens]`, in [0, 1).
        settings: how to draw and when to stop.
        tokenizer: reads what was written so far, where a text may end it.
        end_ids: tokens that end a completion.
        per_prompt: consecutive rows with the same prompt, which is then read once; it divides `batch`.
        started: first tokens of each completion, the same in rows of one prompt; their log-probs and values are 0 in
            the rollout. Padded on the left to the longest, they take up to `limit` columns more of the context than
            prompts and completions do. None for none.
    """
    batch, limit = uniforms.shape
    readers = stop_readers(prompts, tokenizer) if settings.stop else []
    started = [prompts.ids.new_zeros(0)] * batch if started is None else started
    state = Decoding(uniforms, started, settings, torch.tensor(list(end_ids), device=prompts.ids.device), readers)
    critic = model.critic if isinstance(model.critic, Critic) and model.critic.reads_last else None
    inputs, mask = continued(prompts, started)
    steps = CachedSteps(model, mask, limit - min(len(tokens) for tokens in started))
    hidden = steps.prompts(inputs, per_prompt)
    while True:
        tokens = state.draw(model.logits(hidden), inputs, None if critic is None else critic(hidden))
        going = state.going(tokens)
        if not going.all():
            state.rows, tokens = state.rows[going], tokens[going]
            if len(tokens) == 0:
                return state.rollout(prompts)
            steps.keep(going)
        inputs = tokens.unsqueeze(-1)
        hidden = steps.next(inputs)


def continued(prompts: PromptBatch, started: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Token ids of prompts with the first tokens of their completions, padded on the left, and their mask."""
    longest = max(len(tokens) for tokens in started)
    if longest == 0:
        return prompts.ids, prompts.mask
    rows = [
        (prompt.new_zeros(longest - len(tokens)), prompt, own, tokens)
        for prompt, own, tokens in zip(prompts.ids, prompts.mask, started, strict=True)
    ]
    ids = torch.stack([torch.cat([padding, prompt, tokens]) for padding, prompt, _, tokens in rows])
    mask = torch.stack(
        [torch.cat([padding.bool(), own, torch.ones_like(tokens).bool()]) for padding, _, own, tokens in rows]
    )
    return ids, mask


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


def stop_readers(prompts: PromptBatch, tokenizer: PreTrainedTokenizerBase) -> list[Detokenizer]:
    """For each row, a reader of completions with their special tokens, which may be what ends them.

    Decoders look back a few tokens, so the prompt's last ones stand for all of it and each step stays cheap.
    """
    rows = zip(prompts.ids, prompts.mask, strict=True)
    return [Detokenizer(tokenizer, ids[own][-CONTEXT:].tolist(), skip_special_tokens=False) for ids, own in rows]


def says_any(stops: Sequence[str], rows: Sequence[Sequence[int]], readers: Sequence[Detokenizer]) -> list[bool]:
    """Which rows of token ids contain one of the texts."""
    texts = [reader.text(ids) for reader, ids in zip(readers, rows, strict=True)]
    return [any(stop in text for stop in stops) for text in texts]


def draw(distribution: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens from unnormalised log-distributions `[batch, vocabulary]`, by inverse-CDF sampling."""
    cumulated = distribution.exp().cumsum(-1)
    tokens = torch.searchsorted(cumulated, (uniforms.unsqueeze(-1) * cumulated[:, -1:]), right=True)
    return tokens.squeeze(-1).clamp(max=distribution.shape[-1] - 1)
