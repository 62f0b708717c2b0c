import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from tokencredit.runs.summary import (
    WINDOW,
    History,
    attained,
    count,
    duration,
    figure,
    final_mean,
    final_window,
    finite,
    in_iterations,
    mean,
    rise_in_words,
    shortened,
    summarise,
)
from tokencredit.settings.run_kind import CONTROL, SFT, TEXT


def history(**columns):
    rows = History()
    for values in zip(*columns.values(), strict=True):
        rows.append(dict(zip(columns, values, strict=True)))
    return rows


def test_one_iteration_is_singular():
    assert [in_iterations(number) for number in (0, 1, 2)] == ["0 iterations", "1 iteration", "2 iterations"]


def test_a_summary_has_attributes_and_is_a_mapping_of_the_same():
    rows = history(reward=[None, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0], kl=[0.0, 9.0, 1.0, 1.0, 1.0, 1.0, 6.0], tokens=[10] * 7)
    summary = summarise(rows, TEXT, {}, Path("runs/x"), 35.0, "stop.kl")
    assert (summary.first, summary.last, summary.kl_last) == (1.0, 5.0, 8 / 3)
    assert (summary.iterations, summary.seconds, summary.per_second) == (7, 35.0, 2.0)
    assert (summary.stopped_by, summary.folder) == ("stop.kl", Path("runs/x"))
    expected = {
        "reward_first": 1.0,
        "reward_last": 5.0,
        "kl_last": 8 / 3,
        "attainable_last": None,
        "iterations": 7,
        "seconds": 35.0,
        "tokens_per_second": 2.0,
        "stopped_by": "stop.kl",
    }
    assert isinstance(summary, Mapping)
    assert list(summary) == list(expected)
    assert summary == expected
    assert json.loads(json.dumps(dict(summary))) == summary
    assert len(summary) == 8
    with pytest.raises(KeyError):
        summary["folder"]
    with pytest.raises(AttributeError):
        summary.last = 1.0


def test_an_agents_summary_has_the_names_of_its_world():
    rows = history(**{"train/average_return": [math.nan, 20.0], "steps": [512, 512]})
    summary = summarise(rows, CONTROL, {}, Path("x"), 2.0, "iterations")
    assert dict(summary) == {
        "average_return_first": 20.0,
        "average_return_last": 20.0,
        "kl_last": None,
        "attainable_last": None,
        "iterations": 2,
        "seconds": 2.0,
        "steps_per_second": 512.0,
        "stopped_by": "iterations",
    }


@pytest.mark.parametrize(
    ("few", "pooled", "bound"), [(0, 0, ""), (1, 0, "at most "), (0, 1, "at least "), (1, 1, "about ")]
)
def test_the_share_of_the_attainable_is_said_with_its_bound(few, pooled, bound):
    def shared(share):
        limits = {"limit/few": [few, None], "limit/pooled": [pooled, None]}
        rows = history(reward=[0.0, 1.0], attainable=[0.0, share], **limits)
        summary = summarise(rows, TEXT, {}, Path("x"), 1.0, "iterations")
        assert summary["attainable_last"] == (share if share < 1.01 else None)
        return rows, summary.attained

    assert shared(0.9)[1].startswith(f"{bound}90 % of what this reward allows")
    assert shared(1.004)[1].startswith(f"{bound}100 % of what this reward allows")
    rows, said = shared(1.16)
    assert said == (
        "an unknown share of what this reward allows at this KL price: samples of the reference with such rewards are "
        "too few to estimate the limit (tokencredit limit takes more)"
    )
    below = history(reward=[0.0, 0.0], attainable=[0.0, -0.2])
    assert summarise(below, TEXT, {}, Path("x"), 1.0, "iterations").attained.startswith(
        "nothing of what this reward allows"
    )
    assert attained(history(reward=[0.1], attainable=[-4e-8])).startswith("0 % of what"), "the start, but for rounding"
    rows.priced = 1
    summary = summarise(rows, TEXT, {}, Path("x"), 1.0, "iterations")
    assert (summary["attainable_last"], summary.attained) == (None, None)


def test_a_share_that_still_rises_is_no_verdict():
    """The last five iterations against the five before: 0.3 more, and 0.02 more with a spread of 0.16."""
    for shares, rises in (([0.1, 0.2, 0.1, 0.2, 0.1, 0.4, 0.5, 0.4, 0.5, 0.4], True), ([0.2, 0.5] * 5, False)):
        said = attained(history(reward=shares, attainable=shares))
        assert said.endswith("at this KL price, after 10 iterations" + " and still rising" * rises)
    assert not attained(history(reward=[0.1, 0.5], attainable=[0.1, 0.5])).endswith("rising"), "two say nothing"


def test_a_reward_with_penalties_is_judged_by_what_is_trained_on():
    """Fewer completions are cut off, of scores that stay: 1.96 · √(0.5² / 15 + 0.5² / 15), by hand."""
    rows = history(
        **{"reward": [0.31, 0.33], "reward_std": [0.1, 0.1], "shaped_reward": [-0.6, 0.3]},
        **{"shaped_reward_std": [0.5, 0.5], "tokens": [160.0] * 2, "length": [10.0] * 2},
    )
    summary = summarise(rows, TEXT, {}, Path("x"), 1.0, "iterations")
    assert (summary.rise, summary.shaped) == ("+0.9 ± 0.358 at 95 %", (-0.6, 0.3))
    names = ("reward_first", "reward_last", "shaped_reward_first", "shaped_reward_last")
    assert [summary[name] for name in names] == [0.31, 0.33, -0.6, 0.3]


@pytest.mark.parametrize(
    ("last", "per_prompt", "said"),
    [
        (0.8, 1, "+0.6 ± 0.124 at 95 %"),  # 1.96 · √(0.2² / 15 + 0.2² · 2 / 4 / 15), by hand
        (0.1, 1, "-0.1 ± 0.124 at 95 %: within chance"),
        (0.8, 16, ""),  # one prompt says nothing of others
    ],
)
def test_a_rise_has_an_interval_that_says_if_it_is_chance(last, per_prompt, said):
    rows = history(
        reward=[0.2, 0.5, last, last], reward_std=[0.2, 9.0, 0.2, 0.2], tokens=[160.0] * 4, length=[10.0] * 4
    )
    assert rise_in_words(rows, TEXT, {"rollout": {"per_prompt": per_prompt}}) == said
    assert summarise(rows, TEXT, {}, Path("x"), 1.0, "iterations").last == last


def test_averages_over_the_same_episodes_are_no_more_exact_together():
    """The first iteration ended no episode; the last average is over 100, whatever number of iterations has it."""
    returns, deviations = [None, 20.0, 90.0, 100.0, 100.0], [None, 6.0, 50.0, 49.749372, 49.749372]
    columns = {"train/average_return": returns, "train/std_return": deviations, "episodes": [0, 10, 50, 60, 30]}
    said = "+80 ± 10.6 at 95 %"  # 1.96 · √(6² / 9 + 25): each of the last two averages has a standard error of 5
    assert rise_in_words(history(**columns), CONTROL, {}) == said


def test_a_rise_without_standard_errors_has_no_interval():
    assert rise_in_words([{"loss": 2.0}, {"loss": 1.0}], SFT, {}) == ""
    assert rise_in_words([], TEXT, {}) == ""
    one = {"reward": 1.0, "reward_std": 1.0, "tokens": 20, "length": 2}
    assert rise_in_words([one], TEXT, {}) == ""
    assert rise_in_words([one | {"reward_std": 0.0}] * 2, TEXT, {}) == ""


def test_a_run_without_an_iteration_has_no_outcome():
    summary = summarise(History(), TEXT, {}, Path("x"), 1.0, "interrupt")
    assert (summary.first, summary.last, summary.kl_last, summary.per_second) == (None, None, None, 0.0)


def test_numbers_have_three_digits():
    numbers = (None, 0.0, 0.91443, -12.68, 487.25, 999.4, 999.6, 2309.4, -1e6, 1e-5)
    assert list(map(figure, numbers)) == [
        "none",
        "0",
        "0.914",
        "-12.7",
        "487",
        "999",
        "1,000",
        "2,309",
        "-1,000,000",
        "1e-05",
    ]


def test_times_are_said_in_units_to_plan_with():
    assert [duration(seconds) for seconds in (40, 600, 20_000)] == ["40 s", "10 min", "5.6 h"]


def test_counts_and_long_texts_are_short():
    counted = {4288: "4,288", 1_900_417: "1.9 million", 999_600_000: "1 billion", 7_615_616_512: "7.62 billion"}
    assert {number: count(number) for number in counted} == counted
    assert shortened(" a\n b ", 3) == "a b"
    assert shortened("a" * 9, 5) == "aaaa…"


def test_a_number_that_is_not_known_is_nan_in_a_history():
    rows = history(reward=[0.5, None])
    assert math.isnan(rows[1]["reward"])
    assert rows.values("reward") == [0.5]
    assert rows.values("kl") == []


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
