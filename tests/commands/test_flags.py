"""Flags: a text is taken to its last character, and what is no key, option or command is answered in one line."""

import re

import pytest

from helpers.commands import refused
from tokencredit.commands.command_line import config_parser, to_config
from tokencredit.runs.folder import RunFolder
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.text import PPOConfig

TEXTS = [
    "# Poem",
    "#hashtag",
    "~",
    "null",
    "- Hello",
    "yes",
    "1",
    " x ",
    "a: b",
    "'q'",
    "[INST]",
    "[1, 2] x",
    "{a}",
    "é\n",
]


def read(*arguments):
    """The settings of flags of `tokencredit train`, by groups."""
    return config_parser(PPOConfig).read(arguments).settings


@pytest.mark.parametrize("text", TEXTS)
def test_a_flag_for_a_text_holds_that_text_and_null_is_none_where_it_may_be(text):
    for key in ("prompts.text", "eval.text", "model.name", "prompts.template", "critic.name"):
        group, _, name = key.partition(".")
        value = None if text == "null" and key != "model.name" else text
        assert read(f"--{key}", text) == read(f"--{key}={text}") == {group: {name: value}}
    assert read("--rollout.stop+", text)["rollout"]["stop"] == [text], "one more of a list"


def test_a_flag_for_one_more_keeps_those_before_it_in_groups_too(capsys):
    assert read("--rollout.stop+", "a", "--rollout.stop+", "b") == {"rollout": {"stop": ["a", "b"]}}
    assert read("--rollout.stop", "[a]", "--rollout.stop+", '["b", c]') == {"rollout": {"stop": ["a", "b", "c"]}}
    assert read("--rollout.stop+", "[/INST]") == {"rollout": {"stop": ["[/INST]"]}}
    told = "rollout.stop is 'END'; it must be a list of texts, such as [\"END\"]"
    assert refused(capsys, "train", "--rollout.stop", "END", "--rollout.stop+", "b") == told


def test_a_list_in_a_flag_has_brackets_and_quotes_where_a_text_may_stand():
    assert read("--prompts.text", '["# a", "~"]')["prompts"]["text"] == ["# a", "~"]
    assert read("--prompts.text", " ['a']")["prompts"]["text"] == ["a"]
    assert read("--rollout.stop", '["###"]')["rollout"]["stop"] == ["###"]
    assert read("--model.lora.target_modules", "[q_proj, v_proj]")["model"]["lora"]["target_modules"] == [
        "q_proj",
        "v_proj",
    ]
    assert read("--model.lora.target_modules", "null")["model"]["lora"]["target_modules"] is None


@pytest.mark.parametrize("text", ["###", "null", "~", "- a", "END"])
def test_a_text_where_a_list_belongs_is_answered_with_that_list(text, capsys):
    told = f'rollout.stop is {text!r}; it must be a list of texts, such as ["{text}"]'
    assert refused(capsys, "train", "--rollout.stop", text) == told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command trian; did you mean train?"),
        (["reward_model", "--x"], "unknown command reward_model; did you mean reward-model?"),
        (["finetune"], "unknown command finetune; the commands are train, plan, control, sft"),
        (["train", "--prompts.text", "-Hello"], "a value that begins with - is --prompts.text=VALUE"),
        (["train", "optim.lr=1e-3"], "unexpected argument 'optim.lr=1e-3'; write --optim.lr=1e-3"),
        (["train", "algorithm.gamma=1"], "unknown key algorithm.gamma; here it is advantage.gamma"),
        (["train", "--device", "cuda"], "CUDA_VISIBLE_DEVICES chooses it, ACCELERATE_USE_CPU=true takes the CPU"),
        (
            ["control", "--reward", "f"],
            "unknown key reward; it has no counterpart here (the environment, env.id, rewards",
        ),
        (
            ["train", "--reward", "[{function: length, unit: words}]"],
            "unknown key reward[0].unit; arguments of the function go into reward[0].kwargs",
        ),
        (["train", "--critic.clip", "None"], "critic.clip is 'None'; it must be a number; did you mean null?"),
        (["train", "--advantage.estimator", "grpo"], 'critic or loss"); did you mean group_relative?'),
        (["train", "--model.dtype", "bf16"], "auto; did you mean bfloat16?"),
    ],
)
def test_a_mistake_has_the_cure_that_is_meant(arguments, message, capsys):
    assert message in refused(capsys, *arguments)


@pytest.mark.parametrize("value", ["float16", "fp16"])
def test_a_value_that_is_only_spelt_alike_is_not_suggested(value, capsys):
    assert refused(capsys, "train", "--model.dtype", value).endswith("one of float32, bfloat16, auto")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dir: x\nvariants: {a: {advantage.unit: turn}}\n", "it is a sweep's; train its runs with: tokencredit sweep"),
        (
            "model_name_or_path: x\nreward_model: y\nstage: ppo\n",
            "it is another project's; make one of it with: tokencredit migrate ",
        ),
        ("algorithm: {adv_estimator: gae}\n", "unknown key algorithm.adv_estimator; here it is advantage.estimator"),
        ("reward_model: {center: 0.1}\n", "it is a configuration of tokencredit reward-model"),
        ("env.id: x\n", "it is a configuration of tokencredit control"),
    ],
)
def test_a_file_of_another_kind_is_named_for_what_it_is(text, message, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert refused(capsys, "train", "--config", str(file)).startswith(f"{file}: {message}")


def test_a_tilde_is_the_home_folder_wherever_a_path_is_given(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.yaml").write_text("run: {dir: ~/runs/a, iterations: 3}\n")
    options = config_parser(PPOConfig).read(["--config=~/run.yaml"])
    assert to_config(options, PPOConfig).run.dir == f"{tmp_path}/runs/a"
    assert config_parser(PPOConfig).read(["--run.dir=~/x"]).settings == {"run": {"dir": "~/x"}}
    assert PPOConfig.from_yaml("~/run.yaml").run.dir == ControlConfig.from_dict({"run.dir": "~/runs/a"}).run.dir
    assert RunFolder("~/b").path == tmp_path / "b"
    for command in (["train", "--resume=~/no"], ["generate", "~/no"], ["audit", "~/no"], ["evaluate", "~/no"]):
        assert re.match(f"'{tmp_path}/no' is (not|neither) a run's folder", refused(capsys, *command))
    assert read("--prompts.text=~/x")["prompts"]["text"] == "~/x", "a text stays as it is"
