"""Reverse linear recurrences in time, which all advantages with a trace solve."""

import math

import torch
from torch import Tensor

from tokencredit.core.argument_checks import require_shape, require_tensors
from tokencredit.core.masked import at_least_float32


@torch.no_grad()
def reverse_scan(deltas: Tensor, decays: Tensor) -> Tensor:
    """Reverse scan: solve Aₜ = δₜ + cₜ · Aₜ₊₁ backwards in time, with A_T = 0 after the last step.

    A loop over T takes T sequential steps on one column each. Here time is cut into √T blocks of √T steps. All blocks
    first run their recurrence in parallel, as if nothing followed, and keep the product of their decays. Then, from the
    last block to the first, every step adds the result after its block, times the decay up to there. That is the
    standard blocked scan (Blelloch 1990, "Prefix sums and their applications", section 1.4), with O(√T) sequential
    steps and O(T) work, in plain PyTorch on any device.

    Args:
        deltas: δ, [..., time].
        decays: c, the same shape, or [1, time] or [time] if all rows share it, which is cheaper. Any numbers whose
            products within a block stay finite; a 0 ends an episode.

    Returns:
        A, the same shape, in float32 at least, without a gradient.

    Raises:
        ValueError: the shapes differ or there is no time axis.
    """
    require_tensors(deltas=deltas, decays=decays)
    if deltas.dim() == 0:
        raise ValueError("deltas is a scalar; its last axis must be time")
    shared = decays.shape[:-1].numel() == 1
    require_shape("decays", decays, (*decays.shape[:-1], deltas.shape[-1]) if shared else deltas.shape)
    dtype = torch.promote_types(at_least_float32(deltas).dtype, at_least_float32(decays).dtype)
    if deltas.numel() == 0:
        return deltas.to(dtype)

    time = deltas.shape[-1]
    steps = math.isqrt(time - 1) + 1
    blocks = -(-time // steps)
    sums = _time_first(deltas.to(dtype), blocks * steps).view(blocks, steps, -1)
    products = _time_first(decays.to(dtype), blocks * steps).view(blocks, steps, -1)
    _scan_blocks(sums, products)
    return sums.view(blocks * steps, -1)[:time].t().contiguous().view(deltas.shape)


def _scan_blocks(sums: Tensor, products: Tensor) -> None:
    """Turn δ and c, [blocks, steps, rows or 1], into A and the products of c up to the end of each block, in place."""
    # Views are made once, outside the loops: on short rows they cost more than the arithmetic.
    sum_at, product_at = sums.unbind(1), products.unbind(1)
    for step in range(len(sum_at) - 2, -1, -1):
        sum_at[step].addcmul_(product_at[step], sum_at[step + 1])
        product_at[step].mul_(product_at[step + 1])

    # The last block is complete. The first step of each block is the input of the block before it.
    block_sums, block_products, first_sums = sums.unbind(0), products.unbind(0), sum_at[0].unbind(0)
    for block in range(len(block_sums) - 2, -1, -1):
        block_sums[block].addcmul_(block_products[block], first_sums[block + 1])


def _time_first(x: Tensor, padded: int) -> Tensor:
    """Copy [..., time] to [padded, rows] with zero padding, so that one step of all rows is contiguous in memory."""
    rows = x.reshape(-1, x.shape[-1])
    copy = rows.new_zeros(padded, rows.shape[0]) if padded > rows.shape[1] else rows.new_empty(padded, rows.shape[0])
    copy[: rows.shape[1]].copy_(rows.t())
    return copy
