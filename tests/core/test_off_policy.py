import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokencredit.core.off_policy import (
    LEVELS,
    correction,
    correction_stats,
    divergence_mask,
    importance_ratios,
    interpolated_logprobs,
    sequence_surrogate,
    weighted_policy_gradient,
)

T, F = True, False
NAN = math.nan

# --- worked by hand -------------------------------------------------------------------------------------------------

MASK = torch.tensor([[T, F, T, T], [T, T, F, F]])
RATIO = torch.tensor([[0.5, NAN, 2.0, 4.0], [0.8, 1.25, NAN, NAN]])
BEHAVIOR = torch.full((2, 4), 0.1).log()
LOGPROBS = BEHAVIOR + RATIO.log()
ONE = 1.0


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("token", [[0.5, ONE, 2.0, 4.0], [0.8, 1.25, ONE, ONE]]),
        ("sequence", [[4.0, ONE, 4.0, 4.0], [1.0, 1.0, ONE, ONE]]),
        ("geometric", [[4 ** (1 / 3), ONE, 4 ** (1 / 3), 4 ** (1 / 3)], [1.0, 1.0, ONE, ONE]]),
    ],
)
def test_ratios_by_hand(level, expected):
    ratios = importance_ratios(LOGPROBS, BEHAVIOR, MASK, level=level)
    torch.testing.assert_close(ratios, torch.tensor(expected))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"high": 2.0}, [[0.5, 0.0, 2.0, 2.0], [0.8, 1.25, 0.0, 0.0]]),
        ({"low": 0.7, "high": 2.0}, [[0.7, 0.0, 2.0, 2.0], [0.8, 1.25, 0.0, 0.0]]),
        ({"outside": "mask", "low": 0.7, "high": 3.0}, [[0.0, 0.0, 2.0, 0.0], [0.8, 1.25, 0.0, 0.0]]),
        ({"outside": "mask", "level": "sequence", "high": 3.0}, [[0.0] * 4, [1.0, 1.0, 0.0, 0.0]]),
        (
            {"outside": "mask", "level": "geometric", "low": 0.9, "high": 1.7},
            [[1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]],
        ),
        ({"outside": "mask", "level": "geometric", "low": 1.1}, [[1.0, 0.0, 1.0, 1.0], [0.0] * 4]),
        ({"level": "geometric", "high": 1.5}, [[1.5, 0.0, 1.5, 1.5], [1.0, 1.0, 0.0, 0.0]]),
    ],
)
def test_corrections_by_hand(options, expected):
    torch.testing.assert_close(correction(LOGPROBS, BEHAVIOR, MASK, **options), torch.tensor(expected))


def test_the_published_vector_of_icepop():
    """verl's test of IcePop: ratios 0.4, 0.8 and 6 in the band 0.5 to 5, and their effective sample size."""
    ratios, mask = torch.tensor([[0.4, 0.8, 6.0]]), torch.ones(1, 3, dtype=torch.bool)
    behavior = -ratios.log()
    weights = correction(torch.zeros(1, 3), behavior, mask, outside="mask", low=0.5, high=5.0)
    torch.testing.assert_close(weights, torch.tensor([[0.0, 0.8, 0.0]]))
    metrics = correction_stats(weights, torch.zeros(1, 3), behavior, mask).metrics()
    assert metrics["weight_ess"] == pytest.approx(1 / 3)
    assert metrics["weight_zero"] == pytest.approx(2 / 3)
    assert metrics["weight_mean"] == pytest.approx(0.8 / 3)
    assert metrics["behavior_ratio"] == pytest.approx(7.2 / 3)
    without = correction_stats(None, torch.zeros(1, 3), behavior, mask).metrics()
    assert without == {name: metrics[name] for name in ("behavior_ratio", "behavior_kl")}


def test_distance_from_the_behavior_policy_is_not_clamped():
    now, behavior = torch.tensor([[-61.0, -1.0, NAN]]), torch.tensor([[-1.0, -1.0, -1.0]])
    metrics = correction_stats(None, now, behavior, torch.tensor([[T, T, F]])).metrics()
    assert metrics == {"behavior_ratio": pytest.approx(0.5), "behavior_kl": 30.0}


def test_interpolation_in_float64_keeps_its_precision():
    behavior, current = (torch.tensor([x], dtype=torch.float64) for x in (-4.0, -1.0))
    assert float(interpolated_logprobs(behavior, current, torch.tensor([3]))) == pytest.approx(-2.0, abs=1e-15)


def test_interpolation_by_hand():
    behavior, current = torch.tensor([-2.0, -2.0, -2.0, -2.0]), torch.tensor([-1.0, -1.0, -1.0, -1.0])
    proximal = interpolated_logprobs(behavior, current, torch.tensor([0, 1, 2, 4]))
    torch.testing.assert_close(proximal, torch.tensor([-2.0, -2.0, -1.5, -1.25]))


def test_cispo_and_sao_by_hand():
    logprobs, advantages = LOGPROBS.nan_to_num(-5.0).requires_grad_(), torch.tensor([[1.0], [-2.0]]).expand(2, 4)
    cispo = correction(logprobs, BEHAVIOR, MASK, high=1.2)
    weighted_policy_gradient(logprobs, advantages, cispo, MASK).sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-0.5, 0.0, -1.2, -1.2], [1.6, 2.4, 0.0, 0.0]]))
    logprobs.grad = None
    sao = correction(logprobs, BEHAVIOR, MASK, outside="mask", low=0.7, high=2.0)
    loss = weighted_policy_gradient(logprobs, advantages, sao, MASK)
    loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, 0.0, -2.0, 0.0], [1.6, 2.5, 0.0, 0.0]]))
    torch.testing.assert_close(loss[0, 2], -2 * logprobs[0, 2])


def test_gspo_by_hand():
    logprobs, mask = torch.tensor([[0.2, 0.1]]).requires_grad_(), torch.tensor([[T, T]])
    old, up, down = torch.zeros(1, 2), torch.ones(1, 2), -torch.ones(1, 2)
    s = math.exp(0.15)
    free = sequence_surrogate(logprobs, old, up, mask, clip=0.2)
    torch.testing.assert_close(free, torch.full((1, 2), -s))
    free.mean().backward()
    torch.testing.assert_close(logprobs.grad, torch.full((1, 2), -s / 2))  # −s · ∇ of the mean log-ratio
    logprobs.grad = None
    clipped = sequence_surrogate(logprobs, old, up, mask, clip=0.1)
    torch.testing.assert_close(clipped, torch.full((1, 2), -1.1))
    clipped.sum().backward()
    assert not logprobs.grad.any(), "both tokens are clipped, although the ratio of the second is within the range"
    torch.testing.assert_close(sequence_surrogate(logprobs, old, down, mask, clip=0.1), torch.full((1, 2), s))


@pytest.mark.parametrize(
    ("divergence", "limit", "expected"),
    [
        # π − μ: +0.3, −0.3, +0.05 (ratio 6)
        ("tv", 0.2, [0.0, 0.4, 6.0]),
        ("tv", (0.2, 0.4), [1.6, 0.4, 6.0]),
        ("tv", 0.04, [0.0, 0.4, 0.0]),
        # KL(0.5 ‖ 0.8) = 0.2231, KL(0.01 ‖ 0.06) = 0.0324
        ("kl", 0.1, [0.0, 0.4, 6.0]),
        ("kl", 0.03, [0.0, 0.4, 0.0]),
        ("kl", 0.23, [1.6, 0.4, 6.0]),
    ],
)
def test_dppo_by_hand(divergence, limit, expected):
    behavior, now = torch.tensor([[0.5, 0.5, 0.01]]).log(), torch.tensor([[0.8, 0.2, 0.06]]).log()
    mask = torch.ones(1, 3, dtype=torch.bool)
    weights = divergence_mask(now, behavior, torch.ones(1, 3), mask, divergence=divergence, limit=limit)
    torch.testing.assert_close(weights, torch.tensor([expected]))


def test_dppo_stops_a_token_that_fell_and_is_pushed_down():
    behavior, now, mask = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.2, 0.8]]).log(), torch.tensor([[T, T]])
    weights = divergence_mask(now, behavior, -torch.ones(1, 2), mask, limit=0.2)
    torch.testing.assert_close(weights, torch.tensor([[0.0, 1.6]]))
    capped = divergence_mask(now, behavior, -torch.ones(1, 2), mask, limit=0.2, cap=1.5)
    torch.testing.assert_close(capped, torch.tensor([[0.0, 1.5]]))


# --- properties -----------------------------------------------------------------------------------------------------


def random_batch(seed, spread=0.3, batch=6, time=5):
    generator = torch.Generator().manual_seed(seed)
    behavior = -torch.rand(batch, time, generator=generator) * 3 - 0.05
    logprobs = (behavior + spread * torch.randn(batch, time, generator=generator)).clamp(max=-1e-3)
    mask = torch.rand(batch, time, generator=generator) < 0.7
    advantages = torch.randn(batch, time, generator=generator)
    return logprobs, behavior, mask, advantages


@given(st.integers(0, 10_000), st.sampled_from(LEVELS))
def test_on_policy_every_weight_is_one(seed, level):
    logprobs, _, mask, _ = random_batch(seed)
    for outside in ("clip", "mask"):
        weights = correction(logprobs, logprobs, mask, level=level, outside=outside, low=0.9, high=1.1)
        assert torch.equal(weights, mask.float())


@given(st.integers(0, 10_000))
def test_values_outside_the_mask_have_no_effect(seed):
    logprobs, behavior, mask, advantages = random_batch(seed)
    broken = [x.masked_fill(~mask, NAN) for x in (logprobs, behavior, advantages)]

    def results(logprobs, behavior, advantages):
        logprobs = logprobs.clone().requires_grad_()
        weights = [correction(logprobs, behavior, mask, level=level, outside="mask", high=1.5) for level in LEVELS]
        weights += [divergence_mask(logprobs, behavior, advantages, mask, divergence=name) for name in ("tv", "kl")]
        losses = [weighted_policy_gradient(logprobs, advantages, w, mask) for w in weights]
        losses.append(sequence_surrogate(logprobs, behavior, advantages, mask, clip=0.1))
        torch.stack(losses).sum().backward()
        return torch.stack([*weights, *(x.detach() for x in losses), logprobs.grad])

    clean = results(logprobs, behavior, advantages)
    assert torch.equal(results(*broken), clean)
    assert not clean[:, ~mask].any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": "row"}, "level is 'row'; it may be token, sequence, geometric"),
        ({"outside": "drop"}, "outside is 'drop'; it may be clip, mask"),
        ({"low": -1.0}, "low is -1.0; it must be at least 0 and finite"),
        ({"low": 2.0, "high": 1.0}, "high is 1.0; it must be above low, 2.0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        correction(LOGPROBS, BEHAVIOR, MASK, **arguments)
