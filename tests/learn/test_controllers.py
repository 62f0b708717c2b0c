import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokencredit.learn.controllers import EarlyStopping, KLController, Plateau, RunningMoments


def test_a_fixed_coefficient_stays():
    controller = KLController(0.1)
    controller.update(1e6, 1000)
    assert controller.coef == 0.1
    other = KLController(0.7)
    other.load_state_dict(controller.state_dict())
    assert other.coef == 0.1


def test_adaptive_by_hand():
    controller = KLController(0.2, target=6.0, horizon=10_000)
    controller.update(12.0, 1000)  # e = 1, clipped to 0.2; 0.2 · (1 + 0.2 · 0.1)
    assert controller.coef == pytest.approx(0.204)
    controller.update(5.4, 1000)  # e = −0.1; 0.204 · (1 − 0.1 · 0.1)
    assert controller.coef == pytest.approx(0.204 * 0.99)
    controller.update(6.0, 1000)  # on target
    assert controller.coef == pytest.approx(0.204 * 0.99)
    wide = KLController(0.2, target=6.0, horizon=10_000, error_clip=3.0)
    wide.update(12.0, 1000)  # e = 1
    assert wide.coef == pytest.approx(0.22)


def test_an_adaptive_coefficient_stays_within_its_bounds():
    controller = KLController(0.2, target=6.0, horizon=10, bounds=(0.1, 0.5))
    controller.update(60.0, 100)  # e = 0.2: × 3
    assert controller.coef == 0.5
    controller.update(0.0, 1000)  # the factor itself would be negative
    assert controller.coef == 0.1


def test_adaptive_goes_on_where_it_was():
    controller = KLController(0.2, target=6.0, horizon=1000)
    controller.update(8.0, 64)
    other = KLController(0.2, target=6.0, horizon=1000)
    other.load_state_dict(controller.state_dict())
    for one in (controller, other):
        one.update(3.0, 64)
    assert controller.coef == other.coef


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": 0.0}, "kl target is 0.0"),
        ({"target": math.inf}, "kl target is inf"),
        ({"horizon": -1}, "kl horizon is -1"),
        ({"error_clip": 0.0}, "kl error_clip is 0.0"),
        ({"bounds": (0.0, 1.0)}, "the lower of bounds is 0.0"),
        ({"bounds": (0.5, 1.0)}, "kl_coef is 0.2; it must lie within its bounds, 0.5 to 1.0"),
        ({"coef": math.nan}, "kl_coef is nan"),
    ],
)
def test_adaptive_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        KLController(**{"coef": 0.2, "target": 6.0, "horizon": 1000, **changes})


def test_controllers_refuse_a_nan_and_a_negative_coefficient():
    with pytest.raises(ValueError, match=r"kl is nan; it must be finite"):
        KLController(0.2, target=6.0, horizon=1000).update(math.nan, 64)
    with pytest.raises(ValueError, match=r"kl_coef is -0.1"):
        KLController(-0.1)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.sampled_from([0.0, 1e5]), st.integers(0, 2**32))
def test_a_stream_has_the_moments_of_the_whole(sizes, offset, seed):
    numbers = offset + torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    running = RunningMoments()
    for batch in numbers.split(sizes):
        running.update(batch)
        # as if the run had been resumed here
        state = running.state_dict()
        assert all(type(value) is float for value in state.values())
        running = RunningMoments()
        running.load_state_dict(state)
    assert running.count == len(numbers)
    assert running.mean == pytest.approx(numbers.mean().item())
    assert running.deviation == pytest.approx(numbers.std(correction=0).item(), abs=1e-9)


def test_running_moments_refuse():
    running = RunningMoments()
    running.update(torch.tensor([1.0]))
    with pytest.raises(ValueError, match=r"x holds NaN or an infinity"):
        running.update(torch.tensor([1.0, math.nan]))
    assert running.mean == 1  # what was refused left no trace


@pytest.mark.parametrize(
    ("numbers", "ends"),
    [
        ([0.0, 0.4, 0.405, 0.39, 0.409], 4),  # none of the last three is 0.01 above 0.4
        ([0.0, 0.4, 0.3, 0.3, 0.42, 0.41, 0.42, 0.43], 7),  # 0.42 begins to count anew
        ([0.1, math.nan, math.nan, math.nan], 3),
        ([math.nan] * 3, 2),
        ([-3.0, -2.0, -1.0, 0.0, 0.1], None),
    ],
)
def test_a_plateau_is_three_checks_without_a_rise(numbers, ends):
    plateau = Plateau(patience=3, min_delta=0.01)
    assert next((check for check, number in enumerate(numbers) if plateau.update(number)), None) == ends


def first_stop(stopping, rewards, kls):
    """What stops the run, and at which check."""
    for check, (reward, kl) in enumerate(zip(rewards, kls, strict=True)):
        reason = stopping.update(reward=reward, kl=kl)
        if reason:
            return reason, check
    return None


def test_patience_counts_checks_in_a_row():
    rewards = [0.95, 0.95, 0.5, 0.95, 0.95, 0.95]
    assert first_stop(EarlyStopping(reward=0.9, patience=3), rewards, [0.0] * 6) == ("reward", 5)
    assert first_stop(EarlyStopping(reward=0.9), rewards, [0.0] * 6) == ("reward", 0)
    assert first_stop(EarlyStopping(kl=10.0, patience=2), rewards, [11, 9, 11, 12, 11, 11]) == ("kl", 3)


def test_both_rules_share_one_count():
    stopping = EarlyStopping(reward=0.9, kl=10.0, patience=3)
    assert first_stop(stopping, [1.0, 1.0, 0.5, 0.5], [9.0, 9.0, 11.0, 11.0]) == ("kl", 2)
    stopping.reset()
    assert first_stop(stopping, [1.0, 0.5, 1.0, 1.0], [11.0, 9.0, 11.0, 9.0]) is None


def test_a_reset_forgets_all_checks():
    stopping = EarlyStopping(reward=0.9, patience=3)
    assert first_stop(stopping, [1.0, 1.0], [0.0, 0.0]) is None
    stopping.reset()
    assert first_stop(stopping, [1.0, 1.0], [0.0, 0.0]) is None


def test_the_threshold_itself_is_not_above():
    assert first_stop(EarlyStopping(reward=0.9, kl=10.0), [0.9], [10.0]) is None


def test_nothing_stops_without_thresholds():
    assert first_stop(EarlyStopping(), [1e9] * 5, [1e9] * 5) is None


def test_kl_comes_first_and_nan_is_above_nothing():
    assert first_stop(EarlyStopping(reward=0.9, kl=10.0), [1.0], [11.0]) == ("kl", 0)
    assert first_stop(EarlyStopping(reward=0.9, kl=10.0), [math.nan], [math.nan]) is None
