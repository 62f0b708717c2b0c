"""Per-token rewards: the score at the last token, minus penalties, minus the KL penalty at every token."""

import torch
from torch import Tensor

from tokencredit.core.argument_checks import (
    require_acted,
    require_flags,
    require_not_negative,
    require_rows,
    require_shape,
    require_tensors,
)
from tokencredit.core.masked import at_least_float32, zero_outside


def token_rewards(
    scores: Tensor,
    mask: Tensor,
    *,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    eos: Tensor | None = None,
    missing_eos_penalty: float = 0.0,
    overlong: Tensor | None = None,
    clip: float | None = None,
) -> Tensor:
    """rₜ = sₜ − β · KLₜ, with a completion's score on its last acted token.

    Ziegler et al. 2019 (arXiv 1909.08593), eq. 2, with the KL of each token charged to that token (Ouyang et al. 2022,
    arXiv 2203.02155, section 3.5). The score goes on the last token only: on every token, the critic's target would be
    the score times the number of tokens left.

    In this order: clip the scores, subtract the penalties at the last acted token, subtract the KL at every token.

    Args:
        scores: [batch], one per completion; or [batch, time], one per token (dense).
        mask: bool [batch, time], true where the policy acted.
        kl: [batch, time], an estimate of KL(policy ‖ reference) at each token, in nats; see `core.kl`.
        kl_coef: β, reward per nat.
        eos: bool [batch], true where the completion ended with an end-of-sequence token.
        missing_eos_penalty: subtracted where it did not, for scores that do not account for truncated text.
        overlong: [batch], a further penalty, such as an `overlong_penalty`; None for none.
        clip: clamp scores to ± this first; None for no clipping.

    Returns:
        [batch, time] in float32 at least, 0 outside the mask, without a gradient.

    Raises:
        ValueError: shapes differ; a flag is not bool; a row has no acted token; a coefficient is negative or not
            finite; there is a penalty and no `eos`.
    """
    require_rows("mask", mask)
    require_tensors(scores=scores)
    require_shape("scores", scores, mask.shape if scores.dim() == 2 else mask.shape[:1])
    require_flags("mask", mask, mask.shape)
    require_acted(mask)
    require_not_negative("missing_eos_penalty", missing_eos_penalty)
    scores = at_least_float32(scores.detach())
    if clip is not None:
        require_not_negative("clip", clip)
        scores = scores.clamp(-clip, clip)
    at_last = torch.zeros(mask.shape[0], dtype=scores.dtype, device=mask.device) if scores.dim() == 2 else scores
    if missing_eos_penalty:
        if eos is None:
            raise ValueError("eos is None; a missing_eos_penalty needs to know which completions ended")
        require_flags("eos", eos, at_last.shape)
        at_last = at_last - missing_eos_penalty * (~eos).to(at_last.dtype)
    if overlong is not None:
        require_shape("overlong", overlong, at_last.shape)
        at_last = at_last - overlong.to(at_last.dtype)
    rewards = zero_outside(scores, mask) if scores.dim() == 2 else torch.zeros_like(mask, dtype=scores.dtype)
    rewards = rewards.scatter_add(-1, _last_acted(mask), at_last[:, None])
    if kl is not None:
        require_shape("kl", kl, mask.shape)
        require_not_negative("kl_coef", kl_coef)
        rewards = rewards - kl_coef * zero_outside(kl.detach(), mask)
    return rewards


def overlong_penalty(lengths: Tensor, *, limit: int, tokens: int, penalty: float) -> Tensor:
    """Penalty for completions near the length limit: 0 up to `tokens` before it, then linear.

    P = penalty · clip((length − (limit − tokens)) / tokens, 0, 1). Yu et al. 2025 (DAPO, arXiv 2503.14476), eq. 13,
    where the penalty is 1, `limit` L_max and `tokens` L_cache, and −P is added to the reward.

    Args:
        lengths: [batch], acted tokens of each completion.
        limit: the longest completion, in tokens.
        tokens: width of the penalised zone before the limit, at least 1 and at most `limit`.
        penalty: penalty of a completion of `limit` tokens, in units of the score.

    Returns:
        [batch], in float32, at least 0.

    Raises:
        ValueError: `tokens` is out of its range; `penalty` is negative or not finite.
    """
    require_tensors(lengths=lengths)
    if not 1 <= tokens <= limit:
        raise ValueError(f"tokens is {tokens}; it must be at least 1 and at most limit, {limit}")
    require_not_negative("penalty", penalty)
    return penalty * ((lengths - (limit - tokens)).float() / tokens).clamp(0.0, 1.0)


def _last_acted(mask: Tensor) -> Tensor:
    """Index of the last acted token of each row, [batch, 1]."""
    time = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, time, -1).amax(dim=-1, keepdim=True)
