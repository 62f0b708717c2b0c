"""Whitening of advantages, rewards and scores over the positions where the policy acted."""

import torch
from torch import Tensor

from tokencredit.core.masked import Reduce, above_rounding, moments_and_centred

VARIANCE_GUARD = 1e-8
"""Added to the variance that `whiten` divides by, in squared units of the numbers. Differences much below its root,
1e-4, are noise, and stay small."""


def whiten(
    x: Tensor,
    mask: Tensor,
    *,
    shift_mean: bool = True,
    reduce: Reduce | None = None,
    count: Tensor | float | None = None,
) -> Tensor:
    """Whiten `x` over the mask: unit variance and, by default, zero mean.

    yₜ = (xₜ − μ) / √(σ² + 1e-8), plus μ again when `shift_mean` is false; 0 outside the mask. The guard, as in TRL's
    and verl's `masked_whiten`, keeps noise from becoming a signal: numbers about 1e-7 apart, such as the rounding of a
    KL where all scores are equal, end about 1e-3 apart instead of 1. If `x` is constant up to rounding of its mean,
    (x − μ) becomes exactly 0.

    Args:
        x: any shape.
        mask: bool of the same shape.
        shift_mean: true gives mean 0 (advantages); false keeps the mean (rewards, whose sign matters).
        reduce: sums a tensor over processes; μ and σ are then over all processes.
        count: as in `moments`.

    Returns:
        A tensor with the shape of `x`.

    Raises:
        ValueError: no element of the mask is true.
    """
    _, mean, variance, centred = moments_and_centred(x, mask, reduce, count)
    inverse = torch.where(above_rounding(variance.sqrt(), mean), (variance + VARIANCE_GUARD).rsqrt(), 0.0)
    whitened = centred * inverse
    if not shift_mean:
        whitened = whitened + mean
    return whitened.masked_fill(~mask, 0.0)
