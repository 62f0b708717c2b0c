"""Times of stages from timed passes: worked numbers, and a calibration of a small model."""

import pytest

from tokencredit import PPOConfig
from tokencredit.distributed.processes import Processes
from tokencredit.tools.plan import duration
from tokencredit.tools.plan.duration import all_reduce_rate, estimate, exchanged_bytes, extrapolated, stage_seconds
from tokencredit.tools.plan.work import Options, plan_work

TIMINGS = {"prefill": 1.0, "first_step": 0.1, "last_step": 0.3, "scoring": 2.0, "reference": 3.0, "critic": 0.0}
TIMINGS |= {"training": 5.0, "critic_training": 0.0, "optimizer": 0.5}
SETTINGS = {"rollout.batch_size": 16, "rollout.max_new_tokens": 11, "ppo.epochs": 3, "ppo.minibatches": 2}
SETTINGS |= {"model.dtype": "float32", "run.samples": 2}


def work_of(settings=None, **options):
    return plan_work(PPOConfig.from_dict(SETTINGS | (settings or {})), Options(**options))


def test_seconds_of_the_stages_worked_by_hand():
    seconds = stage_seconds(work_of(), TIMINGS, rows=4)
    # 16 rows are four passes of 4; ten steps of 0.2 s on average.
    assert seconds == pytest.approx(
        {"rollout": 1 + 10 * 0.2, "reference": 4 * 3, "update": 3 * (4 * 5 + 2 * 0.5), "samples": 0.5 * 2}
    )


def test_a_full_pass_follows_a_rollout_in_bfloat16_and_a_separate_critic_has_its_own():
    timings = TIMINGS | {"critic": 1.5, "critic_training": 2.0}
    settings = {"model.dtype": "bfloat16", "critic.kind": "separate", "critic.epochs": 2}
    seconds = stage_seconds(work_of(settings), timings, rows=4)
    assert seconds["rollout"] == pytest.approx(3 + 4 * 2 + 4 * 1.5)
    assert seconds["update"] == pytest.approx(3 * (4 * 5 + 2 * 0.5) + 2 * (4 * 2 + 2 * 0.5))


def test_layers_that_were_not_timed_take_as_long_as_those_that_were():
    deep = TIMINGS | {"training": 9.0, "last_step": 0.7}
    whole = extrapolated(TIMINGS, deep, more=4.0)
    assert whole == pytest.approx(TIMINGS | {"training": 9 + 4 * 4, "last_step": 0.7 + 4 * 0.4})


def test_bytes_that_processes_exchange():
    assert exchanged_bytes(work_of(processes=2), trained=10.0, models=8.0) == 6 * 10
    sharded = work_of({"run.shard": "full"}, processes=2)
    # Six passes with gradients; the reference and the rollout gather the policy once.
    assert exchanged_bytes(sharded, trained=10.0, models=8.0) == 8 * (1.5 * 6 + 0.5 * 2)


@pytest.mark.slow
def test_an_all_reduce_is_timed_between_new_processes():
    assert 1e6 < all_reduce_rate(2) < 1e12


def test_no_time_without_memory_for_two_layers():
    assert estimate(work_of(), peak=1e8, memory=1e6, trained=1.0, models=1.0) is None


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
    monkeypatch.setattr(duration, "SECONDS", 0.0)
    own = {"critic", "critic_training"} if settings.get("critic.kind") == "separate" else set()
    for layers in (1, 2):
        timings = duration.timed(work_of(settings), Processes(), layers, rows=2)
        positive = {name for name, value in timings.items() if value > 0}
        assert {"scoring", "reference", "training", "optimizer", "first_step"} | own <= positive
        assert not ({"critic", "critic_training"} - own) & positive
