"""Agreement with a noisy truth: by hand, and in a made-up case where everything is known."""

import math
from dataclasses import replace

import pytest
import torch

from helpers.proofs import proofs
from tokencredit.audit.agreement import audit_metrics, judge_credit, judge_critic, share_real
from tokencredit.audit.truth import Truth
from tokencredit.audit.verdict import credit_verdict, critic_caution, remedy, text_parts

SLOPE, OFFSET, NOISE = 0.6, 0.2, 0.5


def truth_of(x, errors):
    x, errors = torch.as_tensor(x).double(), torch.as_tensor(errors).double().expand(torch.as_tensor(x).shape)
    return Truth(x, errors, errors.square(), x, errors, errors.square())


def value(figures, name):
    return figures[name]["value"]


def test_every_figure_by_hand():
    """x̂ = 0, 2, 4, 6 with errors of ½, so m = ¼; v = 1, 1, 3, 5: means 3 and 2½, Var 5 and 2¾, cov 3½."""
    figures = judge_critic(truth_of([[0.0, 2.0], [4.0, 6.0]], 0.5), torch.tensor([[1.0, 1.0], [3.0, 5.0]]))
    expected = {
        "explained_variance": 1 - (5 - 7 + 2.75 - 0.25) / 4.75,
        "rmse": math.sqrt(1 - 0.25),
        "constant_rmse": math.sqrt(4.75),
        "bias": -0.5,
        "slope": 3.5 / 2.75,
        "spread": math.sqrt(2.75 / 4.75),
        "noise": 0.25 / 5,
        "ranking": 5.5 / 6,  # the critic ties one pair of six
        "ranking_within": 1.5 / 2,
    }
    for name, number in expected.items():
        assert value(figures, name) == pytest.approx(number), name
    assert figures["states"] == 4
    assert sum(each["states"] for each in figures["reliability"]) == 4
    assert {each["predicted"]: each["true"] for each in figures["reliability"]} == {1.0: 1.0, 3.0: 4.0, 5.0: 6.0}


def test_credit_by_hand():
    truth = truth_of([[0.0, 2.0], [4.0, -6.0]], 0.5)
    shown, other = torch.tensor([[1.0, -1.0], [3.0, -5.0]]), torch.tensor([[0.0, 1.0], [2.0, -3.0]])
    credit = judge_credit(truth, {"shown": shown, "other": other})
    # x̂ has mean 0 and Var 14; shown has mean −½, Var 8¾, cov 10; other is x̂ / 2.
    assert value(credit["estimators"]["shown"], "correlation") == pytest.approx(10 / math.sqrt(13.75 * 8.75))
    assert value(credit["estimators"]["other"], "correlation") == pytest.approx(7 / math.sqrt(13.75 * 3.5))
    gain = 7 / math.sqrt(13.75 * 3.5) - 10 / math.sqrt(13.75 * 8.75)
    assert value(credit["estimators"]["other"], "gain") == pytest.approx(gain)
    assert value(credit["estimators"]["shown"], "gain") == 0
    assert value(credit["estimators"]["shown"], "sign_agreement") == pytest.approx(2 / 3), "0 ± ½ has no sign"
    assert value(credit["estimators"]["other"], "sign_agreement") == 1
    assert (credit["tokens"], credit["significant"], credit["shown"]) == (4, 3, "shown")
    assert value(credit, "noise") == pytest.approx(0.25 / 14)
    assert value(credit, "error") == pytest.approx(math.sqrt((1 + 9 + 1 + 1) / 4 - 0.25)), "without the truth's noise"
    assert [share_real(x) for x in (None, -0.5, 0.3, 1.2)] == [None, 0.0, pytest.approx(0.09), 1.0]


@pytest.mark.parametrize(
    ("true", "shown", "why"), [(0, 1, "true advantages do not vary"), (1, 0, "ones are all alike")]
)
def test_advantages_without_variance_are_not_blamed_on_noise(true, shown, why):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    size = {"iteration": 1, "continuations": 8, "settings": {"completions": 8, "states": 4}}
    audit = size | {"credit": judge_credit(truth_of(true * x, 0.0), {"a": shown * x}), "critic": None}
    assert why in credit_verdict(audit)
    assert remedy(audit, "tokencredit audit run") == "", "no larger audit can tell more"


def test_advantages_in_other_units_have_no_error_and_the_same_correlation():
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    plain, scaled = (judge_credit(truth_of(x, 0.1), {"a": 2 * x}, scaled) for scaled in (False, True))
    assert audit_metrics(plain, None).keys() - audit_metrics(scaled, None).keys() == {"audit/advantage_error"}
    assert plain["estimators"] == scaled["estimators"]


@pytest.mark.parametrize("rows", [2, 5, 6])
def test_intervals_need_six_rows(rows):
    """Two completions gave the same three resamples over and over, and with them an interval of width zero."""
    generator = torch.Generator().manual_seed(0)
    x, v = torch.randn(2, rows, 4, generator=generator).unbind()
    critic, credit = judge_critic(truth_of(x, 0.1), v), judge_credit(truth_of(x, 0.1), {"a": v})
    shown = [critic["explained_variance"], critic["bias"], credit["noise"], credit["estimators"]["a"]["correlation"]]
    assert all(figure["value"] is not None for figure in shown)
    for figure in [*shown, *critic["reliability"]]:
        assert (figure["low"] is None, figure["high"] is None) == (rows < 6, rows < 6)


@pytest.mark.parametrize(("noise", "rows", "known"), [(0.1, 8, True), (0.1, 5, False), (1.1, 8, False)])
def test_a_correlation_is_a_metric_only_where_the_verdict_is_known(noise, rows, known):
    """Of noise or few rows it may be 2.25."""
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))
    credit = judge_credit(truth_of(x, noise * float(x.std())), {"a": x})
    metrics = audit_metrics(credit, None)
    names = {f"audit/{name}" for name in ("correlation", "correlation_low", "correlation_high", "trust")}
    assert names & metrics.keys() == (names if known else set())
    assert (metrics["audit/noise"] > 0.5) == (noise > 1)


def test_unknown_states_take_no_part():
    known = truth_of([[0.0, 2.0], [4.0, 6.0]], 0.5)
    judged = torch.tensor([[1.0, 1.0], [3.0, 5.0]])
    nan = torch.full((2, 1), torch.nan)
    wider = Truth(*(torch.cat([x, nan], 1) for x in vars(known).values()))
    for beside in (7.0, torch.nan):
        more = torch.cat([judged, torch.full((2, 1), beside)], 1)
        assert judge_critic(wider, more) == judge_critic(known, judged)
        assert judge_credit(wider, {"a": more}) == judge_credit(known, {"a": judged})


def test_nothing_known_gives_no_figures():
    unknown = truth_of(torch.full((2, 3), torch.nan), 1.0)
    critic, credit = judge_critic(unknown, torch.zeros(2, 3)), judge_credit(unknown, {"a": torch.zeros(2, 3)})
    assert critic["states"] == credit["tokens"] == 0
    assert critic["reliability"] == []
    assert all(value(critic, name) is None for name in ("explained_variance", "rmse", "bias", "ranking"))
    assert value(credit["estimators"]["a"], "correlation") is None


@pytest.mark.parametrize("x", [torch.ones(3, 4), torch.tensor([[1.0, 1.1], [0.9, 1.0]])])
def test_a_truth_that_noise_explains_has_no_correlation(x):
    truth = truth_of(x, 0.5)
    assert value(judge_credit(truth, {"a": x})["estimators"]["a"], "correlation") is None
    figures = judge_critic(truth, x)
    assert value(figures, "explained_variance") is None
    assert value(figures, "spread") is None
    assert value(figures, "ranking") is None, "no pair differs"


def made_up(rows, time, seed, row_effect=0.0):
    """x ~ N(1, 1), errors between 0.3 and 1.1, v = 0.6 x + 0.2 + N(0, ½²); rows may share a part of both noises."""
    random = torch.Generator().manual_seed(seed)

    def normal(of_rows=0.0):
        own = torch.randn(rows, time, generator=random, dtype=torch.float64)
        shared = torch.randn(rows, 1, generator=random, dtype=torch.float64)
        return math.sqrt(1 - of_rows) * own + math.sqrt(of_rows) * shared

    x = 1 + normal(row_effect)
    errors = 0.3 + 0.8 * torch.rand(rows, time, generator=random, dtype=torch.float64)
    values = SLOPE * x + OFFSET + NOISE * normal(row_effect)
    return x, truth_of(x + errors * normal(), errors), values


KNOWN = {
    "correlation": SLOPE / math.hypot(SLOPE, NOISE),
    "explained_variance": 1 - ((1 - SLOPE) ** 2 + NOISE**2),
    "slope": SLOPE / (SLOPE**2 + NOISE**2),
    "rmse": math.sqrt((1 - SLOPE) ** 2 + NOISE**2 + (SLOPE + OFFSET - 1) ** 2),
    "constant_rmse": 1.0,
    "bias": SLOPE + OFFSET - 1,
    "spread": math.hypot(SLOPE, NOISE),
}
CORRECTED = {"correlation", "explained_variance", "rmse", "constant_rmse", "spread"}


def figures_of(truth, values):
    credit = judge_credit(truth, {"a": values})["estimators"]["a"]
    return judge_critic(truth, values) | {"correlation": credit["correlation"], "signs": credit["sign_agreement"]}


@pytest.mark.slow
def test_the_noise_of_the_truth_is_taken_out():
    """With 40,000 states a figure is known to about 0.01; without the correction they are off by 0.05 to 0.6."""
    _, truth, values = made_up(400, 100, seed=0)
    figures = figures_of(truth, values)
    raw = figures_of(truth_of(truth.values, 0.0), values)
    for name, number in KNOWN.items():
        assert value(figures, name) == pytest.approx(number, abs=0.02), name
        assert (abs(value(raw, name) - number) > 0.05) == (name in CORRECTED), name
    noise = float(truth.value_errors.square().mean())
    assert value(figures, "noise") == pytest.approx(noise / (1 + noise), abs=0.01)


def test_pairs_and_signs_are_those_of_the_true_values():
    """Of pairs and signs that the measured truth tells clearly, the true one tells nearly the same."""
    x, truth, values = made_up(40, 30, seed=1)
    figures = figures_of(truth, values)
    measured, errors, true, judged = (y.flatten() for y in (truth.values, truth.value_errors, x, values))
    clear = measured[:, None] - measured > 2 * torch.hypot(errors[:, None], errors)
    right = (judged[:, None] > judged) == (true[:, None] > true)
    assert value(figures, "ranking") == pytest.approx(float(right[clear].double().mean()), abs=0.01)
    every = (judged[:, None] > judged) == (measured[:, None] > measured)
    different = ~torch.eye(len(true), dtype=torch.bool)
    assert value(figures, "ranking") > float(every[different].double().mean()) + 0.1, "all pairs would look worse"
    sure = measured.abs() > 2 * errors
    agree = judged.sign() == true.sign()
    assert value(figures, "signs") == pytest.approx(float(agree[sure].double().mean()), abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("samples", [60, *proofs(200)])
def test_intervals_hold_the_known_numbers_in_95_of_100_cases(samples):
    """Over samples of 60 rows whose states depend on each other; the bootstrap's 95 % are about 93 % here."""
    held = dict.fromkeys(KNOWN, 0)
    for seed in range(samples):
        _, truth, values = made_up(60, 5, seed=seed, row_effect=0.5)
        figures = figures_of(truth, values)
        for name, number in KNOWN.items():
            held[name] += figures[name]["low"] <= number <= figures[name]["high"]
    assert all(0.88 <= count / samples <= 0.99 for count in held.values()), held


def test_rows_are_drawn_whole():
    """Where all states of a row are one and the same, more of them do not make an interval narrower."""
    _, truth, values = made_up(50, 1, seed=2)
    many = Truth(*(y.expand(50, 20) for y in vars(truth).values()))
    one, twenty = figures_of(truth, values), figures_of(many, values.expand(50, 20))
    for name in ("correlation", "explained_variance", "slope", "bias"):
        width = one[name]["high"] - one[name]["low"]
        assert twenty[name]["high"] - twenty[name]["low"] == pytest.approx(width, rel=1e-6), name


RELATIVE = {"explained_variance", "slope", "spread"}


@pytest.mark.parametrize("offset", [500.0, 1e6])
def test_a_large_offset_changes_no_figure_but_those_of_variance_lost_beside_it(offset):
    _, truth, values = made_up(30, 10, seed=3)
    far = replace(truth, values=truth.values + offset)
    near, moved = judge_critic(truth, values), judge_critic(far, values + offset)
    for name in set(KNOWN) - {"correlation"}:
        known = None if offset == 1e6 and name in RELATIVE else pytest.approx(value(near, name), rel=1e-4, abs=1e-4)
        assert value(moved, name) == known, name


@pytest.mark.parametrize(("error", "judged"), [(1.8e-3, False), (5.0, True)])
def test_true_values_that_hardly_vary_judge_only_a_critic_far_from_them(error, judged):
    """CartPole, solved: true values 100 ± 2.2e-5, a critic within 0.0018 of them; or one of 100 ± 5, which is bad."""
    random = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(16, 4, generator=random, dtype=torch.float64) for _ in range(2))
    truth, values = truth_of(100 + 2.2e-5 * x, 1e-5), 100 + error * noise
    critic = judge_critic(truth, values)
    assert value(critic, "rmse") == pytest.approx(error, rel=0.2)
    assert value(critic, "constant_rmse") == pytest.approx(2.2e-5, rel=0.2)
    metrics = audit_metrics(judge_credit(truth, {"a": x}), critic)
    assert ("audit/explained_variance_high" in metrics) == ("audit/spread_high" in metrics) == judged
    assert metrics.get("audit/explained_variance_high", 0.0) < -1e6 if judged else metrics["audit/value_noise"] < 0.5
    caution = "The true values hardly vary here, so the critic cannot be judged by them."
    assert critic_caution(critic) == (None if judged else caution)
    assert text_parts(critic["constant_rmse"])[0] == f"{value(critic, 'constant_rmse'):.2g}", "not 0.00"
