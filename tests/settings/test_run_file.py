"""A run's own config.yaml is read as it was written, with defaults for settings that are newer than the run."""

from dataclasses import asdict, replace

import pytest

from tokencredit.errors import ConfigError
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.data import ClassifierTerm, FunctionTerm, PromptsConfig
from tokencredit.settings.offline import RewardModelConfig
from tokencredit.settings.reader import dump_yaml
from tokencredit.settings.run_kind import read_config
from tokencredit.settings.text import PPOConfig


@pytest.fixture
def file(tmp_path):
    return tmp_path / "config.yaml"


def test_groups_lists_of_groups_and_null_come_back(file):
    config = PPOConfig(
        prompts=PromptsConfig(text=["a: b"], chat_template_kwargs={"a.b": [1, None]}),
        reward=[FunctionTerm(function="length", kwargs={"target": 3}), ClassifierTerm(classifier="builtin:reviews")],
    )
    file.write_text(dump_yaml(asdict(config)))
    assert read_config(file, PPOConfig) == config


@pytest.mark.parametrize(
    ("own", "asked", "command"), [(PPOConfig, ControlConfig, "generate"), (ControlConfig, PPOConfig, "play")]
)
def test_the_command_for_a_run_of_the_other_kind_is_named(own, asked, command, tmp_path):
    (tmp_path / "a run").mkdir()
    file = tmp_path / "a run" / "config.yaml"
    file.write_text(dump_yaml(asdict(own())))
    with pytest.raises(ConfigError, match=rf"which this command cannot read; use tokencredit {command} '.*/a run'$"):
        read_config(file, asked)


def test_no_command_is_named_for_a_reward_model_which_samples_nothing(file):
    file.write_text(dump_yaml(asdict(RewardModelConfig())))
    with pytest.raises(ConfigError, match=r"of a run of tokencredit reward-model, which this command cannot read$"):
        read_config(file, PPOConfig)


def test_settings_that_are_left_out_have_the_defaults_of_the_whole_configuration(file):
    file.write_text("optim: {lr: 1e-3}\n")
    default = ControlConfig()
    assert default.optim.max_grad_norm != PPOConfig().optim.max_grad_norm
    assert read_config(file, ControlConfig) == replace(default, optim=replace(default.optim, lr=1e-3))
    file.write_text("reward: [{classifier: builtin:reviews}]\neval: {every: 5, text: x}\n")
    config = read_config(file, PPOConfig)
    assert config.reward[0].label == "NEGATIVE"
    assert config.eval.text == "x"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it holds no settings; it must be a mapping of keys to values"),
        ("- 1", "it holds no settings; it must be a mapping of keys to values"),
        ("kl: 3", "kl is 3; it must hold keys, such as kl.coef"),
        ("kl: null", "kl is null; it needs a value"),
        ("kl: {coef: '1'}", "kl.coef is '1'; it must be a number"),
        ("reward: [{functio: length}]", "unknown key reward[0].functio; did you mean reward[0].function?"),
        ("reward: [length]", "reward[0] is 'length'; it must hold keys, such as reward[0].function"),
        (
            "reward: length",
            "reward is 'length'; it must be a list of terms, such as --reward '[{function: f.py:f}]', or "
            "reward: [{function: f.py:f}] in a file",
        ),
        ("1: 2", "1 is a key that YAML does not read as text; quote it"),
    ],
)
def test_mistakes_are_answered_with_file_and_key(text, message, file):
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config(file, PPOConfig)
    assert str(caught.value) == f"{file}: {message}"
