"""Old keys are answered with the new ones, wherever they stand."""

from dataclasses import asdict

import pytest
import yaml

from helpers.commands import refused
from tokencredit.errors import ConfigError
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.parsing import configure
from tokencredit.settings.renamed_keys import MOVED
from tokencredit.settings.run_file import read_config
from tokencredit.settings.run_kind import CONTROL, RUN_KINDS, TEXT, run_kind_of
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.yaml import flat

OLD = {"model": {"name": "m", "critic": "separate"}, "optim": {"value_lr": 1e-3}, "ppo": {"critic_warmup": 2}}
TOLD = "model.critic is now critic.kind, optim.value_lr is now critic.lr, ppo.critic_warmup is now critic.warmup"


@pytest.fixture
def old(tmp_path):
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(OLD, sort_keys=False))
    return folder


def test_every_moved_key_is_gone_and_its_new_one_is_there():
    text, control = flat(asdict(PPOConfig())), flat(asdict(ControlConfig()))
    assert not MOVED.keys() & {*text, *control}
    assert set(MOVED.values()) <= text.keys()


@pytest.mark.parametrize("key", [key for key in MOVED if not key.startswith("agent.")])
def test_a_flag_that_has_moved_is_answered_with_the_new_one(key, capsys):
    assert refused(capsys, "train", f"--{key}", "1") == f"{key} is now {MOVED[key]}"
    assert refused(capsys, "train", f"--{key}=1") == f"{key} is now {MOVED[key]}"


def test_a_file_with_old_keys_is_answered_with_all_new_ones(old, capsys):
    file = old / "config.yaml"
    assert refused(capsys, "train", "--config", str(file)) == f"{file}: {TOLD}"
    assert refused(capsys, "generate", str(old)) == f"{file}: {TOLD}"
    assert refused(capsys, "evaluate", str(old)) == f"{file}: {TOLD}"
    with pytest.raises(ConfigError, match=r"model\.critic is now critic\.kind"):
        read_config(file, PPOConfig)
    file.write_text("agent: {critic: none}\n")
    assert refused(capsys, "control", "--config", str(file)) == f"{file}: agent.critic is now critic.kind"


def test_a_run_of_an_older_version_is_not_resumed(old, capsys):
    error = refused(capsys, "train", "--resume", str(old))
    assert f"'{old}' was written by an older version of Tokencredit" in error
    assert "begin a new run, or resume it with the version that wrote it" in error


def test_unknown_keys_of_a_runs_configuration_have_a_suggestion(tmp_path):
    file = tmp_path / "config.yaml"
    for text, message in (
        ("kl: {coeff: 1}", "unknown key kl.coeff; did you mean kl.coef?"),
        ("zzz: 1", "unknown key zzz; see --print_config for all keys"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            read_config(file, PPOConfig)
        assert str(caught.value) == f"{file}: {message}"


def test_a_world_is_that_of_its_configuration():
    assert run_kind_of(asdict(PPOConfig())) is TEXT
    assert run_kind_of(asdict(ControlConfig())) is CONTROL
    for run_kind in RUN_KINDS.values():
        assert run_kind_of(asdict(run_kind.config())) is run_kind
    assert [run_kind.name for run_kind in RUN_KINDS.values()] == ["text", "control", "sft", "reward-model", "dpo"]
    assert (TEXT.outcome, TEXT.evaluation) == ("reward", "eval/reward")
    assert (CONTROL.outcome, CONTROL.evaluation) == ("average_return", "eval/average_return")


def test_a_configuration_is_filled_in_for_its_world():
    assert configure(TEXT, {"kl": {"coef": "1e-2"}})["kl"]["coef"] == 0.01
    assert configure(CONTROL, {"steps": 64})["steps"] == 64


def test_configurations_of_dicts_have_defaults_of_their_own():
    one = PPOConfig.from_dict({"rollout.stop": ["."]})
    one.reward.clear()
    one.rollout.stop.append("x")
    assert PPOConfig.from_dict({}) == PPOConfig()
