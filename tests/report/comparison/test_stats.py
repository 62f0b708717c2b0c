"""Statistics and grouping of runs, against numbers worked by hand, enumerations and the definition."""

from dataclasses import replace
from functools import partial
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest

from helpers.proofs import proofs
from tokencredit.errors import ConfigError
from tokencredit.provenance.parts import describe, label
from tokencredit.report.comparison.compare import compare, difference, verdict
from tokencredit.report.comparison.page import outcome_cells
from tokencredit.report.comparison.stats import (
    POINTS,
    RunGroup,
    axes,
    bootstrap,
    choose_metric,
    curve,
    differing,
    estimate,
    group_runs,
    names,
    rank_p,
    repeated,
    series,
    settings_of,
    spread,
    texts,
    too_few,
    varying,
)
from tokencredit.report.reading import Run
from tokencredit.user_code.user_objects import load_object


def made(name="a", rewards=(0.0, 1.0), seed=1, lr=0.1, tokens=10, summary=None, columns=None, **config):
    """A run in memory; `columns` are further metrics, a list each."""
    rows = [
        {"iteration": i, "reward": reward, "tokens": tokens, "seconds": 1.0}
        | {key: column[i - 1] for key, column in (columns or {}).items()}
        for i, reward in enumerate(rewards, start=1)
    ]
    base = {"seed": seed, "optim": {"lr": lr}, "run": {"dir": f"runs/{name}", "iterations": len(rows)}}
    return Run(Path(f"runs/{name}"), base | config, rows, [], {} if summary is None else summary)


def agent(name="agent", **options):
    steps = {"train/average_return": [1.0, 3.0], "steps": [128, 128], "train/average_length": [5.0, 7.0]}
    return made(name, columns=steps, env={"id": "CartPole-v1"}, **options)


def scalars(*numbers):
    return estimate(np.array(numbers, dtype=float)[:, None])


def both(result):
    return result.low.item(), result.high.item()


# statistics


def test_two_runs_have_a_mean_and_no_interval():
    result = scalars(1.0, 3.0)
    assert (result.middle.item(), result.low, result.high) == (2.0, None, None)


@pytest.mark.parametrize("count", [3, 4, 7, 12])
def test_intervals_stay_within_the_runs(count):
    """So a return of at most 500 has no interval up to 1,101, and a probability none beyond 0 and 1."""
    numbers = np.random.default_rng(count).choice([0.0, 0.02, 0.9, 1.0], size=(count, 50))
    result = estimate(numbers)
    assert (result.low >= numbers.min(axis=0)).all()
    assert (result.high <= numbers.max(axis=0)).all()


def test_three_runs_by_hand():
    # A quarter of three, rounded down, is none: the mean is 2. One resample of 27, 3.7 %, is the lowest run thrice, so
    # the percentiles 2.5 and 97.5 are the runs themselves.
    result = scalars(0.0, 5.0, 1.0)
    assert result.middle.item() == pytest.approx(2.0)
    assert both(result) == (0.0, 5.0)


@pytest.mark.parametrize("count", [3, 4, 5, 7, 8, 13])
def test_the_interquartile_mean_is_its_definition(count):
    numbers = np.random.default_rng(count).normal(size=count)
    kept = sorted(numbers)[count // 4 : count - count // 4]
    assert scalars(*numbers).middle.item() == pytest.approx(sum(kept) / len(kept))


@pytest.mark.parametrize("count", [4, 5])
def test_bootstrap_intervals_are_those_of_all_resamples(count):
    numbers = np.random.default_rng(count).normal(size=count)
    cut = count // 4
    every = [np.mean(sorted(drawn)[cut : count - cut]) for drawn in product(numbers, repeat=count)]
    exact = np.percentile(every, [2.5, 97.5])
    assert both(scalars(*numbers)) == pytest.approx(exact, abs=0.15 * numbers.std())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "covered"),
    [(3, 0.75), (5, 0.90), *proofs((4, 0.88), (8, 0.93), (10, 0.94))],
)
def test_how_often_an_interval_covers_the_truth(count, covered):
    """Of normal numbers, whose interquartile mean is their mean; docs/compare.md holds these figures."""
    result = estimate(np.random.default_rng(0).normal(size=(count, 2000)))
    assert np.mean((result.low <= 0) & (result.high >= 0)) == pytest.approx(covered, abs=0.02)


# curves


def test_a_series_is_a_running_mean_over_what_was_counted():
    columns = {"tokens": [4, 20, 10, 60], "pretrain/tokens": [6, None, None, None]}
    run = made(rewards=[0.0, 2.0, 4.0, 9.0], columns=columns)
    x, y = series(run, "reward", "tokens", 2)
    assert x.tolist() == [10, 30, 40, 100]
    assert y.tolist() == [0.0, 1.0, 3.0, 6.5]
    x, y = series(run, "reward", "iteration", 1)
    assert (x.tolist(), y.tolist()) == ([1, 2, 3, 4], [0.0, 2.0, 4.0, 9.0])


def test_a_series_leaves_out_what_is_no_number():
    run = made(rewards=[None, 2.0, float("nan"), 4.0, "text"])
    x, y = series(run, "reward", "tokens", 2)
    assert (x.tolist(), y.tolist()) == ([20, 40], [2.0, 3.0])


def test_a_long_series_is_thinned_and_forgets_nothing():
    spike = [0.0] * 5003
    spike[2500] = 1.0
    x, y = series(made(rewards=spike), "reward", "iteration", 1)
    assert len(x) <= POINTS
    assert (x[0], x[-1]) == (1, 5003)
    assert y.max() == pytest.approx(1 / 11)  # eleven iterations a point


def test_a_curve_ends_where_its_shortest_run_does():
    found = curve([made(rewards=[0.0, 1.0, 2.0, 3.0]), made(rewards=[2.0, 3.0])], "reward", "iteration")
    assert found.x.tolist() == [1, 2]
    assert found.y.middle.tolist() == [1.0, 2.0]
    assert [len(x) for x, _ in found.runs] == [4, 2]


def test_curves_are_interpolated_between_the_points_of_runs():
    # At 20 tokens the first run is at its second point, 1, and the second at its first, 4; at 30 the second is halfway.
    runs = [made(rewards=[0.0, 1.0, 2.0, 3.0], tokens=10), made(rewards=[4.0, 8.0], tokens=20)]
    found = curve(runs, "reward", "tokens")
    assert found.x.tolist() == [20, 30, 40]
    assert found.y.middle.tolist() == [2.5, 4.0, 5.5]


def test_runs_without_a_common_stretch_have_no_points():
    runs = [made(rewards=[0.0, 1.0], tokens=1), made(rewards=[0.0, 1.0], tokens=100), made(tokens=100)]
    found = curve(runs, "reward", "tokens")
    assert len(found.x) == len(found.y.middle) == 0
    assert len(found.runs) == 3


def test_axes_are_what_every_run_counted():
    assert axes([made()]) == {"iteration": "iterations", "seconds": "seconds", "tokens": "tokens sampled"}
    assert axes([agent()])["steps"] == "environment steps"
    assert "tokens" not in axes([made(), made(tokens=None)])


# settings


def test_settings_are_texts_by_their_whole_keys():
    config = {"a": {"b": 1, "c": [1, 2]}, "reward": [{"name": "x"}, {"name": "y"}], "none": None, "empty": {}}
    expected = {"a.b": "1", "a.c": "[1, 2]", "reward[0].name": "x", "reward[1].name": "y", "none": "null"}
    assert texts(config) == expected


def test_runs_that_differ_in_their_seed_are_one_group():
    runs = [made(f"{lr}-{seed}", lr=lr, seed=seed) for seed in (1, 2, 3) for lr in (0.1, 0.5)]
    groups = group_runs(runs)
    assert [group.label for group in groups] == ["optim.lr 0.1", "optim.lr 0.5"]
    assert [[run.config["seed"] for run in group.runs] for group in groups] == [[1, 2, 3], [1, 2, 3]]
    assert differing([group.settings for group in groups]) == ["optim.lr"]
    assert [varying(group) for group in groups] == [[], []]


def test_one_setting_takes_the_name_of_its_runs():
    assert group_runs([made("first"), made("second", seed=2)])[0].label == "first and 1 more"
    assert group_runs([made("first")])[0].label == "first"


def test_many_seeds_of_a_sweep_take_the_name_of_their_variant():
    long = {"prompts": {"text": ["long" * 20]}}
    runs = [
        made(f"{name}/seed-{seed}", seed=seed, **kind) for name, kind in (("a", {}), ("b", long)) for seed in (1, 2)
    ]
    assert [group.label for group in group_runs(runs)] == ["a", "b"]
    assert group_runs(runs[:2])[0].label == "a"
    assert [group.label for group in group_runs([runs[0], *runs[2:]])] == ["a", "b"]
    one_folder = [runs[0], made("a/seed-2", **long), made("a/seed-3", seed=2, **long)]
    assert [group.label for group in group_runs(one_folder)] == ["seed-1", "seed-2 and 1 more"]


def test_many_differences_make_no_name():
    wide = {"prompts": {"text": ["This movie was really", "All in all this film was"]}}
    assert [group.label for group in group_runs([made("one"), made("two", **wide)])] == ["one", "two"]


def test_folders_of_one_name_are_told_apart():
    one, two = made("x/run", prompts={"text": ["long" * 20]}), made("y/run")
    assert [group.label for group in group_runs([one, two])] == ["x/run", "y/run"]


def test_an_own_part_is_one_setting_from_a_file_and_from_python_and_names_its_curve(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def by_entropy(rewards, values, entropy, scale=1.0):\n    return rewards, values\n"
    )
    file, key = f"{tmp_path}/mine.py:by_entropy", "advantage.estimator"
    part = describe(partial(load_object(file, "estimator"), scale=2.0))
    from_file = made(advantage={"estimator": file, "kwargs": {"scale": 2.0}})
    named = {"advantage": {"estimator": f"python:{label(part)}", "kwargs": {}}, "python": {key: label(part)}}
    runs = [replace(run, parts={key: part}) for run in (from_file, made("b", seed=2, **named))]
    own, default = group_runs([*runs, made("c", advantage={"estimator": "gae", "kwargs": {}})])
    assert [len(own.runs), len(default.runs)] == [2, 1]
    assert own.label == f"advantage.estimator by_entropy(scale=2.0) ({part['digest'][:8]})"
    assert default.label == "advantage.estimator gae"


def test_a_setting_that_the_estimator_does_not_read_is_no_difference():
    lams = {"gae": 0.9, "uniform": "auto", "reward_to_go": "auto"}
    made_of = [made(name, advantage={"estimator": name, "lam": lam}) for name, lam in lams.items()]
    assert [group.label for group in group_runs(made_of)] == [f"advantage.estimator {name}" for name in lams]
    others = made("gae", advantage={"estimator": "gae", "lam": 0.5})
    labels = [group.label for group in group_runs([*made_of[:2], others])]
    assert labels[1] == "advantage.estimator uniform"
    assert labels[2] == "advantage.estimator gae, advantage.lam 0.5"
    source = "def mine(rewards, values, *, gamma, power=2.0):\n    return rewards, values\n"
    for text, read in ((source, False), (source.replace("power", "lam"), True), ("lambda: …", True), (None, True)):
        part = {"name": "mine", "digest": "1868bd1b"} | ({"source": text} if text else {})
        settings = {"estimator": "mine.py:mine", "lam": "auto", "gamma": 1.0}
        own = replace(made("own", advantage=settings), parts={"advantage.estimator": part})
        assert settings_of(own)["advantage.lam"] == ("auto" if read else "not read")
        assert settings_of(own)["advantage.gamma"] == "1"


def test_a_key_groups_runs_that_differ_elsewhere():
    runs = [made("a", lr=0.1, gamma=1.0), made("b", lr=0.5, gamma=1.0), made("c", lr=0.1)]
    groups = group_runs(runs, "gamma")
    assert [(group.label, len(group.runs)) for group in groups] == [("gamma 1", 2), ("gamma not set", 1)]
    assert varying(groups[0]) == ["optim.lr"]
    assert [len(group.runs) for group in group_runs(runs, "seed")] == [3]


def test_an_unknown_key_is_named():
    with pytest.raises(ConfigError, match=r"no run has the key optim\.lrr; did you mean optim\.lr\?"):
        group_runs([made()], "optim.lrr")


def test_one_sample_twice_is_found():
    group = group_runs([made("a"), made("b"), made("c", seed=2)])[0]
    assert list(repeated(group)) == [("runs/a", "runs/b")]


# what came out


def came_out(runs, metric=None):
    """The row of each setting in the table of outcomes."""
    names, rows = outcome_cells(compare(runs, metric=metric))
    return [dict(zip(names, row, strict=True)) for row in rows]


def test_outcomes_by_hand():
    evaluated = {"eval/reward": [None, 0.4, None, 0.3, None, None], "kl": [1.0] * 6, "length": [8.0] * 6}
    runs = [
        made("a", [0.0, 1, 1, 1, 1, 1], columns=evaluated, summary={"stopped_by": "stop.kl"}),
        made("b", [1.0, 3, 3, 3, 3, 3], seed=2, columns=evaluated, summary={"stopped_by": "iterations"}),
        made("c", [0.5], lr=0.5),
    ]
    first, second = came_out(runs)
    assert first == {
        "reward_first": "0.50 (0 and 1)",
        "reward_last": "2 (1 and 3)",
        "eval/reward_best": "0.40",
        "kl_last": "1",
        "length_last": "8",
        "seconds": "6",
        "iterations": "6",
        "stopped by": "iterations, stop.kl",
    }
    assert (second["reward_last"], second["kl_last"], second["stopped by"]) == ("0.50", "", "not finished")


def test_an_outcome_says_of_how_many_runs_it_is():
    runs = [made("a", columns={"kl": [1.0, 2.0]}), made("b", seed=2)]
    assert came_out(runs)[0]["kl_last"] == "2 (1 of 2 runs)"


def test_a_rare_metric_has_its_last_number():
    """Audits at iterations 3 and 6 of 20; the last five iterations hold none."""
    audit = [None] * 20
    audit[2], audit[5] = 0.25, 0.75
    runs = [made(f"run{seed}", [0.0] * 20, seed=seed, columns={"audit/correlation": audit}) for seed in (1, 2)]
    assert choose_metric(runs, "audit/correlation") == "audit/correlation"
    (found,) = came_out(runs, "audit/correlation")
    assert found["audit/correlation_first"] == "0.25"
    assert found["audit/correlation_last"] == "0.75"
    line = curve(runs, "audit/correlation", "iteration")
    assert line.x.tolist() == [3, 6]
    assert line.y.middle.tolist() == [0.25, 0.75]
    assert curve(runs, "audit/correlation", "tokens").x.tolist() == [30, 60]
    near = made("near", [0.0] * 20, columns={"audit/correlation": [*audit[:-2], 0.5, 1.0]})
    assert came_out([near], "audit/correlation")[0]["audit/correlation_last"] == "0.75"  # the mean of 0.5 and 1


def test_iterations_that_epochs_replace_are_not_read():
    runs = [made("a", sft={}, data={"epochs": 2.0}), made("b", [0.0] * 6, sft={}, data={"epochs": None})]
    runs[0].config["run"]["iterations"] = 100  # the default, of a run of two
    assert [group.label for group in group_runs(runs)] == ["data.epochs 2", "data.epochs null"]


def test_ends_are_of_the_last_reward():
    """As in the run's summary: rows before the reward changed are of another one; an audit's number is kept."""
    columns = {"attainable": [0.5] * 6, "eval/reward": [9.0, *[1.0] * 5], "audit/slope": [0.25, *[None] * 5]}
    run = replace(made("a", [0.0, 0, 0, 0, 1, 2], columns=columns), changes=[(4, "reward[0].weight")])
    (found,) = came_out([run])
    assert (found["reward_first"], found["reward_last"], found["eval/reward_best"]) == ("1", "2", "1")
    assert (found["seconds"], found["iterations"]) == ("6", "6")
    assert "attainable_last" not in found
    shares = [
        made(str(seed), [0.0] * 2, seed=seed, columns={"attainable": [0.0, x]}) for seed, x in ((1, 0.5), (2, 136))
    ]
    assert came_out(shares)[0]["attainable_last"] == "0.50 (1 of 2 runs)", "none above 100 %, where it is not known"
    assert came_out([run], "audit/slope")[0]["audit/slope_last"] == "0.25"
    assert verdict(group_runs([run]), "reward") == [
        "reward ends at 2 in 1 run of one setting; there is nothing to compare."
    ]
    not_yet = replace(run, changes=[(6, "reward[0].weight")])
    with pytest.raises(ConfigError, match="has no finished iteration since what is scored changed"):
        came_out([not_yet])


def test_agents_have_their_own_outcomes():
    (found,) = came_out([agent()])
    assert found["train/average_length_last"] == "7"
    assert "kl_last" not in found


# what cannot be compared


def test_the_metric_is_what_says_how_well_it_goes():
    assert choose_metric([made(), made()]) == "reward"
    assert choose_metric([agent()]) == "train/average_return"
    assert choose_metric([agent()], "seconds") == "seconds"


def test_texts_and_agents_do_not_mix():
    for runs in ([made("text"), agent()], [agent(), made("text")]):
        with pytest.raises(ConfigError, match=r"is a run of tokencredit \w+ and .* is a run of .* of one kind$"):
            choose_metric(runs)
        with pytest.raises(ConfigError, match=r"their metrics differ: compare runs of one kind$"):
            choose_metric(runs, "seconds")


def test_a_run_that_lacks_the_metric_is_named():
    runs = [made("a", columns={"kl": [1.0, 1.0]}), made("b", columns={"kl": [None, None]})]
    with pytest.raises(ConfigError, match="for the metric kl in 'runs/b'; all runs have reward, seconds, tokens"):
        choose_metric(runs, "kl")
    with pytest.raises(ConfigError, match=r"did you mean reward\?"):
        choose_metric(runs, "rewards")
    with pytest.raises(ConfigError, match="no metric in common"):
        choose_metric([made(rewards=[None], tokens=None, columns={"seconds": [None]}), made()])
    noisy = made(columns={"audit/noise": [None, 0.7]})
    with pytest.raises(ConfigError, match=r"no audit/correlation in 'runs/a': noise may explain such an audit"):
        choose_metric([noisy], "audit/correlation")
    with pytest.raises(ConfigError, match=r"for the metric audit/nose in 'runs/a'; did you mean audit/noise"):
        choose_metric([noisy], "audit/nose")


def test_runs_are_called_by_what_tells_them_apart():
    assert names([Path("a/first"), Path("b/second")]) == ["first", "second"]
    assert names([Path("sweep/low/seed-1"), Path("sweep/high/seed-1")]) == ["low/seed-1", "high/seed-1"]
    assert names([Path("a/seed-1"), Path("a/seed-1")]) == ["seed-1", "seed-1"]


# the verdict


def group(label, *ends, iterations=3, metric="reward"):
    rows = [[{"iteration": i, metric: float(end)} for i in range(1, iterations + 1)] for end in ends]
    return RunGroup(label, [Run(Path(label), {}, found, [], {}) for found in rows], [{} for _ in ends])


def test_a_clear_difference_has_its_size_and_interval():
    sentences = verdict([group("low", 0.10, 0.11, 0.12, 0.13), group("high", 0.90, 0.91, 0.92, 0.94)], "reward")
    low, high = bootstrap(spread, np.array([0.90, 0.91, 0.92, 0.94]), np.array([0.10, 0.11, 0.12, 0.13]))
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


def test_the_reverse_difference_is_the_mirror_image():
    one, two = group("one", 0.87, 0.87, 0.83, 0.85), group("two", 0.88, 0.82, 0.82, 0.83)
    found, back = difference(one, two, "reward"), difference(two, one, "reward")
    assert (back.difference, back.low, back.high) == (-found.difference, -found.high, -found.low)
    assert found.low < found.difference < found.high


def test_the_best_is_compared_with_the_next():
    sentences = verdict([group("worst", *[0.0] * 5), group("best", *[2.0] * 5), group("middle", *[1.0] * 5)], "reward")
    assert sentences[0].startswith(
        "best ends at the higher reward: 2, against 1 with middle, the next of 3 settings, a difference of 1,"
    )


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
        ({"env.factory": "a", "env.kwargs.size": "3"}, {"env.factory": "b"}, "env.factory, env.kwargs.size"),
        ({"env.max_turns": "1"}, {"env.max_turns": "2"}, None),
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


@pytest.mark.proof  # how often an interval covers the truth, too
def test_a_verdict_on_noise_is_rarely_more_than_noise():
    """Of 400 pairs of five runs without a true difference about 5 % are called more than noise."""
    random = np.random.default_rng(0)
    found = [rank_p(*random.normal(size=(2, 5))) <= 0.05 for _ in range(400)]
    assert 0.01 < np.mean(found) < 0.08


@pytest.mark.parametrize("metric", ["loss", "eval/loss", "perplexity"])
def test_a_lower_loss_is_better(metric):
    high, low = group("high", 2.0, 2.1, 2.2, 2.3, metric=metric), group("low", 1.0, 1.1, 1.2, 1.3, metric=metric)
    sentences = verdict([high, low], metric)
    assert sentences[0].startswith(f"low ends at the lower {metric}: 1.15, against 2.15 with high, a difference of -1")
