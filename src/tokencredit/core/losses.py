"""PPO's losses, one number per token, and the weights that reduce them.

Each loss returns a tensor with the shape of its arguments, 0 outside the mask. A reduction is a weighted sum:

    weights = token_weights(mask, by="token", count=global_count)
    loss = weighted_sum(policy, weights) + value_coef * weighted_sum(value, weights)

The weights of all micro-batches and processes together sum to 1 (by token, by sequence), however the batch is split, so
their losses and gradients add up to those of the whole batch without another division. In training the parts are summed
by `learn.objective`: `Objective.total` for the policy, `Loss.total` with the critic.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokencredit.core.argument_checks import (
    require_choice,
    require_flags,
    require_not_negative,
    require_shape,
    require_tensors,
)
from tokencredit.core.masked import at_least_float32, zero_outside
from tokencredit.core.rewards import k1, k3

Clip = float | tuple[float, float]
"""Clip range of the ratio around 1: one number for both sides, or (below, above)."""

REDUCTIONS = ("token", "sequence", "constant")

MAX_LOG_RATIO = 20.0
"""Clamp of log-ratios in losses and weights, in nats, so that the ratio cannot overflow. e²⁰ is 5·10⁸: a token that far
off is outside every trust region, and an infinite or NaN gradient would only hide the cause. Statistics are not
clamped."""

SMOOTHING = 0.75
"""Standard deviation of the Gaussian around a return, in bin widths; a target spreads over about six bins."""


def clip_range(clip: Clip) -> tuple[float, float]:
    """The clip interval [1 − below, 1 + above].

    Raises:
        ValueError: a side is negative or not finite, or the lower side is above 1.
    """
    below, above = clip if isinstance(clip, tuple) else (clip, clip)
    require_not_negative("clip", below)
    require_not_negative("clip", above)
    if below > 1:
        raise ValueError(f"clip is {clip}; its lower side may be at most 1, since a ratio is never negative")
    return 1 - below, 1 + above


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    clip: Clip = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """PPO's policy loss: −min(r A, clip(r, 1 − ε₋, 1 + ε₊) A) with r = π(x) / π_old(x).

    Schulman et al. 2017 (arXiv 1707.06347), eq. 7, as a loss. Asymmetric range: Yu et al. 2025 (DAPO, arXiv
    2503.14476), eq. 10. Dual clip: where A < 0 the loss is at most −c A, so that a bad token that became far more
    likely does not dominate the batch; Ye et al. 2020 (arXiv 1912.09729), eq. 4.

    Args:
        logprobs: log π of the tokens under the policy in training; any shape.
        old_logprobs: log π_old of the same tokens under the policy that sampled them.
        advantages: A; no gradient flows into it.
        mask: bool; the loss is 0 where it is false. None: every element counts.
        clip: ε, or (ε₋, ε₊).
        dual_clip: c, above 1; None for no dual clip.

    Returns:
        The loss of each token, with the shape of `logprobs`.

    Raises:
        ValueError: shapes differ, or a clip is out of its range.
    """
    require_tensors(logprobs=logprobs)
    require_shape("advantages", advantages, logprobs.shape)
    low, high = clip_range(clip)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip is {dual_clip}; it must be above 1")
    advantages = zero_outside(advantages.detach(), mask)
    ratio = _log_ratio(logprobs, old_logprobs, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    return -objective


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor | None = None,
    *,
    clip: float | None = None,
) -> Tensor:
    """½ (V − R)², or the maximum of that and ½ (V_clipped − R)², with V_clipped within ± clip of the old value.

    The clipped form is from OpenAI's baselines (`ppo2`); the PPO paper does not mention it. Engstrom et al. 2020 (arXiv
    2005.12729), section 3, describe and measure its effect.

    Args:
        values: V, from the critic in training; any shape.
        old_values: V at the time of the rollout.
        returns: R, the target; no gradient flows into it or into `old_values`.
        mask: bool; the loss is 0 where it is false. None: every element counts.
        clip: distance from the old value beyond which V is clipped, in units of value. None: no clip.

    Returns:
        The loss of each token, with the shape of `values`.

    Raises:
        ValueError: shapes differ, or `clip` is negative.
    """
    require_tensors(values=values)
    require_shape("old_values", old_values, values.shape)
    require_shape("returns", returns, values.shape)
    values, returns = zero_outside(values, mask), zero_outside(returns.detach(), mask)
    error = (values - returns).square()
    if clip is not None:
        require_not_negative("value clip", clip)
        old_values = zero_outside(old_values.detach(), mask)
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (clipped - returns).square())
    return 0.5 * error


def smoothed_histogram(targets: Tensor, edges: Tensor) -> Tensor:
    """Probability mass per bin, `[..., bins]`, of a Gaussian around each target, truncated at the outer edges.

    Its deviation is 0.75 bin widths: Farebrother et al. 2024 (HL-Gauss, arXiv 2403.03950). Where a target is 4
    deviations or more inside the outer edges, the mean Σ mass · centre is the target to 1e-4 bin widths.

    `edges`, `[bins + 1]`, ascend and are equally spaced; the targets `[...]` are clamped to the outer ones.
    """
    require_tensors(targets=targets, edges=edges)
    targets = targets.clamp(edges[0], edges[-1]).unsqueeze(-1)
    cdf = torch.special.ndtr((edges - targets) / (SMOOTHING * (edges[1] - edges[0])))
    mass: Tensor = cdf.diff(dim=-1)
    return mass / mass.sum(-1, keepdim=True)


def histogram_loss(logits: Tensor, returns: Tensor, edges: Tensor) -> Tensor:
    """−Σ_b m_b log p_b, the cross-entropy of p = softmax(logits) against m = `smoothed_histogram` of the return.

    Farebrother et al. 2024 (HL-Gauss, arXiv 2403.03950); Imani and White 2018 (arXiv 1806.04613). The minimum is at p
    equal to the mean of m over a state's returns, where Σ p_b · centre_b is the mean return.

    Logits `[..., bins]`, returns `[...]`, which get no gradient, and edges `[bins + 1]` give the loss of each token
    `[...]`, in nats.

    Raises:
        ValueError: shapes differ.
    """
    require_tensors(logits=logits)
    require_shape("returns", returns, logits.shape[:-1])
    require_shape("edges", edges, (logits.shape[-1] + 1,))
    mass = smoothed_histogram(returns.detach(), edges)
    return -(mass * at_least_float32(logits).log_softmax(-1)).sum(-1)


def histogram_values(logits: Tensor, edges: Tensor) -> Tensor:
    """Mean of each histogram, Σ_b p_b · centre_b `[...]`, with p = softmax(logits), `[..., bins]`."""
    require_tensors(logits=logits, edges=edges)
    return at_least_float32(logits).softmax(-1) @ ((edges[1:] + edges[:-1]) / 2)


def reduction_count(mask: Tensor, by: str = "token", horizon: int | None = None) -> Tensor:
    """The divisor of `token_weights` for this mask, a scalar int64 tensor.

    By token: acted tokens. By sequence: rows with an acted token. By constant: batch × horizon, the token budget, where
    `horizon` is the most tokens that a row may have; None for the time axis of this mask. Sum it over micro-batches and
    processes to get the global count. Arguments as in `token_weights`.
    """
    require_tensors(mask=mask)
    require_choice("by", by, REDUCTIONS)
    if by == "token" or (by == "sequence" and mask.dim() == 1):
        return mask.sum()
    if by == "sequence":
        return mask.any(dim=-1).sum()
    return torch.full((), mask.numel() if horizon is None else len(mask) * horizon, device=mask.device)


def token_weights(mask: Tensor, by: str = "token", count: Tensor | float | None = None) -> Tensor:
    """Weight of each token in a loss, so that the loss is Σ weight · token loss.

    - "token": 1 / count for every acted token. Long completions weigh more.
    - "sequence": 1 / (count · length of the row). Every completion weighs the same, split among its tokens.
    - "constant": 1 / count. With a fixed count, such as batch × the longest completion allowed, a token's weight does
      not depend on the policy (Liu et al. 2025, "Understanding R1-Zero-like training", arXiv 2503.20783, §3).

    Args:
        mask: bool [batch, time], or [batch] with one step per row.
        by: one of the three.
        count: the divisor over all micro-batches and processes; see `reduction_count`. Default: that of this mask.

    Returns:
        float32, with the shape of `mask`, 0 where it is false.

    Raises:
        ValueError: `by` is none of the three, the mask is not bool, or the count is 0.
    """
    require_choice("by", by, REDUCTIONS)
    require_tensors(mask=mask)
    require_flags("mask", mask, mask.shape)
    if count is None:
        count = reduction_count(mask, by)
    if count == 0:
        raise ValueError("count is 0; it must be above 0: the mask has no acted token, or the count is wrong")
    weights = mask.float()
    if by == "sequence" and mask.dim() > 1:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=1.0)
    return weights / count


def weighted_sum(x: Tensor, weights: Tensor) -> Tensor:
    """Σ weightₜ · xₜ, a scalar; elements with weight 0 count as 0, even if NaN. Same shapes."""
    require_tensors(x=x)
    require_shape("weights", weights, x.shape)
    x = at_least_float32(x).masked_fill(weights == 0, 0.0)
    return torch.dot(x.flatten(), weights.flatten().to(x.dtype))


@dataclass(frozen=True)
class RatioStats:
    """Statistics of the ratios r = π / π_old, in a form that can be reduced over micro-batches and processes.

    Attributes:
        sums: [tokens, clipped tokens, Σ −log r, Σ (r − 1 − log r), Σ r], float64; reduce by sum.
        extremes: [max r, max −r]; reduce by maximum.
    """

    sums: Tensor
    extremes: Tensor
    clips: bool = True
    """False for a loss that clips no token."""

    def metrics(self) -> dict[str, float]:
        """Per token: clip_fraction, approx_kl_k1 and approx_kl_k3 (old policy ‖ new, nats), ratio_mean, _max and _min.

        E[−log r] and E[r − 1 − log r] over tokens sampled from the old policy are `kl.k1` and `kl.k3` of KL(old ‖ new).
        E[r] over them is 1, however far the new policy is.
        """
        numbers = torch.cat([self.sums, self.extremes]).tolist()
        tokens, clipped, k1_sum, k3_sum, ratio_sum, ratio_max, negative_min = numbers
        return ({"clip_fraction": clipped / tokens} if self.clips else {}) | {
            "approx_kl_k1": k1_sum / tokens,
            "approx_kl_k3": k3_sum / tokens,
            "ratio_mean": ratio_sum / tokens,
            "ratio_max": ratio_max,
            "ratio_min": -negative_min,
        }


@torch.no_grad()
def ratio_stats(
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    clip: Clip | None = 0.2,
    clipped: Tensor | None = None,
) -> RatioStats:
    """Statistics of r = π / π_old over the acted tokens, see `RatioStats`.

    Clipped are the tokens outside the range `clip`, or those that another loss has `clipped`, bool. Other arguments as
    in `clipped_surrogate`.
    """
    require_tensors(logprobs=logprobs, mask=mask, clipped=clipped)
    low, high = (0.0, torch.inf) if clip is None else clip_range(clip)
    if mask is None:
        mask = torch.ones_like(logprobs, dtype=torch.bool)
    log_ratio = _log_ratio(logprobs, old_logprobs, mask).double()  # e³⁰⁰ is finite
    ratio = log_ratio.exp()
    if clipped is None:
        clipped = (ratio < low) | (ratio > high)
    require_flags("clipped", clipped, logprobs.shape)
    zeros = torch.zeros_like(log_ratio)
    kl = k1(zeros, log_ratio, mask), k3(zeros, log_ratio, mask)
    sums = torch.stack([x.sum(dtype=torch.float64) for x in (mask, clipped & mask, *kl, zero_outside(ratio, mask))])
    below = torch.full_like(ratio, -torch.inf)
    extremes = torch.stack([torch.where(mask, ratio, below).max(), torch.where(mask, -ratio, below).max()])
    return RatioStats(sums, extremes, clip is not None)


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor | None) -> Tensor:
    require_shape("old_logprobs", old_logprobs, logprobs.shape)
    log_ratio = at_least_float32(logprobs) - at_least_float32(old_logprobs.detach())
    return zero_outside(log_ratio, mask)
