"""Two methods for verifiers, as an own loss and an own estimator; findings.md, chapter 15, saw no gain in either."""

import torch

from tokencredit.core import group_relative


def with_positive_nll(ratio, logprobs, advantages, returns, clip, coef=0.1):
    """PPO's loss, and `coef` times −log π at tokens of solved problems (VAPO, arXiv 2504.05118).

    VAPO divides by the tokens of solved problems; here the mean is over all tokens, as that of PPO's loss, so that it
    does not depend on micro-batches. Returns must be λ = 1's without a KL in the reward: then each is its row's reward.
    """
    low, high = clip
    surrogate = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    positive_nll = -logprobs * (returns > 0.5)
    return surrogate + coef * positive_nll, {"positive_nll": positive_nll}


def differing_groups(rewards, group_size, **where):
    """GRPO's advantages, with a mean over the groups whose rewards differ (DAPO's filter, arXiv 2503.14476).

    Groups of equal rewards have advantages of 0, so that leaving them out of a mean over rows is a factor.
    """
    advantages, returns = group_relative(rewards, group_size=group_size, **where)
    groups = rewards.sum(1).view(-1, group_size)
    differ = (groups != groups[:, :1]).any(1)
    return advantages * len(groups) / differ.sum().clamp(min=1), returns
