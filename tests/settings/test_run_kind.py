"""Kinds of runs, each known by its configuration; names of models to sample from, and what they lack."""

from dataclasses import asdict

import pytest

from helpers.commands import refused
from tokencredit.errors import ConfigError
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.run_kind import CONTROL, RUN_KINDS, TEXT, read_source, run_kind_of
from tokencredit.settings.text import PPOConfig

REWARD = ["--reward", "[{function: length}]"]


def test_the_kind_of_a_run_is_that_of_its_configuration():
    assert run_kind_of(asdict(PPOConfig())) is TEXT
    assert run_kind_of(asdict(ControlConfig())) is CONTROL
    for run_kind in RUN_KINDS.values():
        assert run_kind_of(asdict(run_kind.config())) is run_kind
    assert [run_kind.name for run_kind in RUN_KINDS.values()] == ["text", "control", "sft", "reward-model", "dpo"]
    assert (TEXT.outcome, TEXT.evaluation) == ("reward", "eval/reward")
    assert (CONTROL.outcome, CONTROL.evaluation) == ("average_return", "eval/average_return")


def test_configurations_of_dicts_have_defaults_of_their_own():
    one = PPOConfig.from_dict({"rollout.stop": ["."]})
    one.reward.clear()
    one.rollout.stop.append("x")
    assert PPOConfig.from_dict({}) == PPOConfig()


def test_a_run_is_known_by_its_configuration_and_a_model_by_its_name(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 3\nmodel: {name: ./base}\n")
    run = read_source(str(tmp_path))
    assert (run.run, run.scored, run.config.seed, run.config.model.name) == (tmp_path, True, 3, "./base")
    named = read_source("org/model")
    assert (named.run, named.scored, named.config.model.name) == (None, False, "org/model")


@pytest.mark.parametrize("group", ["sft", "dpo"])
def test_a_run_on_a_data_set_brings_its_model_alone(group, tmp_path):
    (tmp_path / "config.yaml").write_text(f"model: {{name: ./base}}\n{group}: {{}}\ndata: {{}}\n")
    run = read_source(str(tmp_path))
    assert (run.run, run.scored, run.config.model.name) == (tmp_path, False, "./base")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {name: x}\nreward_model: {}\n", "is a run of tokencredit reward-model, which writes no texts"),
        (
            "env: {id: CartPole-v1}\n",
            "config.yaml: it is of a run of tokencredit control, which this command cannot read",
        ),
        ("model: 3\nsft: {}\n", r"config\.yaml: model is 3; it must hold keys"),
        ("model: {name: 3}\nsft: {}\n", r"model\.name is 3; it must be a text"),
        (None, "is neither a run's folder nor a model's: it has neither config.yaml nor config.json or"),
    ],
)
def test_other_folders_are_refused(text, message, tmp_path):
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_source(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "evaluate needs MODEL, the folder of a run or a model, or a hub id"),
        ([""], "the name of the model is empty; give the folder of a run or a model, or a hub id"),
        (
            ["x", *REWARD],
            "and as a model of the hub it has no prompts of its own; give --prompts.text or --prompts.dataset",
        ),
        (["x", "--prompts.text", "a"], "it has no reward of its own; give --reward '[{function: …}]'"),
        (["x", "--prompts.column", "a"], "prompts has neither text nor dataset; give --prompts.text or"),
        (["x", *REWARD, "--prompts.txt", "a"], "unknown key prompts.txt; did you mean prompts.text?"),
        (["x", "--reward", "{function: length}"], "reward is {'function': 'length'}; it must be a list of"),
        (["x", "--temperature", "-1"], "temperature is -1.0; it must be at least 0"),
        (["x", "--samples", "many"], "samples is 'many'; it must be a whole number"),
        (["x", "--stop", "['']"], "stop has an empty text, which would end every completion; leave it out"),
        (
            ["x", *REWARD, "--prompts.text", "a", "--out", "x.txt"],
            "--out is 'x.txt'; it must be a file that",
        ),
        (["x", *REWARD, "--prompts.text", "a", "--out", "no/x.json"], "and its folder does not exist"),
        (["x", "--base", "--best"], "--base and --best are both given; leave one of them out"),
        (["--no-code", "x", "--reward", "[{function: a.py:f}]", "--prompts.text", "a"], "runs a.py:f"),
        (["builtin:reviews", "--base", *REWARD, "--prompts.text", "a"], "--base needs a run; 'builtin:re"),
    ],
)
def test_mistakes_of_evaluate_are_answered_in_one_line(arguments, message, capsys):
    assert message in refused(capsys, "evaluate", *arguments)
