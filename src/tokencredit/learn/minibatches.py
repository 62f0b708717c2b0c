"""Minibatches of the rows of all processes: the same ones, however many processes share them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tokencredit.distributed.processes import Processes
from tokencredit.learn.experience import Experience, length_batches
from tokencredit.learn.objective import Objective


class Minibatch(NamedTuple):
    """One process's rows of a minibatch."""

    experience: Experience
    """The rows; one row of another process if `real` is false."""
    rows: Tensor
    """Their numbers in the batch of all processes, which begins with the rows of the first one."""
    real: bool
    """False in a process without a row: its pass has no effect, but passes are collective."""
    tokens: float
    """Tokens in the loss, over all processes."""
    counts: list[float]
    """`Objective.count` over all processes: the divisors of the means."""


def minibatches(
    experience: Experience, objective: Objective, count: int, generator: torch.Generator, processes: Processes
) -> Iterator[Minibatch]:
    """The minibatches of one pass, except those without a token in the loss on any process.

    On an empty minibatch, momentum and weight decay alone would still move the weights.

    The rows of all processes are shuffled together and split into minibatches whose sizes differ by at most one, and
    each minibatch is split among the processes in the same way. So one process, or several, take the same steps.

    Args:
        experience: this process's rows; processes may have different numbers of them.
        objective: counts the tokens.
        count: number of minibatches.
        generator: shuffles; in the same state in every process.
        processes: the processes of the job.
    """
    shares = [len(experience)]
    if processes.count > 1:
        experience, shares = aligned(experience, processes)
    mask = processes.gather_rows(experience.mask, shares)
    sparse = None if experience.value_mask is None else processes.gather_rows(experience.value_mask, shares)
    parts = torch.randperm(len(mask), generator=generator).to(mask.device).tensor_split(count)
    masks = [mask[rows] for rows in parts]
    divisors = map(objective.count, masks, [None if sparse is None else sparse[rows] for rows in parts])
    # One transfer for the counts of all minibatches, since each one stalls a GPU's queue.
    counts = torch.stack([torch.cat([x.sum().view(1), count]) for x, count in zip(masks, divisors, strict=True)])
    counted = [(rows, numbers) for rows, numbers in zip(parts, counts.tolist(), strict=True) if numbers[0] > 0]
    shared = dealt(experience, [rows for rows, _ in counted], shares, processes)
    for (_, (tokens, *numbers)), (part, rows, real) in zip(counted, shared, strict=True):
        yield Minibatch(part, rows, real, tokens, numbers)


def aligned(experience: Experience, processes: Processes) -> tuple[Experience, list[int]]:
    """An experience padded to the longest prompt and response of all processes; and each process's number of rows."""
    sizes = torch.tensor([[len(experience), *experience.widths()]], device=experience.mask.device)
    everywhere = processes.gather(sizes)
    return experience.padded(everywhere.amax(0)[1:].tolist()), everywhere[:, 0].tolist()


def dealt(
    experience: Experience, parts: Sequence[Tensor], shares: Sequence[int], processes: Processes
) -> Iterator[tuple[Experience, Tensor, bool]]:
    """This process's rows of each minibatch: the rows, their numbers in the whole batch, and `Minibatch.real`.

    All rows of a pass move in one exchange per tensor.
    """
    if processes.count == 1:
        for rows in parts:
            yield experience.select(rows), rows, True
        return
    split = [[own if len(own) else rows[:1] for own in rows.tensor_split(processes.count)] for rows in parts]
    wanted = [torch.cat(own) for own in zip(*split, strict=True)]
    moved = experience.map(lambda _, x: processes.exchange_rows(x, wanted, shares)) if parts else experience
    first = 0
    for rows, own in zip(parts, split, strict=True):
        mine = own[processes.rank]
        yield moved.select(slice(first, first + len(mine))), mine, processes.rank < len(rows)
        first += len(mine)


def micro_batches(
    minibatch: Experience, budget: int | None, lockstep: Processes | None, *, real: bool = True
) -> list[tuple[Experience, bool]]:
    """Micro-batches of rows of similar length, and true for those whose pass has an effect.

    Args:
        minibatch: the rows.
        budget: most tokens per micro-batch, padding included; None for no limit.
        lockstep: processes that make as many passes as the one with most, because each pass is collective; None if
            processes may make different numbers of passes.
        real: false for a row of another process (`Minibatch.real`).
    """
    batches = length_batches(minibatch.lengths, budget)
    parts = [(minibatch if len(batches) == 1 else minibatch.select(rows), real) for rows in batches]
    if lockstep is None:
        return parts
    spare = minibatch.select(batches[-1][:1])
    return parts + [(spare, False)] * (lockstep.most(len(parts)) - len(parts))
