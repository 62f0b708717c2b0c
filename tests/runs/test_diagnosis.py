"""Each check on metrics made for it: the disease is named, and everything short of it is not."""

import math
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from tokencredit.runs.diagnosis import CHECKS, EXPLAINS, diagnose, no_finding
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.fields import flat
from tokencredit.settings.text import PPOConfig

ROOT = Path(__file__).parents[2]
CONFIG = {
    "reward": [{"classifier": "a", "weight": 1.0}, {"function": "b", "weight": 2.0}],
    "rollout": {"stop_at_eos": True},
    "ppo": {"epochs": 4, "minibatches": 4},
    "optim": {"warmup": 5, "max_grad_norm": 1.0},
    "advantage": {"estimator": "gae", "lam": 0.95},
}


def healthy(iterations=40):
    return [
        {
            "iteration": i + 1,
            "reward": 0.5 + 0.01 * i,
            "reward_std": 0.2,
            "reward_std/a": 0.1,
            "reward_std/b": 0.08,
            "entropy": 2.0 - 0.02 * i,
            "length": 20.0,
            "truncated": 0.1,
            "distinct": 1.0,
            "distinct_2": 0.6 - 0.003 * i,
            "repetition": 0.02,
            "kl": 0.2 * i,
            "ref_logprob": -2.0,
            "explained_variance": 0.5 if i else -1.0,
            "value_loss": 0.02,
            "clip_fraction": 0.1,
            "first_ratio_error": 0.0,
            "grad_norm": 1.5,
        }
        for i in range(iterations)
    ]


AUDITED = {
    "noise": 0.1,
    "value_noise": 0.1,
    "explained_variance_high": 0.8,
    "spread_high": 0.9,
    "raise_lam": 0.02,
    "lower_lam": -0.1,
}


def audited(metrics, *iterations, **changes):
    """Rows with audits at some iterations."""
    numbers = {f"audit/{name}": value for name, value in (AUDITED | changes).items() if value is not None}
    return [row | (numbers if row["iteration"] in iterations else {}) for row in metrics]


def in_audits(metric, value):
    """Columns of a run that is audited every ten iterations."""
    columns = {f"audit/{name}": lambda i, x=x: None if (i + 1) % 10 else x for name, x in AUDITED.items()}
    changed = {f"audit/{metric}": lambda i: None if (i + 1) % 10 else value}
    return changed | {name: column for name, column in columns.items() if name not in changed}


def ramp(start, end):
    return lambda i: start + (end - start) * i / 39


EPISODES = {
    "env/turns": 3.0,
    "env/calls": 1.5,
    "env/malformed": 0.05,
    "env/failed": 0.1,
    "env/timeout": 0.0,
    "env/cut": 0.1,
    "env/ending/done": 0.3,
    "env/ending/answer": 0.4,
    "env/ending/max_turns": 0.2,
    "env/ending/length": 0.08,
    "env/ending/error": 0.02,
}


def of_episodes(**changes):
    """Columns of a run with episodes of several turns, of which the named ones are changed."""
    changed = {f"env/{name}": value for name, value in changes.items()}
    return {
        name: lambda i, x=x: x
        for name, x in (changed | {k: v for k, v in EPISODES.items() if k not in changed}).items()
    }


SLOW = {"reward": lambda i: 0.5 + 0.002 * i, "kl": lambda i: 0.02 * i}
"""Columns of a run whose reward hardly rises, near its reference."""
DISEASES = {
    "mismatch": {"first_ratio_error": lambda i: 0.05},
    "engine_mismatch": {"behavior_kl": lambda i: 0.05, "behavior_ratio": lambda i: 1.0},
    "stale_samples": {"behavior_kl": lambda i: 0.2, "age_max": lambda i: 4.0, "age_mean": lambda i: 3.5},
    "no_step": {"bad_steps": lambda i: 1, "loss": lambda i: math.nan},
    "not_moved": {"kl": lambda i: 1e-6 * (-1) ** i},
    "all_masked": {"masked": lambda i: 1.0},
    "degenerate": {"ref_logprob": ramp(-2.0, -4.0)},
    "kl_runaway": {"kl": ramp(0.0, 60.0)},
    "entropy_collapse": {"entropy": ramp(2.0, 0.01)},
    "clip_high": {"clip_fraction": lambda i: 0.6} | SLOW,
    "clip_low": {"clip_fraction": lambda i: 0.0} | SLOW,
    "entropy_explodes": {"entropy": ramp(1.0, 4.0)},
    "discounted": {"reward": lambda i: 0.5},
    "explained_variance": {"explained_variance": lambda i: -0.5} | SLOW,
    "pretraining": {
        "pretrain/explained_variance": lambda i: math.nan if i else -0.1,
        "pretrain/batches": lambda i: math.nan if i else 5,
    },
    "critic_worse": in_audits("explained_variance_high", -0.2),
    "critic_flat": in_audits("spread_high", 0.1),
    "lam_low": in_audits("raise_lam", 0.2),
    "lam_high": in_audits("lower_lam", 0.2),
    "truncated": {"truncated": lambda i: 0.95},
    "constant_term": {"reward_std/b": lambda i: 0.0},
    "dominant_term": {"reward_std/b": lambda i: 5.0},
    "flat_reward": {"reward": lambda i: 0.5, "kl": lambda i: 0.02 * i},
    "equal_scores": {"reward_std": lambda i: 0.0 if i % 3 else 0.2, "reward": lambda i: 0.01},
    "evaluation_disagrees": {"eval/reward": lambda i: 0.5 - 0.001 * i},
    "stop_unused": {"stopped": lambda i: 0.0},
    "ends_at_once": {"length": lambda i: 1.2},
    "environment_fails": of_episodes(**{"ending/error": 0.9}),
    "calls_malformed": of_episodes(malformed=0.8, calls=0.01),
    "tools_fail": of_episodes(failed=0.8),
    "never_ended": of_episodes(**{"ending/max_turns": 0.97}),
    "no_room": of_episodes(**{"ending/length": 0.8}),
    "observations_cut": of_episodes(cut=0.7),
}


SETTINGS = {
    "discounted": CONFIG | {"advantage": {"estimator": "gae", "gamma": 0.5}},
    "stop_unused": CONFIG | {"rollout": {"stop_at_eos": True, "stop": ["###"]}},
}
"""Configurations of runs whose check reads more than metrics."""


def sick(name):
    columns = DISEASES[name]
    return [row | {key: column(i) for key, column in columns.items()} for i, row in enumerate(healthy())]


def names(metrics, config=CONFIG, **options):
    return [finding.name for finding in diagnose(metrics, config, **options)]


def test_a_healthy_run_has_no_findings():
    assert names(healthy()) == []


@pytest.mark.parametrize("iterations", range(1, 12))
def test_a_young_run_has_no_findings(iterations):
    assert names(healthy(iterations), ended=False) == []


@pytest.mark.parametrize(("iterations", "found"), [(1, False), (2, True), (5, True)])
def test_a_constant_term_is_named_from_the_second_iteration_on(iterations, found):
    rows = [row | {"reward_std/b": 0.0} for row in healthy(iterations)]
    assert ("constant_term" in names(rows, ended=False)) == found
    if found:
        assert diagnose(rows, CONFIG)[0].evidence == f"reward_std/b 0 in iterations 1–{iterations}"
        varied = [*rows[:-1], rows[-1] | {"reward_std/b": 0.1}]
        assert "constant_term" not in names(varied, ended=False)


@pytest.mark.parametrize("name", ["constant_term", "dominant_term"])
def test_a_term_of_weight_0_is_watched_alone(name):
    watched = CONFIG | {"reward": [term | {"weight": 0.0} if i else term for i, term in enumerate(CONFIG["reward"])]}
    assert name in names(sick(name))
    assert name not in names(sick(name), watched)


@pytest.mark.parametrize(
    ("weights", "a", "b", "found"),
    [
        ((1.0, 2.0), lambda i: 0.1, lambda i: 5.0, True),
        ((1.0, -1.0), lambda i: 0.1, lambda i: 5.0, True),  # a penalty that drowns the goal
        ((0.05, 1.0), lambda i: 0.1, lambda i: 0.3, False),  # small by its weight, on purpose
        ((-1.0, 1.0), lambda i: 0.01, lambda i: 0.3, False),  # a penalty of what hardly occurs
        ((1.0, 1.0), ramp(0.2, 0.001), lambda i: 0.3, False),  # a form that was learned
        ((1.0, 1.0), lambda i: 0.05, lambda i: 0.3, False),
    ],
)
def test_a_term_is_drowned_by_anothers_scale_and_not_by_its_own_weight(weights, a, b, found):
    terms = [{"function": name, "weight": weight} for name, weight in zip("ab", weights, strict=True)]
    rows = [row | {"reward_std/a": a(i), "reward_std/b": b(i)} for i, row in enumerate(healthy())]
    findings = diagnose(rows, CONFIG | {"reward": terms})
    assert [finding.title for finding in findings] == ["the reward's term b drowns a"] * found


def test_terms_of_python_have_weights_that_the_configuration_lacks():
    assert "dominant_term" not in names(sick("dominant_term"), CONFIG | {"reward": CONFIG["reward"][:1]})


def test_a_result_without_findings_says_how_little_was_checked():
    """Fewer than half of the illnesses can be named in nine iterations."""
    named = {name for name in DISEASES if name in names(sick(name)[:9])}
    assert len(named) < len(DISEASES) / 2
    assert no_finding({}, 1) == "the checks find nothing wrong in 1 iteration, but most of them need at least 10"
    assert no_finding({}, 9) == "the checks find nothing wrong in 9 iterations, but most of them need at least 10"
    assert no_finding({}, 10) == "the checks find nothing wrong with this run"
    assert no_finding({"model": {}, "dpo": {}}, 10) == "there are no checks for runs of tokencredit dpo"


@pytest.mark.parametrize("name", DISEASES)
def test_each_fault_is_named(name):
    found = diagnose(sick(name), SETTINGS.get(name, CONFIG))
    assert name in [finding.name for finding in found]
    finding = next(finding for finding in found if finding.name == name)
    column = "advantage.gamma" if name == "discounted" else next(iter(DISEASES[name]))
    assert column in finding.evidence
    assert finding.advice in finding.line()


@pytest.mark.parametrize(("dtype", "rounding", "mismatch"), [("float32", 1e-4, 2e-3), ("bfloat16", 0.1, 0.3)])
def test_a_ratio_may_be_off_by_what_the_number_format_rounds(dtype, rounding, mismatch):
    config = CONFIG | {"model": {"dtype": dtype}}
    assert names([row | {"first_ratio_error": rounding} for row in healthy()], config) == []
    assert names([row | {"first_ratio_error": mismatch} for row in healthy()], config) == ["mismatch"]


@pytest.mark.parametrize(("dtype", "rounding", "mismatch"), [("float32", 1e-6, 2e-5), ("bfloat16", 1e-3, 0.01)])
def test_an_engine_may_round_otherwise(dtype, rounding, mismatch):
    config = CONFIG | {"model": {"dtype": dtype}}
    noise = {"behavior_kl": rounding, "behavior_ratio": 1 - rounding}
    assert names([row | noise for row in healthy()], config) == []
    rows = [row | {"behavior_kl": mismatch, "behavior_ratio": 1.0} for row in healthy()]
    assert names(rows, config) == ["engine_mismatch"]
    assert "off_policy.correct" in diagnose(rows, config)[0].advice
    corrected = config | {"off_policy": {"proximal": "recomputed", "correct": "clip"}}
    assert "off_policy.correct" not in diagnose(rows, corrected)[0].advice
    ahead = config | {"rollout": {"max_age": 1}}
    old = {"age_max": 1.0, "age_mean": 1.0}
    assert names([row | old for row in rows], ahead) == [], "drawn with the weights of an earlier update"
    assert names([row | old for row in rows], config) == [], "learned again in a loop by hand"
    assert names([row | old | {"behavior_kl": 0.08} for row in rows], ahead) == []
    new = {"age_max": 0.0, "age_mean": 0.0}  # the first batch
    assert names([row | new for row in rows[:1]], ahead) == []
    (again,) = diagnose([row | old | {"behavior_kl": 0.2} for row in rows], config)
    assert "learn from a batch soon, and only once" in again.advice


def test_an_engine_in_bfloat16_beside_training_in_float32_is_named():
    """By the size of the differences: their mean, here below 0, is chance."""
    rows = [row | {"behavior_kl": -5e-5, "behavior_ratio": 1 + 5e-5 + 8e-7} for row in healthy()]
    assert names(rows, CONFIG | {"model": {"dtype": "float32"}}) == ["engine_mismatch"]
    assert names(rows, CONFIG | {"model": {"dtype": "bfloat16"}}) == []


@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}, {"min_new_tokens": 5}])
def test_filters_that_leave_out_a_part_of_the_policy_are_named(filters):
    config = CONFIG | {"rollout": {"stop_at_eos": True, **filters}}
    rows = [row | {"behavior_kl": 0.04, "behavior_ratio": 0.96} for row in healthy()]
    (finding,) = diagnose(rows, config)
    assert finding.name == "truncated_support"
    assert f"rollout.{next(iter(filters))} left had 96.0% of the probability" in finding.evidence
    assert "off_policy.correct" in finding.advice
    for corrected in ({"proximal": "recomputed", "correct": "mask"}, {"proximal": "behavior", "correct": "none"}):
        assert names(rows, config | {"off_policy": corrected}) == []
    assert names([row | {"behavior_ratio": 0.99} for row in rows], config) == []
    assert names(rows, CONFIG | {"rollout": {"top_p": 1.0}}) == ["engine_mismatch"], "these are no filters of the run"


def test_around_the_policy_that_drew_no_first_ratio_has_to_be_1():
    config = CONFIG | {"off_policy": {"proximal": "behavior", "correct": "none"}}
    assert names(sick("mismatch"), config) == []


def test_every_check_has_a_case():
    # In tests of their own.
    others = {"still_warming", "truncated_support", "hollow_score", "phrase_spreads", "critic_lags"}
    assert {check.__name__ for _, check, _ in CHECKS} == {*DISEASES, *others}


def test_evaluations_that_are_as_good_as_training_need_not_rise():
    solved = [row | {"eval/reward": 1.0} for row in healthy()]
    assert names(solved) == []


@pytest.mark.parametrize("section", sorted({section for *_, section in CHECKS}))
def test_the_section_that_explains_a_finding_exists_and_the_table_of_findings_links_to_it(section):
    page, _, anchor = section.partition("#")
    headings = re.findall(r"^##+ (.*)", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert anchor in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    if section != "docs/audit.md#the-diagnosis":  # a table of its own
        link = section.removeprefix("docs/").removeprefix("report.md")
        assert f"]({link}) |" in (ROOT / "docs" / "report.md").read_text(encoding="utf-8")


def test_a_warm_up_longer_than_the_run():
    config = CONFIG | {"optim": {"warmup": 40}}
    assert names(healthy(), config) == ["still_warming"]
    assert names(healthy(), config, ended=False) == []
    assert names(healthy(39), config | {"run": {"iterations": 40}}) == [], "it was cut short"
    assert names(healthy(40), config | {"run": {"iterations": 40}}) == ["still_warming"]


@pytest.mark.parametrize(("iterations", "found"), [(1, []), (3, []), (4, ["still_warming"])])
def test_a_trial_may_end_in_its_warm_up(iterations, found):
    config = CONFIG | {"optim": {"warmup": 10}, "run": {"iterations": iterations}}
    assert names(healthy(iterations), config) == found


@pytest.mark.parametrize("iterations", [1, 2, 4, 40])
def test_a_run_without_a_step_is_told_that_alone(iterations):
    """As after rewards that were NaN in all iterations: the rows have no other numbers."""
    config = CONFIG | {"optim": {"warmup": 40}, "run": {"iterations": iterations}}
    rows = [{"iteration": i + 1, "reward": None, "steps": 0, "bad_steps": 1} for i in range(iterations)]
    assert names(rows, config) == ["no_step"]
    assert names(rows, config, ended=False) == ["no_step"]
    assert f"bad_steps {iterations} in {iterations} iterations" in diagnose(rows, config)[0].evidence
    assert "no_step" not in names([*rows, {"iteration": iterations + 1, "reward": 1.0, "loss": 0.5}], config)


def test_updates_that_all_ended_before_a_step_are_told():
    still = {"steps": 0, "bad_steps": 0, "loss": 0.1, "approx_kl_k3": 0.02}
    assert "no_step" in names([row | still for row in healthy(20)])
    assert "no_step" not in names([row | still | {"steps": row["iteration"] % 2} for row in healthy(20)])


def test_filtered_and_older_samples_show_that_the_policy_has_not_moved():
    rows = [{key: x for key, x in row.items() if key != "kl"} | {"log_ratio": 0.0} for row in healthy(20)]
    assert "not_moved" in names(rows)


ILL = {
    "critic_worse": ("explained_variance_high", -0.01, 0.0),
    "critic_flat": ("spread_high", 0.29, 0.3),
    "lam_low": ("raise_lam", 0.06, 0.05),
    "lam_high": ("lower_lam", 0.06, 0.05),
}


@pytest.mark.parametrize("name", ILL)
def test_a_finding_needs_the_last_two_audits(name):
    metric, ill, well = ILL[name]
    assert names(audited(healthy(), 40, **{metric: ill})) == [name]
    assert names(audited(healthy(), 40, **{metric: well})) == []
    assert names(audited(audited(healthy(), 30, **{metric: ill}), 40, **{metric: ill})) == [name]
    assert names(audited(audited(healthy(), 30, **{metric: well}), 40, **{metric: ill})) == []
    assert names(audited(audited(healthy(), 30, **{metric: ill}), 40, **{metric: well})) == []
    assert names(audited(audited(healthy(), 30, **{metric: ill}), 40, **{metric: None})) == []
    assert names(audited(audited(healthy(), 10, **{metric: well}), 30, 40, **{metric: ill})) == [name]
    found = diagnose(audited(healthy(), 30, 40, **{metric: ill}), CONFIG)
    assert f"audit/{metric} {ill:.3g}, {ill:.3g} in the audits of iterations 30 and 40" in found[0].evidence


def test_audits_that_are_mostly_noise_say_nothing_of_lambda():
    for metric in ("raise_lam", "lower_lam"):
        assert names(audited(healthy(), 40, **{metric: 0.3, "noise": 0.5})) == []
        assert len(names(audited(healthy(), 40, **{metric: 0.3, "noise": 0.49}))) == 1


@pytest.mark.parametrize("name", ["critic_worse", "critic_flat"])
def test_true_values_that_are_mostly_noise_say_nothing_of_the_critic(name):
    metric, ill, _ = ILL[name]
    for noise in (0.5, 0.71, None):  # audits of older versions have none
        assert names(audited(healthy(), 40, **{metric: ill, "value_noise": noise})) == []
    assert names(audited(healthy(), 40, **{metric: ill, "value_noise": 0.49})) == [name]


@pytest.mark.parametrize("name", ILL)
def test_audits_of_a_young_run_give_no_findings(name):
    metric, ill, _ = ILL[name]
    assert names(audited(healthy(), 1, 5, 9, **{metric: ill})) == []
    assert names(audited(healthy(), 9, 10, **{metric: ill})) == [name]


@pytest.mark.parametrize(
    ("estimator", "lam", "raised", "lowered"),
    [
        ("gae", 0.5, True, True),
        ("gae", 0.0, True, False),
        ("gae", 1.0, False, True),
        ("td", 0.95, True, False),
        ("monte_carlo", 0.95, False, True),
        ("decoupled_gae", 0.9, True, True),
        ("n_step", 0.9, False, False),
        ("uniform", 0.9, False, False),
    ],
)
def test_only_a_lambda_that_is_there_can_be_raised_or_lowered(estimator, lam, raised, lowered):
    rows, config = audited(healthy(), 40, raise_lam=0.3, lower_lam=0.3), {"estimator": estimator, "lam": lam}
    found = diagnose(rows, CONFIG | {"advantage": config})
    assert [finding.name for finding in found] == ["lam_low"] * raised + ["lam_high"] * lowered
    assert all(("advantage.estimator: gae" in f.advice) == (estimator in ("td", "monte_carlo")) for f in found)


def test_findings_are_ordered_by_severity():
    both = [a | {"first_ratio_error": 0.05} for a in sick("clip_low")]
    assert names(both) == ["mismatch", "clip_low"]


def test_a_policy_that_moves_late_has_moved():
    still = [row | {"kl": 1e-6} for row in healthy()]
    assert "not_moved" not in names(still[:29] + healthy()[29:])


@pytest.mark.parametrize(("batches", "explained", "vain"), [(5, 0.0, True), (5, 0.01, False), (1, 0.0, False)])
def test_a_pretraining_is_in_vain_where_the_critic_explains_nothing_new(batches, explained, vain):
    """The one batch of `critic.pretrain: 1` is measured before anything is learned."""
    first, *others = healthy()
    first |= {"pretrain/batches": batches, "pretrain/explained_variance": explained}
    assert names([first, *others]) == ["pretraining"] * vain


@pytest.mark.parametrize(("norm", "limit", "named"), [(3000.0, 1.0, True), (150.0, 1.0, False), (3000.0, None, False)])
def test_a_clipped_gradient_is_a_cause_of_small_updates_if_hardly_anything_of_it_is_left(norm, limit, named):
    config = CONFIG | {"optim": {"warmup": 5, "max_grad_norm": limit}}
    (found,) = diagnose([row | {"grad_norm": norm} for row in sick("clip_low")], config)
    assert found.name == "clip_low"
    assert ("optim.max_grad_norm" in found.cures[0]) == named


@pytest.mark.parametrize(("loss", "named"), [("clip", True), ("gspo", False), ("cispo", False), ("dppo_tv", False)])
@pytest.mark.parametrize(("finding", "share"), [("clip_high", 0.6), ("clip_low", 0.0)])
def test_the_clip_fraction_is_judged_only_for_ppos_own_loss(finding, share, loss, named):
    rows = [row | {"clip_fraction": share} for row in sick("clip_low")]
    assert (finding in names(rows, CONFIG | {"ppo": CONFIG["ppo"] | {"loss": loss}})) == named


def test_healthy_episodes_have_no_findings():
    rows = [row | {key: column(i) for key, column in of_episodes().items()} for i, row in enumerate(healthy())]
    assert names(rows) == []
    assert all(names(rows[:count], ended=False) == [] for count in range(1, 12))


def episodes(**changes):
    """Rows of a run with episodes of several turns."""
    return [row | EPISODES | {f"env/{name}": value for name, value in changes.items()} for row in healthy()]


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"malformed": 0.5, "calls": 0.16, "failed": 0.0}, ["calls_malformed"]),  # 1.5 of 1.66 per episode
        ({"malformed": 0.5, "calls": 0.17, "failed": 0.0}, []),
        ({"malformed": 0.05, "calls": 0.0}, []),
        ({"malformed": 0.06, "calls": 0.0, "failed": 0.0}, ["calls_malformed"]),
        ({"failed": 0.74}, ["tools_fail"]),  # 1 − 0.4 / 3 − 0.05 = 0.82 of the turns have calls
        ({"failed": 0.73}, []),
        ({"failed": 0.4, "timeout": 0.34}, ["tools_fail"]),
        ({"failed": 0.04, "turns": 1.1, "ending/answer": 1.0}, []),  # 0.04 of the turns
        ({"failed": 0.9, "calls": 0.0}, []),  # step of the plain protocol
        ({"ending/error": 0.51}, ["environment_fails"]),
        ({"ending/error": 0.5}, []),
        ({"ending/max_turns": 0.6, "ending/length": 0.36}, ["never_ended"]),
        ({"ending/max_turns": 0.6, "ending/length": 0.34}, []),
        ({"ending/max_turns": 0.3, "ending/length": 0.66}, ["no_room"]),
        ({"ending/length": 0.5}, []),
        ({"cut": 0.5}, []),
    ],
)
def test_limits_of_the_checks_of_episodes(changes, found):
    rows = episodes(**changes)
    assert names(rows) == found
    learned = {"calls_malformed", "tools_fail", "never_ended"}  # the policy may learn better
    first = 10 if learned & set(found) else 5
    assert names(rows[:first], ended=False) == found
    assert names(rows[: first - 1], ended=False) == []


def test_tools_that_time_out_need_another_advice():
    failing, late = diagnose(episodes(failed=0.8), CONFIG), diagnose(episodes(failed=0.1, timeout=0.7), CONFIG)
    assert [finding.title for finding in (*failing, *late)] == ["tools fail", "tools time out"]
    assert "env.timeout" in late[0].advice


def test_an_environment_that_always_pays_the_same_is_named():
    """Its term comes before those of the configuration, which has two."""
    rows = [{"iteration": i + 1, "reward_std/Grid": 0.0, "reward_std/a": 0.1, "reward_std/b": 0.1} for i in range(2)]
    (found,) = diagnose([row | EPISODES for row in rows], CONFIG, ended=False)
    assert found.title == "the environment Grid always pays the same"
    assert found.evidence == "reward_std/Grid 0 in iterations 1–2"
    varied = [row | EPISODES | {"reward_std/Grid": 0.1, "reward_std/b": 0.0} for row in rows]
    assert [f.title for f in diagnose(varied, CONFIG, ended=False)] == ["the reward's term b does not vary"]
    of_config = [{k: v for k, v in row.items() if k != "reward_std/Grid"} | {"reward_std/a": 0.0} for row in rows]
    assert [f.title for f in diagnose([row | EPISODES for row in of_config], CONFIG, ended=False)] == [
        "the reward's term a does not vary"
    ]


def test_an_environment_that_fails_comes_before_what_it_then_pays():
    rows = [{"reward_std/Grid": 0.0} | row for row in episodes(**{"ending/error": 1.0})]
    assert names(rows) == ["environment_fails"]


def test_short_equal_episodes_of_a_solved_task_pass():
    rows = [row | EPISODES | {"length": 20.0 - 0.4 * i, "kl": 1.0} for i, row in enumerate(healthy())]
    rows = [row | {"repetition": 0.01 * i} for i, row in enumerate(rows)]
    assert names(rows) == []
    assert "degenerate" in names([{k: v for k, v in row.items() if k not in EPISODES} for row in rows])
    assert names([row | {"ref_logprob": -2.0 - 0.1 * i} for i, row in enumerate(rows)]) == ["degenerate"]


def test_truncated_episodes_are_judged_by_their_endings():
    assert names([row | EPISODES for row in sick("truncated")]) == []
    assert names([row | {"truncated": 1.0} for row in episodes(**{"ending/length": 1.0})]) == ["no_room"]


def test_texts_of_a_fixed_length_are_never_cut_off():
    assert names(sick("truncated"), CONFIG | {"rollout": {"stop_at_eos": False}}) == []


def test_numbers_that_are_missing_or_not_finite_are_passed_over():
    rows = [{k: v for k, v in row.items() if k in ("iteration", "reward", "reward_std")} for row in healthy()]
    assert names(rows) == []
    assert names([row | {"kl": None, "entropy": math.nan} for row in rows]) == []
    assert names([]) == []


def test_texts_without_a_token_pass():
    assert names([row | {"length": 0.0} for row in sick("kl_runaway")]) == ["ends_at_once"]


def test_agents_are_judged_by_their_return():
    rows = [{"iteration": i, "train/average_return": 20.0, "train/std_return": 5.0} for i in range(1, 41)]
    assert names(rows, {"env": {"id": "CartPole-v1"}}) == ["flat_reward"]


def test_runs_without_a_critic_are_not_judged_by_one():
    rows = [{k: v for k, v in row.items() if k not in ("explained_variance", "value_loss")} for row in healthy()]
    assert names(rows) == []


def test_advice_names_settings_that_exist():
    known = {*flat(asdict(PPOConfig())), *flat(asdict(ControlConfig()))}
    groups = {key.partition(".")[0] for key in known if "." in key}
    for name in DISEASES:
        for finding in diagnose(sick(name), CONFIG):
            for key in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", finding.advice):
                assert key.partition(".")[0] not in groups or key in known, f"{finding.name} advises {key}"


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_advice_names_no_value_that_a_setting_has(kind):
    config = CONFIG | {"critic": {"kind": kind, "detach": kind == "shared"}}
    advised = {}
    for name in ("critic_worse", "critic_flat", "lam_low", "pretraining"):
        (found,) = diagnose(sick(name), config)
        assert ("critic.kind: separate" in found.advice) == (kind == "shared")
        advised[name] = found.advice
    assert ("critic.detach: false" in advised["critic_flat"]) == (kind == "shared")
    greedy = kind == "shared"
    rows = agent(**{"eval/average_return": 20.0})
    (found,) = diagnose(rows, AGENT | {"eval": {"greedy": greedy}})
    assert ("eval.greedy: false" in found.advice) == greedy


@pytest.mark.parametrize(
    ("name", "group", "refused", "kept"),
    [
        ("engine_mismatch", {"off_policy": {"proximal": "behavior"}}, "off_policy.correct", "take the same dtype"),
        ("explained_variance", {"critic": {"coef": 0.0}}, "critic.pretrain", "critic.epochs"),
        ("lam_low", {"critic": {"kind": "mine.py:Table"}}, "critic.epochs", "change the critic of this run"),
        ("degenerate", {"kl": {"coef": 0.0}}, "stop.kl", "stop earlier (stop.reward)"),
        ("kl_runaway", {"kl": {"target": 5.0}}, "kl.target", "raise kl.coef"),
        ("truncated", {"score": {"missing_eos_penalty": 1.0}}, "missing_eos_penalty", "rollout.max_new_tokens"),
        ("clip_high", {"ppo": {"epochs": 1, "minibatches": 1}}, "ppo.epochs", "ppo.target_kl"),
    ],
)
def test_advice_names_no_setting_that_is_refused_or_set(name, group, refused, kept):
    rows = [row | {"approx_kl_k3": 1.0} for row in sick(name)] if name == "clip_high" else sick(name)
    before, now = (
        next(x.advice for x in diagnose(rows, config) if x.name == name) for config in (CONFIG, CONFIG | group)
    )
    assert refused in before
    assert refused not in now
    assert kept in now


def test_a_frozen_trunk_gets_no_learning_rate():
    rows = [row | {"reward": 3.0, "value_mean": 0.4, "explained_variance": 0.0, "kl": 0.1} for row in healthy()]
    (lags,) = diagnose(rows, CONFIG | {"critic": {"kind": "separate", "detach": True}}, ended=False)
    assert lags.cures[0] == "raise critic.lr"


# Cause and consequence, and cures that the kind of run has.


def test_no_finding_explains_its_own_cause():
    known = {check.__name__ for _, check, _ in CHECKS}
    for cause, consequences in EXPLAINS.items():
        assert {cause, *consequences} <= known
        assert all(cause not in EXPLAINS.get(name, ()) for name in consequences)


def test_a_collapsed_run_shows_the_cause_alone():
    rows = sick("degenerate")
    worse = {"explained_variance": -0.5, "truncated": 1.0, "kl": 60.0, "entropy": 0.01, "repetition": 0.6}
    rows = [row | worse if row["iteration"] > 20 else row for row in rows]
    assert names(rows) == ["degenerate"]


AGENT = {"env": {"id": "CartPole-v1"}, "critic": {"kind": "separate"}, "ppo": {"epochs": 4, "minibatches": 4}}


def agent(iterations=20, rise=1.2, **changes):
    """Rows of an agent, as of CartPole with the default settings: the critic begins at 0, and no ratio is clipped."""
    return [
        {
            "iteration": i + 1,
            "train/average_return": 20.0 + rise * i,
            "train/std_return": 9.0,
            "train/average_length": 20.0 + rise * i,
            "explained_variance": -0.01,
            "value_mean": 0.1 * i,
            "value_loss": 50.0,
            "clip_fraction": 0.0,
            "approx_kl_k3": 2e-4,
            "grad_norm": 20.0,
        }
        | changes
        for i in range(iterations)
    ]


def test_an_agent_that_learns_is_not_accused():
    for iterations in range(1, 21):
        assert names(agent(iterations), AGENT, ended=iterations == 20) == []
    shared = AGENT | {"critic": {"kind": "shared", "coef": 1.0}}
    assert names(agent(), shared) == []


@pytest.mark.parametrize(
    ("value", "advantage", "deviation", "found"),
    [
        (22.4, 10.0, 4.0, True),  # as CartPole in the notebook, with values clipped
        (0.1, 14.0, 4.0, True),  # as with critic.lr: 1e-5
        (-12.0, -11.0, 5.0, True),
        (69.0, 1.8, 6.9, False),  # as recipes/control/cartpole.yaml
        (2.9, 0.021, 0.005, False),  # as pendulum.yaml, solved: a small distance, and hardly any spread
    ],
)
def test_an_agents_critic_that_returns_outgrow_is_named_at_the_end(value, advantage, deviation, found):
    columns = {"value_mean": value, "advantage_mean": advantage, "advantage_std": deviation}
    rows = agent(40, **columns)
    assert names(rows, AGENT) == ["critic_lags"] * found
    assert names(rows, AGENT, ended=False) == names(rows[:39], AGENT) == []
    if found:
        clipped, plain = AGENT | {"critic": {"clip": 0.2}}, AGENT | {"algorithm": "policy_gradient"}
        assert [diagnose(rows, config)[0].cures[0][:26] for config in (AGENT, clipped, plain)] == [
            "raise critic.lr",
            "raise critic.lr, and set c",
            "give the critic more steps",
        ]
    bare = [{name: x for name, x in row.items() if name != "value_mean"} for row in rows]
    assert names(bare, AGENT) == [], "there is no critic"
    texts = [row | {"value_mean": value, "advantage_mean": advantage, "advantage_std": deviation} for row in healthy()]
    assert "critic_lags" not in names(texts)


def test_agents_are_advised_keys_that_they_have():
    known, foreign = set(flat(asdict(ControlConfig()))), set(flat(asdict(PPOConfig())))
    rows = [*agent(rise=0.0), *agent(rise=0.0, explained_variance=-0.5, approx_kl_k3=1e-7)]
    for name in ("explained_variance", "clip_low", "flat_reward", "discounted", "no_step"):
        changed = [row | {"iteration": i} for i, row in enumerate(rows)] if name == "flat_reward" else rows
        config = AGENT | {"advantage": {"gamma": 0.5}} if name == "discounted" else AGENT
        for finding in diagnose(changed, config):
            for key in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", finding.advice):
                assert key in known or key not in foreign, f"{finding.name} advises {key}"
    (found,) = diagnose(agent(rise=0.0, explained_variance=-0.5, approx_kl_k3=2e-4), AGENT, ended=False)
    assert found.name == "explained_variance"
    assert "env.number" in found.advice
    assert "pretrain" not in found.advice


def test_the_first_cure_of_a_critic_depends_on_how_it_fails():
    rows = [row | {"reward": 3.0, "value_mean": 0.4, "explained_variance": 0.0, "kl": 0.1} for row in healthy()]
    (lags,) = diagnose(rows, CONFIG | {"critic": {"kind": "separate"}}, ended=False)
    assert (lags.title, lags.cures[0]) == ("the critic lags behind the rewards", "raise critic.lr and critic.trunk_lr")
    normalized = diagnose(rows, CONFIG | {"score": {"normalize": "running"}}, ended=False)
    assert normalized == [], "the critic's values are not in units of the reward"
    noisy, wild = ([row | {"explained_variance": x} for row in sick("explained_variance")] for x in (-0.5, -5.0))
    assert [diagnose(rows, CONFIG)[0].cures[0].split(" (")[0] for rows in (noisy, wild)] == [
        "give the critic more steps",
        "lower critic.lr",
    ]
    assert names(noisy[:19], ended=False) == [], "its first iterations say nothing"


def test_groups_of_equal_scores_are_counted_by_their_advantages():
    config = CONFIG | {"advantage": {"estimator": "group_relative", "scale": True}, "rollout": {"per_prompt": 4}}
    rows = [row | {"advantage_std": 0.4, "kl": 0.1, "reward": 0.5 + 0.002 * i} for i, row in enumerate(healthy())]
    (found,) = diagnose(rows, config, ended=False)
    assert (found.title, found.cures[0]) == ("most groups have equal scores", "raise rollout.per_prompt")
    assert names([row | {"advantage_std": 0.8} for row in rows], config, ended=False) == []
    some = [row | {"advantage_std": 0.0 if i % 10 < 4 else 0.8} for i, row in enumerate(rows)]
    assert names(some, config, ended=False) == [], "4 of 10, whatever the square of the mean deviation says"
    assert names(rows, CONFIG, ended=False) == []


def test_completions_that_grow_with_the_reward_need_another_advice():
    rows = [row | {"length": 20 + 0.2 * i, "truncated": min(1.0, 0.2 + 0.03 * i)} for i, row in enumerate(healthy())]
    (found,) = diagnose(rows, CONFIG)
    assert (found.name, found.title) == ("truncated", "the reward rises with the length")
    assert "score.overlong" in found.cures[0]


def test_an_agent_whose_episodes_all_return_the_same_is_told_what_it_can_change():
    rows = agent(rise=0.0, **{"train/average_return": -200.0, "train/std_return": 0.0})
    (found,) = diagnose(rows, AGENT)
    assert found.name == "equal_scores"
    assert "env.number" in found.cures[0]
    assert names([*rows, *agent(40)[20:]], AGENT) == [], "it learns after all"


def test_a_flat_reward_is_the_price_of_the_kl_only_if_that_is_large():
    cheap = [row | {"kl_coef": 0.05} for row in sick("flat_reward")]
    dear = [row | {"kl_coef": 0.5} for row in sick("flat_reward")]
    assert diagnose(cheap, CONFIG)[0].cures[:2] == ("raise optim.lr", "lower kl.coef")
    assert diagnose(dear, CONFIG)[0].cures[:2] == ("lower kl.coef", "raise optim.lr")


def test_gamma_is_named_where_it_leaves_nothing_of_the_reward():
    config, rows = SETTINGS["discounted"], sick("discounted")
    assert names(rows, config) == ["discounted"]
    for advantage in ({"gamma": 0.99}, {"gamma": 1.0}, {"gamma": 0.5, "unit": "turn"}):
        assert "discounted" not in names(rows, CONFIG | {"advantage": {"estimator": "gae"} | advantage})
    assert "discounted" not in names(healthy(), config), "it learns nevertheless"


# Completions that end too late, too early, or say nothing.


def test_completions_that_a_stop_string_never_ends_are_named():
    rows = [row | {"truncated": 1.0, "stopped": 0.0} for row in healthy()]
    config = CONFIG | {"rollout": {"stop_at_eos": False, "stop": ["###"]}}
    (found,) = diagnose(rows, config)
    assert (found.name, found.cures[0]) == ("stop_unused", "set rollout.stop_at_eos: true")
    assert names(rows[:5], config, ended=False) == ["stop_unused"]
    assert names(rows[:4], config, ended=False) == ["truncated"]
    assert names([row | {"stopped": 0.1} for row in rows], config) == ["truncated"]


def completion(text, ids, reward, **more):
    return {"iteration": 40, "completion": text, "tokens": [str(one) for one in ids], "reward": reward} | more


@pytest.mark.parametrize(
    ("text", "ids", "reward", "named"),
    [
        ("", [2], 0.97, True),
        (" \n", [5, 2], 0.97, True),
        ("", [2], 0.5, False),
        ("good good good good", [7, 7, 7, 7, 7, 7, 7, 8], 0.97, True),
        ("so good", [7, 7, 8], 0.97, False),
        ("a good movie that was good", [1, 2, 3, 4, 5, 6, 2, 7], 0.97, False),
    ],
)
def test_a_high_score_of_a_text_that_says_nothing_is_named_with_the_text(text, ids, reward, named):
    samples = [completion("a fine movie", [1, 2, 3], 0.6), completion(text, ids, reward)]
    found = diagnose(healthy(), CONFIG, samples=samples)
    assert [finding.name for finding in found] == ["hollow_score"] * named
    assert not named or f"{text.strip()!r} has the reward 0.97" in found[0].evidence


@pytest.mark.parametrize(
    ("first", "last", "named"), [(0, 36, True), (1, 25, True), (1, 23, False), (3, 33, False), (0, 22, False)]
)
def test_a_phrase_that_has_spread_over_the_completions_is_named(first, last, named):
    """Of 8 completions of the first iteration, and 40 of the last five; a run that does not learn hacks nothing."""
    rows = [[i < first for i in range(8)], *[[i < last for i in range(j, 40, 5)] for j in range(5)]]
    samples = [
        {"iteration": number, "completion": f"{one} was: good. See" if has else "A film about love", "reward": 0.6}
        | {"tokens": [str(token) for token in range(9)]}
        for number, row in zip((1, *range(36, 41)), rows, strict=True)
        for one, has in enumerate(row)
    ]
    found = diagnose(healthy(), CONFIG, samples=samples)
    assert [finding.name for finding in found] == ["phrase_spreads"] * named
    if named:
        shares = f"{first / 8:.0%} of the samples of iteration 1, and in {last / 40:.0%} of those of 36–40"
        assert f"'was: good. See' is in {shares}" in found[0].evidence
        assert "phrase_spreads" not in names([row | {"reward": 0.5} for row in healthy()], samples=samples)
        episodes_of = [row | EPISODES for row in healthy()]
        assert names(episodes_of, samples=[sample | {"turns": []} for sample in samples]) == []
        assert names(sick("degenerate"), samples=samples) == ["degenerate"], "the cause alone"
        assert names(healthy()[20:], samples=samples) == [], "the reward changed after iteration 20"


def test_plain_prompts_that_are_answered_with_nothing_are_named_at_once():
    rows = [row | {"length": 1.5} for row in healthy(1)]
    (found,) = diagnose(rows, CONFIG, ended=False)
    assert found.name == "ends_at_once"
    assert "conversations" in found.cures[0]
    answers = [completion("yes", [1, 2], 0.5, messages=[{"role": "user", "content": "Is it so?"}])]
    assert names(rows, CONFIG, ended=False, samples=answers) == [], "a conversation may have a short answer"
    assert names([row | {"length": 3.0} for row in rows], CONFIG, ended=False) == []
