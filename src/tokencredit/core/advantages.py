"""Advantage estimators with a critic: from rewards and values to credit.

Every estimator, here and in `critic_free`, takes rewards and values [batch, time], a mask and the episode flags, and
returns `(advantages, returns)` of the same shape: how much better each acted step turned out than the critic expected,
and the critic's regression target. `estimators.estimate` calls any of them by name. They share these conventions:

- `values[t]` is the value of the state before step t, `rewards[t]` the reward of step t.
- Steps where `mask` is false are skipped: no discounting, no reward. Their contents are ignored and the outputs are 0
  there.
- An episode ends where `terminated` is set (the next state has value 0) or `truncated` is set (the next state has value
  `bootstrap[t]`). If both are set, it terminated. The last acted step of a row always ends an episode; with neither
  flag set there, it counts as terminated. A row may hold several episodes.
- Results are in float32 at least and carry no gradient.
"""

from typing import Unpack

import torch
from torch import Tensor
from torch.nn.functional import pad

from tokencredit.core.argument_checks import refuse_foreign, require_fraction, require_positive
from tokencredit.core.episodes import EpisodeBounds, Steps, prepare_steps, reverse_scan


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
