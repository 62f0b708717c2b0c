"""From the tensors of a rollout to steps that a recursion can run over: checked, without gaps, cut into episodes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokencredit.core.checks import require_acted, require_finite, require_flags, require_shape
from tokencredit.core.masked import at_least_float32


@dataclass(frozen=True)
class Steps:
    """A rollout whose acted steps stand at the front of each row; all numbers behind them are 0.

    Attributes:
        rewards: [batch, time].
        values: [batch, time], the value of the state before each step.
        inside: [batch, time], or [1, time] if it is the same for every row: 1.0 where the next step belongs to the same
            episode, 0.0 at the last step of an episode.
        cut_values: [batch, time], the bootstrap where an episode was truncated and 0 elsewhere; None if none was.
        lengths: [batch, 1], or [1, 1] if it is the same for every row: how many steps of each were acted.
        order: where each step of a row stood originally; None if none had to move.
    """

    rewards: Tensor
    values: Tensor
    inside: Tensor
    cut_values: Tensor | None
    lengths: Tensor
    order: Tensor | None

    def rewards_to_the_end(self, gamma: float) -> Tensor:
        """The rewards, and where an episode was cut off the discounted value of what would have followed."""
        if self.cut_values is None:
            return self.rewards
        return self.rewards + gamma * self.cut_values

    def restore(self, *results: Tensor) -> tuple[Tensor, ...]:
        """Put every step back to where it stood. What is not acted must be 0 and stays 0."""
        if self.order is None:
            return results
        return tuple(torch.empty_like(result).scatter_(-1, self.order, result) for result in results)


def prepare_steps(
    rewards: Tensor,
    values: Tensor | None,
    mask: Tensor | None = None,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    bootstrap: Tensor | None = None,
) -> Steps:
    """Check a rollout and bring it into the form of `Steps`; the conventions are those of `core.advantages`.

    Without `values` they are 0, and then a missing `bootstrap` is 0 too.

    Raises:
        ValueError: see `advantages.gae`.
    """
    if rewards.dim() != 2 or rewards.shape[1] == 0:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}; it must be [batch, time] with time above 0")
    shape = rewards.shape
    if values is None:
        values = torch.zeros_like(rewards)
        bootstrap = values if bootstrap is None else bootstrap
    require_shape("values", values, shape)
    for name, flags in (("mask", mask), ("terminated", terminated), ("truncated", truncated)):
        if flags is not None:
            require_flags(name, flags, shape)
    if mask is not None:
        require_acted(mask)

    dtype = torch.promote_types(at_least_float32(rewards).dtype, at_least_float32(values).dtype)
    acted = None if mask is None else mask.to(dtype)
    rewards = _acted_only("rewards", rewards.to(dtype), mask, acted)
    values = _acted_only("values", values.to(dtype), mask, acted)
    cut_values = _cut_values(mask, terminated, truncated, bootstrap, dtype)
    flagged = _flagged(mask, terminated, truncated)

    order = _closing_order(mask)
    if order is not None:
        rewards, values = rewards.gather(-1, order), values.gather(-1, order)
        cut_values = None if cut_values is None else cut_values.gather(-1, order)
        flagged = None if flagged is None else flagged.gather(-1, order)
    lengths = _lengths(mask, rewards)
    return Steps(rewards, values, _inside(flagged, lengths, rewards), cut_values, lengths, order)


def _lengths(mask: Tensor | None, like: Tensor) -> Tensor:
    if mask is None:
        return torch.full((1, 1), like.shape[1], device=like.device)
    return mask.sum(dim=-1, keepdim=True)


def _flagged(mask: Tensor | None, terminated: Tensor | None, truncated: Tensor | None) -> Tensor | None:
    """Where an acted step carries a flag; None if there are no flags."""
    given = [flags for flags in (terminated, truncated) if flags is not None]
    if not given:
        return None
    flagged = given[0] if len(given) == 1 else given[0] | given[1]
    return flagged if mask is None else flagged & mask


def _inside(flagged: Tensor | None, lengths: Tensor, like: Tensor) -> Tensor:
    inside = like.new_ones(len(lengths), like.shape[1]) if flagged is None else (~flagged).to(like.dtype)
    return inside.scatter_(-1, (lengths - 1).expand(len(inside), 1), 0.0)


def _acted_only(name: str, x: Tensor, mask: Tensor | None, acted: Tensor | None) -> Tensor:
    """Return `x` with 0 where nobody acted; refuse NaN and infinities where somebody did."""
    x = x.detach()
    if mask is None or acted is None:
        require_finite(name, x)
        return x
    kept = x * acted
    if not bool(torch.isfinite(kept.sum())):
        # The product is several times as fast as filling, but NaN · 0 is NaN: something is not finite, so look where.
        kept = x.masked_fill(~mask, 0.0)
        require_finite(name, kept)
    return kept


def _cut_values(
    mask: Tensor | None,
    terminated: Tensor | None,
    truncated: Tensor | None,
    bootstrap: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """The bootstrap where an episode was cut off and 0 elsewhere; None if none was."""
    if truncated is None:
        return None
    cut = truncated if mask is None else truncated & mask
    if terminated is not None:
        cut = cut & ~terminated
    if not bool(cut.any()):
        return None
    if bootstrap is None:
        raise ValueError("bootstrap is None; where truncated is set it must hold the value of the state after the step")
    require_shape("bootstrap", bootstrap, cut.shape)
    cut_values = bootstrap.detach().to(dtype).masked_fill(~cut, 0.0)
    require_finite("bootstrap", cut_values)
    return cut_values


def _closing_order(mask: Tensor | None) -> Tensor | None:
    """The order of steps that brings the acted ones to the front of each row; None if they stand there already."""
    if mask is None or not bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        return None
    return torch.argsort(~mask, dim=-1, stable=True)
