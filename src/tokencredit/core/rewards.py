"""Per-token rewards: the score at the last token, minus penalties, minus the KL penalty; the best reward at its price.

KL(π ‖ ρ) = E_{x∼π}[log π(x) − log ρ(x)] of the policy from the reference is in nats. The first argument is always the
distribution that the tokens were sampled from. Averages of k1 and k3 over such tokens are unbiased estimates of the
divergence. Formulas: J. Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html. A
low-noise estimate need not give a good gradient when it is differentiated as a loss; each docstring states it.

At a price of β per nat a policy has the objective J(π) = E_π[R] − β · KL(π ‖ π_ref). For each prompt no policy exceeds
J* = β ln E_ref[exp(R / β)], which π* ∝ π_ref · exp(R / β) reaches: the variational formula of Donsker and Varadhan
(1975); Korbak et al. 2022 (arXiv 2205.11275); Rafailov et al. 2023 (arXiv 2305.18290), appendix A.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from tokencredit.core.argument_checks import (
    require_acted,
    require_choice,
    require_flags,
    require_not_negative,
    require_positive,
    require_rows,
    require_shape,
    require_tensors,
)
from tokencredit.core.masked import at_least_float32, extents, zero_outside

KL_ROUNDING = 1e-5
"""Log-probs of a token this close, or an exact KL this small, in nats, count as rounding, with a KL of 0. Without other
rewards, Adam, which is scale-invariant, would turn rounding into full-size steps. The exact KL of a model to itself is
the rounding of the log of a sum over the vocabulary in float32: up to 1.4e-6 with 2,048 tokens, 5.7e-6 with 151,936."""
GROUP = 16
"""Fewest samples of a prompt that is estimated by itself; prompts with fewer are pooled."""
FEW = 5.0
"""Effective samples below which the estimate is called a lower bound."""
RESAMPLES = 500
"""Resamples of the bootstrap interval."""
DRAWS = 2**20
"""Most draws of the bootstrap in memory at once."""
REWARD_ROUNDING = 1e-9
"""Relative difference of J* and J_ref up to which the rewards count as equal."""


def k1(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """log π(x) − log ρ(x) per token: unbiased, and noisy (a single token's estimate is often negative).

    Its expected gradient as a loss is 0, so it belongs in the reward and not in the loss.

    Args:
        logprobs: log π of tokens sampled from π; any shape, which the other tensors and the result share.
        ref_logprobs: log ρ of the same tokens.
        mask: bool; the result, in nats per token, is 0 where it is false.

    Raises:
        ValueError: the shapes differ.
    """
    require_tensors(logprobs=logprobs)
    require_shape("ref_logprobs", ref_logprobs, logprobs.shape)
    return zero_outside(at_least_float32(logprobs) - at_least_float32(ref_logprobs), mask)


def k2(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """½ (log π(x) − log ρ(x))² per token: slightly biased while π is near ρ; low variance, never negative.

    Its gradient as a loss, unlike its value, is unbiased: E[k1 · ∇log π] = ∇KL(π ‖ ρ).

    Arguments, result and errors as in `k1`.
    """
    return 0.5 * k1(logprobs, ref_logprobs, mask).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """r − 1 − log r with r = ρ(x)/π(x), per token: unbiased, low variance while π is near ρ, never negative.

    Its variance is unbounded where ρ has mass that π has lost, since r is large there. Its gradient as a loss is that
    of the reverse divergence, ∇KL(ρ ‖ π), which agrees with ∇KL(π ‖ ρ) only near π = ρ.

    Arguments, result and errors as in `k1`.
    """
    log_ratio = -k1(logprobs, ref_logprobs, mask)
    return torch.expm1(log_ratio) - log_ratio


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""Estimators that need only the log-probabilities of the sampled tokens."""


def kl_estimate(name: str, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """The estimator `name`, one of `KL_ESTIMATORS`; arguments, result and errors as in `k1`."""
    require_choice("kl estimator", name, KL_ESTIMATORS)
    return KL_ESTIMATORS[name](logprobs, ref_logprobs, mask)


def kl_of_next(kl: Tensor, mask: Tensor) -> Tensor:
    """The KL of each row's next acted position, 0 at its last one: what a token's choice leads to.

    The gradient of Σₜ KLₜ has two parts: the KL of each position itself, which is differentiated in the loss, and that
    of the later ones, which the token's choice leads to and which is paid as its reward. Where the KL is exact, its own
    position's is known before the token is drawn, and would only be noise in its reward (Amini, Vieira and Cotterell
    2025, arXiv 2504.10637).

    Args:
        kl: [batch, time], nats.
        mask: bool [batch, time], true at acted tokens.

    Raises:
        ValueError: the shapes differ, or the mask is not bool.
    """
    require_tensors(kl=kl)
    require_rows("kl", kl)
    require_flags("mask", mask, kl.shape)
    acted, rows = kl[mask], mask.nonzero()[:, 0]
    following = torch.where(rows[1:] == rows[:-1], acted[1:], 0.0)
    return torch.zeros_like(kl).masked_scatter(
        mask, torch.cat([following, acted.new_zeros(len(acted) - len(following))])
    )


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
        kl: [batch, time], an estimate of KL(policy ‖ reference) at each token, in nats, such as `k1`.
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
    rewards = rewards.scatter_add(-1, extents(mask)[:, None] - 1, at_last[:, None])
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


class Attainable(NamedTuple):
    """The optimum at a KL price, averaged over prompts."""

    objective: float
    """J*, its reward minus the price of its KL."""
    low: float
    high: float
    """95 % bootstrap interval of `objective`, over the samples of each prompt."""
    reward: float
    """Mean reward of π*."""
    kl: float
    """KL(π* ‖ π_ref), nats per sequence."""
    start: float
    """J_ref, the reference's mean reward."""
    effective: float
    """Effective samples per prompt, 1 / Σ w² with the weights w ∝ exp(R / β); the harmonic mean over prompts."""
    samples: int
    prompts: int
    pooled: bool
    """Prompts with fewer than `GROUP` samples are treated as one. By Jensen's inequality their J* is then an upper
    bound, of a policy that could also choose the prompt."""

    @property
    def few(self) -> bool:
        """True if `objective` is rather a lower bound: too few samples have the rewards that the optimum is made of."""
        return self.effective < FEW

    def share(self, objective: float) -> float:
        """(J − J_ref) / (J* − J_ref) of a policy with the objective J; NaN if all rewards of a prompt are equal."""
        room = self.objective - self.start
        return (objective - self.start) / room if room > REWARD_ROUNDING * (1 + abs(self.start)) else math.nan


def attainable(
    rewards: Tensor, coef: float, prompts: Tensor | None = None, generator: Generator | None = None
) -> Attainable:
    """Estimate J* = mean over prompts of β ln E_ref[exp(R / β) | prompt], and the optimum that reaches it.

    The logarithm of a mean is too low on average, by about β / (2 · effective samples).

    Args:
        rewards: [samples], whole rewards of completions that the reference sampled.
        coef: β, reward per nat, above 0.
        prompts: [samples], a number for each prompt; None for a single one. A policy cannot choose its prompt, so that
            the expectation is of each prompt by itself.
        generator: of the bootstrap, on the CPU.

    Raises:
        ValueError: there is no sample, the shapes differ, a reward is not finite, or β is not above 0.
    """
    require_tensors(rewards=rewards, prompts=prompts)
    require_positive("coef", coef)
    if rewards.dim() != 1 or not len(rewards):
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}; it must be [samples], at least one")
    prompts = torch.zeros_like(rewards, dtype=torch.long) if prompts is None else prompts
    require_shape("prompts", prompts, rewards.shape)
    rewards = rewards.detach().double().cpu()
    if not bool(rewards.isfinite().all()):
        raise ValueError("rewards holds NaN or an infinity; it must be finite")
    # Groups of one prompt each, the samples in their order; all rare prompts are one group.
    _, groups, counts = prompts.cpu().unique(return_inverse=True, return_counts=True)
    different, rare = len(counts), int((counts < GROUP).sum())
    _, groups, counts = torch.where(counts[groups] < GROUP, -1, groups).unique(return_inverse=True, return_counts=True)
    groups, order = groups.sort()
    rewards, shares = rewards[order], counts.double() / len(rewards)
    # J* of each group, and the weights of π* on its samples.
    best = _objectives(rewards, groups, counts, coef)
    weights = ((rewards - best[groups]) / coef).exp() / counts[groups]
    objective, reward = float(shares @ best), float((shares[groups] * weights) @ rewards)
    # Bootstrap: as many samples of each group, drawn from it.
    first, resampled = counts.cumsum(0) - counts, []
    for part in torch.arange(RESAMPLES).split(max(1, DRAWS // len(rewards))):
        drawn = torch.rand(len(part), len(rewards), dtype=torch.double, generator=generator) * counts[groups]
        resampled.append(_objectives(rewards[first[groups] + drawn.long()], groups, counts, coef) @ shares)
    low, high = torch.cat(resampled).quantile(torch.tensor([0.025, 0.975], dtype=torch.double)).tolist()
    return Attainable(
        objective=objective,
        low=low,
        high=high,
        reward=reward,
        kl=max((reward - objective) / coef, 0.0),
        start=float(rewards.mean()),
        effective=1 / float(shares[groups] @ weights.square()),
        samples=len(rewards),
        prompts=different,
        pooled=rare > 1,
    )


def _objectives(rewards: Tensor, groups: Tensor, counts: Tensor, coef: float) -> Tensor:
    """β ln mean exp(R / β) of each group along the last dimension, with its largest reward outside the exponential."""
    at = groups.expand_as(rewards)
    top = rewards.new_full((*rewards.shape[:-1], len(counts)), -torch.inf).scatter_reduce(-1, at, rewards, "amax")
    sums = torch.zeros_like(top).scatter_add(-1, at, ((rewards - top[..., groups]) / coef).exp())
    return top + coef * (sums / counts).log()
