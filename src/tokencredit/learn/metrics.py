"""Metrics of an update, from what its passes gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tokencredit.core.losses import Clip, RatioStats, ratio_stats
from tokencredit.processes import Processes


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
