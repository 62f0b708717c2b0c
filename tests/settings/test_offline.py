"""Configurations of runs that learn from a data set."""

import pytest

from tokencredit.errors import ConfigError
from tokencredit.settings.offline import DPOConfig, OfflineRunConfig, PairsConfig, RewardModelConfig, SFTConfig


def test_values_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match=r"data\.micro_batch is 8; it must be at most data\.batch_size, 4"):
        SFTConfig.from_dict({"data.batch_size": 4, "data.micro_batch": 8})
    with pytest.raises(ConfigError, match=r"dpo\.loss is 'kto'; it must be one of sigmoid, ipo, hinge, robust"):
        DPOConfig.from_dict({"dpo.loss": "kto"})
    with pytest.raises(ConfigError, match=r"PairsConfig\.held_out is 1\.0; it must be at least 0 and below 1"):
        RewardModelConfig(data=PairsConfig(held_out=1.0))


def test_keys_of_another_kind_are_unknown():
    with pytest.raises(ConfigError, match=r"unknown key data\.completion"):
        DPOConfig.from_dict({"data.completion": "answer"})
    with pytest.raises(ConfigError, match=r"unknown key data\.max_length"):
        RewardModelConfig.from_dict({"data.max_length": 8})


def test_a_file_is_read_as_a_dict_is(tmp_path):
    (tmp_path / "run.yaml").write_text("data: {dataset: a.jsonl, epochs: 2}\nsft: {loss_on: all}\n")
    config = SFTConfig.from_yaml(tmp_path / "run.yaml")
    assert config == SFTConfig.from_dict({"data.dataset": "a.jsonl", "data.epochs": 2.0, "sft.loss_on": "all"})
    assert config.run == OfflineRunConfig()
