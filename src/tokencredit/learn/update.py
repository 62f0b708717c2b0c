"""Parts of an update: settings, skipped steps, metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tokencredit.core.losses import Clip, RatioStats, ratio_stats
from tokencredit.core.off_policy import CorrectionStats
from tokencredit.distributed.processes import Processes
from tokencredit.learn.experience import Experience
from tokencredit.learn.objective import sum_parts


@dataclass(frozen=True)
class UpdateSettings:
    """Settings of an update."""

    epochs: int = 4
    """Passes over the experience."""
    minibatches: int = 4
    """Optimizer steps per pass."""
    critic_epochs: int = 0
    """Critic-only passes after these, which minimise the value loss over the critic's own parameters."""
    micro_batch_tokens: int | None = None
    """Most tokens per micro-batch, padding included; None for no limit. It changes no gradient."""
    whiten_minibatches: bool = False
    """Whiten the advantages of each minibatch (Huang et al. 2022, "The 37 implementation details of PPO", detail 7)."""
    target_kl: float | None = None
    """End the update at the first minibatch whose KL from the sampling policy (k3, nats per token) exceeds this; None
    for no limit."""
    max_grad_norm: float | None = None
    """Gradient clipping norm; None for no clipping."""
    grad_norm: str = "l2"
    """That norm: `l2`, or `max` for the largest magnitude of an element."""


class NonFiniteUpdate(ArithmeticError):
    """A loss or gradient is NaN or infinite, and the optimizer step was skipped.

    `row` is the first row at which `term` is not finite, counted over all processes, or None if only the gradient is
    not.
    """

    def __init__(self, term: str, row: int | None):
        super().__init__(f"{term} is not finite")
        self.term, self.row = term, row


OnStep = Callable[[Experience, NonFiniteUpdate | None], None]
"""Called after each minibatch with None, or with the error that made the step be skipped."""


def raise_non_finite(_minibatch: Experience, error: NonFiniteUpdate | None) -> None:
    """Raise the error of a skipped step, which ends the update."""
    if error is not None:
        raise error


def drop_gradients(parameters: Iterable[Tensor]) -> None:
    """Free the gradients' memory."""
    for parameter in parameters:
        parameter.grad = None


class StepRecord(NamedTuple):
    """Loss, terms, log-probabilities and clipped tokens of a micro-batch, without gradients."""

    loss: Tensor
    parts: dict[str, Tensor]
    logprobs: Tensor
    old_logprobs: Tensor
    mask: Tensor
    clipped: Tensor | None = None
    """As `Objective.clipped` returns it."""
    correction: CorrectionStats | None = None
    """Statistics of weights, and of π / μ for the policy of the pass; None without `Experience.behavior_logprobs`."""


def update_metrics(
    records: Sequence[Sequence[StepRecord]], clip: Clip | None, processes: Processes
) -> dict[str, float]:
    """Mean loss and terms over minibatches, and metrics of ratios over all tokens, of all processes.

    Those of weights are of the first minibatch, before a step of the update's own. So is `first_ratio_error`, the
    largest deviation of the ratio from 1, e^|log r| − 1. Beyond rounding it is a bug: 8e-6 in float32; in bfloat16 up
    to 5e-2, since each pass batches rows its own way. Only around a behavior or interpolated policy, the age of samples
    and filters explain it too.
    """
    micro_batches = [micro for record in records for micro in record]
    sums = sum_parts([{"loss": micro.loss} | micro.parts for micro in micro_batches])
    means = (processes.sum(torch.stack(list(sums.values()))) / len(records)).tolist()
    errors = [(m.logprobs - m.old_logprobs).masked_fill(~m.mask, 0.0).abs().max() for m in records[0]]
    metrics = {
        **dict(zip(sums, means, strict=True)),
        **ratios(micro_batches, clip, processes).metrics(),
        "first_ratio_error": float(processes.max(torch.stack(errors).amax()).expm1()),
    }
    corrections = [x for micro in records[0] if (x := micro.correction) is not None]
    if corrections:
        total = processes.sum(torch.stack([x.sums for x in corrections]).sum(0))
        metrics |= CorrectionStats(total, corrections[0].weighted).metrics()
    return metrics


def ratios(record: Sequence[StepRecord], clip: Clip | None, processes: Processes) -> RatioStats:
    """Ratio statistics of micro-batches, over all processes."""
    logprobs, old_logprobs, mask = (
        torch.cat([getattr(micro, name) for micro in record]) for name in ("logprobs", "old_logprobs", "mask")
    )
    parts = [micro.clipped for micro in record if micro.clipped is not None]
    stats = ratio_stats(logprobs, old_logprobs, mask, clip=clip, clipped=torch.cat(parts) if parts else None)
    return RatioStats(processes.sum(stats.sums), processes.max(stats.extremes), stats.clips)
