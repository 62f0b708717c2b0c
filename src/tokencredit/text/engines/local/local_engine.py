"""The local engine: samples from the trained model itself, in this process, single completions and turns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokencredit.settings.rollout import SamplingConfig
from tokencredit.text.data.detokenizer import StopSearch
from tokencredit.text.data.prompts import PromptBatch
from tokencredit.text.data.rollout import Rollout
from tokencredit.text.engines.engine import FAILURES, Conversation, Engine, OnTurn
from tokencredit.text.engines.local.sampling import Decoding, decode, sample
from tokencredit.text.engines.local.static_kv_cache import StaticDecoding
from tokencredit.text.models.kv_cache import (
    SPARE_TOKENS,
    CachedSteps,
    RowCache,
    can_keep_rows,
    put_rows,
    steps_of,
    take_rows,
)
from tokencredit.text.rollout_passes import evaluate_rollout


@dataclass
class LocalEngine(Engine):
    """An `Engine` that shares the policy's weights; the same uniforms give bitwise the same rollout."""

    decoding: StaticDecoding | None = None
    """Decoding with a static KV cache; None uses a growing one."""
    keeps_support: bool = False
    """Keep the tokens that filters leave (`Rollout.support`) where `top_k` bounds their number."""

    def generate(
        self,
        prompts: PromptBatch,
        settings: SamplingConfig,
        uniforms: Tensor,
        per_prompt: int = 1,
        started: Sequence[Tensor] | None = None,
    ) -> Rollout:
        """Sample with a KV cache; in bfloat16, recompute log-probs and values by a full forward pass."""
        # The policy itself samples, or its copy for a static cache, with the same weights.
        model = nullcontext(self.policy) if self.decoding is None else self.decoding.weights()
        with self.precision.no_grad(), model as policy:
            rollout = sample(
                policy,
                prompts.to(self.precision.device),
                uniforms.to(self.precision.device),
                settings,
                self.tokenizer,
                self.end_ids,
                per_prompt,
                None if started is None else [tokens.to(self.precision.device) for tokens in started],
                steps=steps_of if self.decoding is None else self.decoding.steps,
                in_step=self.in_step,
                keeps_support=self.keeps_support,
            )
        # In bfloat16 a pass of one token at a time is rounded in other ways than the update's pass of the whole text.
        return self.exact(rollout, settings)

    def converse(self, prompts: PromptBatch, settings: SamplingConfig, uniforms: Tensor) -> LocalConversation:
        """Begin episodes of several turns, with a growing KV cache."""
        return LocalConversation(self, prompts.to(self.precision.device), settings, uniforms.to(self.precision.device))

    def exact(self, rollout: Rollout, settings: SamplingConfig) -> Rollout:
        """The rollout with log-probs and values of a full forward pass in bfloat16; in float32 they equal it.

        The tokens were drawn with the log-probs of the sampling pass, which become `behavior_logprobs`.
        """
        if not self.precision.bfloat16:
            return rollout
        if rollout.behavior_logprobs is None:
            rollout = replace(rollout, behavior_logprobs=rollout.logprobs)
        with self.precision.no_grad():
            return evaluate_rollout(self.policy, rollout, settings.temperature, self.budget, self.in_step)

    def agreed(self) -> AbstractContextManager[None]:
        """A context for sampling a rollout, in which a failure of one process is raised in all."""
        # A process that fails between steps in step leaves the others in one, where they cannot hear of it.
        return self.processes.agreed(*FAILURES, MemoryError) if self.in_step is None else nullcontext()


class LocalConversation(Conversation):
    """Turns of a batch of rows, sampled by the model itself.

    A row that waits keeps its own keys and values, without padding. A batch of rows that go on is aligned at the right:
    the cache holds all but the last tokens of each, as many as the longest observation and the token before it, and one
    forward pass runs those. Models whose cache cannot be cut into rows (sliding windows, recurrent states) run the
    whole text again at each turn.
    """

    def __init__(self, engine: LocalEngine, prompts: PromptBatch, settings: SamplingConfig, uniforms: Tensor):
        """Start before the first turns; arguments as in `Engine.converse`, on the model's device."""
        super().__init__(prompts, settings)
        self.engine = engine
        ends = torch.tensor(list(engine.end_ids), device=prompts.ids.device)
        started = [prompts.ids.new_zeros(0)] * len(uniforms)
        self.state = Decoding(uniforms, started, settings, ends, {}, keeps_support=engine.keeps_support)
        self.turn_ends = torch.zeros_like(self.state.acted)
        self._kept: dict[int, RowCache] = {}

    def begin(self, started: Sequence[Sequence[int]], turns: Sequence[int]) -> None:
        """Give rows their first tokens, as `engine.Conversation.begin`."""
        super().begin(started, turns)
        self.state.begin_turn(range(len(started)), started, [1] * len(started))

    def turn(self, row: int) -> tuple[list[int], bool]:
        """The token ids of a row's last turn, and true if it was cut at its limit."""
        return self.state.ids(row, int(self.state.turn_starts[row])), bool(self.state.truncated[row])

    def ids(self, row: int) -> list[int]:
        """All token ids of a row after its prompt."""
        return self.state.ids(row)

    def sample(
        self, rows: Sequence[int], observations: Sequence[Sequence[int]], limits: Sequence[int], ended: OnTurn
    ) -> None:
        """Sample the next turn of some rows, as `engine.Conversation.sample`; none of them may be running."""
        before = [len(self.tokens(row)) for row in rows]
        self.state.begin_turn(rows, observations, limits)
        texts = [self.tokens(row) for row in rows]
        for row, text in zip(rows, texts, strict=True):
            begun, self.begun[row] = self.begun[row], 0
            self.state.turn_starts[row] -= begun
            if stops := self.settings.stop:
                context = text[: len(text) - begun]
                self.state.searches[row] = StopSearch(stops, self.engine.tokenizer, context, searched=begun)
        running = list(rows)

        def finished(active: list[bool]) -> None:
            done = [slot for slot, goes_on in enumerate(active) if not goes_on]
            if done and can_keep_rows(states.cache):
                starts = (~states.attention_mask[states.rows[done], : states.end]).sum(1).tolist()
                taken = take_rows(states.cache, done, starts, last=not any(active))
                self._kept |= {running[slot]: layers for slot, layers in zip(done, taken, strict=True)}
            ends = [running[slot] for slot in done]
            running[:] = [row for row, goes_on in zip(running, active, strict=True) if goes_on]
            for row in ends:
                self.turn_ends[row, int(self.state.lengths[row]) - 1] = True
                ended(row)

        with self.engine.precision.no_grad():
            states, hidden, inputs = self._resume(rows, texts, before, max(limits))
            decode(self.engine.policy, self.state, states, hidden, inputs, max(limits), finished=finished)

    def end(self, row: int) -> None:
        """Free the keys and values of a row."""
        self._kept.pop(row, None)

    def rollout(self) -> Rollout:
        """The rollout of all rows."""
        rollout = self.state.rollout(self.prompts)
        rollout.turn_ends = self.turn_ends[:, : rollout.mask.shape[1]]
        return self.engine.exact(rollout, self.settings)

    def _resume(
        self, rows: Sequence[int], texts: Sequence[Sequence[int]], before: Sequence[int], limit: int
    ) -> tuple[CachedSteps, Tensor, Tensor]:
        """Run what is not in the rows' caches, of `before` tokens at most; returns steps, states and these tokens."""
        policy, device = self.engine.policy, self.prompts.ids.device
        # A stop string, found late, may have cut tokens that are in the cache; the last one must run in any case.
        kept = [self._kept.pop(row, None) for row in rows]
        cached = [0 if layers is None else layers[0][0].shape[1] for layers in kept]
        cached = [min(have, length - 1) for have, length in zip(cached, before, strict=True)]
        # All rows run as many tokens as the row with most new ones; the rest of each comes from its cache.
        new = max(len(text) - have for text, have in zip(texts, cached, strict=True))
        reused = [max(len(text) - new, 0) for text in texts]
        width = max(reused) + new
        mask = torch.tensor([[False] * (width - len(text)) + [True] * len(text) for text in texts], device=device)
        inputs = torch.tensor([[0] * max(new - len(text), 0) + list(text[-new:]) for text in texts], device=device)
        states = steps_of(policy, mask, limit)
        if any(reused):
            put_rows(states.cache, kept, reused, new + min(limit, SPARE_TOKENS))
        positions = states.position_ids[:, width - new : width]
        states.begin(inputs)
        hidden = policy.hidden(inputs, states.attention_mask[:, :width], positions, states.cache)
        return states, hidden[:, -1], inputs
