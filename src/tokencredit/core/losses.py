"""The losses of PPO, one number a token, and the weights that reduce them.

Each loss returns a tensor of the shape of its arguments, 0 outside the mask. A reduction is a sum with weights:

    weights = token_weights(mask, by="token", count=global_count)
    loss = total_loss(policy, value, entropy, weights, value_coef=…, entropy_coef=…)

The weights of all micro-batches and processes together sum to 1 (by token, by sequence), whichever way the batch was
cut, so their losses and gradients add up to those of the whole batch without another division.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokencredit.core.checks import require_choice, require_flags, require_not_negative, require_shape
from tokencredit.core.kl import k1, k3
from tokencredit.core.masked import at_least_float32, zero_outside

Clip = float | tuple[float, float]
"""How far a ratio may go below and above 1: one number for both sides, or (below, above)."""

REDUCTIONS = ("token", "sequence", "constant")

MAX_LOG_RATIO = 20.0
"""Log-ratios are held within ± this many nats, so that no ratio overflows. e²⁰ is 5·10⁸: a token that far off has
left every trust region, and the infinite or NaN gradient it would give helps nobody find out why."""


def clip_range(clip: Clip) -> tuple[float, float]:
    """The interval [1 − below, 1 + above] that `clip` stands for.

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

    Schulman et al. 2017 (arXiv 1707.06347), eq. 7, as a loss. Two-sided range: Yu et al. 2025 (DAPO, arXiv
    2503.14476), eq. 10. Dual clip: where A < 0 the loss is at most −c A, so that a token that became far more likely
    though it was bad does not take over the batch; Ye et al. 2020 (arXiv 1912.09729), eq. 4.

    Args:
        logprobs: log π of the tokens under the policy that is being trained; any shape.
        old_logprobs: log π_old of the same tokens under the policy that drew them.
        advantages: A; no gradient flows into it.
        mask: bool; the loss is 0 where it is false. None: every element counts.
        clip: ε, or (ε₋, ε₊).
        dual_clip: c, above 1; None leaves it out.

    Returns:
        The loss of each token, the shape of `logprobs`.

    Raises:
        ValueError: shapes differ, or a clip is out of its range.
    """
    require_shape("advantages", advantages, logprobs.shape)
    low, high = clip_range(clip)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip is {dual_clip}; it must be above 1")
    advantages = zero_outside(advantages.detach(), mask)
    ratio = _log_ratio(logprobs, old_logprobs, mask).exp()
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
    """½ (V − R)², or ½ max of that and ½ (V_clipped − R)², where V_clipped stays within ± clip of the old value.

    The clipped form is the one of OpenAI's baselines (`ppo2`), which the PPO paper does not mention; its effect is
    named and measured in Engstrom et al. 2020 (arXiv 2005.12729), section 3.

    Args:
        values: V, from the critic that is being trained; any shape.
        old_values: V when the rollout was made.
        returns: R, the target; no gradient flows into it or into `old_values`.
        mask: bool; the loss is 0 where it is false. None: every element counts.
        clip: how far V may move from its old value before more movement stops paying, in units of value. None: no clip.

    Returns:
        The loss of each token, the shape of `values`.

    Raises:
        ValueError: shapes differ, or `clip` is negative.
    """
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


def reduction_count(mask: Tensor, by: str = "token", horizon: int | None = None) -> Tensor:
    """What `token_weights` divides by when `mask` is the whole batch.

    By token: acted tokens. By sequence: rows with an acted token. By constant: batch × horizon, the budget of tokens.
    Sum it over micro-batches and processes to get the global count.

    Args:
        mask: bool [batch, time], or [batch] when there is one step per row.
        by: one of `REDUCTIONS`.
        horizon: the most tokens that a row may have, which a constant reduction counts; None for the time axis of this
            mask, which ends with the longest row.

    Returns:
        A scalar int64 tensor.
    """
    require_choice("by", by, REDUCTIONS)
    if by == "token" or (by == "sequence" and mask.dim() == 1):
        return mask.sum()
    if by == "sequence":
        return mask.any(dim=-1).sum()
    return torch.tensor(mask.numel() if horizon is None else len(mask) * horizon, device=mask.device)


def token_weights(mask: Tensor, by: str = "token", count: Tensor | float | None = None) -> Tensor:
    """The weight of each token in a loss, so that the loss is Σ weight · loss of the token.

    - "token": 1 / count for every acted token. Long completions weigh more.
    - "sequence": 1 / (count · length of the row). Every completion weighs the same, its tokens share it.
    - "constant": 1 / count. With a fixed count, such as batch × the longest completion allowed, the weight of a
      token depends on nothing that the policy does (Liu et al. 2025, "Understanding R1-Zero-like training", arXiv
      2503.20783, §3).

    Args:
        mask: bool [batch, time], or [batch] when there is one step a row.
        by: which of the three.
        count: the divisor over all micro-batches and processes; see `reduction_count`. Default: that of this mask.

    Returns:
        float32, the shape of `mask`, 0 where it is false.

    Raises:
        ValueError: `by` is none of the three, the mask is not bool, or the count is 0.
    """
    require_choice("by", by, REDUCTIONS)
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
    """Σ weightₜ · xₜ, where whatever stands at a weight of 0 counts as 0. Same shapes; returns a scalar."""
    require_shape("weights", weights, x.shape)
    x = at_least_float32(x).masked_fill(weights == 0, 0.0)
    return torch.dot(x.flatten(), weights.flatten().to(x.dtype))


def total_loss(
    policy: Tensor,
    value: Tensor | None,
    entropy: Tensor | None,
    weights: Tensor,
    *,
    value_coef: float = 0.5,
    entropy_coef: float = 0.0,
) -> Tensor:
    """What is minimised: Σ weight · (L_policy + c_vf · L_vf − c_ent · H).

    Schulman et al. 2017 (arXiv 1707.06347), eq. 9, with its sign turned, since that one is maximised.

    Args:
        policy: the policy's loss of each token, such as `clipped_surrogate`.
        value: the critic's loss of each token; None without a critic.
        entropy: H of the policy at each token, in nats; None without a bonus.
        weights: from `token_weights`.
        value_coef: c_vf.
        entropy_coef: c_ent.

    Returns:
        A scalar; those of all micro-batches and processes add up to the loss of the whole batch.
    """
    total = weighted_sum(policy, weights)
    if value is not None:
        total = total + value_coef * weighted_sum(value, weights)
    if entropy is not None and entropy_coef != 0:
        total = total - entropy_coef * weighted_sum(entropy, weights)
    return total


@dataclass(frozen=True)
class RatioStats:
    """What the ratios r = π / π_old of some tokens were, in a form that adds up over micro-batches and processes.

    Attributes:
        sums: [tokens, clipped tokens, Σ −log r, Σ (r − 1 − log r)]; over processes, sum it.
        extremes: [max r, max −r]; over processes, take the maximum.
    """

    sums: Tensor
    extremes: Tensor

    def metrics(self) -> dict[str, float]:
        """Per token: clip_fraction, approx_kl_k1 and approx_kl_k3 (old policy ‖ new, nats), ratio_mean, _max and _min.

        E[−log r] and E[r − 1 − log r] over tokens drawn from the old policy are `kl.k1` and `kl.k3` of KL(old ‖ new);
        their difference gives E[r], which is 1 over tokens drawn from the old policy, however far the new one is.
        """
        tokens, clipped, k1_sum, k3_sum = self.sums.tolist()
        ratio_max, negative_min = self.extremes.tolist()
        return {
            "clip_fraction": clipped / tokens,
            "approx_kl_k1": k1_sum / tokens,
            "approx_kl_k3": k3_sum / tokens,
            "ratio_mean": 1 + (k3_sum - k1_sum) / tokens,
            "ratio_max": ratio_max,
            "ratio_min": -negative_min,
        }


@torch.no_grad()
def ratio_stats(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor | None = None, *, clip: Clip = 0.2) -> RatioStats:
    """Statistics of r = π / π_old over the acted tokens, see `RatioStats`; arguments as in `clipped_surrogate`."""
    low, high = clip_range(clip)
    if mask is None:
        mask = torch.ones_like(logprobs, dtype=torch.bool)
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    ratio = log_ratio.exp()
    clipped = ((ratio < low) | (ratio > high)) & mask
    zeros = torch.zeros_like(log_ratio)
    sums = torch.stack([mask.sum(), clipped.sum(), k1(zeros, log_ratio).sum(), k3(zeros, log_ratio).sum()])
    below = torch.full_like(ratio, -torch.inf)
    extremes = torch.stack([torch.where(mask, ratio, below).max(), torch.where(mask, -ratio, below).max()])
    return RatioStats(sums, extremes)


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor | None) -> Tensor:
    require_shape("old_logprobs", old_logprobs, logprobs.shape)
    log_ratio = at_least_float32(logprobs) - at_least_float32(old_logprobs.detach())
    return zero_outside(log_ratio, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
