"""Sampling with a KV cache, one token per step, with log-probs and, for a critic on the policy's trunk, values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, MinPLogitsWarper, PreTrainedTokenizerBase, TopKLogitsWarper, TopPLogitsWarper

from tokencredit.distributed.processes import Processes
from tokencredit.distributed.sharding import within
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.text.data.detokenizer import StopSearch
from tokencredit.text.data.prompts import PromptBatch
from tokencredit.text.data.rollout import Rollout, padded
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.kv_cache import CachedSteps, steps_of

CHECK_EVERY = 16
"""Steps between checks for finished completions, on devices other than a CPU; each check is a host sync."""


class Decoding:
    """State of a batch of completions that grow by one token per step.

    `draw` makes no host sync and reads no changing Python number, so that a CUDA graph can replay it.
    """

    def __init__(
        self,
        uniforms: Tensor,
        started: Sequence[Tensor],
        settings: SamplingConfig,
        ends: Tensor,
        searches: dict[int, StopSearch],
        *,
        keeps_support: bool = False,
    ):
        """Start before the first sampled token.

        Args:
            uniforms: `[batch, limit]`, one random number per row and token.
            started: first tokens of each completion, which count as sampled.
            settings: sampling settings and stop conditions.
            ends: token ids that end a completion.
            searches: of each completion, if there are stop strings.
            keeps_support: keep the tokens that filters leave, if `settings.top_k` bounds their number.
        """
        (batch, self.limit), device = uniforms.shape, ends.device
        # Finished completions write to the extra column.
        shape = (batch, self.limit + 1)
        self.uniforms = uniforms
        self.settings, self.ends, self.searches = settings, ends, searches
        self.start_lengths = [len(tokens) for tokens in started]
        self.response_ids = torch.zeros(shape, dtype=torch.long, device=device)
        self.lengths = torch.tensor(self.start_lengths, device=device)
        self.acted = torch.arange(self.limit + 1, device=device) < self.lengths.unsqueeze(1)
        self.response_ids[self.acted] = torch.cat(list(started))
        self.turn_starts, self.turn_limits = torch.zeros_like(self.lengths), self.lengths.new_full((batch,), self.limit)
        self.logprobs = torch.zeros(shape, device=device)
        self.values: Tensor | None = None
        filtered = bool(settings.filters())
        self.entropy = torch.zeros(shape, device=device) if filtered else None
        self.behavior_logprobs = torch.zeros(shape, device=device) if filtered else None
        kept = settings.top_k if keeps_support else None
        self.support = None if kept is None else torch.full((*shape, kept), -1, dtype=torch.int32, device=device)
        self.truncated = torch.ones(batch, dtype=torch.bool, device=device)
        self.active = torch.ones(batch, dtype=torch.bool, device=device)
        self.rows = torch.arange(batch, device=device)
        self.warpers = logits_warpers(settings)

    def begin_turn(self, rows: Sequence[int], observations: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
        """Append observations, and make these rows the running batch; arguments as in `Conversation.sample`."""
        for row, ids, most in zip(rows, observations, limits, strict=True):
            start, end = int(self.lengths[row]), int(self.lengths[row]) + len(ids)
            self.response_ids[row, start:end] = torch.tensor(ids, dtype=torch.long, device=self.ends.device)
            self.acted[row, start:] = False  # tokens after a stop string, drawn before it was found
            self.lengths[row] = self.turn_starts[row] = end
            self.turn_limits[row] = min(end + most, self.limit)
        self.rows = torch.tensor(rows, device=self.ends.device)
        self.active[self.rows] = self.truncated[self.rows] = True

    def ids(self, row: int, start: int = 0) -> list[int]:
        """Token ids of a row so far, observations included, from column `start` on."""
        ids: list[int] = self.response_ids[row, start : int(self.lengths[row])].tolist()
        return ids

    def last(self) -> Tensor:
        """The last token of each slot, `[slots]`."""
        return self.response_ids[self.rows, self.lengths[self.rows] - 1]

    def draw(self, logits: Tensor, inputs: Tensor, values: Tensor | None) -> None:
        """Sample a token per slot and append it to unfinished completions.

        Args:
            logits: `[slots, vocabulary]`.
            inputs: the tokens of the step, an argument of Transformers' filters.
            values: `[slots]`, values of the states before the tokens; None if not computed.
        """
        settings, rows = self.settings, self.rows
        lengths, active, truncated = self.lengths[rows], self.active[rows], self.truncated[rows]
        # The policy's distribution at its temperature: that of the log-probs, of the KL and of the update.
        distribution = torch.log_softmax(logits / settings.temperature, dim=-1)
        # The filters leave a part of it to draw from: no end before min_new_tokens, then top_k, top_p and min_p.
        allowed = distribution
        if settings.min_new_tokens:
            early = (lengths - self.turn_starts[rows] < settings.min_new_tokens).unsqueeze(-1)
            allowed = torch.where(early, allowed.index_fill(-1, self.ends, -torch.inf), allowed)
        for warper in self.warpers:
            allowed = warper(inputs, allowed)
        # Where the token goes: behind its completion, or for finished ones into the extra column.
        at = rows, torch.where(active, lengths, self.limit)
        if self.support is not None:  # drops tokens beyond `top_k`, which it keeps if they tie
            best, ids = allowed.topk(min(self.support.shape[-1], allowed.shape[-1]))
            allowed = torch.full_like(allowed, -torch.inf).scatter(-1, ids, best)
            self.support[*at, : ids.shape[-1]] = ids.masked_fill(best == -torch.inf, -1).int()
        # Draw with the row's own random number for this position, and record the token with what it was drawn from.
        tokens = draw(allowed, self.uniforms[rows, lengths.clamp(max=self.limit - 1)])
        self.response_ids[at] = tokens
        self.acted[at] = torch.ones_like(active)  # of a Python number, a GPU would wait for a copy
        self.logprobs[at] = distribution.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        if self.entropy is not None:
            self.entropy[at] = torch.special.entr(distribution.exp()).sum(-1)
        if self.behavior_logprobs is not None:
            drawn = allowed.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
            self.behavior_logprobs[at] = drawn - allowed.logsumexp(-1)
        if values is not None:
            self.values = torch.zeros_like(self.logprobs) if self.values is None else self.values
            self.values[at] = values
        # An end token ends a completion, a limit cuts it; stop strings need text, and are searched for in `check`.
        lengths = lengths + active
        self.lengths[rows] = lengths
        if settings.stop_at_eos:
            active = active & ~(tokens.unsqueeze(-1) == self.ends).any(-1)
            self.truncated[rows] = truncated & (active | ~self.active[rows])
        self.active[rows] = active & (lengths < self.turn_limits[rows])

    def check(self) -> list[bool]:
        """End completions at stop strings; returns the slots that are unfinished. The only host sync."""
        if self.settings.stop:
            completions = zip(self.rows.tolist(), self.response_ids[self.rows].tolist(), strict=True)
            lengths, starts = self.lengths.tolist(), self.turn_starts.tolist()
            for row, ids in completions:
                end = self.searches[row].end(ids[starts[row] : lengths[row]], self.settings.min_new_tokens)
                if end is not None:
                    self.lengths[row] = starts[row] + end
                    self.active[row] = self.truncated[row] = False
        active: list[bool] = self.active[self.rows].tolist()
        return active

    def keep(self, slots: Tensor | None) -> None:
        """Keep only these slots; None keeps all."""
        if slots is not None:
            self.rows = self.rows[slots]

    def rollout(self, prompts: PromptBatch) -> Rollout:
        """The sampled completions, padded to the longest."""
        longest = int(self.lengths.max())
        present = torch.arange(longest, device=self.lengths.device) < self.lengths.unsqueeze(1)
        mask = self.acted[:, :longest] & present

        def padded(x: Tensor) -> Tensor:
            return x[:, :longest].masked_fill(~mask, 0.0)

        return Rollout(
            prompt_ids=prompts.ids,
            prompt_mask=prompts.mask,
            response_ids=self.response_ids[:, :longest].masked_fill(~present, int(self.ends[0])),
            mask=mask,
            logprobs=padded(self.logprobs),
            values=None if self.values is None else padded(self.values),
            truncated=self.truncated,
            entropy=None if self.entropy is None else padded(self.entropy),
            behavior_logprobs=None if self.behavior_logprobs is None else padded(self.behavior_logprobs),
            support=None if self.support is None else self.support[:, :longest],
        )


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
    steps: Callable[[ActorCritic, Tensor, int], CachedSteps] = steps_of,
    every: int | None = None,
    in_step: Processes | None = None,
    keeps_support: bool = False,
) -> Rollout:
    """Sample a completion for each prompt, by inverse-CDF sampling with one uniform number per token.

    Each row has its own random number per step, used or not, so a completion depends neither on how the batch was cut
    nor on which rows finished before it.

    Arguments that are not listed are those of `Engine.generate`, on the model's device.

    Args:
        model: the policy and its critic; a critic on the last hidden states computes values as it goes.
        per_prompt: number of consecutive rows with the same prompt, which is prefilled once; it divides `batch`.
        started: first tokens of each completion, whose log-probs and values are 0 in the rollout. Prompts with them are
            left-padded to the longest, which may take up to `limit` columns of context more than prompt and completion.
        steps: makes the `CachedSteps` from the model, the prompts' mask and the limit of new tokens.
        every: steps between checks for finished completions; by default 1 on a CPU and `CHECK_EVERY` elsewhere, where
            each check is a host sync.
        in_step: processes that sample in step, since the model is sharded over them; None samples alone.
        keeps_support: as in `Decoding`.
    """
    batch, limit = uniforms.shape
    started = [prompts.ids.new_zeros(0)] * batch if started is None else started
    rows = zip(prompts.ids, prompts.mask, started, strict=True) if settings.stop else ()
    searches = {
        row: StopSearch(settings.stop, tokenizer, ids[mask].tolist(), len(tokens))
        for row, (ids, mask, tokens) in enumerate(rows)
    }
    ends = torch.tensor(list(end_ids), device=prompts.ids.device)
    state = Decoding(uniforms, started, settings, ends, searches, keeps_support=keeps_support)
    inputs, mask = append_started(prompts, started)
    left = limit - min(state.start_lengths)
    states = steps(model, mask, left)
    decode(model, state, states, states.prompts(inputs, per_prompt), inputs, left, every, in_step=in_step)
    return state.rollout(prompts)


def decode(
    model: ActorCritic,
    state: Decoding,
    states: CachedSteps,
    hidden: Tensor,
    inputs: Tensor,
    left: int,
    every: int | None = None,
    finished: Callable[[list[bool]], None] | None = None,
    in_step: Processes | None = None,
) -> None:
    """Sample until all slots have finished their turns.

    Args:
        model: the policy and its critic.
        state: the running batch.
        states: computes hidden states.
        hidden: `[slots, width]`, states before the first tokens.
        inputs: the tokens that led to them.
        left: most tokens to sample per slot.
        every: as in `sample`.
        finished: called with the slots that are unfinished, after each check and before finished slots are dropped.
        in_step: as in `sample`; a process that has finished runs one of its slots on until all have.
    """
    critic = model.critic if model.critic is not None and model.critic.reads_last else None
    every = (1 if hidden.device.type == "cpu" else CHECK_EVERY) if every is None else every

    def draw_after(hidden: Tensor, inputs: Tensor) -> None:
        state.draw(model.logits(hidden), inputs, None if critic is None else critic(hidden))

    def step() -> None:
        tokens = state.last().unsqueeze(-1)
        within(model.lm, lambda: draw_after(states.next(tokens), tokens))

    draw_after(hidden, inputs)  # the first token, from the states of the prefill
    left -= 1
    while any(active := state.check()) or (in_step is not None and left):
        if in_step is not None:  # each pass is collective: go on until all processes have finished
            if not in_step.any(any(active)):
                break
            active = active if any(active) else [True, *active[1:]]
        if finished is not None:
            finished(active)
        # Finished slots leave the batch, so that the next passes are smaller.
        state.keep(states.keep(active))
        count = min(every, left)
        states.repeat(step, count)
        left -= count
    if finished is not None:
        finished(active)


def append_started(prompts: PromptBatch, started: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Left-padded token ids of prompts with the first tokens of their completions, and their mask."""
    rows = list(zip(prompts.ids, prompts.mask, started, strict=True))
    ids = [torch.cat([prompt, tokens]) for prompt, _, tokens in rows]
    mask = [torch.cat([prompt_mask, torch.ones_like(tokens).bool()]) for _, prompt_mask, tokens in rows]
    return padded(ids, torch.long, side="left"), padded(mask, torch.bool, side="left")


def logits_warpers(settings: SamplingConfig) -> list[LogitsProcessor]:
    """Transformers' logits warpers for top_k, top_p and min_p."""
    warpers: tuple[Any, ...] = (TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
    values = (settings.top_k, settings.top_p, settings.min_p)
    return [warper(value) for warper, value in zip(warpers, values, strict=True) if value is not None]


def draw(distribution: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens from unnormalised log-distributions `[batch, vocabulary]`, by inverse-CDF sampling."""
    cumulated = distribution.exp().cumsum(-1)
    tokens = torch.searchsorted(cumulated, (uniforms.unsqueeze(-1) * cumulated[:, -1:]), right=True)
    return tokens.squeeze(-1).clamp(max=distribution.shape[-1] - 1)
