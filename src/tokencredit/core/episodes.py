"""Compact a rollout into steps without gaps, mark its episodes, and solve linear recurrences over them."""

import math
from dataclasses import dataclass
from functools import reduce
from typing import TypedDict

import torch
from torch import Tensor

from tokencredit.core.argument_checks import (
    empty_rows,
    refuse_foreign,
    refuse_time_first,
    require_acted,
    require_finite,
    require_flags,
    require_rows,
    require_shape,
    require_tensors,
)
from tokencredit.core.masked import at_least_float32, extents, zero_outside


class EpisodeBounds(TypedDict, total=False):
    """Padding mask, episode flags and bootstrap values: the arguments of `gae` of these names, all [batch, time]."""

    mask: Tensor | None
    terminated: Tensor | None
    truncated: Tensor | None
    bootstrap: Tensor | None


@dataclass(frozen=True)
class Steps:
    """A rollout with the acted steps packed at the front of each row and zeros after them.

    Attributes:
        rewards: [batch, time].
        values: [batch, time], the value of the state before each step.
        inside: [batch, time], 1.0 where the next step belongs to the same episode, 0.0 at the last step of an episode.
        cut_values: [batch, time], the bootstrap where an episode was truncated and 0 elsewhere; None if none was.
        lengths: [batch, 1], number of acted steps.
        order: original time index of each step; None if no step had to move.
    """

    rewards: Tensor
    values: Tensor
    inside: Tensor
    cut_values: Tensor | None
    lengths: Tensor
    order: Tensor | None

    def bootstrapped_rewards(self, gamma: float) -> Tensor:
        """Rewards plus, at truncated steps, the discounted bootstrap value."""
        if self.cut_values is None:
            return self.rewards
        return self.rewards + gamma * self.cut_values

    def restore(self, advantages: Tensor, returns: Tensor) -> tuple[Tensor, Tensor]:
        """Scatter every step back to its original position. Steps that are not acted must be 0 and stay 0."""
        if self.order is None:
            return advantages, returns
        advantages = torch.empty_like(advantages).scatter_(-1, self.order, advantages)
        return advantages, torch.empty_like(returns).scatter_(-1, self.order, returns)


@refuse_foreign
def prepare_steps(
    rewards: Tensor,
    values: Tensor | None,
    mask: Tensor | None = None,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    bootstrap: Tensor | None = None,
    *,
    one_episode: bool = False,
) -> Steps:
    """Check a rollout and pack it into `Steps`; the conventions are those of `core.advantages`.

    Without `values`, values and a missing `bootstrap` are 0. With `one_episode`, a row may hold only one.

    Raises:
        ValueError: as `advantages.gae`; or a row holds several episodes despite `one_episode`.
    """
    require_rows("rewards", rewards)
    if bootstrap is not None and truncated is None:
        raise ValueError(
            "bootstrap is given without truncated, and read only where that is true; give truncated= as well, true at "
            "the steps that an episode was cut off after. Without it the last step of a row terminates its episode"
        )
    if values is None:
        values = torch.zeros_like(rewards)
        bootstrap = values if bootstrap is None and truncated is not None else bootstrap
    mask = torch.ones_like(rewards, dtype=torch.bool) if mask is None else mask
    _require_shapes(rewards, values, {"mask": mask, "terminated": terminated, "truncated": truncated}, bootstrap)
    dtype = torch.promote_types(at_least_float32(rewards).dtype, at_least_float32(values).dtype)
    all_rewards, all_values, acted = rewards.detach().to(dtype), values.detach().to(dtype), mask.to(dtype)
    # A product is several times as fast as filling. NaN · 0 is NaN, which the sums below detect; only then fill.
    rewards, values = all_rewards * acted, all_values * acted
    flagged, cut, cut_values = _flagged(mask, terminated, truncated), None, None
    if truncated is not None:
        cut = truncated & mask if terminated is None else truncated & mask & ~terminated
        cut_values = None if bootstrap is None else bootstrap.detach().to(dtype).masked_fill(~cut, 0.0)
    early = _early_ends(flagged, mask) if one_episode and flagged is not None else None

    # One transfer for all checks that depend on values, since each one stalls a GPU's queue.
    no_acted, bad_rewards, bad_values, any_gap, any_cut, bad_cut_values, any_early = _any_true(
        empty_rows(mask),
        ~rewards.sum().isfinite(),
        ~values.sum().isfinite(),
        mask[:, 1:] & ~mask[:, :-1],
        cut,
        None if cut_values is None else ~cut_values.sum().isfinite(),
        early,
    )
    if no_acted:
        require_acted(mask)
    if bad_rewards:
        rewards = zero_outside(all_rewards, mask)
        require_finite("rewards", rewards)
    if bad_values:
        values = zero_outside(all_values, mask)
        require_finite("values", values)
    if any_cut and cut_values is None:
        raise ValueError("bootstrap is None; where truncated is set it must hold the value of the state after the step")
    if bad_cut_values and cut_values is not None:
        require_finite("bootstrap", cut_values)
    if any_early and early is not None:
        row = int(early.any(-1).nonzero()[0])
        raise ValueError(f"row {row} holds several episodes; this estimator scores a row as one")
    return _packed(rewards, values, mask, flagged, cut_values if any_cut else None, any_gap)


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


def _require_shapes(rewards: Tensor, values: Tensor, flags: dict[str, Tensor | None], bootstrap: Tensor | None) -> None:
    if rewards.shape[1] == 0:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}; it must be [batch, time] with time above 0")
    for name, tensor in {"values": values, **flags, "bootstrap": bootstrap}.items():
        if tensor is not None:
            refuse_time_first(name, tensor, rewards.shape)
    if values.dim() == 2 and values.shape == (len(rewards), rewards.shape[1] + 1):
        raise ValueError(
            f"values has shape {tuple(values.shape)}, one more than the steps; it must be {tuple(rewards.shape)}: give "
            "values[:, :-1], and bootstrap=values[:, 1:] with truncated= if the last state is worth its value"
        )
    require_shape("values", values, rewards.shape)
    for name, flag in flags.items():
        if flag is not None:
            require_flags(name, flag, rewards.shape)
    if bootstrap is not None:
        require_shape("bootstrap", bootstrap, rewards.shape)


def _flagged(mask: Tensor, terminated: Tensor | None, truncated: Tensor | None) -> Tensor | None:
    """True where an acted step carries a flag; None if there are no flags."""
    present = [flags & mask for flags in (terminated, truncated) if flags is not None]
    return reduce(torch.logical_or, present) if present else None


def _packed(
    rewards: Tensor, values: Tensor, mask: Tensor, flagged: Tensor | None, cut_values: Tensor | None, any_gap: bool
) -> Steps:
    """The steps, moved to the front of each row if there is a gap between them."""
    order = torch.argsort(~mask, dim=-1, stable=True) if any_gap else None
    if order is not None:
        rewards, values = rewards.gather(-1, order), values.gather(-1, order)
        cut_values = None if cut_values is None else cut_values.gather(-1, order)
        flagged = None if flagged is None else flagged.gather(-1, order)
    lengths = mask.sum(-1, keepdim=True)
    inside = torch.ones_like(rewards) if flagged is None else (~flagged).to(rewards.dtype)
    return Steps(rewards, values, inside.scatter_(-1, lengths - 1, 0.0), cut_values, lengths, order)


def _any_true(*checks: Tensor | None) -> list[bool]:
    """True for each bool tensor with a true element, in one transfer; False for None."""
    present = [check.any() for check in checks if check is not None]
    results = iter(torch.stack(present).tolist())
    return [False if check is None else next(results) for check in checks]


def _early_ends(flagged: Tensor, mask: Tensor) -> Tensor:
    """True where an episode ends before the last acted step of its row."""
    return flagged & (torch.arange(flagged.shape[1], device=flagged.device) != extents(mask)[:, None] - 1)


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
