"""Hidden states of completions token by token, with a KV cache that has spare capacity, or without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from tokencredit.text.models.actor_critic import ActorCritic, cache_argument, positions
from tokencredit.text.models.architecture import trunk_of

SPARE_TOKENS = 64
"""Least spare capacity of a new buffer, in tokens; a longer cache gets half its length."""


def sampling_cache(config: PreTrainedConfig) -> DynamicCache:
    """An empty cache for a model of this configuration; sliding-window layers stay Transformers' own."""
    cache = DynamicCache(config=config)
    cache.layers = [SpareCapacityLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def can_keep_rows(cache: Cache | None) -> bool:
    """True if single rows can be taken out of a cache and put back: every layer holds keys and values of all tokens."""
    return cache is not None and all(type(layer) is SpareCapacityLayer for layer in cache.layers)


def take_rows(cache: Cache, slots: Sequence[int], starts: Sequence[int], *, last: bool) -> list[RowCache]:
    """Copy rows out of a cache that holds tokens; `starts` are their columns of padding.

    With `last` the cache is not needed any more, and its layers are freed one by one.
    """
    rows: list[RowCache] = [[] for _ in slots]
    for layer in cache.layers:
        assert isinstance(layer, SpareCapacityLayer)
        keys, values = cast(KeysAndValues, (layer.keys, layer.values))
        for row, slot, start in zip(rows, slots, starts, strict=True):
            row.append((keys[slot, :, start:].clone(), values[slot, :, start:].clone()))
        if last:
            layer.keys, layer.values, layer.buffers = None, None, [None, None]
    return rows


def put_rows(cache: Cache, rows: Sequence[RowCache | None], lengths: Sequence[int], spare: int) -> None:
    """Fill an empty cache with the first tokens of rows from `take_rows`, left-padded to the longest; empties the rows.

    Args:
        cache: of `sampling_cache`.
        rows: not all None.
        lengths: number of tokens to keep of each row; 0 for None.
        spare: columns to allocate for tokens to come.
    """
    for layer in cache.layers:
        assert isinstance(layer, SpareCapacityLayer)
        # Layer by layer, so that no more than one layer is in memory twice.
        layer.fill([None if row is None else row.pop(0) for row in rows], lengths, spare)


KeysAndValues = tuple[Tensor, Tensor]
"""`[heads, time, width]` each, of one row in one layer."""
RowCache = list[KeysAndValues]
"""A row's keys and values by layer, without padding."""


class SpareCapacityLayer(DynamicLayer):
    """Transformers' growing cache layer, with keys and values as views of larger buffers."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self.buffers: list[Tensor | None] = [None, None]

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values `[batch, heads, time, width]`; returns all so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        seen = self.get_seq_length()
        for index, (old, new) in enumerate(((self.keys, key_states), (self.values, value_states))):
            buffer, length = self.buffers[index], seen + new.shape[-2]
            # Selecting or repeating rows replaces the view by a tensor of its own.
            if buffer is None or old is None or buffer.data_ptr() != old.data_ptr() or buffer.shape[-2] < length:
                buffer = new.new_empty(*new.shape[:-2], length + max(SPARE_TOKENS, length // 2), new.shape[-1])
                if seen and old is not None:
                    buffer[..., :seen, :] = old
                self.buffers[index] = buffer
            buffer[..., seen:length, :] = new
        self.keys, self.values = (torch.narrow(buffer, -2, 0, length) for buffer in self.buffers if buffer is not None)
        return self.keys, self.values

    def fill(self, rows: Sequence[KeysAndValues | None], lengths: Sequence[int], spare: int) -> None:
        """Take the first tokens of rows, left-padded to the longest, with room for `spare` more."""
        longest, filled = max(lengths), next(row for row in rows if row is not None)
        self.lazy_initialization(*filled)
        for index, (heads, _, width) in enumerate(x.shape for x in filled):
            buffer = filled[index].new_zeros(len(rows), heads, longest + spare, width)
            for slot, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                if row is not None:
                    buffer[slot, :, longest - length : longest] = row[index][:, :length]
            self.buffers[index] = buffer
        self.keys, self.values = (torch.narrow(buffer, -2, 0, longest) for buffer in self.buffers if buffer is not None)


class CachedSteps:
    """Hidden states of completions, one token per step, with a growing KV cache.

    A slot is a row of the running batch.
    """

    cached = True

    def __init__(self, model: ActorCritic, prompt_mask: Tensor, limit: int):
        """Prepare for prompts with this mask, `[batch, prompt]`, and at most `limit` new tokens."""
        self.model, self.end = model, prompt_mask.shape[1]
        self.attention_mask, self.position_ids = positions(prompt_mask, limit)
        self.cache: Any = sampling_cache(model.lm.config) if self.cached else None
        self.rows = torch.arange(len(prompt_mask), device=prompt_mask.device)

    def prompts(self, prompt_ids: Tensor, per_prompt: int) -> Tensor:
        """Prefill, each prompt once per `per_prompt` consecutive rows; returns the last states `[slots, width]`."""
        first, end = self.rows[::per_prompt], self.end
        mask, position_ids = self.attention_mask[first, :end], self.position_ids[first, :end]
        hidden = self.model.hidden(prompt_ids[first], mask, position_ids, self.cache)[:, -1]
        if per_prompt == 1:
            return hidden
        self._select(torch.arange(len(hidden), device=hidden.device).repeat_interleave(per_prompt))
        return hidden.repeat_interleave(per_prompt, dim=0)

    def next(self, tokens: Tensor) -> Tensor:
        """Run one token `[slots, 1]` per slot; returns the states after them, `[slots, width]`."""
        self.end += 1
        mask, position_ids = self.attention_mask[:, : self.end], self.position_ids[:, self.end - 1 : self.end]
        return self.model.hidden(tokens, mask[self.rows], position_ids[self.rows], self.cache)[:, -1]

    def repeat(self, step: Callable[[], None], count: int) -> None:
        """Run `step`, which calls `next` once, `count` times."""
        for _ in range(count):
            step()

    def begin(self, ids: Tensor) -> None:
        """Take the tokens of the running batch, `[slots, time]`, that have been run; a cache holds them."""

    def keep(self, active: list[bool]) -> Tensor | None:
        """Drop finished slots; returns the indices of those that stay, None if all do."""
        if all(active):
            return None
        slots = torch.tensor(active).nonzero().squeeze(-1).to(self.rows.device)
        self.rows = self.rows[slots]
        self._select(slots)
        return slots

    def _select(self, rows: Tensor) -> None:
        # Layers with a recurrent state have neither `batch_repeat_interleave` nor `batch_select_indices`.
        self.cache.reorder_cache(cast(torch.LongTensor, rows))


class FullSteps(CachedSteps):
    """The same for a model without a cache: each step runs all tokens again."""

    ids: Tensor
    cached = False

    def begin(self, ids: Tensor) -> None:
        """Take the tokens of the running batch, `[slots, time]`, that have been run."""
        self.ids = ids

    def prompts(self, prompt_ids: Tensor, per_prompt: int) -> Tensor:
        """As `CachedSteps.prompts`."""
        self.begin(prompt_ids[::per_prompt])
        return super().prompts(prompt_ids, per_prompt)

    def next(self, tokens: Tensor) -> Tensor:
        """As `CachedSteps.next`."""
        self.end += 1
        self.ids = torch.cat([self.ids, tokens], dim=1)
        mask, position_ids = self.attention_mask[:, : self.end], self.position_ids[:, : self.end]
        return self.model.hidden(self.ids, mask[self.rows], position_ids[self.rows])[:, -1]

    def _select(self, rows: Tensor) -> None:
        self.ids = self.ids[rows]


def steps_of(model: ActorCritic, prompt_mask: Tensor, limit: int) -> CachedSteps:
    """Steps of a model, with a cache if it takes one; arguments as of `CachedSteps`."""
    cached = cache_argument(trunk_of(model.lm)) is not None
    return (CachedSteps if cached else FullSteps)(model, prompt_mask, limit)
