"""Reward terms: their kinds, and what belongs to each."""

import re
from dataclasses import asdict

import pytest

from tokencredit.commands.command_line import config_parser, to_config
from tokencredit.errors import ConfigError
from tokencredit.settings.data import ClassifierTerm, FunctionTerm, RewardModelTerm, RewardTerm
from tokencredit.settings.reader import dump_yaml
from tokencredit.settings.run_kind import read_config
from tokencredit.settings.text import PPOConfig

MISTAKES = [
    ({"weight": 2.0}, "{key} needs exactly one of function, classifier, reward_model; it has none"),
    (
        {"function": "length", "classifier": "builtin:reviews"},
        "{key} needs exactly one of function, classifier, reward_model; it has function and classifier",
    ),
    (
        {"function": "length", "label": "POSITIVE"},
        "{key}.label belongs to a classifier, and this term is a function; leave it out",
    ),
    (
        {"function": "length", "batch_size": 8},
        "{key}.batch_size belongs to a classifier or reward_model, and this term is a function; leave it out",
    ),
    (
        {"reward_model": "rm", "output": "logit"},
        "{key}.output belongs to a classifier, and this term is a reward_model; leave it out",
    ),
    (
        {"classifier": "builtin:reviews", "kwargs": {"n": 1}},
        "{key}.kwargs belongs to a function, and this term is a classifier; leave it out",
    ),
    ({"functio": "length"}, "unknown key {key}.functio; did you mean {key}.function?"),
    ("length", "{key} is 'length'; it must hold keys, such as {key}.function"),
]


@pytest.mark.parametrize(("settings", "message"), MISTAKES)
def test_a_term_holds_its_kinds_keys_and_no_others(settings, message, tmp_path):
    with pytest.raises(ConfigError, match=f"^{re.escape(message.format(key='reward[0]'))}$"):
        PPOConfig.from_dict({"reward": [settings]})
    file = tmp_path / "config.yaml"
    file.write_text(dump_yaml({"reward": [{"function": "length"}, settings]}))
    with pytest.raises(ConfigError, match=re.escape(message.format(key="reward[1]"))):
        read_config(file, PPOConfig)


def test_the_kind_of_a_term_is_the_key_that_names_its_source():
    assert RewardTerm.read({"function": "count", "kwargs": {"text": "a"}}, "reward[0]") == FunctionTerm(
        function="count", kwargs={"text": "a"}
    )
    assert RewardTerm.read({"classifier": "builtin:reviews", "weight": 2.0}, "reward[0]") == ClassifierTerm(
        classifier="builtin:reviews", label="NEGATIVE", weight=2.0
    )
    assert RewardTerm.read({"reward_model": "rm", "text": "completion"}, "reward[0]") == RewardModelTerm(
        reward_model="rm", text="completion"
    )


def test_a_term_comes_back_from_a_runs_file_and_from_a_flag(tmp_path):
    config = PPOConfig(reward=[FunctionTerm(function="length"), RewardModelTerm(reward_model="rm", timeout=3.0)])
    (tmp_path / "config.yaml").write_text(dump_yaml(asdict(config)))
    assert read_config(tmp_path / "config.yaml", PPOConfig) == config
    parser = config_parser(PPOConfig)
    flag = "--reward+={function: length}"
    assert to_config(parser.read([flag]), PPOConfig).reward == [
        *PPOConfig().reward,
        FunctionTerm(function="length"),
    ]


def test_a_terms_values_are_checked_by_their_keys():
    with pytest.raises(ConfigError, match=r"^reward\[0\]\.weight is 'heavy'; it must be a number$"):
        PPOConfig.from_dict({"reward": [{"function": "length", "weight": "heavy"}]})
    with pytest.raises(ConfigError, match=r"^reward\[0\]\.dtype is 'float16'; it must be one of float32, bfloat16"):
        PPOConfig.from_dict({"reward": [{"reward_model": "rm", "dtype": "float16"}]})
