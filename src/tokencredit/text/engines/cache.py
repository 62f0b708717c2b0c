"""A key-value cache for sampling, in which one more token is written down and not everything before it copied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

LEAST_ROOM = 64
"""Tokens that a layer's memory can still take when it is made; beyond that, half of what it holds."""


def sampling_cache(config: PreTrainedConfig) -> DynamicCache:
    """An empty cache for a model of this configuration; layers that look back a limited way stay Transformers' own."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class RoomyLayer(DynamicLayer):
    """Transformers' growing layer, with room for tokens to come: its keys and values are views of larger tensors."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self.rooms: list[Tensor | None] = [None, None]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values `[batch, heads, time, width]`; returns all so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        seen = self.get_seq_length()
        for index, (old, new) in enumerate(((self.keys, key_states), (self.values, value_states))):
            room, length = self.rooms[index], seen + new.shape[-2]
            # Rows that left, or were repeated, made keys a tensor of its own.
            if room is None or old is None or room.data_ptr() != old.data_ptr() or room.shape[-2] < length:
                room = new.new_empty(*new.shape[:-2], length + max(LEAST_ROOM, length // 2), new.shape[-1])
                if seen and old is not None:
                    room[..., :seen, :] = old
                self.rooms[index] = room
            room[..., seen:length, :] = new
        self.keys, self.values = (torch.narrow(room, -2, 0, length) for room in self.rooms if room is not None)
        return self.keys, self.values
