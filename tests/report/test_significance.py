"""The verdict of a comparison, against enumerations and the definition."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from tokencredit.report.comparison_stats import Group
from tokencredit.report.reading import Run
from tokencredit.report.significance import interval, rank_p, too_few, verdict


def group(label, *ends, iterations=3, metric="reward"):
    rows = [[{"iteration": i, metric: float(end)} for i in range(1, iterations + 1)] for end in ends]
    return Group(label, [Run(Path(label), {}, found, [], {}) for found in rows], [{} for _ in ends])


def test_a_clear_difference_has_its_size_and_interval():
    sentences = verdict([group("low", 0.10, 0.11, 0.12, 0.13), group("high", 0.90, 0.91, 0.92, 0.94)], "reward")
    low, high = interval(np.array([0.90, 0.91, 0.92, 0.94]), np.array([0.10, 0.11, 0.12, 0.13]))
    assert 0.77 <= low < 0.8 < high <= 0.84  # 0.90 − 0.13 and 0.94 − 0.10
    assert sentences == [
        "high ends at the higher reward: 0.92, against 0.11 with low, a difference of 0.80, "
        f"95 % interval {low:.2f} to {high:.2f}.",
        "Over 4 and 4 runs this is more than noise (rank-sum test, p = 0.029).",  # 2 of 70 exchanges
    ]


def test_a_difference_within_the_noise_is_called_so():
    sentences = verdict([group("one", 0.1, 0.4, 0.6, 0.9), group("two", 0.2, 0.5, 0.7, 0.95)], "reward")
    assert sentences[0].startswith("two ends at the higher reward: 0.60, against 0.50 with one, a difference of 0.10, ")
    assert "not distinguishable from noise" in sentences[1]


def test_the_best_is_compared_with_the_next():
    sentences = verdict([group("worst", *[0.0] * 5), group("best", *[2.0] * 5), group("middle", *[1.0] * 5)], "reward")
    assert sentences[0].startswith(
        "best ends at the higher reward: 2, against 1 with middle, the next of 3 settings, a difference of 1,"
    )


@pytest.mark.parametrize(("one", "other"), [(1, 5), (2, 2), (2, 9), (3, 3), (3, 4)])
def test_few_seeds_allow_no_verdict(one, other):
    sentences = verdict([group("one", *np.arange(one)), group("other", *(100.0 + np.arange(other)))], "reward")
    assert "interval" not in sentences[0]
    assert "too few seeds to tell it from noise" in sentences[1]


@pytest.mark.parametrize(("one", "other", "few"), [(3, 4, True), (3, 5, False), (4, 4, False), (2, 20, True)])
def test_too_few_is_where_no_exchange_is_rare_enough(one, other, few):
    """3 and 4 runs: the rarest of 35 exchanges and its mirror image are 5.7 %."""
    assert too_few(one, other) is few


def test_one_run_per_setting_has_values_only():
    assert verdict([group("one", 0.4), group("other", 0.9)], "reward") == [
        "other ends at the higher reward: 0.90, against 0.40 with one, a difference of 0.50.",
        "There is one run per setting: other seeds may reverse the order.",
    ]


def test_one_setting_and_equal_ends():
    assert verdict([group("one", 0.4, 0.6)], "reward") == [
        "reward ends at 0.50 in 2 runs of one setting; there is nothing to compare."
    ]
    assert verdict([group("one", 0.5), group("other", 0.5)], "reward") == [
        "one and other end at the same reward, 0.50."
    ]


def test_runs_of_different_length_are_named():
    sentences = verdict([group("one", 0.4, iterations=7), group("other", 0.9)], "reward")
    assert sentences[-1] == "The runs end at different iterations, 3 to 7."


def with_settings(found, **settings):
    return replace(found, settings=[dict(settings) for _ in found.runs])


@pytest.mark.parametrize(
    ("one", "other", "keys"),
    [
        ({"reward[0].weight": "1"}, {"reward[0].weight": "2"}, "reward[0].weight"),
        ({"reward[0].classifier": "a"}, {"reward[0].function": "b"}, "reward[0].classifier, reward[0].function"),
        ({"reward[0].name": "a"}, {"reward[0].name": "b"}, None),
        ({"reward[0].timeout": "1"}, {"reward[0].timeout": "2"}, None),
        ({"rewarded": "1"}, {"rewarded": "2"}, None),
        (
            {f"reward[{i}].weight": "1" for i in range(4)} | {"reward[0].function": "a"},
            {"reward[0].function": "b"},
            "reward[0].function, reward[0].weight, reward[1].weight and 2 more",
        ),
    ],
)
def test_different_rewards_are_named_before_any_ranking(one, other, keys):
    groups = [with_settings(group("one", 0.4), **one), with_settings(group("other", 0.9), **other)]
    for metric in ("reward", "eval/reward"):
        rows = [replace(found, runs=[Run(Path("x"), {}, [{"iteration": 1, metric: 1.0}], [], {})]) for found in groups]
        sentences = verdict(rows, metric)
        assert sentences[0].startswith(f"The runs have different rewards ({keys}): ") == (keys is not None)
        assert sentences[-1] == f"one and other end at the same {metric}, 1."
    ranked = verdict(groups, "reward")
    assert [i for i, text in enumerate(ranked) if "ends at the higher" in text] == [int(keys is not None)]
    kl = [replace(found, runs=[Run(Path("x"), {}, [{"iteration": 1, "kl": 1.0}], [], {})]) for found in groups]
    assert len(verdict(kl, "kl")) == 1


@pytest.mark.parametrize("tie", [0.85, 0.8])
def test_the_rank_sum_test_counts_all_exchanges(tie):
    everything = np.array([0.3, 0.8, 0.9, 0.95, 0.1, 0.2, 0.4, tie])

    def wins(chosen):
        rest = everything[[i for i in range(8) if i not in chosen]]
        return sum(np.mean(x > rest) + np.mean(x == rest) / 2 for x in everything[list(chosen)])

    above = np.mean([wins(chosen) >= wins(range(4)) for chosen in combinations(range(8), 4)])
    assert rank_p(everything[:4], everything[4:]) == pytest.approx(2 * above)


@pytest.mark.slow
def test_a_verdict_on_noise_is_rarely_more_than_noise():
    """Of 400 pairs of five runs without a true difference about 5 % are called more than noise."""
    random = np.random.default_rng(0)
    found = [rank_p(*random.normal(size=(2, 5))) <= 0.05 for _ in range(400)]
    assert 0.01 < np.mean(found) < 0.08


@pytest.mark.parametrize("metric", ["loss", "eval/loss", "perplexity"])
def test_of_a_loss_less_is_better(metric):
    high, low = group("high", 2.0, 2.1, 2.2, 2.3, metric=metric), group("low", 1.0, 1.1, 1.2, 1.3, metric=metric)
    sentences = verdict([high, low], metric)
    assert sentences[0].startswith(f"low ends at the lower {metric}: 1.15, against 2.15 with high, a difference of -1")
