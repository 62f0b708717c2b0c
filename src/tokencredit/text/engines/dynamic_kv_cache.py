"""KV cache with spare capacity: appending a token writes in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

SPARE_TOKENS = 64
"""Least spare capacity of a new buffer, in tokens; a longer cache gets half its length."""


def sampling_cache(config: PreTrainedConfig) -> DynamicCache:
    """An empty cache for a model of this configuration; sliding-window layers stay Transformers' own."""
    cache = DynamicCache(config=config)
    cache.layers = [SpareCapacityLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


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
