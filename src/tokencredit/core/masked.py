"""Statistics over the positions where the policy acted, and whitening by them.

Positions outside the mask may hold anything, NaN and infinities included: they are set to 0 first, so that they reach
neither a result nor a gradient. All statistics are in float32 at least.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tokencredit.core.argument_checks import require_flags, require_rows, require_tensors

Reduce = Callable[[Tensor], Tensor]
"""All-reduce: sums a tensor elementwise over processes and returns the sum on each of them."""

VARIANCE_GUARD = 1e-8
"""Added to the variance that `whiten` divides by, in squared units of the numbers. Differences much below its root,
1e-4, are noise, and stay small."""


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` in float32, or unchanged if it is float64."""
    require_tensors(x=x)
    return x if x.dtype == torch.float64 else x.float()


def zero_outside(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return `x` in float32 at least, with 0 wherever `mask` is false; the gradient there is 0 too.

    Fills instead of multiplying, because 0 · NaN is NaN. Without a mask, keeps everything.

    Raises:
        ValueError: `mask` is not bool or has another shape than `x`.
    """
    x = at_least_float32(x)
    if mask is None:
        return x
    require_flags("mask", mask, x.shape)
    return x.masked_fill(~mask, 0.0)


def moments(
    x: Tensor, mask: Tensor, reduce: Reduce | None = None, *, count: Tensor | float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and variance of `x` where `mask` is true.

    n = Σ mₜ,  μ = Σ mₜ xₜ / n,  σ² = Σ mₜ (xₜ − μ)² / n: the population variance, not the sample variance.

    Takes two passes, the second about the mean of the first, because Σx²/n − μ² loses all digits if μ is large compared
    to σ. The second pass also removes the rounding error of the first mean (the corrected two-pass algorithm of Chan,
    Golub and LeVeque 1983, "Algorithms for computing the sample variance").

    Args:
        x: any shape.
        mask: bool of the same shape.
        reduce: sums a tensor over processes; the three scalars are then over all processes, and the same on each.
        count: n over all processes, if known and above 0; avoids waiting for a GPU. Default: the count of `mask`.

    Raises:
        ValueError: no element is true, here or (with `reduce`) on any process.
    """
    total, mean, variance, _ = moments_and_centred(x, mask, reduce, count)
    return total, mean, variance


def inverse_deviation(deviation: Tensor, mean: Tensor, guard: float = 0.0) -> Tensor:
    """1 / (σ + guard), or 0 where σ is within the rounding error of a constant. Same shapes.

    A guard of 0 suits results without a unit, such as a correlation.
    """
    return torch.where(above_rounding(deviation, mean), 1 / (deviation + guard), torch.zeros_like(deviation))


def above_rounding(deviation: Tensor, mean: Tensor) -> Tensor:
    """True where σ exceeds the rounding error of a constant, 4 ulp of the mean. Same shapes."""
    require_tensors(deviation=deviation, mean=mean)
    return deviation > 4 * torch.finfo(mean.dtype).eps * mean.abs()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, reduce: Reduce | None = None) -> Tensor:
    """Explained variance of the critic: 1 − Var[R − V] / Var[R].

    1 is a perfect critic; 0 is no better than a constant; below 0 is worse. NaN if the returns are constant up to
    rounding, because there is then nothing to explain.

    All three of the same shape; `reduce` sums a tensor over processes. Returns a scalar.
    """
    require_tensors(values=values, returns=returns, mask=mask)
    count, mean, total = moments(returns, mask, reduce)
    _, _, residual = moments(zero_outside(returns, mask) - zero_outside(values, mask), mask, reduce, count=count)
    return torch.where(above_rounding(total.sqrt(), mean), 1 - residual / total, torch.full_like(total, torch.nan))


def moments_and_centred(
    x: Tensor, mask: Tensor, reduce: Reduce | None = None, known_count: Tensor | float | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result of `moments`, and x − μ without the rounding error of μ; arguments as there."""
    require_tensors(mask=mask)
    x = zero_outside(x, mask)
    if known_count is None:
        count, first_sum = _over_processes(mask.sum(), x.sum(), reduce)
        if count == 0:
            raise ValueError("mask has no true element; moments need one")
    else:
        count = known_count.to(x.dtype) if isinstance(known_count, Tensor) else x.new_full((), known_count)
        first_sum = x.sum() if reduce is None else reduce(x.sum())
    shift = first_sum / count
    centred = (x - shift).masked_fill(~mask, 0.0)
    centred_sum, square_sum = _over_processes(centred.sum(), centred.square().sum(), reduce)
    correction = centred_sum / count
    variance = (square_sum / count - correction.square()).clamp(min=0.0)
    return count, shift + correction, variance, centred - correction


def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True, reduce: Reduce | None = None) -> Tensor:
    """Whiten `x` over the mask: unit variance and, by default, zero mean.

    yₜ = (xₜ − μ) / √(σ² + 1e-8), plus μ again when `shift_mean` is false; 0 outside the mask. The guard, as in TRL's
    and verl's `masked_whiten`, keeps noise from becoming a signal: numbers about 1e-7 apart, such as the rounding of a
    KL where all scores are equal, end about 1e-3 apart instead of 1. If `x` is constant up to rounding of its mean,
    (x − μ) becomes exactly 0.

    `shift_mean` false suits rewards, whose sign matters. Other arguments as in `moments`.

    Raises:
        ValueError: no element of the mask is true.
    """
    return whiten_with_divisor(x, mask, shift_mean=shift_mean, reduce=reduce)[0]


def whiten_with_divisor(
    x: Tensor,
    mask: Tensor,
    *,
    shift_mean: bool = True,
    reduce: Reduce | None = None,
    count: Tensor | float | None = None,
) -> tuple[Tensor, Tensor]:
    """`whiten`, and what it divides by, √(σ² + 1e-8), a scalar: 1 if `x` is constant up to rounding."""
    _, mean, variance, centred = moments_and_centred(x, mask, reduce, count)
    varies, inverse = above_rounding(variance.sqrt(), mean), (variance + VARIANCE_GUARD).rsqrt()
    whitened = centred * torch.where(varies, inverse, 0.0)
    if not shift_mean:
        whitened = whitened + mean
    return whitened.masked_fill(~mask, 0.0), torch.where(varies, 1 / inverse, 1.0)


def _over_processes(a: Tensor, b: Tensor, reduce: Reduce | None) -> tuple[Tensor, Tensor]:
    """Reduce two sums over all processes, in the dtype of the second."""
    if reduce is None:
        return a.to(b.dtype), b
    a, b = reduce(torch.stack([a.to(b.dtype), b]))
    return a, b


def extents(mask: Tensor) -> Tensor:
    """Number of columns of each row up to its last true one, `[batch]`; 0 for a row without one.

    These are all tokens of a row that holds observations between the policy's tokens; `mask.sum(1)` counts the
    policy's alone.
    """
    require_rows("mask", mask)
    require_flags("mask", mask, mask.shape)
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask * columns).amax(1) if mask.shape[1] else mask.sum(1)
