"""Times of stages from timed passes: worked numbers, and a calibration of a small model."""

from dataclasses import replace

import pytest
import torch

from tokencredit import PPOConfig
from tokencredit.text.data.prefixes import policy_passes
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.tools.plan import duration
from tokencredit.tools.plan.duration import exchanged_bytes, stage_seconds
from tokencredit.tools.plan.memory import Sizes
from tokencredit.tools.plan.passes import SkeletonPasses
from tokencredit.tools.plan.work import plan_work

TIMINGS = {"step": 0.2, "scoring": 2.0, "reference": 3.0, "training": 5.0, "optimizer": 0.5}
SETTINGS = {"rollout.batch_size": 16, "rollout.max_new_tokens": 11, "ppo.epochs": 3, "ppo.minibatches": 2}
SETTINGS |= {"model.dtype": "float32"}


def work_of(settings=None, **options):
    work = plan_work(PPOConfig.from_dict(SETTINGS | (settings or {})), **options)
    return replace(work, mean=replace(work.mean, prompt=10))


def test_seconds_of_the_stages_worked_by_hand():
    seconds = stage_seconds(work_of(), TIMINGS, rows=4)
    # 16 rows are four passes of 4, prompts are 10 of 20 tokens, and ten steps follow.
    assert seconds == pytest.approx(
        {"rollout": 4 * 2 / 2 + 10 * 0.2, "reference": 4 * 3, "update": 3 * (4 * 5 + 2 * 0.5)}
    )


def test_a_full_pass_follows_a_rollout_in_bfloat16_and_a_separate_critic_has_its_own():
    settings = {"model.dtype": "bfloat16", "critic.kind": "separate", "critic.epochs": 2}
    seconds = stage_seconds(work_of(settings), TIMINGS | {"critic": 1.5}, rows=4)
    assert seconds["rollout"] == pytest.approx(4 + 10 * 0.2 + 4 * 2 + 4 * 1.5)
    assert seconds["update"] == pytest.approx(3 * (4 * 5 + 2 * 0.5) + 2 * (3 * 4 * 1.5 + 2 * 0.5))


def test_entropies_for_a_part_of_the_user_take_a_full_pass(tmp_path):
    (tmp_path / "mine.py").write_text("def unsure(rewards, entropy):\n    return entropy, rewards\n")
    settings = {"advantage.estimator": f"{tmp_path}/mine.py:unsure", "critic.kind": "none"}
    assert stage_seconds(work_of(settings), TIMINGS, rows=4)["rollout"] == pytest.approx(4 + 10 * 0.2 + 4 * 2)


def test_scores_of_prefixes_take_their_share_of_the_policys_passes():
    assert stage_seconds(work_of(), TIMINGS, rows=4, prefixes=0.5)["prefixes"] == pytest.approx(4 * 2 / 2)


def test_bytes_that_processes_exchange():
    sizes = Sizes({"kept": {"weights": 4.0, "critic": 1.0}}, parameters=1, trained=5, saved=0, checkpoint=0)
    assert exchanged_bytes(work_of(processes=2), sizes) == 6 * 4 * 5
    sharded = work_of({"run.shard": "full"}, processes=2)
    # Six passes with gradients; the reference and the rollout gather the policy once.
    assert exchanged_bytes(sharded, sizes) == 2 * 5 * (1.5 * 6 + 0.5 * 2)
    both = work_of({"run.shard": "full", "kl.place": "both", "kl.estimator": "full"}, processes=2)
    assert exchanged_bytes(both, sizes) == 2 * 5 * (1.5 * 6 + 0.5 * 3)


def test_a_kl_in_both_places_takes_a_pass_of_the_policy_beside_the_references(monkeypatch):
    passes = []
    monkeypatch.setattr(ActorCritic, "forward", lambda *_, **__: passes.append("policy"))
    monkeypatch.setattr(ActorCritic, "logprobs", lambda *_: (passes.append("reference"), torch.zeros(2, 11, 1)))
    for place, made in {"loss": ["reference"], "both": ["reference", "policy"]}.items():
        work = work_of({"kl.place": place, "kl.estimator": "full"})
        skeletons = SkeletonPasses(work, torch.device("cpu"))
        skeletons.refer(skeletons.inputs(2, work.mean))
        assert passes == made
        assert policy_passes(work.config) == 1 + len(made) + 3 * 3
        passes.clear()


@pytest.mark.slow
def test_a_short_completion_is_timed_within_the_context_of_the_model(monkeypatch):
    monkeypatch.setattr(duration, "SECONDS", 0.001)
    work = plan_work(PPOConfig.from_dict(SETTINGS | {"rollout.max_new_tokens": 4}), prompt_tokens=124)
    assert duration.timed(work, torch.device("cpu"), rows=2)["step"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"critic.kind": "separate", "critic.layers": 1, "critic.epochs": 1},
        {"model.lora.rank": 2, "model.gradient_checkpointing": True, "model.dtype": "bfloat16"},
        {"critic.kind": "none", "advantage.estimator": "uniform", "rollout.per_prompt": 2, "rollout.cache": "static"},
    ],
    ids=["separate", "LoRA", "static"],
)
def test_every_pass_of_a_small_model_is_timed(settings, monkeypatch):
    monkeypatch.setattr(duration, "SECONDS", 0.001)
    own = {"critic"} if settings.get("critic.kind") == "separate" else set()
    timings = duration.timed(work_of(settings), torch.device("cpu"), rows=2)
    assert set(timings) == {"scoring", "reference", "training", "optimizer", "step"} | own
    assert min(timings.values()) > 0
