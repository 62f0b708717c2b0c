"""A baseline from the reward's own score of every prefix, fitted by position in closed form.

The score of "prompt and first t tokens" is nearly the value of that state already: V(sₜ) = αₜ + βₜ · S(prefixₜ), with α
and β by regression of sampled returns on scores. It depends on the state alone, so with λ = 1 the policy gradient stays
unbiased (Williams 1992); with a smaller λ its differences are credit, as in potential-based shaping (Ng, Harada and
Russell 1999) and RED (Li et al. 2024, arXiv 2411.08302), whose scores are not calibrated.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokencredit.core.argument_checks import (
    require_flags,
    require_positive,
    require_rows,
    require_shape,
    require_tensors,
)
from tokencredit.core.episodes import reverse_scan

FAR = 1e-6
"""Weight of positions beyond the reach of the kernel, so that those without completions get the overall fit."""

ROUNDING = 1e-10
"""Share of Σ S² up to which a variance is rounding."""


def prefix_moments(scores: Tensor, returns: Tensor, mask: Tensor, critic: Tensor | None = None) -> Tensor:
    """Sums over the rows of a batch, from which `fit_prefixes` makes a fit: those of several batches add up.

    Args:
        scores: [batch, time], the score S of the state before each token.
        returns: [batch, time], the sampled return G from that state on.
        mask: bool [batch, time], true at the states that count.
        critic: [batch, time], outputs u of a critic that has not learned from these returns; 0 if left out.

    Returns:
        [10, time], float64: the number of states at each position, and the sums over them of S, G, u, S², G², u²,
        S · G, S · u and G · u.

    Raises:
        ValueError: shapes differ, or the mask is not bool.
    """
    critic = torch.zeros_like(scores) if critic is None else critic
    require_tensors(scores=scores, returns=returns, mask=mask, critic=critic)
    require_rows("scores", scores)
    require_shape("returns", returns, scores.shape)
    require_shape("critic", critic, scores.shape)
    require_flags("mask", mask, scores.shape)
    s, g, u = (torch.where(mask, x.double(), 0.0) for x in (scores, returns, critic))
    return torch.stack([x.sum(0) for x in (mask.double(), s, g, u, s * s, g * g, u * u, s * g, s * u, g * u)])


def fit_prefixes(moments: Tensor, width: float, prior: float) -> tuple[Tensor, Tensor, Tensor]:
    """Fit V = α + β · S + c · u at each position by ridge regression towards the fit of the neighbouring positions.

    With wₜᵤ = exp(−|t − u| / width), c_xy the sums of products about the means of their own position, v and q the means
    of the variance of S within a position and of u², and p = prior:

        β̄ₜ = Σᵤ wₜᵤ c_sg,ᵤ / (Σᵤ wₜᵤ c_ss,ᵤ + pₜ v)              βₜ = (c_sg,ₜ + pₜ v β̄ₜ) / (c_ss,ₜ + pₜ v)
        ᾱₜ = Σᵤ wₜᵤ (Σ G − βₜ Σ S)ᵤ / Σᵤ wₜᵤ nᵤ                  αₜ = ((Σ G − βₜ Σ S)ₜ + pₜ ᾱₜ) / (nₜ + pₜ)
        c̄ₜ = Σᵤ wₜᵤ (Σ e u)ᵤ / (Σᵤ wₜᵤ (Σ u²)ᵤ + p q)            cₜ = ((Σ e u)ₜ + p q c̄ₜ) / ((Σ u²)ₜ + p q)

    where e = G − α − β · S, and c is kept within 0 and 1. So few completions at a position count less than their
    neighbours, and many count alone. pₜ is p times the part of the returns' variance that S leaves at the position,
    counted with two states like the neighbours: scores that tell the returns exactly need no neighbours.

    Args:
        moments: […, 10, time], of `prefix_moments`.
        width: reach of the neighbours, in tokens, above 0.
        prior: number of states that the neighbours' fit counts as, above 0.

    Returns:
        α, β and c, […, time] each.

    Raises:
        ValueError: width or prior is not above 0.
    """
    require_tensors(moments=moments)
    require_positive("width", width)
    require_positive("prior", prior)
    n, s, g, u, ss, gg, uu, sg, su, gu = moments.unbind(-2)
    # Sums about the means of each position: a trend over the positions is α's, not β's. Rounding is no variance.
    each = torch.where(n > 0, n, 1.0)
    squares, products, spread = ss - s * s / each, sg - s * g / each, (gg - g * g / each).clamp(min=0.0)
    varies = squares > ROUNDING * ss
    squares, products = (torch.where(varies, x, 0.0) for x in (squares, products))
    near_n, near_s, near_g, near_squares, near_products, near_spread = _pooled(
        torch.stack([n, s, g, squares, products, spread], dim=-2), width
    ).unbind(-2)
    # The part of the variance that S leaves, with two states of the neighbourhood.
    two = 2 * _ratio(torch.ones_like(n), near_n)
    left = _unexplained(spread, products, squares) + two * _unexplained(near_spread, near_products, near_squares)
    priors = prior * torch.where(near_spread > 0, _ratio(left, spread + two * near_spread), 1.0).clamp(min=ROUNDING)
    # Scores that never vary have no slope, and without any states the values are 0.
    usual = (squares.sum(-1) / n.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    strength = torch.where(usual > 0, priors * usual, 1.0)
    beta = (products + strength * near_products / (near_squares + strength)) / (squares + strength)
    alpha = (g - beta * s + priors * _ratio(near_g - beta * near_s, near_n)) / (n + priors)
    # The critic's share: the slope, through 0, of what this leaves on its outputs.
    products = gu - alpha * u - beta * su
    near_squares, near_products = _pooled(torch.stack([uu, products], dim=-2), width).unbind(-2)
    usual = (uu.sum(-1) / n.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    strength = torch.where(usual > 0, prior * usual, 1.0)
    share = (products + strength * near_products / (near_squares + strength)) / (uu + strength)
    return alpha, beta, share.clamp(0.0, 1.0)


def _unexplained(spread: Tensor, products: Tensor, squares: Tensor) -> Tensor:
    """The sum of squares that a slope leaves."""
    return (spread - _ratio(products.square(), squares)).clamp(min=0.0)


def _ratio(x: Tensor, y: Tensor) -> Tensor:
    """x / y, and 0 where y is 0."""
    return torch.where(y > 0, x, 0.0) / torch.where(y > 0, y, 1.0)


def _pooled(sums: Tensor, width: float) -> Tensor:
    """Σᵤ (exp(−|t − u| / width) + FAR) xᵤ over the last axis, by a scan in each direction."""
    decay = torch.full(sums.shape[-1:], math.exp(-1 / width), dtype=sums.dtype, device=sums.device)
    after, before = reverse_scan(sums, decay), reverse_scan(sums.flip(-1), decay).flip(-1)
    return after + before - sums + FAR * sums.sum(-1, keepdim=True)
