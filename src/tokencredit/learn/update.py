"""What an update is made of: settings, minibatches, steps that cannot be taken, and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tokencredit.core.losses import Clip, RatioStats, ratio_stats
from tokencredit.learn.experience import Experience
from tokencredit.learn.objective import Objective
from tokencredit.processes import Processes


@dataclass(frozen=True)
class UpdateSettings:
    """How an update goes through an experience."""

    epochs: int = 4
    """Passes over the experience."""
    minibatches: int = 4
    """Optimizer steps per pass."""
    critic_epochs: int = 0
    """Further passes, after these, in which only the critic's own parameters learn, from the value loss alone."""
    critic_buffer: int = 0
    """Earlier experiences that take part in those passes."""
    micro_batch_tokens: int | None = None
    """The most tokens in memory at once, padding included; None for no limit. It changes no gradient."""
    whiten_minibatches: bool = False
    """Whiten the advantages of each minibatch (Huang et al. 2022, "The 37 implementation details of PPO", detail 7)."""
    target_kl: float | None = None
    """End the update before a step whose minibatch is further than this from the sampling policy, in nats per token by
    k3; None never does."""
    max_grad_norm: float | None = None
    """Largest norm of the gradient; None for no limit."""
    grad_norm_type: float = 2.0
    """2 for the L2 norm, inf for the largest element."""


class NonFiniteUpdate(ArithmeticError):
    """A loss or gradient that is NaN or infinite; the optimizer step was not taken.

    `row` is the first row of the experience at which `term` is not finite, or None when only the gradient is not.
    """

    def __init__(self, term: str, row: int | None):
        super().__init__(f"{term} is not finite")
        self.term, self.row = term, row


OnStep = Callable[[Experience, NonFiniteUpdate | None], None]
"""Called after each minibatch with None, or with the error that made the step be skipped."""


def raise_non_finite(minibatch: Experience, error: NonFiniteUpdate | None) -> None:
    """End the update if a step was skipped."""
    if error is not None:
        raise error


class Minibatch(NamedTuple):
    """Rows of an experience, and the numbers over all processes that its means divide by."""

    rows: Tensor
    tokens: float
    """Tokens in the loss."""
    counts: list[float]
    """`Objective.count`."""


def minibatches(
    experience: Experience, objective: Objective, count: int, generator: torch.Generator, processes: Processes
) -> Iterator[Minibatch]:
    """The minibatches of one pass, but for those without a token in the loss in any process.

    A step on nothing would not be nothing: momentum and weight decay alone would move the weights.
    """
    parts = list(experience.minibatches(count, generator))
    masks = [experience.mask[rows] for rows in parts]
    # The numbers of all minibatches in one transfer: a GPU's queue runs empty at each.
    sums = torch.stack([torch.cat([mask.sum().view(1), objective.count(mask)]) for mask in masks])
    for rows, (tokens, *counts) in zip(parts, processes.sum(sums).tolist(), strict=True):
        if tokens > 0:
            yield Minibatch(rows, tokens, counts)


def drop_gradients(parameters: Iterable[Tensor]) -> None:
    """Free the memory of gradients."""
    for parameter in parameters:
        parameter.grad = None


class StepRecord(NamedTuple):
    """What a micro-batch's pass gave, without gradients."""

    loss: Tensor
    parts: dict[str, Tensor]
    logprobs: Tensor
    old_logprobs: Tensor
    mask: Tensor


def update_metrics(records: Sequence[Sequence[StepRecord]], clip: Clip, processes: Processes) -> dict[str, float]:
    """Means over minibatches of the loss and its parts, over all processes, and the ratios of all tokens."""
    micro_batches = [micro for record in records for micro in record]
    names = ["loss", *micro_batches[0].parts]
    sums = torch.stack([torch.stack([micro.loss, *micro.parts.values()]) for micro in micro_batches]).sum(0)
    means = (processes.sum(sums) / len(records)).tolist()
    return {
        **dict(zip(names, means, strict=True)),
        **ratios(micro_batches, clip, processes).metrics(),
        "first_ratio_error": ratio_error(records[0], processes),
    }


def ratios(record: Sequence[StepRecord], clip: Clip, processes: Processes) -> RatioStats:
    """Ratio statistics of micro-batches, over all processes."""
    logprobs, old_logprobs, mask = (
        torch.cat([getattr(micro, name) for micro in record]) for name in ("logprobs", "old_logprobs", "mask")
    )
    found = ratio_stats(logprobs, old_logprobs, mask, clip=clip)
    return RatioStats(processes.sum(found.sums), processes.max(found.extremes))


def ratio_error(record: Sequence[StepRecord], processes: Processes) -> float:
    """How far the ratio is from 1 at the worst token of a minibatch, e^|log r| − 1.

    In an update's first minibatch the policy is still the one that sampled, so more than rounding is a bug somewhere:
    8e-6 in float32; in bfloat16 up to 5e-2, since each pass pads and batches rows its own way.
    """
    apart = [(m.logprobs - m.old_logprobs).masked_fill(~m.mask, 0.0).abs().max() for m in record]
    return float(processes.max(torch.stack(apart).amax()).expm1())
