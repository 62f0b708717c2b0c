from tokencredit.report.curves import FAMILIES, POINTS, SHARED, UNITS, constant, sections
from tokencredit.report.meanings import meaning


def drawn(*rows):
    """Names of each chart's lines, by the chart's name."""
    metrics = [{"iteration": i} | row for i, row in enumerate(rows, start=1)]
    charts = {name: chart for found in sections(metrics).values() for name, chart in found.items()}
    return {name: [line["name"] for line in chart["lines"]] for name, chart in charts.items()}


def test_metrics_of_different_scales_have_charts_of_their_own():
    assert drawn({"grad_norm": 1.0, "lr": 1e-4, "steps": 16.0, "mine": 3.0, "ratio_max": 9.0, "ratio_mean": 1.0}) == {
        "grad_norm": ["grad_norm"],
        "lr": ["lr"],
        "steps": ["steps"],
        "mine": ["mine"],
        "ratio_max": ["ratio_max"],
        "ratio_mean": ["ratio_mean"],
    }


def test_metrics_of_one_unit_that_belong_together_share_a_chart():
    names = [
        *("reward", "eval/reward", "eval/best", "lr", "value_lr", "seconds", "seconds/update"),
        *("audit/correlation", "audit/correlation_low", "train/average_return", "eval/average_return"),
    ]
    assert drawn({name: float(i) for i, name in enumerate(names)}) == {
        "reward": ["reward", "eval/reward", "eval/best"],
        "average_return": ["train/average_return", "eval/average_return"],
        "audit/correlation": ["audit/correlation", "audit/correlation_low"],
        "lr": ["lr", "value_lr"],
        "seconds": ["seconds", "seconds/update"],
    }


def test_metrics_of_evaluations_intervals_and_families_have_the_sentence_of_their_kind():
    assert meaning("eval/reward/short") == meaning("reward/a/b") != meaning("reward")
    assert meaning("audit/correlation_low") == meaning("audit/correlation")
    assert meaning("env/ending/done") == meaning("env/ending/error") != meaning("env/turns")
    assert meaning("mine") == meaning("mine/reward") == meaning("env/mine") == ""
    family = {f"{name}/x" for name in FAMILIES}
    assert all(map(meaning, {*SHARED, *UNITS, *family} - {"env/ending", "approx_kl"}))


def test_turns_have_charts_of_their_units():
    names = [f"env/{name}" for name in ("turns", "calls", "ending/done", "ending/length", "malformed", "failed", "cut")]
    metrics = [{"iteration": 1, **{name: float(i) for i, name in enumerate(names)}, "eval/env/turns": 9.0}]
    charts = sections(metrics)["Turns"]
    assert {chart["title"]: [line["name"] for line in chart["lines"]] for chart in charts.values()} == {
        "env/turns (turns and tool calls per episode)": ["env/turns", "env/calls", "eval/env/turns"],
        "env/ending (share of episodes)": ["env/ending/done", "env/ending/length"],
        "env/malformed (share of turns with a problem)": ["env/malformed", "env/failed", "env/cut"],
    }


def test_the_only_term_of_a_reward_is_not_drawn_again():
    one = {"reward": 0.5, "reward/x": 0.5, "eval/reward": 0.75, "eval/reward/x": 0.75, "reward_std/x": 0.5}
    assert drawn(one) == {"reward": ["reward", "eval/reward"], "reward_std/x": ["reward_std/x"]}
    assert drawn(one | {"reward/x": 0.25, "eval/reward/x": 0.5})["reward/x"] == ["reward/x", "eval/reward/x"]


def test_the_best_of_one_completion_is_not_drawn_again():
    assert drawn({"eval/reward": 0.5, "eval/best": 0.5}) == {"reward": ["eval/reward"]}
    assert drawn({"eval/reward": 0.5, "eval/best": 0.75}) == {"reward": ["eval/reward", "eval/best"]}


def test_constants_are_metrics_with_one_value_in_several_iterations():
    rows = [
        {"iteration": 1, "steps": 16, "lr": 0.5, "kl": None, "length": 3.0, "eval/length": 3.0},
        {"iteration": 2, "steps": 16, "lr": 0.25, "kl": 1.0, "length": 3.0, "eval/length": 3.0},
    ]
    charts = {name: chart for found in sections(rows).values() for name, chart in found.items()}
    assert {name: constant(chart) for name, chart in charts.items()} == {
        "kl": None,  # a single value is drawn
        "length": None,
        "lr": None,
        "steps": 16.0,
    }
    assert constant(sections(rows[:1])["Optimizer and steps"]["steps"]) is None


def test_each_metric_is_in_one_section():
    metrics = [{"iteration": 1, "reward": 1.0, "kl": 2.0, "audit/trust": 0.5, "audit/slope": 1.0, "mine": 1.0}]
    assert {title: list(charts) for title, charts in sections(metrics).items()} == {
        "Reward": ["reward"],
        "Distance from the reference": ["kl"],
        "Audit of the credit": ["audit/trust"],
        "Audit of the critic": ["audit/slope"],
        "Other": ["mine"],
    }


def test_long_curves_keep_the_means():
    metrics = [{"iteration": i, "reward": float(i), "eval/reward": None} for i in range(1, 2 * POINTS + 1)]
    (line,) = sections(metrics)["Reward"]["reward"]["lines"]
    assert len(line["x"]) == POINTS
    assert (line["x"][0], line["y"][0]) == (2, 1.5)
