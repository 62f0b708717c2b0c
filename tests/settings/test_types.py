"""A value of another type is refused by its key, whenever it was set: the key, what it was, what it may be."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tokencredit.errors import ConfigError
from tokencredit.settings.control import AgentConfig, ControlConfig, EnvConfig
from tokencredit.settings.data import FunctionTerm, PromptsConfig
from tokencredit.settings.fields import require_config
from tokencredit.settings.model import LoraConfig, ModelConfig
from tokencredit.settings.reader import dump_yaml
from tokencredit.settings.text import PPOConfig

CHOICES = "tensorboard, wandb, trackio, comet_ml, aim, mlflow, clearml, dvclive, swanlab"
TERMS = "a list of terms, such as --reward '[{function: f.py:f}]', or reward: [{function: f.py:f}] in a file"
WRONG = [
    ("seed", "1", "a whole number"),
    ("seed", True, "a whole number"),
    ("run.iterations", 2.5, "a whole number"),
    ("run.iterations", 40.0, "a whole number"),
    ("kl.coef", "0.1", "a number"),
    ("optim.lr", "1e-3", "a number"),
    ("optim.lr", False, "a number"),
    ("optim.lr", [1e-3], "a number"),
    ("optim.lr", np.float64(1e-3), "a number; give its .item()"),
    ("optim.lr", torch.tensor(1e-3), "a number; give its .item()"),
    ("run.iterations", np.int64(2), "a whole number; give its .item()"),
    ("rollout.stop", np.array(["A", "B"]), "a list of texts; give its .tolist()"),
    ("critic.clip", "none", "a number; did you mean null?"),
    ("rollout.top_k", 2.0, "a whole number"),
    ("model.dropout", 1, "true or false"),
    ("model.dropout", "no", "true or false"),
    ("model.name", 3, "a text"),
    ("model.name", Path("policy"), "a text; give str(path)"),
    ("run.dir", Path("runs/a"), "a text; give str(path)"),
    ("model", {"name": "gpt2"}, "a ModelConfig"),
    ("model.lora", 8, "a LoraConfig"),
    ("eval", ModelConfig(), "an EvalConfig"),
    ("prompts.text", 3, "a list of texts or a text"),
    ("prompts.text", ("A", "B"), "a list of texts or a text"),
    ("rollout.stop", "END", 'a list of texts, such as ["END"]'),
    ("run.trackers", "wandb", f"a list of any of {CHOICES}"),
    ("reward", FunctionTerm(function="length"), TERMS),
    ("reward", "length", TERMS),
    ("kl.place", "outside", "one of reward, loss, both"),
    ("kl.place", 1, "one of reward, loss, both"),
    ("prompts.chat_template_kwargs", [], "a dict"),
]
ELEMENTS = [
    ("prompts.text", ["A", 3], "prompts.text[1] is 3; it must be a text"),
    ("rollout.stop", [None], "rollout.stop[0] is null; it needs a value"),
    ("run.trackers", ["nope"], f"run.trackers[0] is 'nope'; it must be one of {CHOICES}"),
    ("reward", [{"function": "length"}], "reward[0] is {'function': 'length'}; it must be a RewardTerm"),
    ("stop.reward", float("inf"), "stop.reward is inf; it must be finite"),
    ("stop.reward", 10**400, f"stop.reward is 1{'0' * 98}…; it must be finite"),
    ("optim.lr", 10**400, f"optim.lr is 1{'0' * 98}…; it must be above 0 and finite"),
    ("prompts.chat_template_kwargs", {1: 2}, "prompts.chat_template_kwargs has the key 1; keys must be texts"),
    (
        "prompts.chat_template_kwargs",
        {"tools": [len]},
        "prompts.chat_template_kwargs.tools[0] is <built-in function len>; it must be a dict, list, text, number, "
        "true, false or null",
    ),
]


def changed(key, value, kind=PPOConfig):
    """A configuration with a field set after it was made."""
    config = kind()
    *groups, name = key.split(".")
    group = config
    for part in groups:
        group = getattr(group, part)
    setattr(group, name, value)
    return config


@pytest.mark.parametrize(("key", "value", "wanted"), WRONG, ids=[f"{key}-{value!r}"[:50] for key, value, _ in WRONG])
def test_another_type_is_refused(key, value, wanted):
    with pytest.raises(ConfigError) as caught:
        require_config(changed(key, value), PPOConfig)
    text = str(caught.value)
    assert text.startswith(f"{key} is ")
    assert text.endswith(f"; it must be {wanted}")
    assert "\n" not in text
    assert len(text) < 250


@pytest.mark.parametrize(
    ("key", "value", "message"), ELEMENTS, ids=[f"{key}-{value!r}"[:50] for key, value, _ in ELEMENTS]
)
def test_what_a_list_dict_or_number_may_not_hold_is_refused(key, value, message):
    with pytest.raises(ConfigError) as caught:
        require_config(changed(key, value), PPOConfig)
    assert str(caught.value) == message


def test_a_configuration_is_checked_when_it_is_made():
    for kind, wrong in ((PPOConfig, {"seed": "1"}), (LoraConfig, {"rank": 2.0}), (PromptsConfig, {"text": 3})):
        with pytest.raises(ConfigError, match="it must be"):
            kind(**wrong)
    with pytest.raises(ConfigError, match=r"^AgentConfig\.hidden is '64'; it must be a list of whole numbers$"):
        AgentConfig(policy="transformer", hidden="64")
    with pytest.raises(ConfigError, match=r"^AgentConfig\.hidden\[1\] is 64\.0; it must be a whole number$"):
        AgentConfig(hidden=[64, 64.0])
    with pytest.raises(ConfigError, match=r"^EnvConfig\.kwargs\.healthy_z_range is \(0, 1\); it must be a dict, list"):
        EnvConfig(kwargs={"healthy_z_range": (0, 1)})


def test_a_whole_number_is_a_number():
    config = changed("optim.lr", 1)
    assert require_config(config, PPOConfig).optim.lr == 1


def test_what_is_set_later_is_held_to_all_rules():
    for key, value, message in (
        ("optim.lr", -1.0, r"^optim\.lr is -1\.0; it must be above 0$"),
        ("ppo.minibatches", 100, r"^ppo\.minibatches is 100; it must be at most rollout\.batch_size, 64$"),
        ("kl.horizon", 5.0, r"^kl\.horizon is 5\.0, which has no effect without kl\.target; leave it out$"),
        ("prompts.text", [], r"^prompts\.text is \[\]; give"),
    ):
        with pytest.raises(ConfigError, match=message):
            require_config(changed(key, value), PPOConfig)
    config = changed("prompts.dataset", "prompts.jsonl")  # the default text is not in its way
    assert require_config(config, PPOConfig).prompts.dataset == "prompts.jsonl"


@pytest.mark.slow
def test_a_field_that_does_not_exist_is_refused():
    for key, message in (
        ("optim.lrr", "unknown key optim.lrr; did you mean optim.lr?"),
        ("iterations_", "unknown key iterations_; did you mean run.iterations?"),
    ):
        with pytest.raises(ConfigError) as caught:
            require_config(changed(key, 1e-3), PPOConfig)
        assert str(caught.value) == message


def test_none_stands_for_the_default_and_nothing_else_does():
    assert require_config(None, PPOConfig) == PPOConfig()
    for wrong in ({}, [], "", ControlConfig()):
        with pytest.raises(ConfigError, match=r"^args is a \w+; give a PPOConfig"):
            require_config(wrong, PPOConfig)


def test_all_that_passes_can_be_written_as_yaml():
    config = changed("prompts.chat_template_kwargs", {"a": [1, 2.5, None, True, {"b": "c"}]})
    assert yaml.safe_load(dump_yaml(asdict(require_config(config, PPOConfig))))["prompts"]["chat_template_kwargs"] == {
        "a": [1, 2.5, None, True, {"b": "c"}]
    }
