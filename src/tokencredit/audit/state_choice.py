"""Sampling plan of an audit: which states to measure, the number of continuations, and their RNG streams."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

STREAM = 2_000_003
"""First entropy word of an audit's generators; separates them from those of training and evaluation."""
FIRST_ROUND = 4
"""Continuations of every state before any state gets more, if time is limited."""


def generator(*numbers: int) -> torch.Generator:
    """An RNG seeded by these numbers, such as a stream, a seed and an iteration; different numbers are independent."""
    entropy = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(entropy[0]))


def spread(time: int, count: int | None, random: torch.Generator) -> list[int]:
    """Stratified sample of steps: one from each of `count` equal parts of the time axis, shuffled; None for all."""
    parts = time if count is None else min(count, time)
    edges = torch.arange(parts + 1) * time // parts
    positions = edges[:-1] + (torch.rand(parts, generator=random) * edges.diff()).long()
    return [int(positions[i]) for i in torch.randperm(parts, generator=random)]


def rounds(continuations: int, *, limited: bool) -> Iterator[int]:
    """Continuations of each state per round: all at once, or in doubling rounds if time is limited."""
    done = 0
    while done < continuations:
        count = min(max(done, FIRST_ROUND), continuations - done) if limited else continuations
        yield count
        done += count
