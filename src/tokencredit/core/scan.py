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
    their recurrence at once, as if nothing came after them, and keep the product of their decays; then the blocks are
    chained, last to first; then each step adds what follows its block, times the decay up to there. That is the
    standard scan over blocks (Blelloch 1990, "Prefix sums and their applications", section 1.4), with O(√T)
    sequential steps and O(T) work, in plain PyTorch on any device.

    Args:
        deltas: δ, [..., time].
        decays: c, the same shape; any numbers whose products within a block stay finite. A 0 ends an episode.

    Returns:
        A, the same shape, in float32 at least, without a gradient.

    Raises:
        ValueError: the shapes differ or there is no time axis.
    """
    if deltas.dim() == 0:
        raise ValueError("deltas is a scalar; its last axis must be time")
    require_shape("decays", decays, deltas.shape)
    dtype = torch.promote_types(at_least_float32(deltas).dtype, at_least_float32(decays).dtype)
    if deltas.numel() == 0:
        return deltas.to(dtype)

    time = deltas.shape[-1]
    steps = math.isqrt(time - 1) + 1
    blocks = -(-time // steps)
    sums = _steps_first(deltas.to(dtype), steps, blocks)
    products = _steps_first(decays.to(dtype), steps, blocks)

    sum_rows, product_rows = sums.unbind(0), products.unbind(0)
    for step in range(steps - 2, -1, -1):
        sum_rows[step].addcmul_(product_rows[step], sum_rows[step + 1])
        product_rows[step].mul_(product_rows[step + 1])

    # What follows block k: the first sum of block k + 1, completed with what follows that one.
    following = torch.zeros_like(sum_rows[0])
    following_blocks, first_sums, first_products = following.unbind(0), sum_rows[0].unbind(0), product_rows[0].unbind(0)
    for block in range(blocks - 2, -1, -1):
        torch.addcmul(
            first_sums[block + 1],
            first_products[block + 1],
            following_blocks[block + 1],
            out=following_blocks[block],
        )
    sums.addcmul_(products, following)
    return sums.permute(2, 1, 0).reshape(-1, blocks * steps)[:, :time].reshape(deltas.shape)


def _steps_first(x: Tensor, steps: int, blocks: int) -> Tensor:
    """Copy [..., time] to [steps, blocks, rows], padded with 0: a step of all blocks is then one run of memory."""
    rows = x.reshape(-1, x.shape[-1])
    padded = torch.nn.functional.pad(rows, (0, steps * blocks - rows.shape[-1]))
    return padded.view(-1, blocks, steps).permute(2, 1, 0).clone(memory_format=torch.contiguous_format)
