"""The fit of values to the scores of prefixes."""

import numpy as np
import pytest
import torch

from tokencredit.core.prefix_baseline import fit_prefixes, prefix_moments


def moments_of(scores, returns, mask=None):
    scores, returns = torch.tensor(scores, dtype=torch.float64), torch.tensor(returns, dtype=torch.float64)
    return prefix_moments(scores, returns, torch.ones_like(scores, dtype=torch.bool) if mask is None else mask)


def test_a_worked_fit():
    # One position with scores 0 and 1 and returns 1 and 3: c_ss = 1/2, c_sg = 1 and v = 1/4. Almost without a prior,
    # slope 2 and intercept 1. With p = 2: β̄ = 1 / (1/2 + 1/2) = 1, β = (1 + 1/2 · 1) / 1 = 3/2; the residuals' mean,
    # (4 − 3/2) / 2 = 5/4, is the neighbours' too.
    moments = moments_of([[0.0], [1.0]], [[1.0], [3.0]])
    alpha, beta = fit_prefixes(moments, width=1.0, prior=1e-9)
    assert (float(alpha), float(beta)) == pytest.approx((1.0, 2.0))
    alpha, beta = fit_prefixes(moments, width=1.0, prior=2.0)
    assert (float(alpha), float(beta)) == pytest.approx((1.25, 1.5))


@pytest.mark.parametrize("prior", [1e-9, 5.0])
def test_each_position_is_ridge_regression_towards_its_neighbours(prior):
    scores, returns = np.random.default_rng(0).normal(size=(2, 12, 3))
    alpha, beta = fit_prefixes(moments_of(scores, returns), width=2.0, prior=prior)
    s, g = scores - scores.mean(0), returns - returns.mean(0)
    strength = prior * (s**2).mean()
    for t in range(3):
        weights = np.exp(-abs(np.arange(3) - t) / 2.0) + 1e-6
        near = (weights * (s * g).sum(0)).sum() / ((weights * (s**2).sum(0)).sum() + strength)
        # As least squares with one more row, which pulls the slope to that of the neighbours.
        rows, target = np.append(s[:, t], np.sqrt(strength)), np.append(g[:, t], np.sqrt(strength) * near)
        slope = np.linalg.lstsq(rows[:, None], target, rcond=None)[0][0]
        assert float(beta[t]) == pytest.approx(slope)
        residuals = returns - slope * scores
        around = (weights * residuals.mean(0)).sum() / weights.sum()
        assert float(alpha[t]) == pytest.approx((residuals[:, t].sum() + prior * around) / (12 + prior))


def test_masked_states_do_not_count():
    scores = torch.arange(12.0).view(4, 3).remainder(5)
    mask = torch.tensor([[True, True, False]] * 4)
    returns = torch.where(mask, 2 * scores + 1, 1e6)
    alpha, beta = fit_prefixes(prefix_moments(scores, returns, mask), width=1.0, prior=1e-9)
    assert beta.tolist() == pytest.approx([2.0] * 3)
    assert alpha.tolist() == pytest.approx([1.0] * 3)


def test_scores_that_do_not_vary_leave_the_mean():
    alpha, beta = fit_prefixes(moments_of([[7.0], [7.0]], [[1.0], [2.0]]), width=1.0, prior=3.0)
    assert (float(alpha), float(beta)) == (1.5, 0.0)


def test_positions_without_states_get_the_overall_fit():
    moments = torch.nn.functional.pad(moments_of([[0.0], [1.0]], [[1.0], [3.0]]), (0, 2000))
    alpha, beta = fit_prefixes(moments, width=1.0, prior=1e-9)
    assert (float(alpha[-1]), float(beta[-1])) == pytest.approx((1.0, 2.0), abs=0.01)
