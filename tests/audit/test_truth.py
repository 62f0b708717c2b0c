"""Means and standard errors of sampled returns, and how audits spend their samples."""

import math

import pytest
import torch

from tokencredit.audit.truth import Returns, Samples, generator, pooled_variances, rounds, spread


def test_a_mean_and_its_standard_error_by_hand():
    samples = Samples(2, 3)
    samples.add(torch.tensor([1]), 2, torch.tensor([[1.0, 2.0, 6.0]]))
    means, errors, noise = samples.with_errors()
    assert float(means[1, 2]) == 3.0
    assert float(errors[1, 2]) == pytest.approx(math.sqrt((4 + 1 + 9) / 2 / 3)), "alone, it is its own pool"
    assert float(noise[1, 2]) == pytest.approx((4 + 1 + 9) / 2 / 3)
    assert means.isnan().sum() == errors.isnan().sum() == noise.isnan().sum() == 5, "nothing else is known"


def test_a_state_that_missed_a_reward_gets_an_error_from_the_others_by_hand():
    """Samples 0 0 0 and 1 0 0 1: s² = 0 and 1/3 with 2 and 3 degrees of freedom, pooled 1/5."""
    samples = Samples(1, 2)
    samples.add(torch.tensor([0]), 0, torch.tensor([[0.0, 0.0, 0.0]]))
    samples.add(torch.tensor([0]), 1, torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
    _, errors, noise = samples.with_errors()
    expected = [math.sqrt((8 * 0.2 + 0.0) / 10 / 3), math.sqrt((8 * 0.2 + 1.0) / 11 / 4)]
    assert errors[0].tolist() == pytest.approx(expected)
    assert noise[0].tolist() == pytest.approx([0.0, 1 / 12]), "what is averaged stays unbiased"
    no_prior = pooled_variances(torch.tensor([0.0, 1 / 3]), torch.tensor([3.0, 4.0]), weight=0.0)
    assert no_prior.tolist() == pytest.approx([0.0, 1 / 3])


@pytest.mark.slow
@pytest.mark.parametrize("continuations", [8, 32])
@pytest.mark.parametrize("p", [0.5, 0.1, 0.01])
def test_intervals_hold_the_exact_values_of_a_chain_with_a_rare_reward(p, continuations):
    """Eight tokens, each good with probability q; the reward is 1 with four good ones, which p of the completions have.

    With s / √n the nominal 95 % intervals held 35 to 94 % of the values, and states with an error of 0 were off.
    """
    time, needed, rows = 8, 4, 16

    def value(left, missing, q):
        return sum(math.comb(left, k) * q**k * (1 - q) ** (left - k) for k in range(max(missing, 0), left + 1))

    low, high = 0.0, 1.0
    for _ in range(50):
        q = (low + high) / 2
        low, high = (q, high) if value(time, needed, q) < p else (low, q)
    random, held, worst = generator(0), [], 0.0
    for _ in range(40):
        tokens = (torch.rand(rows, time, generator=random) < q).long()
        before, returns = tokens.cumsum(1) - tokens, Samples(rows, time)
        for at in range(time):
            good = (torch.rand(rows, continuations, time - at, generator=random) < q).sum(2) + before[:, at : at + 1]
            returns.add(torch.arange(rows), at, good >= needed)
        exact = [[value(time - at, needed - int(before[row, at]), q) for at in range(time)] for row in range(rows)]
        means, errors, _ = returns.with_errors()
        z = ((means - torch.tensor(exact, dtype=torch.float64)) / errors).abs()[errors.isfinite()]
        held.append(float((z <= 1.96).double().mean()))
        worst = max(worst, float(z.max()))
    assert 0.91 <= sum(held) / len(held) <= 0.99
    assert worst < 20


def test_samples_in_parts_are_those_at_once():
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    rows, whole, parts = torch.tensor([2, 0, 1]), Samples(3, 2), Samples(3, 2)
    whole.add(rows, 1, x)
    for part in x.split([1, 4, 30, 5], dim=1):
        parts.add(rows, 1, part)
    for one, other in zip(whole.with_errors(), parts.with_errors(), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-12, atol=1e-12)
    assert torch.equal(whole.counts, parts.counts)
    torch.testing.assert_close(whole.with_errors()[0][rows, 1], x.double().mean(1))
    torch.testing.assert_close(whole.with_errors().noise[rows, 1], x.double().var(1) / 40)


@pytest.mark.parametrize("offset", [1e6, -1e6, 1e9])
def test_a_large_offset_loses_nothing(offset):
    x = torch.randn(1, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    near, far = Samples(1, 1), Samples(1, 1)
    near.add(torch.tensor([0]), 0, x)
    far.add(torch.tensor([0]), 0, x + offset)
    (mean, error, _), (far_mean, far_error, _) = near.with_errors(), far.with_errors()
    assert float(far_mean - offset) == pytest.approx(float(mean), abs=1e-15 * abs(offset) + 1e-12)
    assert float(far_error) == pytest.approx(float(error), rel=1e-6)


def test_one_sample_has_no_error_and_neither_have_samples_that_are_all_equal():
    samples = Samples(1, 2)
    samples.add(torch.tensor([0]), 0, torch.tensor([[1.0]]))
    samples.add(torch.tensor([0]), 1, torch.tensor([[0.1] * 7]))
    means, errors, noise = samples.with_errors()
    assert means[0].isnan().tolist() == noise[0].isnan().tolist() == [True, False]
    assert float(noise[0, 1]) == 0.0
    assert errors[0].isnan().all(), "how far off the mean is cannot be told from them"


def test_an_environments_answer_parts_the_action_before_it_from_the_state_after_it():
    """Tokens 0 and 2 are the policy's: before the answer Q(s0, a0) alone is sampled, after it V(s2) alone."""
    returns = Returns(torch.tensor([[True, False, True, False]]))
    rows, at, values = torch.tensor([0] * 4), torch.tensor([0, 1, 2, 3]), torch.arange(8.0).view(4, 2)
    returns.add(rows, at, values, 10 + values)
    truth = returns.truth(torch.tensor([math.nan]), torch.tensor([3]))
    nan = pytest.approx(math.nan, nan_ok=True)
    assert truth.values.tolist() == [[0.5, nan, 4.5, nan]]
    assert truth.advantages.tolist() == [[12.5 - 0.5, nan, 16.5 - 4.5, nan]], "chance follows the last token too"


def test_returns_of_two_tokens_by_hand():
    """A completion of two tokens: from before the first V(s0), from before the second V(s1) and Q(s0, a0)."""
    returns = Returns(torch.ones(1, 2, dtype=torch.bool))
    values, actions = torch.tensor([[1.0, 3.0], [2.0, 4.0]]), torch.tensor([[math.nan] * 2, [1.5, 3.5]])
    returns.add(torch.tensor([0, 0]), torch.tensor([0, 1]), values, actions)
    truth = returns.truth(torch.tensor([5.0]), torch.tensor([2]))
    assert truth.values.tolist() == [[2.0, 3.0]]
    assert truth.value_errors.tolist() == [[1.0, 1.0]]
    assert truth.advantages.tolist() == [[2.5 - 2.0, 5.0 - 3.0]]
    assert truth.advantage_errors[0].tolist() == pytest.approx([math.sqrt(2), 1.0]), "the last reward is known"


@pytest.mark.parametrize(("time", "count"), [(10, 4), (3, 2), (7, 7), (5, 9), (1, 4), (1000, 4), (6, None)])
def test_states_are_spread_one_in_each_part(time, count):
    for seed in range(50):
        steps = sorted(spread(time, count, torch.Generator().manual_seed(seed)))
        parts = min(count or time, time)
        assert len(set(steps)) == parts
        assert all(k * time // parts <= step < (k + 1) * time // parts for k, step in enumerate(steps))


def test_each_step_of_a_part_comes_up():
    assert {spread(6, 2, torch.Generator().manual_seed(seed))[0] for seed in range(100)} == set(range(6))


def test_rounds_add_up_and_grow_where_time_is_limited():
    assert list(rounds(8, limited=False)) == [8]
    assert list(rounds(30, limited=True)) == [4, 4, 8, 14]
    assert list(rounds(3, limited=True)) == [3]


def test_random_numbers_of_any_seed_and_number_differ():
    draws = {float(torch.rand((), generator=generator(seed, n))) for seed in (0, 1, 2**62) for n in range(20)}
    assert len(draws) == 60
