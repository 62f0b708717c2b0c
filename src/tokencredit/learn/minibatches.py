"""Minibatches of the rows of all processes, the same however many share them; micro-batches of similar length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tokencredit.distributed.processes import Processes
from tokencredit.learn.experience import Experience
from tokencredit.learn.objective import Objective

PASS_OVERHEAD = 256
"""Fixed cost of an extra forward pass on a CPU, in tokens: split a batch only if that saves more padding."""
PASS_OVERHEAD_ON_ACCELERATORS = 4096
"""Fixed cost of an extra forward pass on other devices, in tokens; only large products keep them busy."""


def minibatches(
    experience: Experience, objective: Objective, count: int, generator: torch.Generator, processes: Processes
) -> Iterator[Experience]:
    """The minibatches of one pass, except those without a token in the loss on any process.

    On an empty minibatch, momentum and weight decay alone would still move the weights.

    The rows of all processes, which may differ in number, are shuffled together and split into `count` minibatches
    whose sizes differ by at most one, and each minibatch is split among the processes in the same way. So one process,
    or several, take the same steps. The generator is in the same state in every process.
    """
    shares = [len(experience)]
    if processes.count > 1:
        # Pad to the longest prompt and response of all processes, and learn how many rows each of them has.
        sizes = torch.tensor([[len(experience), *experience.widths()]], device=experience.mask.device)
        everywhere = processes.gather(sizes)
        experience, shares = experience.padded(everywhere.amax(0)[1:].tolist()), everywhere[:, 0].tolist()
    mask = processes.gather_rows(experience.mask, shares)
    sparse = None if experience.value_mask is None else processes.gather_rows(experience.value_mask, shares)
    shuffled = torch.randperm(len(mask), generator=generator).to(mask.device).tensor_split(count)
    masks = [mask[rows] for rows in shuffled]
    divisors = map(objective.count, masks, [None if sparse is None else sparse[rows] for rows in shuffled])
    # One transfer for the counts of all minibatches, since each one stalls a GPU's queue.
    counts = torch.stack([torch.cat([x.sum().view(1), count]) for x, count in zip(masks, divisors, strict=True)])
    counted = [(rows, numbers) for rows, numbers in zip(shuffled, counts.tolist(), strict=True) if numbers[0] > 0]
    parts = assign_rows(experience, [rows for rows, _ in counted], shares, processes)
    for (_, (tokens, *numbers)), part in zip(counted, parts, strict=True):
        yield replace(part, tokens=tokens, counts=numbers)


def assign_rows(
    experience: Experience, parts: Sequence[Tensor], shares: Sequence[int], processes: Processes
) -> Iterator[Experience]:
    """This process's rows of each minibatch; one row that is not `real` if there are fewer rows than processes.

    All rows of a pass move in one exchange per tensor.
    """
    if processes.count == 1:
        for rows in parts:
            yield replace(experience.select(rows), rows=rows)
        return
    split = [[own if len(own) else rows[:1] for own in rows.tensor_split(processes.count)] for rows in parts]
    wanted = [torch.cat(own) for own in zip(*split, strict=True)]
    moved = experience.map(lambda _, x: processes.exchange_rows(x, wanted, shares)) if parts else experience
    first = 0
    for rows, own in zip(parts, split, strict=True):
        mine = own[processes.rank]
        part = moved.select(slice(first, first + len(mine)))
        yield replace(part, rows=mine, real=processes.rank < len(rows))
        first += len(mine)


def micro_batches(minibatch: Experience, budget: int | None, lockstep: Processes | None) -> list[Experience]:
    """Micro-batches of rows of similar length, of at most `budget` tokens each, padding included.

    The passes of `lockstep` processes are collective: those with fewer micro-batches add some that are not `real`.
    """
    batches = length_batches(minibatch.lengths, budget)
    parts = [minibatch if len(batches) == 1 else minibatch.select(rows) for rows in batches]
    if lockstep is None:
        return parts
    spare = replace(minibatch.select(batches[-1][:1]), real=False)
    return parts + [spare] * (lockstep.most(len(parts)) - len(parts))


def length_batches(lengths: Tensor, budget: int | None = None) -> list[Tensor]:
    """Group rows of similar length into batches, to reduce padding.

    Sorts the rows by length and splits them where Σ (rows · width + overhead) is least, by dynamic programming. The
    overhead is the fixed cost of another forward pass, in tokens. `budget` is the most tokens per batch, padding
    included; `ValueError` if a single row is longer.

    `lengths` are int64 `[batch]`, or `[batch, parts]` where parts are padded apart: a batch is as wide as the longest
    prompt and the longest response together. Returns row indices, one tensor per batch, the longest rows first.
    """
    overhead = PASS_OVERHEAD if lengths.device.type == "cpu" else PASS_OVERHEAD_ON_ACCELERATORS
    lengths = lengths.view(len(lengths), -1)
    order = lengths.sum(1).argsort(descending=True, stable=True)
    parts = np.array(lengths[order].T.tolist(), dtype=np.int64)  # `[parts, batch]`
    if budget is not None and (longest := parts[:, 0].sum()) > budget:
        raise ValueError(f"budget is {budget}; it must be at least {longest}, the tokens of the longest row")
    if (parts == parts[:, :1]).all():
        rows = torch.arange(len(lengths), device=lengths.device)
        return [rows] if budget is None else list(rows.split(budget // max(int(parts[:, 0].sum()), 1)))
    min_cost, best_start = np.zeros(len(order) + 1, dtype=np.int64), np.zeros(len(order) + 1, dtype=np.int64)
    widest = np.zeros_like(parts)  # the longest parts of a batch from each row to the present one
    for end in range(1, len(order) + 1):
        widest[:, :end] = np.maximum(widest[:, :end], parts[:, end - 1 : end])
        tokens = widest[:, :end].sum(0) * np.arange(end, 0, -1)
        costs = min_cost[:end] + tokens + overhead
        if budget is not None:
            costs[tokens > budget] = np.iinfo(np.int64).max
        best_start[end] = costs.argmin()
        min_cost[end] = costs[best_start[end]]
    batches, end = [], len(order)
    while end:
        batches.append(order[best_start[end] : end])
        end = int(best_start[end])
    return batches[::-1]
