"""Advantage estimators: from rewards and values to credit.

Every estimator takes rewards and values [batch, time], a mask and the flags, and returns `(advantages, returns)` of the
same shape: how much better each acted step turned out than the critic expected, and what the critic should have said.

The conventions, for all of them:

- `values[t]` is the value of the state before step t, `rewards[t]` the reward for it.
- Steps where `mask` is false are stepped over: no decay, no reward; whatever stands there changes nothing, and the
  outputs are 0 there.
- An episode ends where `terminated` is set (the next state is worth 0) or `truncated` is set (it was cut off, and the
  next state is worth `bootstrap` there). Where both are set it terminated. The last acted step of a row always ends an
  episode; with neither flag set there it is terminated. Several episodes may follow each other in a row.
- Results are in float32 at least and carry no gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokencredit.core.checks import (
    require_acted,
    require_finite,
    require_flags,
    require_fraction,
    require_shape,
)
from tokencredit.core.masked import at_least_float32, zero_outside
from tokencredit.core.scan import reverse_scan


@dataclass(frozen=True)
class _Steps:
    """A checked rollout without gaps between the acted steps of a row; everything is 0 (false) where nobody acted."""

    rewards: Tensor
    values: Tensor
    acted: Tensor
    ends: Tensor
    """Which steps are the last of their episode."""
    after: Tensor
    """The value of the state after each step: 0 if it terminated, the bootstrap if truncated, else the next value."""
    order: Tensor | None
    """Where each step of a row stood before its gaps were closed; None if there were none."""

    def restore(self, *results: Tensor) -> tuple[Tensor, ...]:
        """Put zeros where nobody acted, and every step back to where it stood."""
        filled = (result.masked_fill(~self.acted, 0.0) for result in results)
        if self.order is None:
            return tuple(filled)
        return tuple(torch.zeros_like(result).scatter(-1, self.order, result) for result in filled)


def gae(
    rewards: Tensor,
    values: Tensor,
    *,
    gamma: float,
    lam: float,
    mask: Tensor | None = None,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: Aₜ = Σₖ (γλ)ᵏ δₜ₊ₖ with δₜ = rₜ + γ Vₜ₊₁ − Vₜ, to the end of the episode.

    Schulman et al. 2016 (arXiv 1506.02438), eq. 16. Computed as Gₜ − Vₜ with the λ-return Gₜ = rₜ + γ [(1 − λ) Vₜ₊₁
    + λ Gₜ₊₁] (Sutton and Barto 2018, eq. 12.2 in recursive form), which is the same number. In this form λ = 0 gives δ,
    λ = 1 gives return − value, and the return of a terminating step is its reward, to the last bit.

    λ trades bias for variance: 0 trusts the critic after one step, 1 trusts only what happened.

    Args:
        rewards: [batch, time].
        values: [batch, time].
        gamma: γ, the discount of a step, in [0, 1].
        lam: λ, in [0, 1].
        mask: bool [batch, time], true where the policy acted. None: everywhere.
        terminated: bool [batch, time].
        truncated: bool [batch, time].
        bootstrap: [batch, time], the value of the state after the step, read only where truncated.

    Returns:
        Advantages A and returns G = A + V.

    Raises:
        ValueError: shapes differ; a flag is not bool; γ or λ lies outside [0, 1]; a row has no acted step; an acted
            step has a reward, value or needed bootstrap that is NaN or infinite; `truncated` without `bootstrap`.
    """
    require_fraction("gamma", gamma)
    require_fraction("lam", lam)
    steps = _prepare(rewards, values, mask, terminated, truncated, bootstrap)
    returns = _lambda_returns(steps, gamma, lam)
    advantages, returns = steps.restore(returns - steps.values, returns)
    return advantages, returns


def _lambda_returns(steps: _Steps, gamma: float, lam: float | Tensor) -> Tensor:
    """Gₜ = rₜ + γ [(1 − λₜ) Vₜ₊₁ + λₜ Gₜ₊₁], where λₜ is 0 at the end of an episode and `lam` elsewhere."""
    lam_t = (~steps.ends).to(steps.rewards.dtype) * lam
    deltas = steps.rewards + gamma * (1 - lam_t) * steps.after
    return reverse_scan(deltas, gamma * lam_t)


def _prepare(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor | None,
    terminated: Tensor | None,
    truncated: Tensor | None,
    bootstrap: Tensor | None,
) -> _Steps:
    if rewards.dim() != 2:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}; it must be [batch, time]")
    shape = rewards.shape
    require_shape("values", values, shape)
    for name, flags in (("mask", mask), ("terminated", terminated), ("truncated", truncated)):
        if flags is not None:
            require_flags(name, flags, shape)
    acted = torch.ones(shape, dtype=torch.bool, device=rewards.device) if mask is None else mask
    require_acted(acted)

    dtype = torch.promote_types(at_least_float32(rewards).dtype, at_least_float32(values).dtype)
    rewards, values = zero_outside(rewards.detach().to(dtype), mask), zero_outside(values.detach().to(dtype), mask)
    require_finite("rewards", rewards)
    require_finite("values", values)
    cut = _cut_off(acted, terminated, truncated)
    at_cut = _bootstrap_at(cut, bootstrap, dtype)

    ends = _last_acted(acted)
    order = None
    if mask is not None and bool((acted[:, :-1] & ~acted[:, 1:] & ~ends[:, :-1]).any()):
        order = torch.argsort(~acted, dim=-1, stable=True)
    for flags in (terminated, truncated):
        if flags is not None:
            ends = ends | (flags & acted)
    if order is not None:
        rewards, values, acted, ends = (x.gather(-1, order) for x in (rewards, values, acted, ends))
        at_cut = None if at_cut is None else at_cut.gather(-1, order)
    after = torch.nn.functional.pad(values[:, 1:], (0, 1)).masked_fill_(ends, 0.0)
    if at_cut is not None:
        after += at_cut
    return _Steps(rewards, values, acted, ends, after, order)


def _last_acted(acted: Tensor) -> Tensor:
    """True at the last acted step of each row [batch, time], where every row has one."""
    time = acted.shape[-1]
    # argmax gives the first of equals.
    last = time - 1 - acted.flip(-1).to(torch.uint8).argmax(dim=-1, keepdim=True)
    return torch.zeros_like(acted).scatter_(-1, last, True)


def _cut_off(acted: Tensor, terminated: Tensor | None, truncated: Tensor | None) -> Tensor | None:
    """The acted steps whose next state is worth its bootstrap; None if there are none."""
    if truncated is None:
        return None
    cut = truncated & acted
    if terminated is not None:
        cut &= ~terminated
    return cut if bool(cut.any()) else None


def _bootstrap_at(cut: Tensor | None, bootstrap: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The bootstrap where an episode was cut off and 0 elsewhere; None if none was."""
    if bootstrap is not None and cut is not None:
        require_shape("bootstrap", bootstrap, cut.shape)
        at_cut = zero_outside(bootstrap.detach().to(dtype), cut)
        require_finite("bootstrap", at_cut)
        return at_cut
    if cut is not None:
        raise ValueError("bootstrap is None; where truncated is set it must hold the value of the state after the step")
    return None
