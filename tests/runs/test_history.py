import math
import tracemalloc

import pytest

from tokencredit.runs.history import WINDOW, History, final_mean, final_window, finite, mean


def test_rows_come_back_and_what_they_lack_is_nan():
    history = History()
    history.append({"iteration": 1, "reward": 0.5})
    history.append({"iteration": 2, "reward": None, "kl": 0.25})
    assert len(history) == 2
    assert history[0]["reward"] == 0.5
    assert math.isnan(history[0]["kl"])
    assert math.isnan(history[1]["reward"])
    assert history[-1]["kl"] == 0.25
    assert [row["iteration"] for row in history] == [row["iteration"] for row in history[0:2]] == [1, 2]
    with pytest.raises(IndexError):
        history[2]


def test_a_number_takes_little_more_than_its_eight_bytes():
    names = [f"metric {number}" for number in range(60)]
    tracemalloc.start()
    try:
        history = History()
        before = tracemalloc.get_traced_memory()[0]
        for row in range(1000):
            history.append(dict.fromkeys(names, float(row)))
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert used < 10 * 60 * 1000


def test_means_are_those_of_the_numbers_there_are():
    assert mean([1.0, None, math.nan, "2", True, 10**400, math.inf, 4]) == 2.5
    assert mean([]) is mean([None]) is None
    assert list(finite([None, 1, "x", 2.5])) == [1.0, 2.5]


@pytest.mark.parametrize(("iterations", "averaged"), [(1, 1), (2, 1), (3, 1), (4, 2), (9, 4), (10, 5), (40, 5)])
def test_the_end_of_a_short_run_leaves_out_its_start(iterations, averaged):
    rows = [{"reward": float(number)} for number in range(iterations)]
    assert final_window(iterations) == averaged
    assert final_mean(rows, "reward") == iterations - 1 - (averaged - 1) / 2


def test_the_final_mean_is_that_of_the_last_five():
    history = History()
    for number in range(-1, 9):
        history.append({"iteration": number, "reward": float(number)} | ({"kl": 1.0} if number == 6 else {}))
    assert WINDOW == 5
    assert final_mean(history, "reward") == 6.0
    assert final_mean(history, "kl") == 1.0
    assert final_mean(history, "entropy") is None
    assert final_mean([{"reward": 1.0}], "reward") == 1.0
