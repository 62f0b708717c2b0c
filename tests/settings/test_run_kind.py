"""Kinds of runs: each is known by its configuration, which is filled in for a sweep."""

from dataclasses import asdict

from tokencredit.settings.control import ControlConfig
from tokencredit.settings.run_kind import CONTROL, RUN_KINDS, TEXT, run_kind_of
from tokencredit.settings.source import configure
from tokencredit.settings.text import PPOConfig


def test_the_kind_of_a_run_is_that_of_its_configuration():
    assert run_kind_of(asdict(PPOConfig())) is TEXT
    assert run_kind_of(asdict(ControlConfig())) is CONTROL
    for run_kind in RUN_KINDS.values():
        assert run_kind_of(asdict(run_kind.config())) is run_kind
    assert [run_kind.name for run_kind in RUN_KINDS.values()] == ["text", "control", "sft", "reward-model", "dpo"]
    assert (TEXT.outcome, TEXT.evaluation) == ("reward", "eval/reward")
    assert (CONTROL.outcome, CONTROL.evaluation) == ("average_return", "eval/average_return")


def test_a_configuration_is_filled_in_for_its_kind_of_run():
    assert configure(TEXT, {"kl": {"coef": 1}})["kl"] == asdict(PPOConfig())["kl"] | {"coef": 1.0}
    assert configure(CONTROL, {"steps": 64})["steps"] == 64


def test_configurations_of_dicts_have_defaults_of_their_own():
    one = PPOConfig.from_dict({"rollout.stop": ["."]})
    one.reward.clear()
    one.rollout.stop.append("x")
    assert PPOConfig.from_dict({}) == PPOConfig()
