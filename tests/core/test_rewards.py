import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokencredit.core.rewards import (
    KL_ESTIMATORS,
    k1,
    k2,
    k3,
    kl_estimate,
    kl_of_next,
    overlong_penalty,
    token_rewards,
)

T, F = True, False
NAN = math.nan
MASK = torch.tensor([[T, T, F], [T, F, T]])
KL = torch.tensor([[1.0, 2.0, NAN], [3.0, NAN, -4.0]])


def test_the_score_stands_on_the_last_acted_token():
    rewards = token_rewards(torch.tensor([5.0, 7.0]), MASK)
    assert rewards.tolist() == [[0.0, 5.0, 0.0], [0.0, 0.0, 7.0]]


def test_every_token_pays_for_its_kl():
    rewards = token_rewards(torch.tensor([5.0, 7.0]), MASK, kl=KL, kl_coef=0.5)
    assert rewards.tolist() == [[-0.5, 4.0, 0.0], [-1.5, 0.0, 9.0]]
    assert torch.equal(
        token_rewards(torch.tensor([5.0, 7.0]), MASK, kl=KL), token_rewards(torch.tensor([5.0, 7.0]), MASK)
    )
    # so that the row's sum is the score less β times the KL of the sequence
    assert rewards.sum(1).tolist() == [5 - 0.5 * 3, 7 + 0.5 * 1]


def test_dense_scores():
    scores = torch.tensor([[1.0, 2.0, NAN], [4.0, NAN, 6.0]])
    assert token_rewards(scores, MASK).tolist() == [[1.0, 2.0, 0.0], [4.0, 0.0, 6.0]]
    rewards = token_rewards(scores, MASK, kl=KL, kl_coef=1.0, eos=torch.tensor([T, F]), missing_eos_penalty=2.0)
    assert rewards.tolist() == [[0.0, 0.0, 0.0], [1.0, 0.0, 8.0]]
    assert token_rewards(scores, MASK, clip=3.0).tolist() == [[1.0, 2.0, 0.0], [3.0, 0.0, 3.0]]


def test_clipping_comes_before_the_penalty():
    scores = torch.tensor([-50.0, 70.0])
    rewards = token_rewards(scores, MASK, eos=torch.tensor([F, T]), missing_eos_penalty=1.0, clip=10.0)
    assert rewards.tolist() == [[0.0, -11.0, 0.0], [0.0, 0.0, 10.0]]


def test_the_overlong_penalty_by_hand():
    # DAPO's eq. 13 with L_max 20 and L_cache 4: 0 up to 16 tokens, then a quarter more with each, −1 at 20
    lengths = torch.tensor([1, 16, 17, 18, 19, 20])
    assert overlong_penalty(lengths, limit=20, tokens=4, penalty=1.0).tolist() == [0, 0, 0.25, 0.5, 0.75, 1]
    assert overlong_penalty(lengths, limit=20, tokens=4, penalty=2.0).tolist() == [0, 0, 0.5, 1, 1.5, 2]
    assert overlong_penalty(lengths, limit=20, tokens=1, penalty=2.0).tolist() == [0, 0, 0, 0, 0, 2]
    # the example of TRL's get_soft_overlong_punishment: 90 of 100 tokens, the last 20 of which cost something
    assert overlong_penalty(torch.tensor([90]), limit=100, tokens=20, penalty=1.0).tolist() == [0.5]


def test_the_overlong_penalty_stands_on_the_last_token_after_clipping():
    overlong = torch.tensor([0.0, 0.5])
    rewards = token_rewards(torch.tensor([50.0, 70.0]), MASK, overlong=overlong, clip=10.0)
    assert rewards.tolist() == [[0.0, 10.0, 0.0], [0.0, 0.0, 9.5]]
    dense = torch.tensor([[1.0, 2.0, NAN], [4.0, NAN, 6.0]])
    assert token_rewards(dense, MASK, overlong=overlong).tolist() == [[1.0, 2.0, 0.0], [4.0, 0.0, 5.5]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 0}, "tokens is 0; it must be at least 1 and at most limit, 20"),
        ({"tokens": 21}, "tokens is 21; it must be at least 1 and at most limit, 20"),
        ({"penalty": -1.0}, "penalty is -1.0"),
    ],
)
def test_the_overlong_penalty_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        overlong_penalty(torch.tensor([3]), **({"limit": 20, "tokens": 4, "penalty": 1.0} | changes))


def test_rewards_are_float32_or_wider_without_gradient():
    assert token_rewards(torch.tensor([5, 7]), MASK).dtype == torch.float32
    assert token_rewards(torch.tensor([5.0, 7.0]).half(), MASK).dtype == torch.float32
    assert token_rewards(torch.tensor([5.0, 7.0]).double(), MASK).dtype == torch.float64
    scores = torch.tensor([5.0, 7.0], requires_grad=True)
    assert not token_rewards(scores, MASK, kl=KL.requires_grad_(), kl_coef=1.0).requires_grad


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": torch.zeros(3)}, r"scores has shape \(3,\); it must be \(2,\)"),
        ({"scores": torch.zeros(2, 4)}, "scores has shape"),
        ({"scores": torch.tensor(1.0)}, "scores has shape"),
        ({"mask": MASK[0]}, "mask has shape"),
        ({"mask": MASK.float()}, "mask has dtype"),
        ({"mask": MASK & torch.tensor([[T], [F]])}, "mask has no acted step in row 1"),
        ({"kl": torch.zeros(2)}, "kl has shape"),
        ({"kl": KL, "kl_coef": -1.0}, "kl_coef is -1.0"),
        ({"clip": -1.0}, "clip is -1.0"),
        ({"missing_eos_penalty": -1.0}, "missing_eos_penalty is -1.0"),
        ({"missing_eos_penalty": 1.0}, "eos is None"),
        ({"overlong": torch.zeros(3)}, r"overlong has shape \(3,\); it must be \(2,\)"),
        ({"missing_eos_penalty": 1.0, "eos": torch.ones(2)}, "eos has dtype"),
        ({"missing_eos_penalty": 1.0, "eos": MASK}, "eos has shape"),
    ],
)
def test_refusals(changes, message):
    arguments = {"scores": torch.zeros(2), "mask": MASK, **changes}
    with pytest.raises(ValueError, match=message):
        token_rewards(**arguments)


LOG2 = math.log(2)


@pytest.mark.parametrize(("name", "expected"), [("k1", LOG2), ("k2", 0.5 * LOG2**2), ("k3", 0.5 - 1 + LOG2)])
def test_kl_estimators_by_hand(name, expected):
    # π(x) = ½, ρ(x) = ¼: the log-ratio is log 2 and r = ρ/π = ½. What is masked may be anything.
    policy, reference = torch.tensor([0.5, 0.0, math.nan]).log(), torch.tensor([0.25, 0.5, 1.0]).log()
    kl = kl_estimate(name, policy, reference, torch.tensor([True, False, False]))
    torch.testing.assert_close(kl, torch.tensor([expected, 0.0, 0.0]))


def exact_kl(log_policy, log_reference):
    return (log_policy.exp() * (log_policy - log_reference)).sum(-1)


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


def test_the_kl_of_the_next_acted_position_by_hand():
    assert kl_of_next(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), MASK).tolist() == [[2, 0, 0], [6, 0, 0]]


def test_the_exact_kl_in_the_loss_and_as_reward_is_the_gradient_of_the_whole_kl():
    """All 27 sequences of 3 tokens, of a policy that is a table; the rewards alone, or the loss alone, are not it."""
    generator = torch.Generator().manual_seed(0)
    table, reference = torch.randn(2, 1 + 3 + 9, 3, generator=generator, dtype=torch.float64)
    logits = table.requires_grad_()
    total, in_loss, as_reward = (torch.zeros((), dtype=torch.float64) for _ in range(3))
    for x, y, z in itertools.product(range(3), repeat=3):
        states = torch.tensor([0, 1 + x, 4 + 3 * x + y])
        log_policy, log_reference = logits[states].log_softmax(-1), reference[states].log_softmax(-1)
        logprobs, kl = log_policy[range(3), (x, y, z)], exact_kl(log_policy, log_reference)
        probability = logprobs.sum().exp()
        to_go = kl_of_next(kl.detach()[None], torch.ones(1, 3, dtype=torch.bool))[0].flip(0).cumsum(0).flip(0)
        total = total + probability * kl.sum()
        in_loss = in_loss + probability.detach() * kl.sum()
        as_reward = as_reward + probability.detach() * (logprobs * to_go).sum()
    expected, *parts = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (total, in_loss, as_reward))
    torch.testing.assert_close(parts[0] + parts[1], expected)
    assert all((part - expected).abs().max() > 0.01 for part in parts)


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_masked_tokens_have_no_gradient(name):
    policy = torch.tensor([-1.0, -1e30, math.nan, math.inf], requires_grad=True)
    reference = torch.tensor([-2.0, math.nan, -1.0, 1e30])
    kl_estimate(name, policy, reference, torch.tensor([True, False, False, False])).sum().backward()
    assert policy.grad[0] != math.nan
    assert policy.grad[1:].tolist() == [0, 0, 0]


def test_kl_is_0_and_float32_without_a_distance():
    x = torch.tensor([-3.1, -0.2]).bfloat16()
    for estimator in KL_ESTIMATORS.values():
        kl = estimator(x, x)
        assert kl.dtype == torch.float32
        assert kl.tolist() == [0, 0]


def test_kl_refuses():
    with pytest.raises(ValueError, match="kl estimator is 'k4'; it may be k1, k2, k3"):
        kl_estimate("k4", torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match="ref_logprobs has shape"):
        k3(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="mask has shape"):
        k1(torch.zeros(2), torch.zeros(2), torch.ones(3, dtype=torch.bool))
