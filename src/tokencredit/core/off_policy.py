"""Corrections and losses for tokens of another policy: an older version, or an engine that computes otherwise.

Three policies are kept apart. The behavior policy μ drew the tokens. The proximal policy π_prox is the centre of the
trust region: PPO's clip bounds π / π_prox. The policy π is in training. On-policy all three are equal when an update
begins. Decoupled PPO (Hilton et al. 2022, "Batch size-invariance for policy optimization", arXiv 2110.00641, eq. 9)
multiplies the clipped surrogate of π / π_prox by w = π_prox / μ, which `correction` bounds:

    weights = correction(proximal_logprobs, behavior_logprobs, mask, level="token", outside="clip", high=2.0)
    loss = weights * clipped_surrogate(logprobs, proximal_logprobs, advantages, mask)

A loss without a trust region of its own has the correction in the place of the ratio: with `outside="clip"` CISPO, with
`outside="mask"` SAO (`weighted_policy_gradient`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokencredit.core.argument_checks import (
    require_choice,
    require_flags,
    require_not_negative,
    require_rows,
    require_shape,
    require_tensors,
)
from tokencredit.core.losses import MAX_LOG_RATIO, Clip, clip_range
from tokencredit.core.masked import at_least_float32, zero_outside
from tokencredit.core.rewards import k1

LEVELS = ("token", "sequence", "geometric")
OUTSIDE = ("clip", "mask")
DIVERGENCES = ("tv", "kl")

SMALLEST_PROBABILITY = 1e-6
"""Probabilities are kept this far from 0 and 1 in `divergence_mask`, so that 1 − p does not round to 0 in float32."""


def importance_ratios(logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, *, level: str = "token") -> Tensor:
    """Ratios π / μ of tokens or of whole rows.

    With d_t = log π(x_t) − log μ(x_t) at the n acted tokens of a row:

    - "token": e^{d_t}
    - "sequence": e^{Σ d_t}, the ratio of the whole completion, at each of its tokens
    - "geometric": e^{Σ d_t / n}, its geometric mean, at each of its tokens

    Args:
        logprobs: log π, `[batch, time]`; carries its gradient into the ratios.
        behavior_logprobs: log μ of the same tokens.
        mask: bool; outside it, ratios are 1.
        level: one of `LEVELS`. The exponent is clamped to ± `MAX_LOG_RATIO`.

    Raises:
        ValueError: shapes differ, or the level is none of the three.
    """
    require_choice("level", level, LEVELS)
    require_rows("logprobs", logprobs)
    require_shape("behavior_logprobs", behavior_logprobs, logprobs.shape)
    require_flags("mask", mask, logprobs.shape)
    differences = zero_outside(at_least_float32(logprobs) - at_least_float32(behavior_logprobs.detach()), mask)
    if level != "token":
        total = differences.sum(1, keepdim=True)
        count = mask.sum(1, keepdim=True).clamp(min=1) if level == "geometric" else 1
        differences = zero_outside((total / count).expand_as(differences), mask)
    return differences.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@torch.no_grad()
def correction(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    level: str = "token",
    outside: str = "clip",
    low: float = 0.0,
    high: float = 2.0,
) -> Tensor:
    """Importance weights π / μ within bounds, without a gradient.

    - `outside="clip"`: min(max(r, low), high). Truncated importance sampling (Ionides 2008, "Truncated importance
      sampling", with low 0; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training").
    - `outside="mask"`: r where low ≤ r ≤ high, else 0. IcePop's band (Ring-1T, arXiv 2510.18855) at the level of
      tokens; rejection of whole completions at the level "sequence".
    - `outside="mask"` at the level "geometric": 1 where low ≤ r ≤ high, else 0. The mean ratio of a completion says
      whether its tokens are kept; it is an importance weight of neither a token nor the completion.

    π is the policy to correct for, such as π_prox; 0 ≤ `low` < `high`. Other arguments as in `importance_ratios`.
    Returns `[batch, time]`, 0 outside the mask.

    Raises:
        ValueError: as `importance_ratios`, or the bounds are out of order.
    """
    require_choice("outside", outside, OUTSIDE)
    require_not_negative("low", low)
    if not high > low:
        raise ValueError(f"high is {high}; it must be above low, {low}")
    ratios = importance_ratios(logprobs, behavior_logprobs, mask, level=level)
    if outside == "clip":
        return zero_outside(ratios.clamp(low, high), mask)
    kept = torch.ones_like(ratios) if level == "geometric" else ratios
    return zero_outside(kept, mask & (ratios >= low) & (ratios <= high))


def interpolated_logprobs(behavior_logprobs: Tensor, logprobs: Tensor, age: Tensor) -> Tensor:
    """Log-probs of a proximal policy between behavior and current policy, by age, without a forward pass.

    log π_prox = log μ / d + (1 − 1 / d) log π for a token that is d ≥ 1 versions old; log μ for d = 0. The proximal
    policy is taken to be one version behind the policy, on a straight line from μ to π (A-3PO, arXiv 2512.06547). For
    d = 0 the paper has log π, which is log μ in the first minibatch; in later ones such a token would have no trust
    region. Its implementation in AReaL has log μ.

    `age` d is int64: versions of the policy between the drawing of a token and its use. All tensors have one shape; no
    gradient flows into them.

    Raises:
        ValueError: shapes differ.
    """
    require_tensors(behavior_logprobs=behavior_logprobs)
    require_shape("logprobs", logprobs, behavior_logprobs.shape)
    require_shape("age", age, behavior_logprobs.shape)
    behavior, current = at_least_float32(behavior_logprobs.detach()), at_least_float32(logprobs.detach())
    return torch.lerp(behavior, current, 1 - 1 / age.clamp(min=1).to(behavior.dtype))


def weighted_policy_gradient(logprobs: Tensor, advantages: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """−w A log π with w and A as constants: the policy gradient, each token times its weight.

    With w = `correction(π, μ, outside="clip", high=ε_max)` it is CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5):
    a clipped token keeps its gradient. With `outside="mask"`, low = 1 − ε₋ and high = 1 + ε₊ it is the double-sided
    masking of SAO (arXiv 2607.07508). With w = `divergence_mask` it is DPPO.

    All tensors are `[batch, time]`. Returns the loss of each token, 0 where the bool mask is false.

    Raises:
        ValueError: shapes differ.
    """
    require_rows("logprobs", logprobs)
    require_shape("advantages", advantages, logprobs.shape)
    require_shape("weights", weights, logprobs.shape)
    require_flags("mask", mask, logprobs.shape)
    factor = zero_outside(weights.detach(), mask) * zero_outside(advantages.detach(), mask)
    return -factor * zero_outside(logprobs, mask)


def sequence_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip: Clip = (3e-4, 4e-4)
) -> Tensor:
    """GSPO's loss: −min(s A, clip(s, 1 − ε₋, 1 + ε₊) A) with s = (π(y) / π_old(y))^{1/n}, the row's geometric mean.

    Zheng et al. 2025 (arXiv 2507.18071), eq. 5, in the form with one advantage per token (GSPO-token, eq. 13): the
    value of s is the row's, its gradient at a token is s ∇ log π of this token. If all tokens of a row share one
    advantage, the mean over them is GSPO's loss of the row, with the same gradient.

    Arguments as in `losses.clipped_surrogate`, all tensors `[batch, time]`; s is far closer to 1 than the ratio of a
    token. Returns the loss of each token, 0 outside the mask. Reduce it by sequence.
    """
    low, high = clip_range(clip)
    require_rows("logprobs", logprobs)
    require_shape("old_logprobs", old_logprobs, logprobs.shape)
    require_shape("advantages", advantages, logprobs.shape)
    ratio = importance_ratios(logprobs.detach(), old_logprobs, mask, level="geometric")
    own = zero_outside(logprobs, mask)
    ratio = ratio * (own - own.detach()).exp()  # the row's value, the token's gradient
    advantages = zero_outside(advantages.detach(), mask)
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)


@torch.no_grad()
def divergence_mask(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    divergence: str = "tv",
    limit: float | tuple[float, float] = 0.2,
    cap: float = 20.0,
) -> Tensor:
    """DPPO's weights: min(r, cap), but 0 for a token that has left the trust region and is pushed further out.

    A token has left if the divergence of the two-point distributions (this token, any other) exceeds the limit:
    `|π − μ|` for "tv", KL(μ ‖ π) = μ log(μ / π) + (1 − μ) log((1 − μ) / (1 − π)) for "kl". It is pushed further out if
    its advantage has the sign of π − μ. A bound on the ratio alone stops rare tokens at tiny changes of probability.
    Qi et al. 2026, "Rethinking the trust region in LLM reinforcement learning" (arXiv 2602.04879).

    Args:
        logprobs: log π, `[batch, time]`, as all tensors here.
        behavior_logprobs: log μ.
        advantages: A.
        mask: bool, true at acted tokens.
        divergence: one of `DIVERGENCES`.
        limit: δ, or (δ₋, δ₊) for tokens that became less and more likely; "kl" in nats.
        cap: upper bound of the ratio r = π / μ.

    Returns:
        `[batch, time]`, without a gradient, 0 outside the mask; for `weighted_policy_gradient`.

    Raises:
        ValueError: shapes differ, or a limit is negative.
    """
    require_choice("divergence", divergence, DIVERGENCES)
    below, above = limit if isinstance(limit, tuple) else (limit, limit)
    require_not_negative("limit", below)
    require_not_negative("limit", above)
    ratios = importance_ratios(logprobs, behavior_logprobs, mask)
    require_shape("advantages", advantages, logprobs.shape)
    now, then = (
        zero_outside(x, mask).exp().clamp(SMALLEST_PROBABILITY, 1 - SMALLEST_PROBABILITY)
        for x in (logprobs, behavior_logprobs)
    )
    if divergence == "tv":
        distance = (now - then).abs()
    else:
        distance = then * (then / now).log() + (1 - then) * ((1 - then) / (1 - now)).log()
    rose = (now > then) & (advantages > 0) & (distance > above)
    fell = (now < then) & (advantages < 0) & (distance > below)
    return zero_outside(ratios.clamp(max=cap), mask & ~rose & ~fell)


@dataclass(frozen=True)
class CorrectionStats:
    """Statistics of importance weights, in a form that adds up over micro-batches and processes.

    Attributes:
        sums: [tokens, Σ w, Σ w², tokens with w = 0, Σ r, Σ −log r], r before its bounds; reduce by sum.
        weighted: there are weights; if not, those of `sums` are 1.
    """

    sums: Tensor
    weighted: bool = True

    def metrics(self) -> dict[str, float]:
        """`behavior_ratio` and `behavior_kl`; with weights also `weight_mean`, `weight_zero` (the share of tokens with
        weight 0) and `weight_ess`.

        The effective sample size (Σ w)² / Σ w² is given as a share of the tokens: 1 for equal weights (Kong 1992). The
        mean of r over tokens of μ is 1 if log-probs and support agree; the mean of −log r estimates KL(μ ‖ π), nats
        per token.
        """
        tokens, total, squares, zero, ratio, kl = self.sums.tolist()
        metrics = {"behavior_ratio": ratio / tokens, "behavior_kl": kl / tokens}
        if not self.weighted:
            return metrics
        ess = total**2 / (tokens * squares) if squares else 0.0
        return metrics | {"weight_mean": total / tokens, "weight_zero": zero / tokens, "weight_ess": ess}


@torch.no_grad()
def correction_stats(
    weights: Tensor | None, logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor
) -> CorrectionStats:
    """Statistics of weights from `correction`, or of ratios alone, see `CorrectionStats`; all `[batch, time]`."""
    require_rows("logprobs", logprobs)
    require_shape("behavior_logprobs", behavior_logprobs, logprobs.shape)
    negative = k1(behavior_logprobs, logprobs, mask).double()  # −log r, which no clamp bounds
    ratios = (-negative).exp()
    if weights is not None:
        require_shape("weights", weights, logprobs.shape)
    weighted, weights = weights is not None, zero_outside(torch.ones_like(ratios) if weights is None else weights, mask)
    numbers = (mask, weights, weights.square(), mask & ~(weights > 0), zero_outside(ratios, mask), negative)
    return CorrectionStats(torch.stack([x.sum(dtype=torch.float64) for x in numbers]), weighted)
