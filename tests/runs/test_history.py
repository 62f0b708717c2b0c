import math
import tracemalloc

import pytest

from tokencredit.runs.history import History


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
