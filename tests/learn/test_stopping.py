import math

import pytest

from tokencredit.learn.controllers import EarlyStopping, Plateau


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


def run(stopping, rewards, kls):
    """What stops the run, and at which check."""
    for check, (reward, kl) in enumerate(zip(rewards, kls, strict=True)):
        reason = stopping.update(reward=reward, kl=kl)
        if reason:
            return reason, check
    return None


def test_patience_counts_checks_in_a_row():
    rewards = [0.95, 0.95, 0.5, 0.95, 0.95, 0.95]
    assert run(EarlyStopping(reward=0.9, patience=3), rewards, [0.0] * 6) == ("reward", 5)
    assert run(EarlyStopping(reward=0.9), rewards, [0.0] * 6) == ("reward", 0)
    assert run(EarlyStopping(kl=10.0, patience=2), rewards, [11, 9, 11, 12, 11, 11]) == ("kl", 3)


def test_the_threshold_itself_is_not_above():
    assert run(EarlyStopping(reward=0.9, kl=10.0), [0.9], [10.0]) is None


def test_nothing_stops_without_thresholds():
    assert run(EarlyStopping(), [1e9] * 5, [1e9] * 5) is None


def test_kl_comes_first_and_nan_is_above_nothing():
    assert run(EarlyStopping(reward=0.9, kl=10.0), [1.0], [11.0]) == ("kl", 0)
    assert run(EarlyStopping(reward=0.9, kl=10.0), [math.nan], [math.nan]) is None


def test_it_goes_on_where_it_was():
    stopping = EarlyStopping(reward=0.9, patience=3)
    assert run(stopping, [1.0, 1.0], [0.0, 0.0]) is None
    state = stopping.state_dict()
    assert state == {"kl": 0, "reward": 2}
    stopping.reset()
    assert run(stopping, [1.0, 1.0], [0.0, 0.0]) is None
    other = EarlyStopping(reward=0.9, patience=3)
    other.load_state_dict(state)
    assert other.update(reward=1.0, kl=0.0) == "reward"


def test_refusals():
    with pytest.raises(ValueError, match=r"patience is 0"):
        EarlyStopping(patience=0)
    with pytest.raises(ValueError, match=r"the kl that stops is -1.0"):
        EarlyStopping(kl=-1.0)
