"""TRL's names, in Python, flags and files: one message with the key here."""

import pytest

import tokencredit as tc
from tokencredit.cli import main
from tokencredit.errors import ConfigError
from tokencredit.settings.trl import trl_names


def test_arguments_of_older_trainers():
    with pytest.raises(ConfigError) as caught:
        tc.PPOTrainer(config=None, tokenizer=None, reward_processing_classes=None)
    assert str(caught.value) == (
        "config is TRL's name for PPOTrainer(args); tokenizer is TRL's name for PPOTrainer(processing_class); "
        "reward_processing_classes is TRL's, and has no counterpart here (docs/from-trl.md)"
    )


def test_a_name_set_on_a_configuration():
    config = tc.PPOConfig()
    config.num_ppo_epochs = 2
    with pytest.raises(ConfigError, match=r"^unknown key num_ppo_epochs; num_ppo_epochs is TRL's name for ppo\.epochs"):
        tc.PPOTrainer(args=config)


def test_a_name_in_a_flag_a_file_and_a_dict(tmp_path, capsys):
    told = "unknown key learning_rate; learning_rate is TRL's name for optim.lr, critic.lr (docs/from-trl.md)\n"
    assert main(["train", "--learning_rate", "1e-5"]) == 2
    assert capsys.readouterr().err == f"tokencredit: {told}"
    file = tmp_path / "run.yaml"
    file.write_text("learning_rate: 1e-5\n")
    assert main(["train", "--config", str(file)]) == 2
    assert capsys.readouterr().err == f"tokencredit: {file}: {told}"
    with pytest.raises(ConfigError) as caught:
        tc.PPOConfig.from_dict({"learning_rate": 1e-5})
    assert str(caught.value) == told.strip()


def test_agents_are_only_told_of_keys_that_they_have(capsys):
    assert main(["control", "--learning_rate", "1e-5"]) == 2
    assert "TRL's name for optim.lr" in capsys.readouterr().err
    assert main(["control", "--response_length", "5"]) == 2
    assert "TRL" not in capsys.readouterr().err


def test_no_name_of_trls_gives_no_message():
    assert trl_names(["zzz"]) == ""
