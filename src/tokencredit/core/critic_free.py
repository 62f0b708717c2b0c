"""Advantage estimators that need no critic. Conventions and errors are those of `core.advantages`.

`reward_to_go` and `total_return` sum rewards within each episode, and can subtract a critic's values as a baseline. The
others give every token of a row the same credit, computed from the row's score: the sum of its rewards. For these a row
is one episode.
"""

import math
from typing import Unpack

import torch
from torch import Tensor

from tokencredit.core.argument_checks import require_fraction
from tokencredit.core.episodes import EpisodeBounds, Steps, prepare_steps, reverse_scan
from tokencredit.core.masked import inverse_deviation

DEVIATION_GUARD = 1e-4
"""Added to the standard deviation that `group_relative` divides by, in units of the score."""


def reward_to_go(
    rewards: Tensor,
    values: Tensor | None = None,
    *,
    gamma: float,
    **where: Unpack[EpisodeBounds],
) -> tuple[Tensor, Tensor]:
    """Discounted reward-to-go: Gₜ = Σₖ γᵏ rₜ₊ₖ, and Aₜ = Gₜ, or Gₜ − Vₜ with `values`, which is `monte_carlo`.

    A step gets no credit for earlier rewards, which it could not have caused (Williams 1992, "Simple statistical
    gradient-following algorithms", with the causality of Sutton et al. 2000's policy gradient theorem).

    Without `values`, `bootstrap` is optional, and then 0. Arguments, results and errors as in `advantages.gae`.
    """
    steps = prepare_steps(rewards, values, **where)
    returns = _to_go(steps, gamma)
    return steps.restore(returns - steps.values, returns)


def total_return(
    rewards: Tensor,
    values: Tensor | None = None,
    *,
    gamma: float,
    **where: Unpack[EpisodeBounds],
) -> tuple[Tensor, Tensor]:
    """Whole-episode return for every step, R = Σₖ γᵏ rₖ from the first step: A = R, or R − Vₜ with `values`.

    The plainest policy gradient (Williams 1992, REINFORCE): unbiased, and noisier than `reward_to_go`, because a step
    also gets credit for earlier rewards.

    Arguments, results and errors as in `reward_to_go`; the returns are R.
    """
    steps = prepare_steps(rewards, values, **where)
    # A forward scan copies the return of each episode's first step to all its steps.
    carries = torch.nn.functional.pad(steps.inside[:, :-1], (1, 0))
    first = _to_go(steps, gamma) * (1 - carries)
    returns = reverse_scan(first.flip(-1), carries.flip(-1)).flip(-1)
    return steps.restore(returns - steps.values, returns)


def uniform(
    rewards: Tensor,
    *,
    baseline: float = 0.0,
    **where: Unpack[EpisodeBounds],
) -> tuple[Tensor, Tensor]:
    """The row's score minus a constant baseline, the same for every token: A = Σₜ rₜ − baseline.

    With the running mean of earlier scores as the baseline (`learn.controllers.RunningMoments`) this is REINFORCE with
    reinforcement comparison (Williams 1992; Sutton and Barto 2018, section 13.4). Update the mean with this batch's
    scores only afterwards, or it takes part of the credit away.

    Arguments as in `advantages.gae`; `bootstrap` is ignored, the flags only checked.

    Returns:
        Advantages, and the scores as returns.

    Raises:
        ValueError: `baseline` is not finite; an episode ends before the last acted step of its row; and as `gae`.
    """
    if not math.isfinite(baseline):
        raise ValueError(f"baseline is {baseline}; it must be finite")
    scores = _scores(rewards, where)
    return _broadcast(scores - baseline, where, rewards), _broadcast(scores, where, rewards)


def group_relative(
    rewards: Tensor,
    *,
    group_size: int,
    scale: bool = True,
    **where: Unpack[EpisodeBounds],
) -> tuple[Tensor, Tensor]:
    """The row's score, standardised within its group (completions of one prompt): A = (s − mean) / (deviation + 1e-4).

    Shao et al. 2024 (GRPO, arXiv 2402.03300, section 4.1.2). The deviation is the sample's, √(Σ (s − mean)² /
    (group_size − 1)). The guard 1e-4, as in TRL's GRPOTrainer, keeps scores that differ only by noise, such as 1e-7,
    from becoming advantages of size 1; scores equal up to rounding give exactly 0. Dividing gives prompts that are
    nearly always or nearly never solved the same weight as the others; without it: Liu et al. 2025 (Dr. GRPO, arXiv
    2503.20783).

    The division would also rescale a KL penalty in the rewards. To keep its size, add the unscaled estimate of the
    penalty to the scaled one of the scores, as `text.credit` does.

    Args:
        rewards: [batch, time].
        group_size: rows i · group_size … (i + 1) · group_size − 1 are one group; at least 2.
        scale: divide by the deviation plus the guard.
        where: as in `advantages.gae`; `bootstrap` is ignored, the flags only checked.

    Returns:
        Advantages, and the scores as returns.

    Raises:
        ValueError: `group_size` is below 2 or does not divide the batch; and as `uniform`.
    """
    scores = _scores(rewards, where)
    groups = _groups(scores, group_size)
    mean = groups.mean(dim=-1, keepdim=True)
    credit = groups - mean
    if scale:
        credit = credit * inverse_deviation(groups.std(dim=-1, keepdim=True), mean, DEVIATION_GUARD)
    return _broadcast(credit.flatten(), where, rewards), _broadcast(scores, where, rewards)


def leave_one_out(
    rewards: Tensor,
    *,
    group_size: int,
    **where: Unpack[EpisodeBounds],
) -> tuple[Tensor, Tensor]:
    """The row's score minus the mean score of the others in its group: Aᵢ = sᵢ − Σ_{j≠i} sⱼ / (group_size − 1).

    The baseline does not contain the row's own score, so it adds no bias: Kool et al. 2019 ("Buy 4 REINFORCE samples,
    get a baseline for free!"); Ahmadian et al. 2024 (RLOO, arXiv 2402.14740). Equal to group_size / (group_size − 1)
    times the unscaled `group_relative`, which is how it is computed.

    Arguments, results and errors as in `group_relative`.
    """
    scores = _scores(rewards, where)
    groups = _groups(scores, group_size)
    credit = (groups - groups.mean(dim=-1, keepdim=True)) * (group_size / (group_size - 1))
    return _broadcast(credit.flatten(), where, rewards), _broadcast(scores, where, rewards)


def _to_go(steps: Steps, gamma: float) -> Tensor:
    require_fraction("gamma", gamma)
    return reverse_scan(steps.bootstrapped_rewards(gamma), gamma * steps.inside)


def _scores(rewards: Tensor, where: EpisodeBounds) -> Tensor:
    """The sum of each row's rewards, [batch]; the bootstrap is ignored."""
    bounds = where if where.get("truncated") is None else EpisodeBounds(**{**where, "bootstrap": None})
    return prepare_steps(rewards, None, **bounds, one_episode=True).rewards.sum(dim=-1)


def _groups(scores: Tensor, group_size: int) -> Tensor:
    if group_size < 2 or scores.numel() % group_size:
        raise ValueError(f"group_size is {group_size}; it must be at least 2 and divide the batch of {scores.numel()}")
    return scores.view(-1, group_size)


def _broadcast(credit: Tensor, where: EpisodeBounds, like: Tensor) -> Tensor:
    """[batch] → [batch, time], 0 outside the mask."""
    mask = where.get("mask")
    expanded = credit[:, None].expand(like.shape)
    return expanded.clone() if mask is None else expanded * mask
