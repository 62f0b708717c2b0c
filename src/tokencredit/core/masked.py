"""Statistics over the positions where the policy acted.

What stands outside the mask is arbitrary, NaN and infinities included: it is replaced by 0 before anything is computed,
so that it reaches neither a result nor a gradient. All statistics are in float32 at least.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tokencredit.core.checks import require_flags

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over processes, elementwise, and returns the sum on each of them."""

VARIANCE_GUARD = 1e-8
"""Added to the variance that `whiten` divides by, in squared units of the numbers: where they differ by much less than
its root, 1e-4, their differences are noise, and stay small."""


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` in float32, or in float64 if it was that already."""
    return x if x.dtype == torch.float64 else x.float()


def zero_outside(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return `x` in float32 at least, with 0 wherever `mask` is false; the gradient there is 0 too.

    A filling, not a product: 0 · NaN is NaN.

    Args:
        x: any shape.
        mask: bool of the same shape; None keeps everything.

    Raises:
        ValueError: `mask` is not bool or has another shape than `x`.
    """
    x = at_least_float32(x)
    if mask is None:
        return x
    require_flags("mask", mask, x.shape)
    return x.masked_fill(~mask, 0.0)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of `x` where `mask` is true: Σ mₜ xₜ. Both of the same shape; returns a scalar."""
    return zero_outside(x, mask).sum()


def masked_mean(x: Tensor, mask: Tensor, count: Tensor | float | None = None) -> Tensor:
    """Mean of `x` where `mask` is true: Σ mₜ xₜ / count.

    Args:
        x: any shape.
        mask: bool of the same shape.
        count: what to divide by, when the mean goes over more than this tensor: the number of acted positions of all
            micro-batches and processes. The parts then add up to the mean of the whole. Default: those of `mask`.

    Returns:
        A scalar.

    Raises:
        ValueError: `mask` has no true element and there is no `count`.
    """
    if count is None:
        count = mask.sum()
        if count == 0:
            raise ValueError("mask has no true element; a mean needs one, or a count from outside")
    return masked_sum(x, mask) / count


def moments(
    x: Tensor, mask: Tensor, reduce: Reduce | None = None, *, count: Tensor | float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and variance of `x` where `mask` is true.

    n = Σ mₜ,  μ = Σ mₜ xₜ / n,  σ² = Σ mₜ (xₜ − μ)² / n: the variance of the population, not of a sample.

    In two passes, the second about the mean of the first, because Σx²/n − μ² loses every digit when μ is large beside
    σ; the second pass also removes the rounding error of the first mean (the corrected two-pass algorithm of Chan,
    Golub and LeVeque 1983, "Algorithms for computing the sample variance").

    Args:
        x: any shape.
        mask: bool of the same shape.
        reduce: sums a tensor over processes; the moments are then those of all of them together.
        count: n of all processes, where it is known to be above 0; nothing then waits for a GPU. Default: of `mask`.

    Returns:
        Three scalars, the same on every process.

    Raises:
        ValueError: no element is true, here or (with `reduce`) on any process.
    """
    total, mean, variance, _ = _moments_and_centred(x, mask, reduce, count)
    return total, mean, variance


def whiten(
    x: Tensor,
    mask: Tensor,
    *,
    shift_mean: bool = True,
    reduce: Reduce | None = None,
    count: Tensor | float | None = None,
) -> Tensor:
    """Scale `x` to deviation 1 over the mask, and shift it to mean 0 if asked to.

    yₜ = (xₜ − μ) / √(σ² + 1e-8), plus μ again when `shift_mean` is false; 0 outside the mask. The guard, that of TRL's
    and verl's `masked_whiten`, keeps noise from becoming a signal: numbers about 1e-7 apart, such as the rounding of a
    KL where all scores are equal, end about 1e-3 apart and not 1. Of a tensor that is constant up to the rounding of
    its mean nothing is left: (x − μ) becomes 0.

    Args:
        x: any shape.
        mask: bool of the same shape.
        shift_mean: whether the mean becomes 0 (advantages) or stays what it was (rewards, whose sign matters).
        reduce: sums a tensor over processes; μ and σ are then those of all of them together.
        count: as in `moments`.

    Returns:
        A tensor of the shape of `x`.

    Raises:
        ValueError: no element of the mask is true.
    """
    _, mean, variance, centred = _moments_and_centred(x, mask, reduce, count)
    inverse = torch.where(above_rounding(variance.sqrt(), mean), (variance + VARIANCE_GUARD).rsqrt(), 0.0)
    whitened = centred * inverse
    if not shift_mean:
        whitened = whitened + mean
    return whitened.masked_fill(~mask, 0.0)


def inverse_deviation(deviation: Tensor, mean: Tensor, guard: float = 0.0) -> Tensor:
    """1 / (σ + guard), or 0 where σ is no more than rounding would make of a constant. Same shapes.

    Without a guard, for what has no unit, such as a correlation.
    """
    return torch.where(above_rounding(deviation, mean), 1 / (deviation + guard), torch.zeros_like(deviation))


def above_rounding(deviation: Tensor, mean: Tensor) -> Tensor:
    """True where σ is more than rounding would make of a constant: 4 ulp of the mean. Same shapes."""
    return deviation > 4 * torch.finfo(mean.dtype).eps * mean.abs()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, reduce: Reduce | None = None) -> Tensor:
    """How much of the variance of the returns the critic foresaw: 1 − Var[R − V] / Var[R].

    1 is a perfect critic, 0 one that is no better than a constant, below 0 one that is worse. NaN when the returns do
    not vary, because there is then nothing to explain.

    Args:
        values: any shape.
        returns: the same shape.
        mask: bool of the same shape.
        reduce: sums a tensor over processes.

    Returns:
        A scalar.
    """
    count, _, total = moments(returns, mask, reduce)
    _, _, left = moments(zero_outside(returns, mask) - zero_outside(values, mask), mask, reduce, count=count)
    return torch.where(total > 0, 1 - left / total, torch.full_like(total, torch.nan))


def _moments_and_centred(
    x: Tensor, mask: Tensor, reduce: Reduce | None, known: Tensor | float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result of `moments`, and x − μ without the rounding that μ itself would bring in."""
    x = zero_outside(x, mask)
    if known is None:
        count, first_sum = _over_processes(mask.sum(), x.sum(), reduce)
        if count == 0:
            raise ValueError("mask has no true element; moments need one")
    else:
        count = known.to(x.dtype) if isinstance(known, Tensor) else x.new_full((), known)
        first_sum = x.sum() if reduce is None else reduce(x.sum())
    shift = first_sum / count
    rest = (x - shift).masked_fill(~mask, 0.0)
    rest_sum, square_sum = _over_processes(rest.sum(), rest.square().sum(), reduce)
    correction = rest_sum / count
    variance = (square_sum / count - correction.square()).clamp(min=0.0)
    return count, shift + correction, variance, rest - correction


def _over_processes(a: Tensor, b: Tensor, reduce: Reduce | None) -> tuple[Tensor, Tensor]:
    """Two sums, in the dtype of the second, over all processes."""
    if reduce is None:
        return a.to(b.dtype), b
    a, b = reduce(torch.stack([a.to(b.dtype), b]))
    return a, b
