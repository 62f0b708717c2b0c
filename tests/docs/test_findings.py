"""The tables of benchmarks/findings.md say what the kept metrics say."""

import math
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import findings
import findings_claims as claims
import findings_measures as measures


@pytest.mark.proof
def test_the_page_has_the_tables_of_the_kept_metrics():
    page = findings.PAGE.read_text(encoding="utf-8")
    assert findings.fill(page, findings.tables(findings.studies())) == page


def test_the_readme_has_the_table_that_its_command_prints():
    table = "\n".join(findings.readme_table(findings.studies()["worlds"]))
    assert f"\n\n{table}\n\n" in (findings.PAGE.parents[1] / "README.md").read_text(encoding="utf-8")


def test_intervals_are_students_and_welchs():
    mean, half = measures.interval([1.0, 2.0, 3.0])
    assert (mean, half) == pytest.approx((2.0, 4.302653 / 3**0.5), rel=1e-6)  # t of 2 degrees of freedom
    delta, low, high = measures.difference([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    error, freedom = (1 / 3 + 4 / 3) ** 0.5, (1 / 3 + 4 / 3) ** 2 / ((1 / 3) ** 2 / 2 + (4 / 3) ** 2 / 2)
    assert delta == -2.0
    assert (high - low) / 2 == pytest.approx(measures.stats.t.ppf(0.975, freedom) * error)


def test_the_pages_verdicts_are_those_of_the_rule():
    page, verdicts = findings.PAGE.read_text(encoding="utf-8"), claims.verdicts(findings.studies())
    rows = dict(re.findall(r"^\| (\w+) \| [^|]+ \| ([^|]+) \|$", page, re.M))
    assert {"1", "2a", "2b", "2c", "3", "4a", "4b"} <= verdicts.keys()
    for number in verdicts.keys() & rows.keys():
        assert rows[number].startswith(verdicts[number]), number


def test_a_claim_has_a_verdict_once_its_runs_are_kept():
    def runs(start, later):
        return {seed: {"reward": [start] + [later + seed / 100] * 9} for seed in range(3)}

    found = {"claims": {"base": runs(0.2, 0.4), "positive": runs(0.7, 0.9)}}
    assert claims.verdicts(found) == {"13a": "**holds here**"}  # 0.6 of the way, and 0.225
    assert claims.verdicts({"claims": {"base": runs(0.2, 0.8), "positive": runs(0.7, 0.75)}}) == {
        "13a": "**does not hold here**"
    }
    assert "positive less base: +0.3" in claims.claim_table(found)


def test_rungs_have_verdicts_as_far_as_they_were_run():
    def runs(solved):
        return {str(seed): {"eval/reward": [None, solved + seed / 1000], "age_mean": [0.0, 4.0]} for seed in range(3)}

    found = {"sao": {"single": runs(0.8), "dis": runs(0.9), "faster-critic": runs(0.7)}}
    assert claims.verdicts(found) == {"16b": "**holds here**", "16c": "**does not hold here**"}
    columns = {"solved": (measures.end, "eval/reward")}
    table = findings.table_if_run(found, "sao", columns, [("dis", "single"), ("single", "grpo")], base="grpo")
    assert table.splitlines()[-1].startswith("| dis less single | | +0.1 [")


def test_variants_in_other_worlds_stand_beside_those_of_their_studies():
    def runs(height):
        return {str(seed): {"distinct_2": [height + seed / 100] * 12} for seed in range(3)}

    own = {"hacking": {"kl-0.05": runs(0.6), "no-kl": runs(0.2), "kl-0.2": runs(0.1)}}
    trec = {"limit": {"best": 1.0}, "hacking: kl-0.05": runs(0.3), "hacking: no-kl": runs(0.5)}
    places = claims.recipes_by_world(own | {"recipes": {"trec": trec}})
    assert claims.recipes_by_world(own) == {}
    assert places["built-in reviews"] == {"hacking: kl-0.05": runs(0.6), "hacking: no-kl": runs(0.2)}
    line = claims.claims_by_place(places, claims.RECIPE_CLAIMS).splitlines()[2]
    assert [cell.split(":")[0].strip() for cell in line.split("|")[2:4]] == [
        "**holds here**",
        "**does not hold here**",
    ]


def test_the_reward_at_a_kl_is_that_of_the_first_three_iterations_there():
    run = {"reward": [0.1, 0.2, 0.3, 0.4, 0.5], "kl": [0.0, 0.5, 1.0, 1.5, 2.0]}
    assert measures.at_kl(run, "1") == pytest.approx(0.3)
    assert measures.at_kl(run, "0.6") == pytest.approx(0.22), "a fifth of the way from 0.2 at 0.5 nats"
    assert math.isnan(measures.at_kl(run, "2"))


def test_dpo_at_ppos_kl_lies_between_its_runs():
    def model(kl, gold):
        return {"1": {"kl": [kl], "reward/gold": [gold]}}

    study = {"SFT": model(0, 0.2), "PPO": model(4.5, 0.7), "DPO, β 0.1": model(6, 0.8), "DPO, β 0.5": model(3, 0.4)}
    found = measures.at_ppos_kl(study | {"IPO, β 0.5": model(4, 0.6)})
    assert found["DPO at PPO's KL"]["1"] == {"kl": [4.5], "reward/gold": [pytest.approx(0.617, abs=5e-4)]}
    assert found["IPO at PPO's KL"]["1"]["reward/gold"] == [], "no run went so far"
    assert found["PPO"] == study["PPO"]


def test_runs_beside_trl_are_judged_in_each_world():
    def runs(height):
        return {str(seed): {"reward": [height + seed / 100] * 40, "kl": [1.0] * 40} for seed in range(3)}

    limit = {"best": 1.0, "reference": 0.1}
    heights = {
        "builtin": {"ours": 0.9, "ppo": 0.7, "grpo": 0.6, "rloo": 0.6},
        "trec": {"ours": 0.5, "grpo": 0.6},
        "subj": {"ours": 0.9, "ppo": 0.7},
    }
    study = {world: {name: runs(x) for name, x in found.items()} | {"limit": limit} for world, found in heights.items()}
    verdicts = claims.verdicts({"beside-trl": measures.by_world(study)})
    assert verdicts == {
        **dict.fromkeys(("17a", "17b"), "**holds here**"),
        **dict.fromkeys(("17c", "17d"), "cannot tell"),  # two of three were not run
        **dict.fromkeys(("17e", "17f"), "**does not hold here**"),
    }


def test_steadiness_looks_at_changes_in_the_second_half():
    assert measures.unsteadiness({"x": [9.0, 1.0, 1.0, 2.0, 1.0, 2.0]}, "x") == pytest.approx(1.0)


def test_a_verdict_asks_for_every_interval():
    base, high, like = [1.0, 1.1, 1.2], [2.0, 2.1, 2.2], [1.0, 1.1, 1.3]
    above, over_zero, below = (high, base), (like, base), (base, high)
    assert measures.verdict([above, above]) == "**holds here**"
    assert measures.verdict([above, over_zero]) == "cannot tell"
    assert measures.verdict([above], all_run=False) == "cannot tell"
    assert measures.verdict([above, below]) == "**does not hold here**"
    assert measures.verdict([([2.0], [1.0])]) == measures.verdict([]) == "cannot tell"
    assert measures.difference([1000.0] * 3, [1000.0] * 3) == (0.0, 0.0, 0.0)
    assert measures.verdict([([1000.0] * 3, [1000.0] * 3)]) == "cannot tell", "equal runs"


def test_one_of_many_comparisons_does_not_refute_a_claim():
    """An interval of a single comparison that is just below 0 is no surprise among twenty."""
    low, high = [1.0, 1.2, 1.4, 1.6, 1.8], [1.5, 1.7, 1.9, 2.1, 2.3]
    assert measures.difference(low, high)[2] < 0
    assert measures.verdict([(low, high)]) == "**does not hold here**"
    assert measures.verdict([(low, high)] * 20) == "cannot tell"


def test_a_claim_holds_only_if_all_runs_have_its_figure():
    runs = {str(seed): {"reward": [0.5 + seed / 100] * 40, "kl": [1.0] * 40} for seed in range(3)}
    some = {seed: run | ({} if seed == "0" else {"kl": [3.0] * 40}) for seed, run in runs.items()}
    study = {"a": {seed: run | {"reward": [0.9] * 40} for seed, run in runs.items()}, "b": runs, "c": some}
    assert measures.judged(study, measures.whole, [("a", "b", "reward")])[0] == "**holds here**"
    assert measures.judged(study, measures.whole, [("a", "b", "reward"), ("a", "d", "reward")])[0] == "cannot tell"
    assert measures.row(study, "c", None, {"x": (measures.at_kl, "2")}) == "| c | 3 | 0.515 ± 0.064 (2 of 3) |"


def test_verdicts_on_lambda_follow_the_runs_of_the_recipes():
    """Made-up runs, λ = 0.95 the best on the pendulum but with PPO."""

    def runs(height):
        returns = {seed: [height + seed] * 20 for seed in range(3)}
        return {str(seed): {"train/average_return": x, "advantage_std": x} for seed, x in returns.items()}

    heights = {"0": 100, "0.95": 900, "1": 500}
    pendulum = {f"algorithm=policy_gradient,lam={lam}": runs(height) for lam, height in heights.items()}
    pendulum |= {f"algorithm=ppo,lam={lam}": runs(500) for lam in heights}
    studies = {"pendulum": pendulum}
    studies["locomotion-lambda"] = {f"id=Humanoid-v5,lam={lam}": runs(1000 - x) for lam, x in heights.items()}
    places = claims.by_lambda(studies)
    assert claims.verdicts_by_place(places, claims.LAMBDA_CLAIMS, ["λ = 0.95 ends above 0 and 1"]) == (
        "λ = 0.95 ends above 0 and 1: **holds here** on the pendulum, cannot tell on the pendulum with PPO, "
        "**does not hold here** on Humanoid with PPO"
    )
    header, _, first, *_ = claims.claims_by_place(places, claims.LAMBDA_CLAIMS).splitlines()
    assert header == "| claim | the pendulum | the pendulum with PPO | Humanoid with PPO |"
    assert "| **holds here**: 0.95 less 0: +800 [" in first


def test_a_critics_lead_on_the_grid_is_judged_at_as_many_maps():
    def runs(height):
        return {str(seed): {"reward": [height + seed / 100] * 20} for seed in range(3)}

    grid = {"group-relative": runs(0.5), "leave-one-out": runs(0.5)}
    assert "per map too: **holds here**, token-gae-8-per-map less group-relative: +0.4 [" in claims.map_control(
        grid | {claims.CONTROL_BY_MAP: runs(0.9)}
    )
