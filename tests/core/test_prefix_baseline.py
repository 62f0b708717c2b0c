"""The fit of values to the scores of prefixes."""

import numpy as np
import pytest
import torch

from tokencredit.core.prefix_baseline import fit_prefixes, prefix_moments


def moments_of(scores, returns, critic=None):
    tensors = [torch.tensor(x, dtype=torch.float64) for x in (scores, returns, critic or np.zeros_like(scores))]
    return prefix_moments(*tensors[:2], torch.ones_like(tensors[0], dtype=torch.bool), tensors[2])


def test_a_worked_fit():
    # One position with scores 0, 0, 1, 1 and returns 0, 2, 2, 4: c_ss = 1, c_sg = 2, c_gg = 8 and v = 1/4. Almost
    # without a prior, slope 2 and intercept 1. That leaves 4 of 8, with two states of the neighbourhood as well: p = 4
    # counts as 2, β̄ = 2 / (1 + 1/2) = 4/3 and β = (2 + 1/2 · 4/3) / (3/2) = 16/9. The residuals' mean,
    # (8 − 2 · 16/9) / 4 = 10/9, is the neighbours' too. The residuals are −10/9, 8/9, −8/9 and 10/9.
    moments = moments_of([[0.0], [0.0], [1.0], [1.0]], [[0.0], [2.0], [2.0], [4.0]], [[-1.0], [1.0], [0.0], [0.0]])
    alpha, beta, _ = fit_prefixes(moments, width=1.0, prior=1e-9)
    assert (float(alpha), float(beta)) == pytest.approx((1.0, 2.0))
    alpha, beta, share = fit_prefixes(moments, width=1.0, prior=4.0)
    assert (float(alpha), float(beta)) == pytest.approx((10 / 9, 16 / 9))
    # Critic outputs −1, 1, 0, 0: Σ e u = 2, Σ u² = 2, q = 1/2; c̄ = 2 / (2 + 2) and c = (2 + 2 · 1/2) / (2 + 2).
    assert float(share) == pytest.approx(3 / 4)


@pytest.mark.parametrize("prior", [1e-9, 5.0])
def test_each_position_is_ridge_regression_towards_its_neighbours(prior):
    scores, returns, critic = np.random.default_rng(0).normal(size=(3, 12, 3))
    returns = returns + scores + critic
    alpha, beta, share = fit_prefixes(moments_of(scores, returns, critic.tolist()), width=2.0, prior=prior)
    s, g = scores - scores.mean(0), returns - returns.mean(0)

    def around(x, t):
        return ((np.exp(-abs(np.arange(3) - t) / 2.0) + 1e-6) * x).sum()

    def pulled(x, y, strength, towards):
        # Least squares with one more row, which pulls the slope to that of the neighbours.
        rows, target = np.append(x, np.sqrt(strength)), np.append(y, np.sqrt(strength) * towards)
        return np.linalg.lstsq(rows[:, None], target, rcond=None)[0][0]

    ss, sg, gg = (s * s).sum(0), (s * g).sum(0), (g * g).sum(0)
    for t in range(3):
        # Two states like the neighbours, and the part of their variance that a slope leaves.
        near, left = 2 * around(gg, t) / around(12.0, t), gg[t] - sg[t] ** 2 / ss[t]
        left += near - 2 * around(sg, t) ** 2 / around(ss, t) / around(12.0, t)
        count = prior * left / (gg[t] + near)
        strength = count * (s**2).mean()
        slope = pulled(s[:, t], g[:, t], strength, around(sg, t) / (around(ss, t) + strength))
        assert float(beta[t]) == pytest.approx(slope)
        residuals = returns - slope * scores
        mean = around(residuals.mean(0), t) / around(1.0, t)
        intercept = (residuals[:, t].sum() + count * mean) / (12 + count)
        assert float(alpha[t]) == pytest.approx(intercept)
    rest, strength = returns - alpha.numpy() - beta.numpy() * scores, prior * (critic**2).mean()
    for t in range(3):
        near = around((critic * rest).sum(0), t) / (around((critic**2).sum(0), t) + strength)
        assert float(share[t]) == pytest.approx(min(pulled(critic[:, t], rest[:, t], strength, near), 1.0))


def test_scores_that_tell_returns_exactly_need_no_neighbours():
    generator = torch.Generator().manual_seed(0)
    scores = torch.cat([torch.zeros(64, 3), (torch.rand(64, 1, generator=generator) < 0.3).float().expand(-1, 5)], 1)
    returns = scores[:, -1:].expand(-1, 8)  # decided by the third token
    alpha, beta, _ = fit_prefixes(moments_of(scores.tolist(), returns.tolist()), width=4.0, prior=30.0)
    values = (alpha + beta * scores - returns)[:, 3:]
    assert float(values.abs().max()) < 0.01


def test_the_critics_share_is_within_0_and_1_and_none_where_it_is_noise():
    generator = torch.Generator().manual_seed(0)
    scores, noise = torch.zeros(400, 40), torch.randn(400, 40, generator=generator)
    outputs = torch.randn(400, 40, generator=generator)
    returns = torch.cat([noise[:, :20] + 3 * outputs[:, :20], noise[:, 20:]], 1)
    for sign, first in ((1, 1.0), (-1, 0.0)):
        moments = moments_of(scores.tolist(), returns.tolist(), (sign * outputs).tolist())
        share = fit_prefixes(moments, width=3.0, prior=3.0)[2]
        assert share[:20].tolist() == pytest.approx([first] * 20)
        assert float(share[25:].max()) < 0.25


def test_masked_states_do_not_count():
    scores = torch.arange(12.0).view(4, 3).remainder(5)
    mask = torch.tensor([[True, True, False]] * 4)
    returns = torch.where(mask, 2 * scores + 1, 1e6)
    alpha, beta, _ = fit_prefixes(prefix_moments(scores, returns, mask), width=1.0, prior=1e-9)
    assert beta.tolist() == pytest.approx([2.0] * 3)
    assert alpha.tolist() == pytest.approx([1.0] * 3)


def test_scores_that_do_not_vary_leave_the_mean():
    alpha, beta, _ = fit_prefixes(moments_of([[7.0], [7.0]], [[1.0], [2.0]]), width=1.0, prior=3.0)
    assert (float(alpha), float(beta)) == (1.5, 0.0)


def test_positions_without_states_get_the_overall_fit():
    moments = torch.nn.functional.pad(moments_of([[0.0], [1.0]], [[1.0], [3.0]]), (0, 2000))
    alpha, beta, _ = fit_prefixes(moments, width=1.0, prior=1e-9)
    assert (float(alpha[-1]), float(beta[-1])) == pytest.approx((1.0, 2.0), abs=0.01)
