import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.proofs import proofs
from tokencredit.core.episodes import reverse_scan


def by_definition(deltas, decays, dtype=torch.float64):
    following = torch.zeros(deltas.shape[:-1], dtype=dtype)
    results = []
    for t in reversed(range(deltas.shape[-1])):
        following = deltas[..., t].to(dtype) + decays[..., t].to(dtype) * following
        results.append(following)
    return torch.stack(results[::-1], dim=-1)


def test_a_reverse_scan_by_hand():
    # A₂ = 3;  A₁ = 2 + 0.5 · 3 = 3.5;  A₀ = 1 + 2 · 3.5 = 8
    scanned = reverse_scan(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 0.5, 7.0]))
    assert scanned.tolist() == [8.0, 3.5, 3.0]


@given(
    rows=st.integers(1, 3),
    time=st.integers(1, 300),
    low=st.sampled_from([-1.0, 0.0, 0.9]),
    high=st.sampled_from([0.0, 0.99, 1.0, 1.01]),
    cuts=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**32),
)
def test_a_reverse_scan_is_exact_to_float32_rounding(rows, time, low, high, cuts, seed):
    generator = torch.Generator().manual_seed(seed)
    deltas = torch.randn(rows, time, generator=generator)
    decays = low + (high - low) * torch.rand(rows, time, generator=generator)
    decays = torch.where(torch.rand(rows, time, generator=generator) < cuts, 0.0, decays)
    error = (reverse_scan(deltas, decays).double() - by_definition(deltas, decays)).abs()
    # What a sum of these terms can be expected to lose: a few roundings of its largest partial sum.
    size = by_definition(deltas.abs(), decays.abs())
    assert (error <= 8 * torch.finfo(torch.float32).eps * size).all()


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.95, *proofs(0.999, 1.0)])
def test_long_rows_are_as_exact_as_a_loop(decay):
    deltas = torch.randn(4, 16_384, generator=torch.Generator().manual_seed(0))
    decays = torch.full_like(deltas, decay)
    expected = by_definition(deltas, decays)
    error = (reverse_scan(deltas, decays) - expected).square().mean().sqrt()
    loop_error = (by_definition(deltas, decays, torch.float32) - expected).square().mean().sqrt()
    assert error <= 3 * loop_error


def test_decays_may_be_shared_by_all_rows():
    generator = torch.Generator().manual_seed(0)
    deltas, decays = torch.randn(3, 4, 50, generator=generator), torch.rand(50, generator=generator)
    expected = reverse_scan(deltas, decays.expand(3, 4, 50))
    for shared in (decays, decays[None]):
        torch.testing.assert_close(reverse_scan(deltas, shared), expected)


def test_a_reverse_scan_is_float32_or_wider_without_gradient():
    deltas, decays = torch.ones(2, 5), torch.ones(2, 5)
    assert reverse_scan(deltas.half(), decays.bfloat16()).dtype == torch.float32
    assert reverse_scan(deltas.double(), decays).dtype == torch.float64
    assert reverse_scan(torch.zeros(0, 5), torch.zeros(0, 5)).shape == (0, 5)
    assert not reverse_scan(deltas.requires_grad_(), decays).requires_grad
    with torch.inference_mode():
        assert reverse_scan(deltas, decays)[0].tolist() == [5, 4, 3, 2, 1]


def test_the_arguments_are_left_alone():
    deltas, decays = torch.ones(2, 9), torch.ones(2, 9)
    reverse_scan(deltas, decays)
    assert torch.equal(deltas, torch.ones(2, 9))
    assert torch.equal(decays, torch.ones(2, 9))


def test_refusals():
    with pytest.raises(ValueError, match="decays has shape"):
        reverse_scan(torch.zeros(2, 3), torch.zeros(3, 3))
    with pytest.raises(ValueError, match=r"decays has shape \(4,\); it must be \(3,\)"):
        reverse_scan(torch.zeros(2, 3), torch.zeros(4))
    with pytest.raises(ValueError, match="deltas is a scalar"):
        reverse_scan(torch.tensor(1.0), torch.tensor(1.0))
