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


def prefix_moments(scores: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Sums over the rows of a batch, from which `fit_prefixes` makes a fit: those of several batches add up.

    Args:
        scores: [batch, time], the score S of the state before each token.
        returns: [batch, time], the sampled return G from that state on.
        mask: bool [batch, time], true at the states that count.

    Returns:
        [5, time], float64: the number of states at each position, and Σ S, Σ G, Σ S², Σ S · G over them.

    Raises:
        ValueError: shapes differ, or the mask is not bool.
    """
    require_tensors(scores=scores, returns=returns, mask=mask)
    require_rows("scores", scores)
    require_shape("returns", returns, scores.shape)
    require_flags("mask", mask, scores.shape)
    s, g = (torch.where(mask, x.double(), 0.0) for x in (scores, returns))
    return torch.stack([x.sum(0) for x in (mask.double(), s, g, s * s, s * g)])


def fit_prefixes(moments: Tensor, width: float, prior: float) -> tuple[Tensor, Tensor]:
    """Fit V = α + β · S at each position by ridge regression towards the fit of the neighbouring positions.

    With wₜᵤ = exp(−|t − u| / width), c the sums of products about the means of their own position, v the mean variance
    of S within a position, and p = prior:

        β̄ₜ = Σᵤ wₜᵤ c_sg,ᵤ / (Σᵤ wₜᵤ c_ss,ᵤ + p v)               βₜ = (c_sg,ₜ + p v β̄ₜ) / (c_ss,ₜ + p v)
        ᾱₜ = Σᵤ wₜᵤ (Σ G − βₜ Σ S)ᵤ / Σᵤ wₜᵤ nᵤ                  αₜ = ((Σ G − βₜ Σ S)ₜ + p ᾱₜ) / (nₜ + p)

    so that few completions at a position count less than their neighbours, and many count alone.

    Args:
        moments: […, 5, time], of `prefix_moments`.
        width: reach of the neighbours, in tokens, above 0.
        prior: number of states that the neighbours' fit counts as, above 0.

    Returns:
        α and β, […, time] each.

    Raises:
        ValueError: width or prior is not above 0.
    """
    require_tensors(moments=moments)
    require_positive("width", width)
    require_positive("prior", prior)
    n, s, g, ss, sg = moments.unbind(-2)
    # Sums about the means of each position: a trend over the positions is α's, not β's. Rounding is no variance.
    each = torch.where(n > 0, n, 1.0)
    squares, products = ss - s * s / each, sg - s * g / each
    varies = squares > ROUNDING * ss
    squares, products = (torch.where(varies, x, 0.0) for x in (squares, products))
    near_n, near_s, near_g, near_squares, near_products = _pooled(
        torch.stack([n, s, g, squares, products], dim=-2), width
    ).unbind(-2)
    # Scores that never vary have no slope, and without any states the values are 0.
    usual = (squares.sum(-1) / n.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    strength = torch.where(usual > 0, prior * usual, 1.0)
    beta = (products + strength * near_products / (near_squares + strength)) / (squares + strength)
    near = torch.where(near_n > 0, near_g - beta * near_s, 0.0) / torch.where(near_n > 0, near_n, 1.0)
    return (g - beta * s + prior * near) / (n + prior), beta


def _pooled(sums: Tensor, width: float) -> Tensor:
    """Σᵤ (exp(−|t − u| / width) + FAR) xᵤ over the last axis, by a scan in each direction."""
    decay = torch.full(sums.shape[-1:], math.exp(-1 / width), dtype=sums.dtype, device=sums.device)
    after, before = reverse_scan(sums, decay), reverse_scan(sums.flip(-1), decay).flip(-1)
    return after + before - sums + FAR * sums.sum(-1, keepdim=True)
