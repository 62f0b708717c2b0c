"""How an audit spends its samples: which states are measured, how often, and with which random numbers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

STREAM = 2_000_003
"""First number of an audit's generators, which keeps them apart from those of training and evaluation."""
FIRST_ROUND = 4
"""Continuations of every state before any state gets more, where time is limited."""


def generator(*numbers: int) -> torch.Generator:
    """Random numbers that are independent of those of other numbers, such as a stream, a seed and an iteration."""
    entropy = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(entropy[0]))


def spread(time: int, count: int | None, random: torch.Generator) -> list[int]:
    """Steps, one at random in each of `count` equal parts of the time axis, in a random order; None for all."""
    parts = time if count is None else min(count, time)
    edges = torch.arange(parts + 1) * time // parts
    positions = edges[:-1] + (torch.rand(parts, generator=random) * edges.diff()).long()
    return [int(positions[i]) for i in torch.randperm(parts, generator=random)]


def rounds(continuations: int, *, limited: bool) -> Iterator[int]:
    """Continuations of each state per round: all at once, or ever more of them where time may run out."""
    done = 0
    while done < continuations:
        count = min(max(done, FIRST_ROUND), continuations - done) if limited else continuations
        yield count
        done += count
