import math
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokencredit.core.masked import explained_variance, moments, whiten, zero_outside

X = torch.tensor([[1.0, 2.0, math.nan], [3.0, math.inf, 6.0]])
MASK = torch.tensor([[True, True, False], [True, False, True]])


def test_moments_by_hand():
    # (1, 2, 3, 6): mean 3, squared deviations 4 + 1 + 0 + 9 = 14 over 4
    count, mean, variance = moments(X, MASK)
    assert (count, mean, variance) == (4, 3, 3.5)


def test_moments_of_numbers_whose_mean_float32_does_not_have():
    # The mean of 2²³ and 2²³ + 1 lies between two float32 numbers; about it, both are 0.5 away.
    x = torch.tensor([2.0**23, 2.0**23 + 1])
    _, mean, variance = moments(x, torch.ones(2, dtype=torch.bool))
    assert mean == 2.0**23
    assert variance == 0.25


def test_whiten_by_hand():
    deviation = 3.5**0.5
    expected = torch.tensor([[-2, -1, 0], [0, 0, 3]]) / deviation
    torch.testing.assert_close(whiten(X, MASK), expected)
    kept = torch.where(MASK, expected + 3, 0.0)
    torch.testing.assert_close(whiten(X, MASK, shift_mean=False), kept)


def test_explained_variance_by_hand():
    values = torch.tensor([[1.0, 2.0, math.nan], [3.0, 0.0, 4.0]])
    # residuals (0, 0, 0, 2): variance 1 − 0.25 = 0.75
    torch.testing.assert_close(explained_variance(values, X, MASK), torch.tensor(1 - 0.75 / 3.5))
    assert explained_variance(X, X, MASK) == 1
    assert explained_variance(torch.full_like(X, 7.0), X, MASK) == 0
    assert explained_variance(-X, X, MASK) == -3
    assert explained_variance(X, torch.ones_like(X), MASK).isnan()


def test_returns_that_differ_by_rounding_have_nothing_to_explain():
    returns = torch.tensor([[0.7, 0.1 + 0.6, 0.7 + 6e-8]])
    assert returns.unique().numel() > 1
    assert explained_variance(torch.tensor([[0.5, 0.6, 0.7]]), returns, torch.ones_like(returns, dtype=bool)).isnan()


@st.composite
def masked_tensors(draw):
    shape = draw(st.integers(1, 5)), draw(st.integers(1, 20))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    mask = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.2, 0.7, 1.0]))
    mask.view(-1)[:2] = True
    offset, scale = draw(st.sampled_from([(0.0, 1.0), (5.0, 1e-3), (-1e4, 1.0), (0.0, 1e-8), (3.0, 1e8)]))
    x = offset + scale * torch.randn(shape, generator=generator)
    return torch.where(mask, x, draw(st.sampled_from([0.0, math.nan, math.inf]))), mask


@given(masked_tensors())
def test_moments_by_definition(example):
    x, mask = example
    count, mean, variance = moments(x, mask)
    acted = x[mask].double()
    assert count == acted.numel()
    torch.testing.assert_close(mean.double(), acted.mean(), rtol=1e-6, atol=1e-6 * float(acted.std(correction=0)))
    torch.testing.assert_close(variance.double(), acted.var(correction=0), rtol=1e-4, atol=1e-30)


@given(masked_tensors())
def test_whitened_has_mean_0_and_the_guarded_deviation(example):
    x, mask = example
    if x[mask].unique().numel() == 1:
        return
    variance = float(x[mask].double().var(correction=0))
    deviation = (variance / (variance + 1e-8)) ** 0.5  # 1 where numbers differ by much more than 1e-4
    for shift_mean in (True, False):
        whitened = whiten(x, mask, shift_mean=shift_mean)
        assert (whitened[~mask] == 0).all()
        acted = whitened[mask].double()
        mean = 0.0 if shift_mean else x[mask].double().mean().item()
        # With the mean kept, it is that of x as float32 can know it.
        rounding = 1e-5 + (0.0 if shift_mean else 1e-6 * x[mask].abs().max().item())
        assert acted.mean().item() == pytest.approx(mean, abs=rounding)
        assert acted.std(correction=0).item() == pytest.approx(deviation, abs=rounding, rel=1e-3)


@pytest.mark.parametrize("constant", [0.0, 0.1, -1e6])
def test_whitening_a_constant_gives_zeros(constant):
    x, mask = torch.full((1, 1000), constant), torch.ones(1, 1000, dtype=torch.bool)
    assert whiten(x, mask).abs().max() == 0
    torch.testing.assert_close(whiten(x, mask, shift_mean=False), x)


class Processes:
    """Runs one function a shard, side by side, with a `reduce` that sums over them as a process group would."""

    def __init__(self, count):
        self.count, self.barrier = count, threading.Barrier(count)
        self.parts = [None] * count

    def run(self, function, shards):
        results = [None] * self.count

        def work(rank):
            def reduce(x):
                self.parts[rank] = x
                self.barrier.wait()
                total = torch.stack(self.parts).sum(0)
                self.barrier.wait()
                return total

            results[rank] = function(*shards[rank], reduce=reduce)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


@pytest.mark.slow
@given(masked_tensors(), st.integers(1, 4))
def test_processes_agree_with_the_whole(example, count):
    x, mask = example
    shards = list(zip(x.tensor_split(count), mask.tensor_split(count), strict=True))
    whole = moments(x, mask)
    for part in Processes(count).run(moments, shards):
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-6 * float(whole[2].sqrt()))
    whitened = torch.cat(Processes(count).run(whiten, shards))
    torch.testing.assert_close(whitened, whiten(x, mask), rtol=1e-3, atol=1e-3)


def test_a_process_without_acted_steps_takes_part():
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    results = Processes(2).run(moments, [(X, MASK), (X, nothing)])
    assert results[0] == results[1] == (4, 3, 3.5)
    values = torch.zeros_like(X)
    explained = Processes(2).run(explained_variance, [(values, X, MASK), (values, X, nothing)])
    assert explained[0] == explained[1] == 0


def test_no_gradient_comes_from_outside_the_mask():
    x = X.clone().requires_grad_()
    (moments(x, MASK)[1] + whiten(x, MASK).square().sum()).backward()
    assert (x.grad[~MASK] == 0).all()
    assert x.grad.isfinite().all()


def test_half_precision_is_summed_in_float32():
    x, mask = torch.ones(1, 5000, dtype=torch.bfloat16), torch.ones(1, 5000, dtype=torch.bool)
    assert moments(x, mask)[0] == 5000
    assert whiten(x, mask).dtype == torch.float32
    assert moments(x.double(), mask)[1].dtype == torch.float64


def test_refusals():
    nothing = torch.zeros_like(MASK)
    for function in (moments, whiten):
        with pytest.raises(ValueError, match="mask has no true element"):
            function(X, nothing)
    with pytest.raises(ValueError, match=r"mask has shape \(2, 2\); it must be \(2, 3\)"):
        zero_outside(X, MASK[:, :2])
    with pytest.raises(ValueError, match="mask has dtype"):
        zero_outside(X, MASK.long())
