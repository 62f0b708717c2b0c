"""The best that any policy can reach at a KL price, estimated from samples of the reference.

At a price of β per nat a policy has the objective J(π) = E_π[R] − β · KL(π ‖ π_ref). For each prompt no policy exceeds
J* = β ln E_ref[exp(R / β)], which π* ∝ π_ref · exp(R / β) reaches: the variational formula of Donsker and Varadhan
(1975); Korbak et al. 2022 (arXiv 2205.11275); Rafailov et al. 2023 (arXiv 2305.18290), appendix A.1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from tokencredit.core.argument_checks import require_positive, require_shape, require_tensors

GROUP = 16
"""Fewest samples of a prompt that is estimated by itself; prompts with fewer are pooled."""
FEW = 5.0
"""Effective samples below which the estimate is called a lower bound."""
RESAMPLES = 500
"""Resamples of the bootstrap interval."""
DRAWS = 2**20
"""Most draws of the bootstrap in memory at once."""
ROUNDING = 1e-9
"""Relative difference of J* and J_ref up to which the rewards count as equal."""


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
        return (objective - self.start) / room if room > ROUNDING * (1 + abs(self.start)) else math.nan


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
