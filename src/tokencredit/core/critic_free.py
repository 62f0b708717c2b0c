"""Advantage estimators that need no critic. Conventions and refusals are those of `core.advantages`.

The first two are sums of rewards and know episodes; a critic, if there is one, may serve as their baseline. The others
give every token of a row the same credit, from the row's score: the sum of its rewards. A row is then one episode.
"""

import math

import torch
from torch import Tensor

from tokencredit.core.checks import require_fraction
from tokencredit.core.masked import inverse_deviation
from tokencredit.core.steps import Steps, prepare_steps, reverse_scan

DEVIATION_GUARD = 1e-4
"""Added to the deviation that `group_relative` divides by, in units of the score."""


def reward_to_go(
    rewards: Tensor,
    values: Tensor | None = None,
    *,
    gamma: float,
    mask: Tensor | None = None,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What came after each step: Gₜ = Σₖ γᵏ rₜ₊ₖ, and Aₜ = Gₜ, or Gₜ − Vₜ with `values`, which is `monte_carlo`.

    A step gets no credit for rewards before it, which it could not have caused (Williams 1992, "Simple statistical
    gradient-following algorithms", with the causality of Sutton et al. 2000's policy gradient theorem).

    Args:
        rewards: [batch, time].
        values: [batch, time], a baseline; None leaves it out.
        gamma: γ, in [0, 1].
        mask: bool [batch, time].
        terminated: bool [batch, time].
        truncated: bool [batch, time].
        bootstrap: [batch, time]; without `values` it may be missing, and what was cut off is then worth 0.

    Returns:
        Advantages A and returns G.

    Raises:
        ValueError: as `advantages.gae`.
    """
    steps = prepare_steps(rewards, values, mask, terminated, truncated, bootstrap)
    returns = _to_go(steps, gamma)
    advantages, returns = steps.restore(returns - steps.values, returns)
    return advantages, returns


def total_return(
    rewards: Tensor,
    values: Tensor | None = None,
    *,
    gamma: float,
    mask: Tensor | None = None,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Every step gets its whole episode's return, R = Σₖ γᵏ rₖ from the first step on: A = R, or R − Vₜ with `values`.

    The plainest policy gradient (Williams 1992, REINFORCE): unbiased, and noisier than `reward_to_go`, because a step
    also gets credit for what happened before it.

    Arguments, results and refusals as in `reward_to_go`; the returns are R.
    """
    steps = prepare_steps(rewards, values, mask, terminated, truncated, bootstrap)
    # The return of the first step of each episode is carried forward through it: a scan in the other direction.
    carries = torch.nn.functional.pad(steps.inside[:, :-1], (1, 0))
    first = _to_go(steps, gamma) * (1 - carries)
    returns = reverse_scan(first.flip(-1), carries.flip(-1)).flip(-1)
    advantages, returns = steps.restore(returns - steps.values, returns)
    return advantages, returns


def uniform(
    rewards: Tensor,
    values: Tensor | None = None,
    *,
    baseline: float = 0.0,
    mask: Tensor | None = None,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The row's score minus one number, the same for every token: A = Σₜ rₜ − baseline.

    With the running mean of earlier scores as the baseline (`learn.controllers.RunningMoments`) this is REINFORCE with
    reinforcement comparison (Williams 1992; Sutton and Barto 2018, section 13.4). The mean should not yet contain this
    batch's own scores, or it takes part of the credit away.

    Args:
        rewards: [batch, time].
        values: takes no part.
        baseline: what to subtract, a finite number.
        mask: bool [batch, time].
        terminated: bool [batch, time]; checked, and takes no part.
        truncated: bool [batch, time]; the same.
        bootstrap: takes no part.

    Returns:
        Advantages, and the scores as returns.

    Raises:
        ValueError: `baseline` is not finite; an episode ends before the last acted step of its row; and as
            `advantages.gae`.
    """
    if not math.isfinite(baseline):
        raise ValueError(f"baseline is {baseline}; it must be finite")
    scores = _scores(rewards, mask, terminated, truncated)
    return _spread(scores - baseline, mask, rewards), _spread(scores, mask, rewards)


def group_relative(
    rewards: Tensor,
    values: Tensor | None = None,
    *,
    group_size: int,
    scale: bool = True,
    mask: Tensor | None = None,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The row's score against those of its group, completions of the same prompt: A = (s − mean) / (deviation + 1e-4).

    Shao et al. 2024 (GRPO, arXiv 2402.03300, section 4.1.2). The deviation is that of a sample, √(Σ (s − mean)² /
    (group_size − 1)). The guard, that of TRL's GRPOTrainer, keeps a group whose scores differ by noise, 1e-7 say, from
    an advantage of size 1; where they agree up to rounding the advantage is 0. Dividing weighs prompts that are nearly
    always or nearly never solved as much as the others; without it: Liu et al. 2025 (Dr. GRPO, arXiv 2503.20783).

    A price of KL in the rewards would be divided too. To leave it its size, add the unscaled estimate of it to the
    scaled one of the scores, as `text.credit` does.

    Args:
        rewards: [batch, time].
        values: takes no part.
        group_size: rows i · group_size … (i + 1) · group_size − 1 are one group; at least 2.
        scale: whether to divide by the deviation and its guard.
        mask: bool [batch, time].
        terminated: bool [batch, time]; checked, and takes no part.
        truncated: bool [batch, time]; the same.
        bootstrap: takes no part.

    Returns:
        Advantages, and the scores as returns.

    Raises:
        ValueError: `group_size` is below 2 or does not divide the batch; an episode ends before the last acted step of
            its row; and as `advantages.gae`.
    """
    scores = _scores(rewards, mask, terminated, truncated)
    groups = _groups(scores, group_size)
    mean = groups.mean(dim=-1, keepdim=True)
    credit = groups - mean
    if scale:
        credit = credit * inverse_deviation(groups.std(dim=-1, keepdim=True), mean, DEVIATION_GUARD)
    return _spread(credit.flatten(), mask, rewards), _spread(scores, mask, rewards)


def leave_one_out(
    rewards: Tensor,
    values: Tensor | None = None,
    *,
    group_size: int,
    mask: Tensor | None = None,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The row's score minus the mean score of the others in its group: Aᵢ = sᵢ − Σ_{j≠i} sⱼ / (group_size − 1).

    The baseline does not contain the row's own score, so it adds no bias: Kool et al. 2019 ("Buy 4 REINFORCE samples,
    get a baseline for free!"); Ahmadian et al. 2024 (RLOO, arXiv 2402.14740). Equal to group_size / (group_size − 1)
    times the unscaled `group_relative`, and computed so.

    Arguments, results and refusals as in `group_relative`.
    """
    scores = _scores(rewards, mask, terminated, truncated)
    groups = _groups(scores, group_size)
    credit = (groups - groups.mean(dim=-1, keepdim=True)) * (group_size / (group_size - 1))
    return _spread(credit.flatten(), mask, rewards), _spread(scores, mask, rewards)


def _to_go(steps: Steps, gamma: float) -> Tensor:
    require_fraction("gamma", gamma)
    return reverse_scan(steps.rewards_to_the_end(gamma), gamma * steps.inside)


def _scores(rewards: Tensor, mask: Tensor | None, terminated: Tensor | None, truncated: Tensor | None) -> Tensor:
    """The sum of each row's rewards, [batch]."""
    return prepare_steps(rewards, None, mask, terminated, truncated, one_episode=True).rewards.sum(dim=-1)


def _groups(scores: Tensor, group_size: int) -> Tensor:
    if group_size < 2 or scores.numel() % group_size:
        raise ValueError(f"group_size is {group_size}; it must be at least 2 and divide the batch of {scores.numel()}")
    return scores.view(-1, group_size)


def _spread(credit: Tensor, mask: Tensor | None, like: Tensor) -> Tensor:
    """[batch] → [batch, time], 0 outside the mask."""
    spread = credit[:, None].expand(like.shape)
    return spread.clone() if mask is None else spread * mask
