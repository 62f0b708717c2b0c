"""The reverse linear recurrence behind every discounted sum."""

import math

import torch
from torch import Tensor

from tokencredit.core.checks import require_shape
from tokencredit.core.masked import at_least_float32


@torch.no_grad()
def reverse_scan(deltas: Tensor, decays: Tensor) -> Tensor:
    """Solve Aₜ = δₜ + cₜ · Aₜ₊₁ backwards in time, with A_T = 0 after the last step.

    A loop over T costs T steps that each touch one column. Here time is cut into √T blocks of √T steps. All blocks run
    their recurrence at once, as if nothing came after them, and keep the product of their decays; then, block by block
    from the last to the first, every step adds what follows its block, times the decay up to there. That is the
    standard scan over blocks (Blelloch 1990, "Prefix sums and their applications", section 1.4), with O(√T)
    sequential steps and O(T) work, in plain PyTorch on any device.

    Args:
        deltas: δ, [..., time].
        decays: c, the same shape, or [1, time] or [time] if all rows share it, which costs less. Any numbers whose
            products within a block stay finite; a 0 ends an episode.

    Returns:
        A, the same shape, in float32 at least, without a gradient.

    Raises:
        ValueError: the shapes differ or there is no time axis.
    """
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
    # Views are made once, outside the loops: on short rows making them costs more than the arithmetic.
    sum_at, product_at = sums.unbind(1), products.unbind(1)
    for step in range(len(sum_at) - 2, -1, -1):
        sum_at[step].addcmul_(product_at[step], sum_at[step + 1])
        product_at[step].mul_(product_at[step + 1])

    # The last block is complete; its first step is what follows the block before it, and so on to the front.
    block_sums, block_products, first_sums = sums.unbind(0), products.unbind(0), sum_at[0].unbind(0)
    for block in range(len(block_sums) - 2, -1, -1):
        block_sums[block].addcmul_(block_products[block], first_sums[block + 1])


def _time_first(x: Tensor, padded: int) -> Tensor:
    """Copy [..., time] to [padded, rows], with 0 after the end, so that one step of all rows is one run of memory."""
    rows = x.reshape(-1, x.shape[-1])
    copy = rows.new_zeros(padded, rows.shape[0]) if padded > rows.shape[1] else rows.new_empty(padded, rows.shape[0])
    copy[: rows.shape[1]].copy_(rows.t())
    return copy
