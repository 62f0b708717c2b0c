"""Means and standard errors of sampled returns, and how audits spend their samples."""

import math

import pytest
import torch

from tokencredit.audit.truth import Returns, Samples, generator, rounds, spread


def test_a_mean_and_its_standard_error_by_hand():
    samples = Samples(2, 3)
    samples.add(torch.tensor([1]), 2, torch.tensor([[1.0, 2.0, 6.0]]))
    means, errors = samples.with_errors()
    assert float(means[1, 2]) == 3.0
    assert float(errors[1, 2]) == pytest.approx(math.sqrt((4 + 1 + 9) / 2 / 3))
    assert means.isnan().sum() == errors.isnan().sum() == 5, "nothing else is known"


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
    torch.testing.assert_close(whole.with_errors()[1][rows, 1], x.double().std(1) / math.sqrt(40))


@pytest.mark.parametrize("offset", [1e6, -1e6, 1e9])
def test_a_large_offset_loses_nothing(offset):
    x = torch.randn(1, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    near, far = Samples(1, 1), Samples(1, 1)
    near.add(torch.tensor([0]), 0, x)
    far.add(torch.tensor([0]), 0, x + offset)
    (mean, error), (far_mean, far_error) = near.with_errors(), far.with_errors()
    assert float(far_mean - offset) == pytest.approx(float(mean), abs=1e-15 * abs(offset) + 1e-12)
    assert float(far_error) == pytest.approx(float(error), rel=1e-6)


def test_one_sample_has_no_error_and_equal_samples_have_error_zero():
    samples = Samples(1, 2)
    samples.add(torch.tensor([0]), 0, torch.tensor([[1.0]]))
    samples.add(torch.tensor([0]), 1, torch.tensor([[0.1] * 7]))
    means, errors = samples.with_errors()
    assert means[0].isnan().tolist() == errors[0].isnan().tolist() == [True, False]
    assert float(errors[0, 1]) == 0.0
    assert samples.mean()[0].tolist() == [1.0, pytest.approx(0.1)], "a mean of one is one"


def test_returns_of_two_tokens_by_hand():
    """A completion of two tokens: from before the first V(s0), from before the second V(s1) and Q(s0, a0)."""
    returns = Returns(1, 2)
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
