"""Several turns per row with one KV cache: rows leave the running batch while an environment answers, and come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokencredit.settings.rollout import SamplingConfig
from tokencredit.text.data.prompts import PromptBatch
from tokencredit.text.engines.engine import Rollout
from tokencredit.text.engines.local.sampling import Decoding, decode
from tokencredit.text.engines.stop_strings import StopSearch
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.kv_cache import SPARE_TOKENS, CachedSteps, RowCache, can_keep_rows, put_rows, take_rows
from tokencredit.text.models.precision import Precision


class LocalConversation:
    """Turns of a batch of rows, sampled by the model itself.

    A row that waits keeps its own keys and values, without padding. A batch of rows that go on is aligned at the right:
    the cache holds all but the last tokens of each, as many as the longest observation and the token before it, and one
    forward pass runs those. Models whose cache cannot be cut into rows (sliding windows, recurrent states) run the
    whole text again at each turn.
    """

    def __init__(
        self,
        model: ActorCritic,
        prompts: PromptBatch,
        uniforms: Tensor,
        settings: SamplingConfig,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Sequence[int],
        precision: Precision,
        exact: Callable[[Rollout], Rollout],
        *,
        keeps_support: bool = False,
    ):
        """Start before the first turns.

        Args:
            model: the policy and its critic.
            prompts: on the model's device; one row per episode.
            uniforms: `[batch, settings.max_new_tokens]`, in [0, 1): one per token after the prompt, observations
                included.
            settings: sampling settings; the stop conditions end a turn, and `max_new_tokens` limits an episode.
            tokenizer: decodes turns for stop strings.
            end_ids: token ids that end a turn.
            precision: dtype of the passes.
            exact: `LocalEngine.exact`.
            keeps_support: as in `Decoding`.
        """
        self.model, self.prompts, self.tokenizer = model, prompts, tokenizer
        self.precision, self.exact = precision, exact
        ends = torch.tensor(list(end_ids), device=prompts.ids.device)
        started = [prompts.ids.new_zeros(0)] * len(uniforms)
        self.state = Decoding(uniforms, started, settings, ends, {}, keeps_support=keeps_support)
        self.prompt_ids: list[list[int]] = [
            ids[mask].tolist() for ids, mask in zip(prompts.ids.cpu(), prompts.mask.cpu(), strict=True)
        ]
        self.turn_ends = torch.zeros_like(self.state.acted)
        self._kept: dict[int, RowCache] = {}

    def left(self, row: int) -> int:
        """Tokens that are left of a row's `max_new_tokens`."""
        return self.state.limit - int(self.state.lengths[row])

    def turn(self, row: int) -> tuple[list[int], bool]:
        """The token ids of a row's last turn, and true if it was cut at its limit."""
        return self.state.ids(row, int(self.state.turn_starts[row])), bool(self.state.truncated[row])

    def tokens(self, row: int) -> list[int]:
        """All token ids of a row: prompt, turns and observations."""
        return self.prompt_ids[row] + self.state.ids(row)

    def sample(
        self,
        rows: Sequence[int],
        observations: Sequence[Sequence[int]],
        limits: Sequence[int],
        ended: Callable[[int], None],
    ) -> None:
        """Sample the next turn of some rows, as `engine.Conversation.sample`; none of them may be running."""
        before = [len(self.tokens(row)) for row in rows]
        self.state.begin_turn(rows, observations, limits)
        if self.state.settings.stop:
            stops = self.state.settings.stop
            self.state.searches |= {row: StopSearch(stops, self.tokenizer, self.tokens(row)) for row in rows}
        texts = [self.tokens(row) for row in rows]
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

        with self.precision.no_grad():
            states = self._resume(rows, texts, before, max(limits))
            decode(self.model, self.state, states, states.hidden, states.inputs, max(limits), finished=finished)

    def end(self, row: int) -> None:
        """Free the keys and values of a row."""
        self._kept.pop(row, None)

    def rollout(self) -> Rollout:
        """The rollout of all rows."""
        rollout = self.state.rollout(self.prompts)
        rollout.turn_ends = self.turn_ends[:, : rollout.mask.shape[1]]
        return self.exact(rollout)

    def _resume(
        self, rows: Sequence[int], texts: Sequence[Sequence[int]], before: Sequence[int], limit: int
    ) -> Resumed:
        """Run the tokens of rows that are not in their caches.

        Args:
            rows: indices of the rows.
            texts: all token ids of each.
            before: their number before the observation.
            limit: most tokens to come.
        """
        kept = [self._kept.pop(row, None) for row in rows]
        cached = [0 if layers is None else layers[0][0].shape[1] for layers in kept]
        # A stop string, found late, may have cut tokens that are in the cache.
        cached = [min(have, length - 1) for have, length in zip(cached, before, strict=True)]
        new = max(len(text) - have for text, have in zip(texts, cached, strict=True))
        reused = [max(len(text) - new, 0) for text in texts]
        width = max(reused) + new
        device = self.prompts.ids.device
        mask = torch.tensor([[False] * (width - len(text)) + [True] * len(text) for text in texts], device=device)
        inputs = [[0] * max(new - len(text), 0) + list(text[-new:]) for text in texts]
        return Resumed(self.model, mask, torch.tensor(inputs, device=device), kept, reused, limit)


class Resumed(CachedSteps):
    """`CachedSteps` of rows whose first tokens are in caches of their own."""

    def __init__(
        self,
        model: ActorCritic,
        mask: Tensor,
        inputs: Tensor,
        kept: Sequence[RowCache | None],
        reused: Sequence[int],
        limit: int,
    ):
        """Fill the cache and run the new tokens.

        Args:
            model: the policy.
            mask: bool `[rows, columns]`, false at the left padding.
            inputs: `[rows, new]`, the tokens of the last columns.
            kept: keys and values of each row.
            reused: tokens of each row before the new ones, which are in its cache.
            limit: most tokens to come.
        """
        super().__init__(model, mask, limit)
        new = inputs.shape[1]
        if any(reused):
            put_rows(self.cache, kept, reused, new + min(limit, SPARE_TOKENS))
        self.inputs = inputs
        positions = self.position_ids[:, self.end - new : self.end]
        self.hidden = model.hidden(inputs, self.attention_mask[:, : self.end], positions, self.cache)[:, -1]
