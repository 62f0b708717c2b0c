import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokencredit.core.rewards import KL_ESTIMATORS, exact_kl, k1, k2, k3, kl_estimate

LOG2 = math.log(2)


@pytest.mark.parametrize(("name", "expected"), [("k1", LOG2), ("k2", 0.5 * LOG2**2), ("k3", 0.5 - 1 + LOG2)])
def test_estimators_by_hand(name, expected):
    # π(x) = ½, ρ(x) = ¼: the log-ratio is log 2 and r = ρ/π = ½. What is masked may be anything.
    policy, reference = torch.tensor([0.5, 0.0, math.nan]).log(), torch.tensor([0.25, 0.5, 1.0]).log()
    kl = kl_estimate(name, policy, reference, torch.tensor([True, False, False]))
    torch.testing.assert_close(kl, torch.tensor([expected, 0.0, 0.0]))


def test_exact_by_hand():
    policy, reference = torch.tensor([0.5, 0.5, 0.0]).log(), torch.tensor([0.25, 0.25, 0.5]).log()
    torch.testing.assert_close(exact_kl(policy, reference), torch.tensor(LOG2))
    assert exact_kl(reference, policy) == math.inf
    # ¾ log(¾/½) + ¼ log(¼/½): the two directions differ, so a wrong sign or order would show.
    policy, reference = torch.tensor([0.75, 0.25]).log(), torch.tensor([0.5, 0.5]).log()
    torch.testing.assert_close(exact_kl(policy, reference), torch.tensor(0.75 * math.log(1.5) - 0.25 * LOG2))
    torch.testing.assert_close(exact_kl(reference, policy), torch.tensor(0.5 * math.log(2 / 3) + 0.5 * LOG2))


@st.composite
def distributions(draw, spread=3.0):
    """log π and log ρ over a vocabulary, in float64."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = spread * torch.randn(2, draw(st.integers(1, 30)), generator=generator, dtype=torch.float64)
    return logits.log_softmax(-1)


@given(distributions())
def test_unbiased_estimators_agree_with_exact_in_expectation(pair):
    policy, reference = pair
    exact = exact_kl(policy, reference)
    assert exact >= -1e-12
    # The expectation over tokens drawn from π, by summing over all of them instead of drawing.
    torch.testing.assert_close((policy.exp() * k1(policy, reference)).sum(), exact)
    torch.testing.assert_close((policy.exp() * k3(policy, reference)).sum(), exact)
    assert (k2(policy, reference) >= 0).all()
    assert (k3(policy, reference) >= -1e-12).all()


@given(distributions(spread=1.0))
def test_k2_agrees_while_the_policy_is_near(pair):
    policy, other = pair
    for step in (0.01, 0.1):
        reference = (policy + step * other).log_softmax(-1)
        exact = exact_kl(policy, reference)
        k2_mean = (policy.exp() * k2(policy, reference)).sum()
        # The bias is of the third order in the distance.
        torch.testing.assert_close(k2_mean, exact, rtol=10 * step, atol=1e-12)


@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_sampled_tokens_give_the_exact_kl(spread):
    """And k3 is the less noisy one near the reference, but the noisier one far from it."""
    generator = torch.Generator().manual_seed(0)
    policy, reference = (spread * torch.randn(2, 50, generator=generator)).log_softmax(-1)
    tokens = torch.multinomial(policy.exp(), 200_000, replacement=True, generator=generator)
    exact = exact_kl(policy, reference)
    for name in ("k1", "k3"):
        samples = kl_estimate(name, policy[tokens], reference[tokens])
        assert (samples.mean() - exact).abs() < 4 * samples.std() / 200_000**0.5
    k1_noise, k3_noise = (k(policy[tokens], reference[tokens]).std() for k in (k1, k3))
    assert k3_noise < k1_noise / 2 if spread == 0.1 else k3_noise > 2 * k1_noise


def gradient(function, logits):
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(function(logits.log_softmax(-1)), logits)[0]


@given(distributions())
def test_gradients_are_those_that_the_docstrings_say(pair):
    logits, reference = pair

    def expected_gradient(estimator):
        """E_{x∼π} of the estimator's gradient: the tokens are drawn, so π(x) itself is not differentiated."""
        return gradient(lambda policy: (policy.detach().exp() * estimator(policy, reference)).sum(), logits)

    close = {"rtol": 1e-8, "atol": 1e-10}
    torch.testing.assert_close(expected_gradient(k1), torch.zeros_like(logits), **close)
    towards = gradient(lambda policy: exact_kl(policy, reference), logits)
    torch.testing.assert_close(expected_gradient(k2), towards, **close)
    other_direction = gradient(lambda policy: exact_kl(reference, policy), logits)
    torch.testing.assert_close(expected_gradient(k3), other_direction, **close)


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_what_is_masked_reaches_no_gradient(name):
    policy = torch.tensor([-1.0, -1e30, math.nan, math.inf], requires_grad=True)
    reference = torch.tensor([-2.0, math.nan, -1.0, 1e30])
    kl_estimate(name, policy, reference, torch.tensor([True, False, False, False])).sum().backward()
    assert policy.grad[0] != math.nan
    assert policy.grad[1:].tolist() == [0, 0, 0]


def test_half_precision_and_no_distance():
    x = torch.tensor([-3.1, -0.2]).bfloat16()
    for estimator in KL_ESTIMATORS.values():
        kl = estimator(x, x)
        assert kl.dtype == torch.float32
        assert kl.tolist() == [0, 0]


def test_refusals():
    with pytest.raises(ValueError, match="kl estimator is 'k4'; it may be k1, k2, k3"):
        kl_estimate("k4", torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match="ref_logprobs has shape"):
        k3(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="mask has shape"):
        k1(torch.zeros(2), torch.zeros(2), torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="log_reference has shape"):
        exact_kl(torch.zeros(2, 3), torch.zeros(3))
