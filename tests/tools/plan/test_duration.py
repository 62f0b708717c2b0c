"""Times of stages from timed passes: worked numbers, and a calibration of a small model."""

from dataclasses import replace

import pytest

from helpers.shapes import SMALL
from tokencredit import PPOConfig
from tokencredit.distributed.processes import Processes
from tokencredit.tools.plan import calibration
from tokencredit.tools.plan.calibration import Timings, affordable, calibrate, extrapolated
from tokencredit.tools.plan.communication import Exchange, exchange_of, exchange_rates
from tokencredit.tools.plan.duration import stage_seconds
from tokencredit.tools.plan.memory import Batch, Setup, critic_parameters, trained_parameters
from tokencredit.tools.plan.shape import parameters
from tokencredit.tools.plan.work import Options, plan_work

TIMINGS = Timings(
    layers=2,
    rows=4,
    prefill=1.0,
    steps=(0.1, 0.3),
    scoring=2.0,
    reference=3.0,
    critic=0.0,
    training=5.0,
    critic_training=0.0,
    optimizer=0.5,
)
SETTINGS = {"rollout.batch_size": 16, "rollout.max_new_tokens": 11, "ppo.epochs": 3, "ppo.minibatches": 2}
SETTINGS |= {"model.dtype": "float32", "run.samples": 2}


def work_of(settings=None):
    return plan_work(PPOConfig.from_dict(SETTINGS | (settings or {})), Options())


def test_seconds_of_the_stages_worked_by_hand():
    seconds = stage_seconds(work_of(), TIMINGS)
    # 16 rows are four passes of 4; ten steps of 0.2 s on average.
    assert seconds == pytest.approx(
        {"rollout": 1 + 10 * 0.2, "reference": 4 * 3, "update": 3 * (4 * 5 + 2 * 0.5), "samples": 0.5 * 2}
    )


def test_a_full_pass_follows_a_rollout_in_bfloat16_and_a_separate_critic_has_its_own():
    timings = replace(TIMINGS, critic=1.5, critic_training=2.0)
    seconds = stage_seconds(
        work_of({"model.dtype": "bfloat16", "critic.kind": "separate", "critic.epochs": 2}), timings
    )
    assert seconds["rollout"] == pytest.approx(3 + 4 * 2 + 4 * 1.5)
    assert seconds["update"] == pytest.approx(3 * (4 * 5 + 2 * 0.5) + 2 * (4 * 2 + 2 * 0.5))


def test_layers_that_were_not_timed_take_as_long_as_those_that_were():
    shallow, deep = replace(TIMINGS, layers=1), replace(TIMINGS, layers=3, training=9.0, steps=(0.3, 0.7))
    whole = extrapolated(shallow, deep, layers=11)
    assert whole.training == pytest.approx(9 + 8 * 2)
    assert whole.steps == pytest.approx((0.3 + 8 * 0.1, 0.7 + 8 * 0.2))
    assert whole.scoring == TIMINGS.scoring, "a difference of 0 adds nothing"


def test_large_models_are_timed_with_fewer_layers_and_rows(monkeypatch):
    work = work_of()
    assert affordable(work) == (2, 8), "the whole model, and a minibatch"
    deep = replace(work, model=replace(work.model, shape=replace(work.model.shape, layers=100)))
    monkeypatch.setattr(calibration, "MEMORY", 60e6)
    layers, rows = affordable(deep)
    assert 2 <= layers < 100
    assert calibration.size(deep, layers, rows) <= 60e6 < calibration.size(deep, layers + 1, rows)
    monkeypatch.setattr(calibration, "MEMORY", 1.0)
    assert affordable(deep) == (2, 1)


def test_bytes_that_processes_exchange():
    shape, batch = SMALL["gpt2"], Batch(rows=8, prompt=4, new=5, minibatches=2)
    setup = Setup(device="cpu", dtype="float32")
    assert exchange_of(shape, batch, setup, epochs=3) == Exchange()
    several = replace(setup, processes=2)
    policy, trained = 4 * parameters(shape), 4 * trained_parameters(shape, several)
    assert exchange_of(shape, batch, several, epochs=3) == Exchange(reduced=6 * trained)
    sharded = replace(several, shard="full")
    # Six passes with gradients; the reference and the rollout gather the policy once.
    assert exchange_of(shape, batch, sharded, epochs=3) == Exchange(read=2 * policy, trained=6 * policy)
    # Five tokens gather it each; the critic's values take another pass, and two epochs train it alone.
    separate = replace(sharded, gathered=False, critic="separate", reference=False)
    trunk = 4 * critic_parameters(shape, separate)[0]
    assert exchange_of(shape, batch, separate, epochs=3, critic_epochs=2) == Exchange(
        read=5 * policy + trunk, trained=6 * policy + 10 * trunk
    )


def test_frozen_weights_are_gathered_and_no_gradients_of_them_scattered():
    shape, batch = SMALL["gpt2"], Batch(rows=8, prompt=4, new=5, minibatches=2)
    lora = Setup(device="cpu", dtype="float32", processes=2, shard="full", lora_rank=2, critic="separate")
    policy, trunk = 4 * parameters(shape), 4 * critic_parameters(shape, lora)[0]
    assert exchange_of(shape, batch, lora, epochs=1) == Exchange(read=6 * policy + trunk, trained=2 * trunk)
    frozen = replace(lora, critic_trains="head")
    assert exchange_of(shape, batch, frozen, epochs=1) == Exchange(read=6 * policy + 3 * trunk)


def test_seconds_of_an_exchange():
    assert Exchange().seconds({}) == 0
    assert Exchange(read=6.0, trained=8.0).seconds({"read": 3.0, "trained": 2.0}) == 2 + 4


@pytest.mark.slow
def test_rates_are_those_of_what_a_run_exchanges():
    rates = exchange_rates(Setup(device="cpu", dtype="float32", processes=2, shard="full"))
    assert set(rates) == {"read", "trained"}
    assert 1e6 < rates["trained"] < rates["read"] < 1e12, "a pass with gradients exchanges three times as much"


def test_no_time_without_memory_for_two_layers():
    assert calibrate(work_of(), Processes(), memory=1e6) is None


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
    monkeypatch.setattr(calibration, "SECONDS", 0.0)
    work = work_of(settings)
    timings = calibrate(work, Processes(), memory=None)
    assert timings.layers == work.model.shape.layers
    positive = {name for name, value in vars(timings).items() if value not in (0, 0.0, (0.0, 0.0))}
    own = {"critic", "critic_training"} if settings.get("critic.kind") == "separate" else set()
    assert {"scoring", "reference", "training", "optimizer", "layers", "rows"} <= positive
    assert own <= positive
    assert not ({"critic", "critic_training"} - own) & positive
    shorter = calibration.timed(work, Processes(), 1, 2)
    assert shorter.layers == 1
