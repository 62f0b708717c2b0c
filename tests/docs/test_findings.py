"""The tables of benchmarks/findings.md say what the kept metrics say."""

import importlib.util
import math
import re
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def findings():
    """The program, which imports Matplotlib."""
    path = Path(__file__).parents[2] / "benchmarks" / "findings.py"
    spec = importlib.util.spec_from_file_location("findings", path)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


@pytest.mark.proof
def test_the_page_has_the_tables_of_the_kept_metrics(findings):
    page = findings.PAGE.read_text(encoding="utf-8")
    assert findings.fill(page, findings.tables(findings.studies())) == page


def test_the_readme_has_the_table_that_its_command_prints(findings):
    found = findings.studies()
    table = "\n".join(findings.readme_table(found["worlds"], found["truth"]))
    assert f"\n\n{table}\n\n" in (findings.PAGE.parents[1] / "README.md").read_text(encoding="utf-8")


def test_intervals_are_students_and_welchs(findings):
    mean, half = findings.interval([1.0, 2.0, 3.0])
    assert (mean, half) == pytest.approx((2.0, 4.302653 / 3**0.5), rel=1e-6)  # t of 2 degrees of freedom
    delta, low, high = findings.difference([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    error, freedom = (1 / 3 + 4 / 3) ** 0.5, (1 / 3 + 4 / 3) ** 2 / ((1 / 3) ** 2 / 2 + (4 / 3) ** 2 / 2)
    assert delta == -2.0
    assert (high - low) / 2 == pytest.approx(findings.stats.t.ppf(0.975, freedom) * error)


def test_the_pages_verdicts_are_those_of_the_rule(findings):
    page, verdicts = findings.PAGE.read_text(encoding="utf-8"), findings.verdicts(findings.studies())
    rows = dict(re.findall(r"^\| (\w+) \| [^|]+ \| ([^|]+) \|$", page, re.M))
    assert {"1", "2a", "2b", "2c", "3", "4a", "4b"} <= verdicts.keys()
    for number in verdicts.keys() & rows.keys():
        assert rows[number].startswith(verdicts[number]), number


def test_a_claim_has_a_verdict_once_its_runs_are_kept(findings):
    def runs(start, later):
        return {seed: {"reward": [start] + [later + seed / 100] * 9} for seed in range(3)}

    found = {"claims": {"base": runs(0.2, 0.4), "positive": runs(0.7, 0.9)}}
    assert findings.verdicts(found) == {"13a": "**holds here**"}  # 0.6 of the way, and 0.225
    assert findings.verdicts({"claims": {"base": runs(0.2, 0.8), "positive": runs(0.7, 0.75)}}) == {
        "13a": "**does not hold here**"
    }
    assert "positive less base: +0.3" in findings.claim_table(found)


def test_rungs_have_verdicts_as_far_as_they_were_run(findings):
    def runs(solved):
        return {str(seed): {"eval/reward": [None, solved + seed / 1000], "age_mean": [0.0, 4.0]} for seed in range(3)}

    found = {"sao": {"single": runs(0.8), "dis": runs(0.9), "faster-critic": runs(0.7)}}
    assert findings.verdicts(found) == {"16b": "**holds here**", "16c": "**does not hold here**"}
    columns = {"solved": (findings.end, "eval/reward")}
    table = findings.table_if_run(found, "sao", columns, [("dis", "single"), ("single", "grpo")], base="grpo")
    assert table.splitlines()[-1].startswith("| dis less single | | +0.1 [")


def test_the_reward_at_a_kl_is_that_of_the_first_three_iterations_there(findings):
    run = {"reward": [0.1, 0.2, 0.3, 0.4, 0.5], "kl": [0.0, 0.5, 1.0, 1.5, 2.0]}
    assert findings.at_kl(run, "1") == pytest.approx(0.3)
    assert math.isnan(findings.at_kl(run, "2"))


def test_runs_beside_trl_are_judged_in_each_world(findings):
    def runs(height):
        return {str(seed): {"reward": [height + seed / 100] * 40, "kl": [1.0] * 40} for seed in range(3)}

    limit = {"best": 1.0, "reference": 0.1}
    heights = {"builtin": {"ours": 0.9, "ppo": 0.7}, "trec": {"ours": 0.5, "grpo": 0.6}}
    study = {world: {name: runs(x) for name, x in found.items()} | {"limit": limit} for world, found in heights.items()}
    verdicts = findings.verdicts({"beside-trl": findings.by_world(study)})
    assert verdicts == dict.fromkeys(("17a", "17b"), "**holds here**") | dict.fromkeys(
        ("17e", "17f"), "**does not hold here**"
    )


def test_steadiness_looks_at_changes_in_the_second_half(findings):
    assert findings.unsteadiness({"x": [9.0, 1.0, 1.0, 2.0, 1.0, 2.0]}, "x") == pytest.approx(1.0)


def test_a_verdict_asks_for_every_interval(findings):
    above, over_zero, below = (1.0, 0.5, 1.5), (1.0, -0.5, 2.5), (-1.0, -1.5, -0.5)
    assert findings.verdict([above, above]) == "**holds here**"
    assert findings.verdict([above, over_zero]) == "cannot tell"
    assert findings.verdict([above, below]) == "**does not hold here**"
    assert findings.verdict([(1.0, math.nan, math.nan)]) == findings.verdict([]) == "cannot tell"
    assert findings.difference([1000.0] * 3, [1000.0] * 3) == (0.0, 0.0, 0.0)
    assert findings.verdict([(0.0, 0.0, 0.0)]) == "cannot tell", "equal runs"


def test_verdicts_on_lambda_follow_the_runs_of_the_recipes(findings):
    """Made-up runs, λ = 0.95 the best on the pendulum but with PPO, and no critic's steps on HumanoidStandup."""

    def runs(height, **more):
        returns = {seed: [height + seed] * 20 for seed in range(3)}
        return {str(seed): {"train/average_return": x, "advantage_std": x} | more for seed, x in returns.items()}

    own = {"critic_value_loss": [1.0]}
    heights = {"0": 100, "0.95": 900, "1": 500}
    pendulum = {f"algorithm=policy_gradient,lam={lam}": runs(height, **own) for lam, height in heights.items()}
    pendulum |= {f"algorithm=ppo,lam={lam}": runs(500, **own) for lam in heights}
    studies = {"pendulum": pendulum, "humanoid": {f"lam={lam}": runs(1000 - x) for lam, x in heights.items()}}
    assert findings.lambda_verdict(studies, ["λ = 0.95 ends above 0 and 1"]) == (
        "λ = 0.95 ends above 0 and 1: **holds here** on the pendulum, cannot tell on the pendulum with PPO"
    ), "runs of the older recipe are not judged"
    header, _, first, *_ = findings.lambda_table(studies).splitlines()
    assert header == "| claim | the pendulum | the pendulum with PPO |"
    assert "| **holds here**: 0.95 less 0: +800 [" in first
    assert findings.older_lambda(studies).startswith("**The kept runs on HumanoidStandup are of an older recipe")
    assert findings.older_lambda(studies | {"humanoid": pendulum}) == "All runs are of these recipes."


def test_runs_without_a_critic_and_with_as_many_maps_replace_the_notes(findings):
    def runs(height, **more):
        return {str(seed): {"reward": [height + seed / 100] * 20} | more for seed in range(3)}

    texts = {"estimator=gae": runs(0.9, value_loss=[1.0]), "estimator=uniform": runs(0.5)}
    assert "train no critic" in findings.critic_free_note(texts)
    texts["estimator=uniform"] = runs(0.5, value_loss=[1.0])
    assert findings.critic_free_note(texts).startswith("**Runs kept from before")
    grid = {"group-relative": runs(0.5), "leave-one-out": runs(0.5)}
    assert "has no kept runs yet" in findings.map_control(grid)
    assert "ahead of both too: **holds here**, token-gae-8-per-map less group-relative: +0.4 [" in findings.map_control(
        grid | {findings.CONTROL_BY_MAP: runs(0.9)}
    )
