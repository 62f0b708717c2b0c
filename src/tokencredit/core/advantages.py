"""Advantage estimators: from rewards and values to credit.

Every estimator takes rewards [batch, time], values if it reads a critic's, a mask and the episode flags, and returns
`(advantages, returns)` of the same shape: how much better each acted step turned out than expected, and the critic's
regression target. `estimators.estimate` calls any of them by name. They share these conventions:

- `values[t]` is the value of the state before step t, `rewards[t]` the reward of step t.
- Steps where `mask` is false are skipped: no discounting, no reward. Their contents are ignored and the outputs are 0
  there.
- An episode ends where `terminated` is set (the next state has value 0) or `truncated` is set (the next state has value
  `bootstrap[t]`). If both are set, it terminated. The last acted step of a row always ends an episode; with neither
  flag set there, it counts as terminated. A row may hold several episodes.
- Results are in float32 at least and carry no gradient.

From `reward_to_go` on they need no critic. `reward_to_go` and `total_return` sum rewards within each episode, and can
subtract a critic's values as a baseline. The others give every token of a row the same credit, computed from the row's
score: the sum of its rewards. For these a row is one episode.
"""

import math
from typing import Unpack

import torch
from torch import Tensor
from torch.nn.functional import pad

from tokencredit.core.argument_checks import refuse_foreign, require_fraction, require_positive
from tokencredit.core.episodes import EpisodeBounds, Steps, prepare_steps, reverse_scan
from tokencredit.core.masked import inverse_deviation

DEVIATION_GUARD = 1e-4
"""Added to the standard deviation that `group_relative` divides by, in units of the score."""


@refuse_foreign
def gae(
    rewards: Tensor,
    values: Tensor,
    *,
    gamma: float,
    lam: float,
    mask: Tensor | None = None,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: Aₜ = Σₖ (γλ)ᵏ δₜ₊ₖ with δₜ = rₜ + γ Vₜ₊₁ − Vₜ, to the end of the episode.

    Schulman et al. 2016 (arXiv 1506.02438), eq. 16. Computed as Gₜ − Vₜ with the λ-return Gₜ = rₜ + γ [(1 − λ) Vₜ₊₁
    + λ Gₜ₊₁] (Sutton and Barto 2018, eq. 12.2 as a recursion), which is the same number. In this form λ = 0 gives δ,
    λ = 1 gives return − value, and the return of a terminating step is its reward, to the last bit.

    λ trades bias for variance: 0 trusts the critic after one step, 1 trusts only the observed rewards.

    Args:
        rewards: [batch, time].
        values: [batch, time].
        gamma: γ, the discount per step, in [0, 1].
        lam: λ, in [0, 1].
        mask: bool [batch, time], true where the policy acted. None: everywhere.
        terminated: bool [batch, time], true where an episode ended. The last acted step of a row always ends one: it
            terminates, unless `truncated` is set there.
        truncated: bool [batch, time], true where an episode was cut off.
        bootstrap: [batch, time], the value of the state after the step, read only where truncated.

    Returns:
        Advantages A and returns G = A + V.

    Raises:
        ValueError: shapes differ; a flag is not bool; γ or λ lies outside [0, 1]; a row has no acted step; an acted
            step has a reward, value or needed bootstrap that is NaN or infinite; one of `truncated` and `bootstrap`
            without the other.
    """
    require_fraction("gamma", gamma)
    require_fraction("lam", lam)
    steps = prepare_steps(rewards, values, mask, terminated, truncated, bootstrap)
    returns = _lambda_returns(steps, gamma, lam)
    return steps.restore(returns - steps.values, returns)


def td(rewards: Tensor, values: Tensor, *, gamma: float, **where: Unpack[EpisodeBounds]) -> tuple[Tensor, Tensor]:
    """One-step TD error: Aₜ = δₜ = rₜ + γ Vₜ₊₁ − Vₜ. `gae` with λ = 0.

    Least variance, and all of the critic's bias. With γ = 1 and a reward at the last step only, it is the "one-step"
    estimator, whose Q is the next state's value and at the last step the reward: A = [V₁ … V_T₋₁, r] − [V₀ … V_T₋₁].

    Arguments, results and errors as in `gae`.
    """
    return gae(rewards, values, gamma=gamma, lam=0.0, **where)


def monte_carlo(
    rewards: Tensor, values: Tensor, *, gamma: float, **where: Unpack[EpisodeBounds]
) -> tuple[Tensor, Tensor]:
    """Discounted return minus the critic's baseline: Aₜ = Σₖ γᵏ rₜ₊ₖ − Vₜ. `gae` with λ = 1.

    No bias, and the variance of everything after the step.

    Arguments, results and errors as in `gae`.
    """
    return gae(rewards, values, gamma=gamma, lam=1.0, **where)


def n_step(
    rewards: Tensor, values: Tensor, *, gamma: float, n: int, **where: Unpack[EpisodeBounds]
) -> tuple[Tensor, Tensor]:
    """n-step return minus the value: Aₜ = rₜ + γ rₜ₊₁ + … + γⁿ⁻¹ rₜ₊ₙ₋₁ + γⁿ Vₜ₊ₙ − Vₜ.

    Sutton and Barto 2018, eq. 7.1. If the episode ends sooner, the sum ends there, with the bootstrap if it was
    truncated. n = 1 is `td`; n of at least the longest episode is `monte_carlo`. Only acted steps count.

    Takes O(log n) passes: a window of a + b steps is a window of a followed by one of b.

    `n` is at least 1, the returns are the n-step targets. Other arguments and errors as in `gae`.
    """
    require_fraction("gamma", gamma)
    if n < 1:
        raise ValueError(f"n is {n}; it must be at least 1")
    steps = prepare_steps(rewards, values, **where)
    # A window maps the value x that follows it to sum + decay · x. At an episode's end the decay is 0.
    window_sum = steps.bootstrapped_rewards(gamma)
    window_decay = gamma * steps.inside
    total, decay, covered = torch.zeros_like(window_sum), torch.ones_like(window_decay), 0
    width, remaining = 1, min(n, rewards.shape[1])
    while remaining:
        if remaining & width:
            total = total + decay * _shifted(window_sum, covered)
            decay = decay * _shifted(window_decay, covered)
            covered, remaining = covered + width, remaining - width
        window_sum = window_sum + window_decay * _shifted(window_sum, width)
        window_decay = window_decay * _shifted(window_decay, width)
        width *= 2
    returns = total + decay * _shifted(steps.values, covered)
    return steps.restore(returns - steps.values, returns)


def decoupled_gae(
    rewards: Tensor,
    values: Tensor,
    *,
    gamma: float,
    lam: float,
    lam_returns: float = 1.0,
    **where: Unpack[EpisodeBounds],
) -> tuple[Tensor, Tensor]:
    """`gae` with one λ for the advantages and another for the critic's targets.

    With `lam_returns` = 1 the critic learns from Monte-Carlo returns, free of its own bias, while the policy still
    gets advantages of low variance. Yuan et al. 2025 (VC-PPO, arXiv 2503.01491) and Yue et al. 2025 (VAPO, arXiv
    2504.05118, section 4.1), both with 1 for the returns.

    Arguments and errors as in `gae`.

    Returns:
        Advantages by `lam`, returns by `lam_returns`; their difference is not V unless both are equal.
    """
    require_fraction("lam", lam)
    return _decoupled(prepare_steps(rewards, values, **where), gamma, lam, lam_returns)


def length_adaptive_gae(
    rewards: Tensor,
    values: Tensor,
    *,
    gamma: float,
    alpha: float = 0.05,
    lam_returns: float = 1.0,
    **where: Unpack[EpisodeBounds],
) -> tuple[Tensor, Tensor]:
    """`decoupled_gae` with a λ per row, set by its length: λ = 1 − 1 / (α · length).

    With a fixed λ = 0.95 a reward fades within some tens of tokens, whether the completion has 50 or 5,000. Here the
    sum of the weights, 1 / (1 − λ) when γ = 1, is α times the length, so that credit reaches the same fraction of every
    completion. Yue et al. 2025 (VAPO, arXiv 2504.05118, section 4.2), α = 0.05. At lengths below 1 / α, where the
    formula is negative, λ is 0.

    α is above 0; the length is the number of acted steps in the row, over all its episodes. Other arguments, results
    and errors as in `decoupled_gae`.
    """
    require_positive("alpha", alpha)
    steps = prepare_steps(rewards, values, **where)
    lam = (1 - 1 / (alpha * steps.lengths.to(steps.rewards.dtype))).clamp(min=0.0)
    return _decoupled(steps, gamma, lam, lam_returns)


def reward_to_go(
    rewards: Tensor, values: Tensor | None = None, *, gamma: float, **where: Unpack[EpisodeBounds]
) -> tuple[Tensor, Tensor]:
    """Discounted reward-to-go: Gₜ = Σₖ γᵏ rₜ₊ₖ, and Aₜ = Gₜ, or Gₜ − Vₜ with `values`, which is `monte_carlo`.

    A step gets no credit for earlier rewards, which it could not have caused (Williams 1992, "Simple statistical
    gradient-following algorithms", with the causality of Sutton et al. 2000's policy gradient theorem).

    Without `values`, `bootstrap` is optional, and then 0. Arguments, results and errors as in `gae`.
    """
    steps = prepare_steps(rewards, values, **where)
    returns = _to_go(steps, gamma)
    return steps.restore(returns - steps.values, returns)


def total_return(
    rewards: Tensor, values: Tensor | None = None, *, gamma: float, **where: Unpack[EpisodeBounds]
) -> tuple[Tensor, Tensor]:
    """Whole-episode return for every step, R = Σₖ γᵏ rₖ from the first step: A = R, or R − Vₜ with `values`.

    The plainest policy gradient (Williams 1992, REINFORCE): unbiased, and noisier than `reward_to_go`, because a step
    also gets credit for earlier rewards.

    Arguments, results and errors as in `reward_to_go`; the returns are R.
    """
    steps = prepare_steps(rewards, values, **where)
    # A forward scan copies the return of each episode's first step to all its steps.
    carries = pad(steps.inside[:, :-1], (1, 0))
    first = _to_go(steps, gamma) * (1 - carries)
    returns = reverse_scan(first.flip(-1), carries.flip(-1)).flip(-1)
    return steps.restore(returns - steps.values, returns)


def uniform(rewards: Tensor, *, baseline: float = 0.0, **where: Unpack[EpisodeBounds]) -> tuple[Tensor, Tensor]:
    """The row's score minus a constant baseline, the same for every token: A = Σₜ rₜ − baseline.

    With the running mean of earlier scores as the baseline (`learn.controllers.RunningMoments`) this is REINFORCE with
    reinforcement comparison (Williams 1992; Sutton and Barto 2018, section 13.4). Update the mean with this batch's
    scores only afterwards, or it takes part of the credit away.

    Arguments as in `gae`; `bootstrap` is ignored, the flags only checked.

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
    rewards: Tensor, *, group_size: int, scale: bool = True, **where: Unpack[EpisodeBounds]
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
        where: as in `gae`; `bootstrap` is ignored, the flags only checked.

    Returns:
        Advantages, and the scores as returns.

    Raises:
        ValueError: `group_size` is below 2 or does not divide the batch; and as `uniform`.
    """
    scores = _scores(rewards, where)
    if group_size < 2 or scores.numel() % group_size:
        raise ValueError(f"group_size is {group_size}; it must be at least 2 and divide the batch of {scores.numel()}")
    groups = scores.view(-1, group_size)
    mean = groups.mean(dim=-1, keepdim=True)
    credit = groups - mean
    if scale:
        credit = credit * inverse_deviation(groups.std(dim=-1, keepdim=True), mean, DEVIATION_GUARD)
    return _broadcast(credit.flatten(), where, rewards), _broadcast(scores, where, rewards)


def leave_one_out(rewards: Tensor, *, group_size: int, **where: Unpack[EpisodeBounds]) -> tuple[Tensor, Tensor]:
    """The row's score minus the mean score of the others in its group: Aᵢ = sᵢ − Σ_{j≠i} sⱼ / (group_size − 1).

    The baseline does not contain the row's own score, so it adds no bias: Kool et al. 2019 ("Buy 4 REINFORCE samples,
    get a baseline for free!"); Ahmadian et al. 2024 (RLOO, arXiv 2402.14740). Equal to group_size / (group_size − 1)
    times the unscaled `group_relative`, which is how it is computed.

    Arguments, results and errors as in `group_relative`.
    """
    advantages, scores = group_relative(rewards, group_size=group_size, scale=False, **where)
    return advantages * (group_size / (group_size - 1)), scores


def _lambda_returns(steps: Steps, gamma: float, lam: float | Tensor) -> Tensor:
    """Gₜ = rₜ + γ [(1 − λₜ) Vₜ₊₁ + λₜ Gₜ₊₁], where λₜ is 0 at the end of an episode and `lam` elsewhere."""
    deltas = steps.bootstrapped_rewards(gamma).clone()
    deltas[:, :-1].addcmul_(gamma * (1 - lam) * steps.inside[:, :-1], steps.values[:, 1:])
    return reverse_scan(deltas, gamma * lam * steps.inside)


def _decoupled(steps: Steps, gamma: float, lam: float | Tensor, lam_returns: float) -> tuple[Tensor, Tensor]:
    require_fraction("gamma", gamma)
    require_fraction("lam_returns", lam_returns)
    return steps.restore(_lambda_returns(steps, gamma, lam) - steps.values, _lambda_returns(steps, gamma, lam_returns))


def _shifted(x: Tensor, count: int) -> Tensor:
    """xₜ₊count at t, 0 past the end."""
    return pad(x[:, count:], (0, min(count, x.shape[1])))


def _to_go(steps: Steps, gamma: float) -> Tensor:
    require_fraction("gamma", gamma)
    return reverse_scan(steps.bootstrapped_rewards(gamma), gamma * steps.inside)


def _scores(rewards: Tensor, where: EpisodeBounds) -> Tensor:
    """The sum of each row's rewards, [batch]; the bootstrap is ignored."""
    bounds = where if where.get("truncated") is None else EpisodeBounds(**{**where, "bootstrap": None})
    return prepare_steps(rewards, None, **bounds, one_episode=True).rewards.sum(dim=-1)


def _broadcast(credit: Tensor, where: EpisodeBounds, like: Tensor) -> Tensor:
    """[batch] → [batch, time], 0 outside the mask."""
    mask = where.get("mask")
    expanded = credit[:, None].expand(like.shape)
    return expanded.clone() if mask is None else expanded * mask
