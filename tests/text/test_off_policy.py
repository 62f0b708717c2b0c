"""`off_policy`: log-probs of the draws from the engine to weights of the loss, metrics and samples."""

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch

from helpers.configs import quiet, text_config
from helpers.files import read_jsonl, read_metrics
from helpers.proofs import proofs
from tokencredit.core.off_policy import correction
from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError
from tokencredit.runs.diagnosis.policy_checks import ROUNDING_KL
from tokencredit.settings.data import EnvironmentConfig
from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.settings.rollout import OffPolicyConfig, RolloutConfig, SamplingConfig
from tokencredit.settings.run_kind import ModelSource, with_engine
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AdvantageConfig, KLConfig, OptimConfig, UpdateConfig
from tokencredit.text.batch import Batch, behavior_metrics
from tokencredit.text.credit import Credit
from tokencredit.text.data.prompts import Prompts
from tokencredit.text.data.rollout import Rollout
from tokencredit.text.engines.local.sampling import Decoding
from tokencredit.text.engines.request_engine import RequestEngine
from tokencredit.text.models import precision
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.tools.scoring_options import EvaluateOptions

NUCLEUS = RolloutConfig(batch_size=8, max_new_tokens=8, top_p=0.9)


def logs(rows):
    return torch.tensor(rows).log()


def scored_by_hand(tokenizer):
    """Ratios 0.5, 2 and 1.5; then 4; the zeros are padding."""
    mask = torch.tensor([[True, True, True], [True, False, False]])
    rollout = Rollout(
        prompt_ids=(prompts := Prompts(["A film"], tokenizer).batch(0, 2)).ids,
        prompt_mask=prompts.mask,
        response_ids=torch.zeros(2, 3, dtype=torch.long),
        mask=mask,
        logprobs=logs([[0.1, 0.4, 0.3], [0.8, 1.0, 1.0]]),
        values=torch.zeros(2, 3),
        truncated=torch.tensor([False, True]),
        behavior_logprobs=logs([[0.2, 0.2, 0.2], [0.2, 1.0, 1.0]]),
    )
    return Batch(prompts, rollout, ["", ""], scores=torch.tensor([1.0, 2.0]))


def given(tokenizer, mask_truncated=False, **settings):
    args = PPOConfig(
        rollout=RolloutConfig(batch_size=2, top_p=0.9),
        ppo=UpdateConfig(mask_truncated=mask_truncated, minibatches=1),
        off_policy=OffPolicyConfig(**settings),
    )
    return Credit(args, lambda x: x).give(scored_by_hand(tokenizer))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"correct": "clip"}, [[0.5, 2.0, 1.5], [2.0, 0.0, 0.0]]),
        ({"correct": "clip", "bounds": [1.0, 1.7]}, [[1.0, 1.7, 1.5], [1.7, 0.0, 0.0]]),
        ({"correct": "mask", "bounds": [0.6, 3.0]}, [[0.0, 2.0, 1.5], [0.0, 0.0, 0.0]]),
        ({"correct": "clip", "level": "sequence", "bounds": [0.0, 9.0]}, [[1.5, 1.5, 1.5], [4.0, 0.0, 0.0]]),
        ({"correct": "mask", "level": "geometric"}, [[1.0] * 3, [0.0, 0.0, 0.0]]),
    ],
)
def test_weights_by_hand(settings, expected, tokenizer):
    batch, experience = given(tokenizer, **settings)
    torch.testing.assert_close(experience.weights, torch.tensor(expected))
    assert experience.weights is batch.weights
    assert torch.equal(experience.logprobs, batch.rollout.logprobs)


def test_a_completion_out_of_the_loss_keeps_its_weight_in_the_statistics(tokenizer):
    batch, experience = given(tokenizer, mask_truncated=True, correct="clip")
    assert not experience.mask[1].any()
    metrics = behavior_metrics(batch.rollout, batch.weights, Processes())
    assert metrics["weight_mean"] == pytest.approx((0.5 + 2 + 1.5 + 2) / 4)


def test_without_a_correction_there_are_no_weights(tokenizer):
    batch, experience = given(tokenizer)
    assert experience.weights is None
    assert torch.equal(experience.logprobs, batch.rollout.logprobs)


def test_the_proximal_policy_may_be_the_one_that_drew(tokenizer):
    batch, experience = given(tokenizer, proximal="behavior")
    assert experience.weights is None
    assert torch.equal(experience.logprobs, batch.rollout.behavior_logprobs)


def test_metrics_by_hand(tokenizer):
    rollout, weights = scored_by_hand(tokenizer).rollout, torch.tensor([[0.5, 2.0, 1.5], [0.0, 7.0, 7.0]])
    ratio, kl = (0.5 + 2 + 1.5 + 4) / 4, -math.log(0.5 * 2 * 1.5 * 4) / 4
    expected = {"behavior_ratio": ratio, "behavior_kl": kl}
    assert behavior_metrics(rollout, None, Processes()) == pytest.approx(expected)
    expected |= {"weight_mean": 1.0, "weight_zero": 0.25, "weight_ess": 4**2 / (4 * 6.5)}
    assert behavior_metrics(rollout, weights, Processes()) == pytest.approx(expected)


@pytest.mark.parametrize(
    "changes",
    [{"off_policy.correct": "clip"}, {"off_policy.correct": "mask"}, {"off_policy.proximal": "behavior"}],
)
def test_a_setting_without_other_logprobs_is_refused(changes, monkeypatch, tmp_path):
    (key, value), *_ = changes.items()
    refused = partial(
        pytest.raises, ConfigError, match=rf"^{key} is {value}, .* log-probs of training, .* leave it out"
    )
    for rollout in ({}, {"rollout.top_p": 1.0}, {"eval.temperature": 0.5}):
        with refused():
            PPOConfig.from_dict({"model.dtype": "float32", **rollout, **changes})
    for others in ({"model.dtype": "bfloat16"}, {"rollout.min_new_tokens": 2}, {"rollout.engine": "continuous"}):
        PPOConfig.from_dict({"model.dtype": "float32"} | others | changes)
    monkeypatch.setattr(precision, "choose_for_device", lambda *_: (False, "as set here"))
    args = PPOConfig.from_dict({"model.dtype": "auto", "run.dir": str(tmp_path / "run")} | changes)
    with refused():
        PPOTrainer(args=args)


def test_off_policy_bounds_must_be_in_order():
    with pytest.raises(ConfigError, match=r"off_policy\.bounds is \[2\.0, 2\.0\]; it must be \[low, high\]"):
        PPOConfig.from_dict({"off_policy.correct": "mask", "off_policy.bounds": [2, 2]})


def test_commands_that_only_sample_ask_for_no_other_logprobs():
    """`tokencredit evaluate RUN --dtype float32`, of a run in bfloat16."""
    run = PPOConfig.from_dict({"model.dtype": "bfloat16", "off_policy.correct": "clip"})
    config = EvaluateOptions(dtype="float32").configure(ModelSource("runs/first", run, scored=True), ())
    assert config.model.dtype == "float32"
    run = PPOConfig.from_dict(
        {"model.dtype": "float32", "rollout.engine": "continuous", "off_policy.proximal": "behavior"}
    )
    assert with_engine(run).rollout.engine == "local"


def trained(folder, iterations=1, **groups):
    optim = OptimConfig(warmup=0, schedule="constant", lr=1e-3)
    args = text_config(folder, iterations, **{"rollout": NUCLEUS, "optim": optim} | groups)
    trainer = PPOTrainer(args=args)
    trainer.train()
    return trainer, read_metrics(folder)


def test_a_run_with_a_nucleus_is_corrected_to_the_whole_distribution(tmp_path):
    """The first step of decoupled PPO is the policy gradient with weights."""
    one_step = UpdateConfig(epochs=1, minibatches=1)
    clip = OffPolicyConfig(correct="clip")
    _, (plain,) = trained(tmp_path / "plain", ppo=one_step)
    trainer, (corrected,) = trained(tmp_path / "corrected", ppo=one_step, off_policy=clip)
    same = ("reward", "entropy", "value_loss", "ratio_max", "first_ratio_error", "behavior_ratio", "behavior_kl")
    assert {name: corrected[name] for name in same} == {name: plain[name] for name in same}
    assert "weight_mean" not in plain
    assert 0.9 <= corrected["behavior_ratio"] < 1, "the probability of the nucleus"
    assert corrected["weight_mean"] == pytest.approx(corrected["behavior_ratio"], rel=1e-6)
    assert corrected["weight_zero"] == 0
    assert 0.9 < corrected["weight_ess"] < 1
    assert corrected["policy_loss"] != plain["policy_loss"]
    assert corrected["grad_norm"] != plain["grad_norm"]
    _, experience = trainer.credit.give(scored := trainer.collect())
    rollout, mask = scored.rollout, scored.rollout.mask
    weights = correction(rollout.logprobs, rollout.behavior_logprobs, mask)
    expected = -(weights * experience.advantages)[mask].sum() / mask.sum()
    metrics = trainer.learner.update(experience)
    assert metrics["policy_loss"] == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.proof  # models/test_precision.py has what bfloat16 draws from
def test_in_bfloat16_tokens_are_drawn_by_another_pass(tmp_path):
    settings = {"model": ModelConfig(dtype="bfloat16"), "rollout": replace(NUCLEUS, top_p=None)}
    _, (plain,) = trained(tmp_path / "plain", **settings)
    assert plain["behavior_ratio"] == pytest.approx(1, abs=1e-2)
    assert plain["behavior_ratio"] != 1
    assert abs(plain["behavior_kl"]) < 1e-2
    trainer, (moved,) = trained(tmp_path / "moved", **settings, off_policy=OffPolicyConfig(proximal="behavior"))
    assert moved["reward"] == plain["reward"]
    assert moved["policy_loss"] != plain["policy_loss"]
    scored = trainer.collect()
    assert torch.equal(trainer.credit.give(scored)[1].logprobs, scored.rollout.behavior_logprobs)


def test_another_engine_in_float32_has_weights_of_1_up_to_rounding(tmp_path):
    rollout = replace(NUCLEUS, engine="continuous")
    clip = OffPolicyConfig(correct="clip")
    _, (row,) = trained(tmp_path / "whole", rollout=replace(rollout, top_p=None), off_policy=clip)
    assert abs(row["behavior_kl"]) < ROUNDING_KL
    expected = {"behavior_ratio": 1, "weight_mean": 1, "weight_zero": 0, "weight_ess": 1}
    assert {name: row[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    _, (row,) = trained(tmp_path / "nucleus", rollout=rollout, off_policy=clip)
    assert 0.9 <= row["weight_mean"] < 0.999, "the probability of the nucleus"
    assert row["first_ratio_error"] < 1e-4


def test_samples_hold_the_logprobs_of_the_draws(tmp_path):
    _, (row,) = trained(tmp_path / "run", run=quiet(tmp_path / "run", samples=8))
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    pairs = [pair for x in samples for pair in zip(x["logprobs"], x["behavior_logprobs"], strict=True)]
    assert len(pairs) == row["tokens"]
    assert sum(b - a for a, b in pairs) / len(pairs) == pytest.approx(row["behavior_kl"], abs=1e-5)
    _, _ = trained(tmp_path / "whole", rollout=replace(NUCLEUS, top_p=None))
    assert "behavior_logprobs" not in read_jsonl(tmp_path / "whole" / "samples.jsonl")[0]


@pytest.mark.parametrize(
    ("critic", "proximal", "passes"),
    [("none", "interpolated", 1), *proofs(("none", "recomputed", 3), ("shared", "interpolated", 3))],
)
def test_the_pass_before_an_update_is_skipped_where_nothing_reads_it(critic, proximal, passes, tmp_path, monkeypatch):
    exact, scored = RequestEngine.exact, []

    def counted(engine, *args):
        scored.append(args)
        return exact(engine, *args)

    monkeypatch.setattr(RequestEngine, "exact", counted)
    rollout = RolloutConfig(batch_size=8, max_new_tokens=8, per_prompt=4, engine="continuous", max_age=2)
    args = text_config(
        tmp_path,
        3,
        rollout=rollout,
        off_policy=OffPolicyConfig(proximal=proximal, correct="clip"),
        critic=CriticConfig(kind=critic),
        advantage=AdvantageConfig(estimator="group_relative" if critic == "none" else "gae"),
        kl=KLConfig(coef=0.0),
        optim=OptimConfig(warmup=0, schedule="constant", lr=1e-4),  # larger steps can move single tokens by much
    )
    PPOTrainer(args=args).train()
    assert len(scored) == passes
    rows = read_metrics(tmp_path)
    names = {"behavior_ratio", "behavior_kl", "weight_mean", "weight_ess"}
    assert all(names <= set(row) for row in rows)
    assert all(("entropy" in row) == (passes == 3) for row in rows), "draws of earlier policies do not estimate it"
    assert all(0.8 < row["behavior_ratio"] < 1.25 for row in rows)
    sample = read_jsonl(tmp_path / "samples.jsonl")[-1]
    assert ("behavior_logprobs" in sample) == (passes == 3)


def test_interpolation_needs_tokens_with_an_age():
    for rollout in ({}, {"rollout.engine": "continuous"}):
        with pytest.raises(ConfigError, match=r"off_policy\.proximal is interpolated, .*; set rollout\.max_age \("):
            PPOConfig.from_dict({"off_policy.proximal": "interpolated"} | rollout)


def test_weights_of_an_interpolated_policy_need_tokens_of_age_2():
    settings = {"rollout.engine": "continuous", "off_policy.proximal": "interpolated", "off_policy.correct": "clip"}
    with pytest.raises(ConfigError, match=r"off_policy\.correct is clip, and rollout\.max_age is 1; all weights are 1"):
        PPOConfig.from_dict(settings | {"rollout.max_age": 1})
    PPOConfig.from_dict(settings | {"rollout.max_age": 2})


@pytest.mark.parametrize(
    ("proximal", "more", "refused"),
    [
        ("behavior", {"rollout.top_p": 0.7}, True),
        ("behavior", {"rollout.engine": "continuous", "rollout.max_age": 1}, True),
        ("interpolated", {"rollout.engine": "continuous", "rollout.max_age": 1}, True),
        ("recomputed", {"rollout.top_p": 0.7}, False),
        ("behavior", {"rollout.engine": "continuous"}, False),
        ("behavior", {"rollout.top_k": 5, "off_policy.support": "truncated"}, False),
    ],
)
def test_a_target_kl_that_an_update_begins_above_is_refused(proximal, more, refused):
    settings = {"ppo.target_kl": 0.01, "off_policy.proximal": proximal} | more
    with (
        pytest.raises(ConfigError, match=r"ppo\.target_kl is 0\.01, .* set off_policy\.proximal: recomputed")
        if refused
        else nullcontext()
    ):
        PPOConfig.from_dict(settings)


@pytest.mark.parametrize(
    ("dtype", "rounding", "turns"),
    [("float32", 1e-4, False), *proofs(("bfloat16", 0.2, False), ("float32", 1e-4, True))],
)
def test_on_the_kept_support_an_update_begins_at_a_ratio_of_1(dtype, rounding, turns, tmp_path):
    filters = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
    groups = {
        "model": ModelConfig(name="builtin:calculator" if turns else "builtin:reviews", dtype=dtype),
        "rollout": replace(NUCLEUS, batch_size=16, max_new_tokens=32 if turns else 8, **filters),
        "ppo": UpdateConfig(epochs=1, minibatches=1, micro_batch_tokens=200, entropy_coef=0.01),
    }
    if turns:
        groups |= {"env": EnvironmentConfig(factory="builtin:calculator"), "reward": []}
    rows = {}
    for support in ("full", "truncated"):
        off_policy = OffPolicyConfig(proximal="behavior", support=support)
        _, (rows[support],) = trained(tmp_path / support, off_policy=off_policy, **groups)
    for name in ("reward", "behavior_ratio", "behavior_kl", "entropy"):
        assert rows["full"][name] == pytest.approx(rows["truncated"][name], abs=1e-6)
    kept, whole = rows["truncated"], rows["full"]
    assert kept["ratio_mean"] == pytest.approx(1.0, abs=1e-3 if dtype == "float32" else 1e-2)
    assert kept["first_ratio_error"] < rounding < whole["first_ratio_error"]
    assert whole["ratio_mean"] < 0.995
    assert 0 < kept["entropy_in_update"] < whole["entropy_in_update"]


@pytest.mark.parametrize("ties", [False, True])
def test_the_kept_support_is_what_tokens_are_drawn_from(ties, tokenizer):
    """Also if several tokens share the probability of the last one that top_k keeps."""
    settings = SamplingConfig(top_k=3, top_p=0.9, min_new_tokens=1)
    one, ends = torch.tensor([], dtype=torch.long), torch.tensor([0])
    state = Decoding(torch.tensor([[0.999]] * 2), [one] * 2, settings, ends, {}, keeps_support=True)
    logits = torch.tensor([[9.0, 2.0, 1.5, 1.0 if not ties else 1.5, 1.5 if ties else 0.5, -9.0]] * 2)
    state.draw(logits, torch.zeros(2, 1, dtype=torch.long), None)
    kept = state.support[0, 0].tolist()
    assert 0 not in kept, "the end, before min_new_tokens"
    assert kept[0] == 1
    logits = logits / settings.temperature
    drawn = state.response_ids[:, :1]
    assert int(drawn[0]) in kept
    expected = logits.gather(1, drawn) - logits[:, kept].logsumexp(1, keepdim=True)
    torch.testing.assert_close(state.behavior_logprobs[:, :1], expected)
