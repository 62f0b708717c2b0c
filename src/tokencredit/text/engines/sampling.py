"""Sampling with a KV cache: a token per step, each with its log-probability and, from a shared trunk, its value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

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

LOOK_EVERY = 16
"""Steps between two looks at which completions have ended, on devices other than a CPU."""

CONTEXT = 16
"""Tokens of a prompt that are read again at each step, to look for stop strings."""


class Steps(Protocol):
    """Hidden states of completions that grow by a token per step. A slot is a row of its batch."""

    def prompts(self, prompt_ids: Tensor, per_prompt: int) -> Tensor:
        """Read the prompts, each once for `per_prompt` consecutive rows; returns the states after them."""

    def next(self, tokens: Tensor) -> Tensor:
        """Read a token `[slots, 1]` of each slot; returns the states after them, `[slots, width]`."""

    def repeat(self, step: Callable[[], None], count: int) -> None:
        """Take a step, which calls `next` once, so many times."""

    def keep(self, going: list[bool]) -> Tensor | None:
        """Drop slots whose completion has ended, or some of them; returns those that stay, None if all do."""


class Decoding:
    """Completions that grow by a token per step, and the slots that hold those still going.

    `draw` neither waits for the device nor depends on Python numbers that change, so that it can be replayed.
    """

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
        # One more column, in which steps of completions that have ended write.
        shape = (batch, self.limit + 1)
        self.uniforms = uniforms
        self.settings, self.ends, self.readers = settings, ends, readers
        self.start_lengths = [len(tokens) for tokens in started]
        self.response_ids = torch.zeros(shape, dtype=torch.long, device=device)
        self.lengths = torch.tensor(self.start_lengths, device=device)
        self.response_ids[:, : self.limit][self._mask()] = torch.cat(list(started))
        self.logprobs = torch.zeros(shape, device=device)
        self.values: Tensor | None = None
        self.entropy = torch.zeros(shape, device=device) if settings.filters() else None
        self.truncated = torch.ones(batch, dtype=torch.bool, device=device)
        self.going = torch.ones(batch, dtype=torch.bool, device=device)
        self.rows = torch.arange(batch, device=device)
        self.warpers = logits_warpers(settings)
        self._searched = list(self.start_lengths)

    def last(self) -> Tensor:
        """The last token of each slot, `[slots]`."""
        return self.response_ids[self.rows, self.lengths[self.rows] - 1]

    def draw(self, logits: Tensor, inputs: Tensor, values: Tensor | None) -> None:
        """Draw a token for each slot, and write it down for those that are still going.

        Args:
            logits: `[slots, vocabulary]`.
            inputs: the tokens that were read, for filters.
            values: `[slots]`, of the states before the tokens, if they are known.
        """
        settings, rows = self.settings, self.rows
        lengths, going, truncated = self.lengths[rows], self.going[rows], self.truncated[rows]
        distribution = torch.log_softmax(logits / settings.temperature, dim=-1)
        allowed = distribution
        if settings.min_new_tokens:
            early = (lengths < settings.min_new_tokens).unsqueeze(-1)
            allowed = torch.where(early, allowed.index_fill(-1, self.ends, -torch.inf), allowed)
        for warper in self.warpers:
            allowed = warper(inputs, allowed)
        tokens = draw(allowed, self.uniforms[rows, lengths.clamp(max=self.limit - 1)])
        at = rows, torch.where(going, lengths, self.limit)
        self.response_ids[at] = tokens
        self.logprobs[at] = distribution.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        if self.entropy is not None:
            self.entropy[at] = torch.special.entr(distribution.exp()).sum(-1)
        if values is not None:
            self.values = torch.zeros_like(self.logprobs) if self.values is None else self.values
            self.values[at] = values
        lengths = lengths + going
        self.lengths[rows] = lengths
        if settings.stop_at_eos:
            going = going & ~(tokens.unsqueeze(-1) == self.ends).any(-1)
            self.truncated[rows] = truncated & (going | ~self.going[rows])
        self.going[rows] = going & (lengths < self.limit)

    def settle(self) -> list[bool]:
        """End completions at texts that end them; returns which slots are still going, the one wait for the device."""
        if self.settings.stop:
            self._end_at_stops()
        going: list[bool] = self.going[self.rows].tolist()
        return going

    def _end_at_stops(self) -> None:
        """Cut completions off after the first token, of those drawn since the last look, with which a stop appears."""
        drawn = zip(self.rows.tolist(), self.response_ids[self.rows].tolist(), strict=True)
        lengths, least = self.lengths.tolist(), max(self.settings.min_new_tokens, 1)
        for row, ids in drawn:
            for length in range(max(self._searched[row] + 1, least), lengths[row] + 1):
                if says_any(self.settings.stop, [ids[:length]], [self.readers[row]])[0]:
                    self.lengths[row] = length
                    self.going[row] = self.truncated[row] = False
                    break
            self._searched[row] = lengths[row]

    def keep(self, slots: Tensor | None) -> None:
        """Go on with these slots; None for all."""
        if slots is not None:
            self.rows = self.rows[slots]

    def rollout(self, prompts: PromptBatch) -> Rollout:
        """What was drawn, its time axis as long as the longest completion."""
        mask = self._mask()
        mask = mask[:, : int(self.lengths.max())]

        def drawn(x: Tensor, filling: float = 0.0) -> Tensor:
            return x[:, : mask.shape[1]].masked_fill(~mask, filling)

        return Rollout(
            prompt_ids=prompts.ids,
            prompt_mask=prompts.mask,
            response_ids=drawn(self.response_ids, int(self.ends[0])),
            mask=mask,
            logprobs=drawn(self.logprobs),
            values=None if self.values is None else drawn(self.values),
            truncated=self.truncated,
            entropy=None if self.entropy is None else drawn(self.entropy),
        )

    def _mask(self) -> Tensor:
        """`[batch, time]`, true at tokens of completions so far."""
        return torch.arange(self.limit, device=self.lengths.device) < self.lengths.unsqueeze(1)


class CachedSteps:
    """`Steps` with a KV cache that grows."""

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
        """Read a token `[slots, 1]` of each slot; returns the states after them, `[slots, width]`."""
        self.end += 1
        mask, position_ids = self.attention_mask[:, : self.end], self.position_ids[:, self.end - 1 : self.end]
        return self.model.hidden(tokens, mask[self.rows], position_ids[self.rows], self.cache)[:, -1]

    def repeat(self, step: Callable[[], None], count: int) -> None:
        """Take a step so many times."""
        for _ in range(count):
            step()

    def keep(self, going: list[bool]) -> Tensor | None:
        """Drop all slots whose completion has ended."""
        if all(going):
            return None
        slots = torch.tensor(going).nonzero().squeeze(-1).to(self.rows.device)
        self.rows = self.rows[slots]
        self._take(slots)
        return slots

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
    *,
    steps: Callable[[ActorCritic, Tensor, int], Steps] = CachedSteps,
    every: int | None = None,
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
            prompts and completions do: completions that have ended are read on until the others have. None for none.
        steps: how hidden states are computed, from the model, the prompts' mask and the most tokens after them.
        every: steps between two looks at which completions have ended; by default 1 on a CPU and `LOOK_EVERY` on other
            devices, for which to look is to wait.
    """
    batch, limit = uniforms.shape
    readers = stop_readers(prompts, tokenizer) if settings.stop else []
    started = [prompts.ids.new_zeros(0)] * batch if started is None else started
    state = Decoding(uniforms, started, settings, torch.tensor(list(end_ids), device=prompts.ids.device), readers)
    critic = model.critic if isinstance(model.critic, Critic) and model.critic.reads_last else None
    inputs, mask = continued(prompts, started)
    left = limit - min(state.start_lengths)
    run = steps(model, mask, left)
    every = (1 if mask.device.type == "cpu" else LOOK_EVERY) if every is None else every

    def write(hidden: Tensor, inputs: Tensor) -> None:
        """Draw the tokens after these states."""
        state.draw(model.logits(hidden), inputs, None if critic is None else critic(hidden))

    def step() -> None:
        """Read the last tokens and draw the next."""
        tokens = state.last().unsqueeze(-1)
        write(run.next(tokens), tokens)

    write(run.prompts(inputs, per_prompt), inputs)
    left -= 1
    while any(going := state.settle()):
        state.keep(run.keep(going))
        count = min(every, left)
        run.repeat(step, count)
        left -= count
    return state.rollout(prompts)


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
