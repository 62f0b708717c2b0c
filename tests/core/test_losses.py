import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokencredit.core.logprobs import token_stats
from tokencredit.core.losses import (
    REDUCTIONS,
    RatioStats,
    clipped_surrogate,
    histogram_loss,
    histogram_values,
    ratio_stats,
    reduction_count,
    smoothed_histogram,
    token_weights,
    value_loss,
    weighted_sum,
)

T, F = True, False
NAN = math.nan

# --- worked by hand -------------------------------------------------------------------------------------------------

RATIO = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1, 5.0])
ADVANTAGES = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0, -2.0])


@pytest.mark.parametrize(
    ("clip", "dual_clip", "expected"),
    [
        (0.2, None, [-2.4, 3.0, -1.0, 1.6, -2.2, 10.0]),
        ((0.1, 0.6), None, [-3.0, 3.0, -1.0, 1.8, -2.2, 10.0]),
        (0.2, 3.0, [-2.4, 3.0, -1.0, 1.6, -2.2, 6.0]),
        (0.0, None, [-2.0, 3.0, -1.0, 2.0, -2.0, 10.0]),
    ],
)
def test_surrogate_by_hand(clip, dual_clip, expected):
    loss = clipped_surrogate(RATIO.log(), torch.zeros(6), ADVANTAGES, clip=clip, dual_clip=dual_clip)
    torch.testing.assert_close(loss, torch.tensor(expected))


def test_the_gradient_of_the_surrogate_is_zero_where_it_is_clipped():
    logprobs = RATIO.log().requires_grad_()
    clipped_surrogate(logprobs, torch.zeros(6), ADVANTAGES, clip=0.2, dual_clip=3.0).sum().backward()
    # d(−r A)/d log π = −r A; nothing where going further would not pay, or where the dual clip holds.
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, 3.0, -1.0, 0.0, -2.2, 0.0]))


def test_value_loss_by_hand():
    values, old, returns = torch.tensor([3.0, 1.1, NAN]), torch.tensor([1.0, 1.0, NAN]), torch.tensor([3.0, 2.0, NAN])
    mask = torch.tensor([T, T, F])
    torch.testing.assert_close(value_loss(values, old, returns, mask), torch.tensor([0.0, 0.405, 0.0]))
    # The first is clipped to 1.2: ½ (1.2 − 3)² = 1.62. The second moved 0.1, which is allowed.
    torch.testing.assert_close(value_loss(values, old, returns, mask, clip=0.2), torch.tensor([1.62, 0.405, 0.0]))


EDGES = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])


def test_a_smoothed_histogram_by_hand():
    """A Gaussian of deviation 0.75 around 2: Φ(4/3) = 0.90879 and Φ(8/3) = 0.99617, cut off at ± 2."""
    inner, outer = 0.90879 - 0.5, 0.99617 - 0.90879
    whole = 2 * (inner + outer)
    mass = smoothed_histogram(torch.tensor([2.0, 0.0]), EDGES)
    torch.testing.assert_close(mass[0], torch.tensor([outer, inner, inner, outer]) / whole, atol=1e-4, rtol=0)
    # Around the outer edge 0: Φ(4/3) − ½, Φ(8/3) − Φ(4/3), Φ(4) − Φ(8/3) = 0.00380, the rest 3e-5.
    expected = torch.tensor([inner, outer, 0.0038, 3.1e-5])
    torch.testing.assert_close(mass[1], expected / expected.sum(), atol=1e-4, rtol=0)


@given(st.floats(-1, 1), st.integers(16, 200), st.floats(-1e3, 1e3), st.floats(1e-2, 1e3))
def test_the_mean_of_a_smoothed_histogram_is_the_target(place, bins, low, width):
    edges = low + width * torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    bin_width, middle = width / bins, low + width / 2
    target = torch.tensor(middle + place * (width / 2 - 3 * bin_width), dtype=torch.float64)
    mass = smoothed_histogram(target, edges)
    assert mass.sum().item() == pytest.approx(1)
    mean = histogram_values(mass.log(), edges).item()
    # Three bins from the end, four deviations, the tail that is cut moves the mean by 0.75 φ(4) = 1.0e-4 bins, and its
    # bins' middles by a tenth of that: 1.11e-4 measured.
    assert abs(mean - target.item()) < 1.2e-4 * bin_width + 1e-6 * abs(mean)


def test_a_target_outside_the_support_counts_as_its_end():
    mass = smoothed_histogram(torch.tensor([-50.0, 0.0, 1e30, 4.0]), EDGES)
    assert torch.equal(mass[0], mass[1])
    assert torch.equal(mass[2], mass[3])


def test_histogram_loss_by_hand():
    """Four even bins cost log 4 whatever the target; the value is the middle. A bin that is sure has its centre."""
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0], [-50.0, 0.0, -50.0, -50.0]])
    loss = histogram_loss(logits, torch.tensor([0.3, 1.5]), EDGES)
    assert loss[0].item() == pytest.approx(math.log(4))
    mass = smoothed_histogram(torch.tensor(1.5), EDGES)
    assert loss[1].item() == pytest.approx(50 * (1 - mass[1]).item(), rel=1e-5)
    torch.testing.assert_close(histogram_values(logits, EDGES), torch.tensor([2.0, 1.5]))
    with pytest.raises(ValueError, match="edges has shape"):
        histogram_loss(logits, torch.zeros(2), EDGES[:-1])


def test_the_histogram_of_least_loss_has_the_mean_return():
    """Its gradient, softmax(logits) − mean of the returns' histograms, is 0 there; PyTorch's cross-entropy agrees."""
    edges = torch.linspace(-2, 3, 52, dtype=torch.float64)
    returns = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    masses = smoothed_histogram(returns, edges)
    logits = masses.mean(0).clamp(min=1e-30).log().expand(4, -1).clone().requires_grad_()
    losses = histogram_loss(logits, returns, edges)
    torch.testing.assert_close(losses, torch.nn.functional.cross_entropy(logits, masses, reduction="none"))
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    torch.testing.assert_close(gradient.sum(0), torch.zeros(51, dtype=torch.float64), atol=1e-9, rtol=0)
    assert histogram_values(logits[0], edges).item() == pytest.approx(0.25, abs=1e-5)


def test_weights_by_hand():
    mask = torch.tensor([[T, T, F], [T, F, F], [F, F, F]])
    torch.testing.assert_close(token_weights(mask, "token"), mask / 3)
    assert token_weights(mask, "sequence").tolist() == [[0.25, 0.25, 0.0], [0.5, 0.0, 0.0], [0.0] * 3]
    torch.testing.assert_close(token_weights(mask, "constant"), mask / 9)
    assert token_weights(mask, "constant", count=4).tolist() == [[0.25, 0.25, 0.0], [0.25, 0.0, 0.0], [0.0] * 3]
    assert token_weights(mask[:, 0], "sequence").tolist() == [0.5, 0.5, 0.0]
    assert [int(reduction_count(mask, by)) for by in REDUCTIONS] == [3, 2, 9]


def test_ratio_stats_by_hand():
    mask = torch.tensor([T, T, T, T, F])
    log_ratio = torch.tensor([2.0, 0.5, 1.1, 1.0, 9.0]).log()
    metrics = ratio_stats(log_ratio, torch.zeros(5), mask, clip=(0.2, 1.5)).metrics()
    assert metrics["clip_fraction"] == 0.25  # 0.5 is below 0.8; 2 is not above 2.5
    others = ratio_stats(log_ratio, torch.zeros(5), mask, clipped=torch.ones(5, dtype=torch.bool)).metrics()
    assert others == metrics | {"clip_fraction": 1.0}
    assert metrics["ratio_mean"] == pytest.approx((2.0 + 0.5 + 1.1 + 1.0) / 4)
    assert metrics["ratio_max"] == pytest.approx(2.0)
    assert metrics["ratio_min"] == pytest.approx(0.5)
    logs = [math.log(r) for r in (2.0, 0.5, 1.1, 1.0)]
    assert metrics["approx_kl_k1"] == pytest.approx(-sum(logs) / 4, abs=1e-7)
    assert metrics["approx_kl_k3"] == pytest.approx((1 - 0.5 + 0.1 + 0 - sum(logs)) / 4, abs=1e-7)


# --- properties -----------------------------------------------------------------------------------------------------


@st.composite
def batches(draw):
    """Per-token tensors of one batch, with anything where the mask is false."""
    rows, time = draw(st.integers(1, 8)), draw(st.integers(1, 10))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    mask = torch.rand(rows, time, generator=generator) < draw(st.sampled_from([0.3, 0.8, 1.0]))
    mask[0, 0] = True
    garbage = draw(st.sampled_from([0.0, 1e30, -math.inf, math.nan]))
    tensors = torch.randn(7, rows, time, generator=generator, dtype=torch.float64)
    return mask, torch.where(mask, tensors, garbage)


small = st.floats(-3.0, 3.0)


@given(small, small, small, st.floats(0.0, 1.0), st.floats(0.0, 2.0), st.none() | st.floats(1.01, 4.0))
def test_surrogate_by_definition(logprob, old_logprob, advantage, below, above, dual_clip):
    ratio = math.exp(logprob - old_logprob)
    objective = min(ratio * advantage, min(max(ratio, 1 - below), 1 + above) * advantage)
    if dual_clip is not None and advantage < 0:
        objective = max(objective, dual_clip * advantage)
    tensors = (torch.tensor([x], dtype=torch.float64) for x in (logprob, old_logprob, advantage))
    loss = clipped_surrogate(*tensors, clip=(below, above), dual_clip=dual_clip)
    assert loss.item() == pytest.approx(-objective)


@given(small, small, small, st.none() | st.floats(0.0, 2.0))
def test_value_loss_by_definition(value, old_value, target, clip):
    expected = 0.5 * (value - target) ** 2
    if clip is not None:
        clipped = min(max(value, old_value - clip), old_value + clip)
        expected = max(expected, 0.5 * (clipped - target) ** 2)
    tensors = [torch.tensor([x], dtype=torch.float64) for x in (value, old_value, target)]
    assert value_loss(*tensors, clip=clip).item() == pytest.approx(expected)


def losses(mask, tensors, weights):
    """The whole PPO loss of some rows, its gradient in what the model gives, and the ratios."""
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    logprobs, values, entropy = leaves
    old_logprobs, advantages, old_values, returns = tensors[3:]
    policy = clipped_surrogate(logprobs, old_logprobs, advantages, mask, clip=(0.2, 0.3), dual_clip=3.0)
    value = value_loss(values, old_values, returns, mask, clip=0.2)
    sums = [weighted_sum(x, weights) for x in (policy, value, entropy)]
    loss = sums[0] + 0.7 * sums[1] - 0.1 * sums[2]
    gradients = torch.autograd.grad(loss, leaves)
    return loss.detach(), torch.stack(gradients), ratio_stats(logprobs, old_logprobs, mask, clip=(0.2, 0.3))


@given(batches(), st.sampled_from(REDUCTIONS), st.sets(st.integers(0, 8)))
def test_splitting_changes_no_loss_and_no_gradient(batch, by, cuts):
    mask, tensors = batch
    whole_loss, whole_gradients, whole_stats = losses(mask, tensors, token_weights(mask, by))
    edges = sorted({0, len(mask), *(cut for cut in cuts if cut <= len(mask))})
    parts = [slice(start, end) for start, end in pairwise(edges)]
    count = sum(reduction_count(mask[part], by) for part in parts)
    results = [losses(mask[p], tensors[:, p], token_weights(mask[p], by, count=count)) for p in parts]
    torch.testing.assert_close(sum(loss for loss, _, _ in results), whole_loss)
    torch.testing.assert_close(torch.cat([gradients for _, gradients, _ in results], dim=1), whole_gradients)
    parts = [stats for _, _, stats in results]
    stats = RatioStats(sum(p.sums for p in parts), torch.stack([p.extremes for p in parts]).amax(0))
    assert stats.metrics() == pytest.approx(whole_stats.metrics())


@given(batches(), st.sampled_from(REDUCTIONS))
def test_padding_of_any_content_changes_nothing(batch, by):
    mask, tensors = batch
    clean = losses(mask, torch.where(mask, tensors, 0.0), token_weights(mask, by))
    results = losses(mask, tensors, token_weights(mask, by))
    assert torch.equal(results[0], clean[0])
    assert torch.equal(results[1], clean[1])
    assert (results[1][:, ~mask] == 0).all()
    assert results[2].metrics() == clean[2].metrics()


@given(st.integers(0, 2**32), st.sampled_from([0.7, 1.0]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_before_the_first_step_the_ratio_is_exactly_1(seed, temperature, dtype):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(3, 5, 8, generator=generator).to(dtype)
    weight = torch.randn(20, 8, generator=generator).to(dtype).requires_grad_()
    tokens = torch.randint(20, (3, 5), generator=generator)
    advantages = torch.randn(3, 5, generator=generator)
    with torch.no_grad():
        old_logprobs, *_ = token_stats(hidden, weight, tokens, temperature=temperature)
    logprobs, *_ = token_stats(hidden, weight, tokens, temperature=temperature)
    assert ratio_stats(logprobs, old_logprobs, clip=0.0).metrics() == {
        "clip_fraction": 0.0,
        "approx_kl_k1": 0.0,
        "approx_kl_k3": 0.0,
        "ratio_mean": 1.0,
        "ratio_max": 1.0,
        "ratio_min": 1.0,
    }
    # And then the surrogate's gradient is the policy gradient, E[A ∇log π].
    (gradient,) = torch.autograd.grad(clipped_surrogate(logprobs, old_logprobs, advantages).sum(), logprobs)
    assert torch.equal(gradient, -advantages)


def test_a_ratio_that_would_overflow_stays_finite():
    logprobs = torch.tensor([500.0, -500.0, 500.0, -math.inf], requires_grad=True)
    loss = clipped_surrogate(logprobs, torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, -1.0]))
    assert loss.isfinite().all()
    loss.sum().backward()
    assert logprobs.grad.isfinite().all()


def test_statistics_of_ratios_are_not_clamped():
    # −log r is 60 and 0: a mean of 30. A clamp at 20 nats, as in the loss, would give 10.
    metrics = ratio_stats(torch.tensor([-61.0, -1.0]), torch.tensor([-1.0, -1.0])).metrics()
    assert metrics["approx_kl_k1"] == 30.0
    assert metrics["approx_kl_k3"] == pytest.approx((math.exp(-60) - 1 + 60) / 2)
    metrics = ratio_stats(torch.tensor([-1.0, -1.0]), torch.tensor([-101.0, -1.0])).metrics()
    assert metrics["ratio_max"] == pytest.approx(math.exp(100))
    assert metrics["ratio_mean"] == pytest.approx((math.exp(100) + 1) / 2)
    # A token that has become impossible: an infinite KL, and a ratio of 0.
    metrics = ratio_stats(torch.tensor([-math.inf, 0.0]), torch.zeros(2)).metrics()
    assert (metrics["approx_kl_k1"], metrics["ratio_min"], metrics["ratio_mean"]) == (math.inf, 0.0, 0.5)


def test_half_precision_is_computed_in_float32():
    half = torch.zeros(3, dtype=torch.bfloat16)
    assert clipped_surrogate(half, half, half).dtype == torch.float32
    assert value_loss(half, half, half).dtype == torch.float32
    assert weighted_sum(half, torch.ones(3)).dtype == torch.float32


def test_targets_get_no_gradient():
    tensors = [torch.randn(4, requires_grad=True) for _ in range(6)]
    clipped_surrogate(tensors[0], tensors[1], tensors[2]).sum().backward()
    value_loss(tensors[3], tensors[4], tensors[5], clip=0.2).sum().backward()
    assert [x.grad is not None for x in tensors] == [True, False, False, True, False, False]


# --- refusals -------------------------------------------------------------------------------------------------------

X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: clipped_surrogate(X, X[:1], X), "old_logprobs has shape"),
        (lambda: clipped_surrogate(X, X, X[0]), "advantages has shape"),
        (lambda: clipped_surrogate(X, X, X, X == 0, clip=-0.1), "clip is -0.1"),
        (lambda: clipped_surrogate(X, X, X, clip=(0.1, math.nan)), "clip is nan"),
        (lambda: clipped_surrogate(X, X, X, clip=(1.2, 0.1)), r"clip is \(1.2, 0.1\)"),
        (lambda: clipped_surrogate(X, X, X, dual_clip=1.0), r"dual_clip is 1.0; it must be above 1"),
        (lambda: clipped_surrogate(X, X, X, X), "mask has dtype"),
        (lambda: clipped_surrogate(X, X, X, X[0] == 0), "mask has shape"),
        (lambda: value_loss(X, X[0], X), "old_values has shape"),
        (lambda: value_loss(X, X, X[0]), "returns has shape"),
        (lambda: value_loss(X, X, X, clip=-1.0), "value clip is -1.0"),
        (lambda: token_weights(X == 0, by="row"), "by is 'row'; it may be token, sequence, constant"),
        (lambda: token_weights(X), "mask has dtype"),
        (lambda: token_weights(X != 0), "count is 0"),
        (lambda: token_weights(X == 0, count=0), "count is 0"),
        (lambda: reduction_count(X == 0, "rows"), "by is 'rows'"),
        (lambda: weighted_sum(X, X[0]), "weights has shape"),
        (lambda: ratio_stats(X, X[0]), "old_logprobs has shape"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
