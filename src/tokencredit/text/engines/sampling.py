"""Sampling with a KV cache: a token per step, each with its log-probability and, from a shared trunk, its value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad
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

    def __init__(self, started: Tensor, settings: SamplingConfig, ends: Tensor, readers: Sequence[Detokenizer]):
        """Begin with nothing drawn.

        Args:
            started: `[batch, begun]`, the tokens that stand already.
            settings: how to draw and when to stop.
            ends: tokens that end a completion.
            readers: of each completion, if texts can end it.
        """
        (batch, begun), device = started.shape, ends.device
        shape = (batch, settings.max_new_tokens)
        self.settings, self.ends, self.readers = settings, ends, readers
        self.response_ids = torch.full(shape, int(ends[0]), device=device)
        self.mask = torch.zeros(shape, dtype=torch.bool, device=device)
        self.response_ids[:, :begun], self.mask[:, :begun] = started, True
        self.logprobs = torch.zeros(shape, device=device)
        self.values: Tensor | None = None
        self.entropy = torch.zeros(shape, device=device) if settings.filters() else None
        self.truncated = torch.ones(batch, dtype=torch.bool, device=device)
        self.rows = torch.arange(batch, device=device)
        self.warpers = logits_warpers(settings)

    def draw(self, step: int, logits: Tensor, uniforms: Tensor, inputs: Tensor) -> Tensor:
        """Draw a token for each row that is still going, and write it down with its log-probability; returns them."""
        settings, rows = self.settings, self.rows
        distribution = torch.log_softmax(logits / settings.temperature, dim=-1)
        allowed = distribution
        if step < settings.min_new_tokens:
            allowed = allowed.index_fill(-1, self.ends, -torch.inf)
        for warper in self.warpers:
            allowed = warper(inputs, allowed)
        tokens = draw(allowed, uniforms[rows, step])
        self.response_ids[rows, step] = tokens
        self.mask[rows, step] = True
        self.logprobs[rows, step] = distribution.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        if self.entropy is not None:
            self.entropy[rows, step] = torch.special.entr(distribution.exp()).sum(-1)
        return tokens

    def keep_values(self, step: int, values: Tensor) -> None:
        """Write down the values of the states before this step's tokens."""
        if self.values is None:
            self.values = torch.zeros_like(self.logprobs)
        self.values[self.rows, step] = values

    def ended(self, step: int, tokens: Tensor) -> Tensor:
        """True for each row that ends with this step's token."""
        settings = self.settings
        ended = torch.isin(tokens, self.ends) if settings.stop_at_eos else torch.zeros_like(tokens, dtype=torch.bool)
        if settings.stop and step + 1 >= settings.min_new_tokens:
            readers = [self.readers[row] for row in self.rows.tolist()]
            ended |= says_any(settings.stop, self.response_ids[self.rows, : step + 1], readers)
        return ended

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
    started: Tensor | None = None,
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
        started: `[batch, begun]`, first tokens of the completions, the same in rows of one prompt; their log-probs and
            values are 0 in the rollout. None for none.
    """
    batch, limit = uniforms.shape
    readers = stop_readers(prompts, tokenizer) if settings.stop else []
    started = prompts.ids.new_zeros(batch, 0) if started is None else started
    begun = started.shape[1]
    state = Decoding(started, settings, torch.tensor(list(end_ids), device=prompts.ids.device), readers)
    critic = model.critic if isinstance(model.critic, Critic) and model.critic.reads_last else None
    inputs = torch.cat([prompts.ids, started], dim=1)
    steps = CachedSteps(model, pad(prompts.mask, (0, begun), value=True), limit - begun)
    for step in range(begun, limit):
        hidden = steps.next(inputs) if step > begun else steps.prompts(inputs, per_prompt)
        tokens = state.draw(step, model.logits(hidden), uniforms, inputs)
        if critic is not None:
            state.keep_values(step, critic(hidden))
        ended = state.ended(step, tokens)
        if ended.any():
            state.truncated[state.rows[ended]] = False
            state.rows, tokens = state.rows[~ended], tokens[~ended]
            if len(tokens) == 0:
                break
            steps.keep(~ended)
        inputs = tokens.unsqueeze(-1)
    return state.rollout(prompts)


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


def says_any(stops: Sequence[str], ids: Tensor, readers: Sequence[Detokenizer]) -> Tensor:
    """Which rows of token ids contain one of the texts."""
    texts = [reader.text(row) for reader, row in zip(readers, ids.tolist(), strict=True)]
    return torch.tensor([any(stop in text for stop in stops) for text in texts], device=ids.device)


def draw(distribution: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens from unnormalised log-distributions `[batch, vocabulary]`, by inverse-CDF sampling."""
    cumulated = distribution.exp().cumsum(-1)
    tokens = torch.searchsorted(cumulated, (uniforms.unsqueeze(-1) * cumulated[:, -1:]), right=True)
    return tokens.squeeze(-1).clamp(max=distribution.shape[-1] - 1)
