"""Nothing foreign runs: bombs are planted wherever something is read, and none goes off."""

import json
import sys

import pytest

from helpers.commands import refused
from tokencredit.cli import main
from tokencredit.errors import ConfigError
from tokencredit.report.reading import read_run
from tokencredit.settings.control import ControlConfig, EnvConfig
from tokencredit.settings.data import FunctionTerm, PromptsConfig
from tokencredit.settings.model import ModelConfig
from tokencredit.settings.run_kind import foreign_code
from tokencredit.settings.text import PPOConfig

LAUGHS = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 10)}]\n"
    for before, name in zip("abcdefghi", "bcdefghij", strict=True)
)
"""Ten thousand million values in 500 bytes."""


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """A file that foreign code would make, and a module that makes it when it is imported, calls it or is an object."""
    marker = tmp_path / "it-ran"
    (tmp_path / "foreign_module.py").write_text(
        f"from tokencredit.settings.text import ModelConfig\nopen({str(marker)!r}, 'w').close()\n"
        "class Foreign(ModelConfig):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield marker
    sys.modules.pop("foreign_module", None)


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch {marker}']",
        "seed: !!python/object/apply:os.system ['touch {marker}']",
        "model: {{name: !!python/object/new:os.system ['touch {marker}']}}",
        "reward: !!python/object/apply:builtins.exec [\"open('{marker}', 'w')\"]",
        "seed: !!python/module:foreign_module",
        "seed: !!python/name:foreign_module.Foreign",
        "model: {{class_path: foreign_module.Foreign}}",
        "model: foreign_module.Foreign",
        "model: {{lora: foreign_module.Foreign}}",
        "eval: {{prompts: {{class_path: foreign_module.Foreign}}}}",
        "reward: [foreign_module.Foreign]",
        "reward: [{{class_path: foreign_module.Foreign}}]",
        "reward: [{{function: length, kwargs: {{unit: {{class_path: foreign_module.Foreign}}}}}}]",
        "reward: [{{function: length, kwargs: {{unit: "
        "{{class_path: subprocess.run, init_args: {{args: [touch, '{marker}']}}}}}}}}]",
        "prompts: {{chat_template_kwargs: {{a: {{class_path: foreign_module.Foreign}}}}}}",
    ],
)
def test_a_configuration_makes_no_objects(text, marker, tmp_path, capsys):
    file, used = tmp_path / "config.yaml", tmp_path / "used"
    used.mkdir()
    (used / "config.yaml").write_text(text.format(marker=marker))
    file.write_text(text.format(marker=marker))
    # A folder in use, so that what is read without a complaint goes no further.
    refused(capsys, "train", "--config", str(file), "--run.dir", str(used))
    refused(capsys, "generate", str(used))
    assert not marker.exists()
    import foreign_module  # noqa: F401

    assert marker.exists(), "the module would have left its mark"


def test_environments_keyword_arguments_make_no_objects(marker, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("env: {kwargs: {a: {class_path: foreign_module.Foreign}}}")
    refused(capsys, "train", "--config", str(tmp_path / "config.yaml"), "--run.dir", str(tmp_path))
    refused(capsys, "control", "--config", str(tmp_path / "config.yaml"), "--run.dir", str(tmp_path))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, "is an alias; write the value again"),
        ("[" * 100_000, "more than 50 nested lists"),
        ("seed: " + "1" * 5000, "integer string conversion"),
    ],
)
def test_a_configuration_that_grows_without_end_is_refused(text, message, tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_run(tmp_path)
    by_hand = refused(capsys, "train", "--config", str(file)), refused(capsys, "evaluate", str(tmp_path))
    for error in (*by_hand, str(raised.value)):
        assert message in error
        assert len(error) < 1000


def test_user_code_that_a_configuration_runs_is_listed():
    assert foreign_code(PPOConfig()) == foreign_code(ControlConfig()) == []
    assert foreign_code(ControlConfig(env=EnvConfig(id="my_envs:Maze-v0"))) == ["env.id imports the module my_envs"]
    reward = [
        FunctionTerm(function="length"),
        FunctionTerm(function="my_reward.py:correct"),
        FunctionTerm(function="a.b:c"),
    ]
    model = ModelConfig(name="org/model", trust_remote_code=True)
    assert foreign_code(PPOConfig(reward=reward, model=model)) == [
        "reward[1].function runs my_reward.py:correct",
        "reward[2].function runs a.b:c",
        "model.trust_remote_code runs the code, if there is any, in org/model",
    ]


REWARD = "reward: [{function: 'foreign_module:Foreign'}]\n"


@pytest.mark.parametrize(
    ("command", "text", "key"),
    [
        ("train", REWARD, "reward[0].function runs foreign_module:Foreign"),
        ("train", "model: {trust_remote_code: true}\n", "model.trust_remote_code"),
        ("train", "env: {factory: 'foreign_module:Foreign'}\n", "env.factory runs foreign_module:Foreign"),
        (
            "train",
            "env: {factory: 'gymnasium:foreign_module:Taxi-v4'}\n",
            "env.factory imports the module foreign_module",
        ),
        ("train", "tools: ['foreign_module:Foreign']\n" + REWARD, "tools[0] runs foreign_module:Foreign"),
        ("generate", "env: {factory: 'foreign_module:Foreign'}\n", "env.factory runs foreign_module:Foreign"),
        ("control", "env: {id: 'foreign_module:Maze-v0'}\n", "env.id imports the module foreign_module"),
        ("generate", "model: {trust_remote_code: true}\n", "model.trust_remote_code"),
        ("evaluate", REWARD, "reward[0].function runs foreign_module:Foreign"),
        ("play", "env: {id: 'foreign_module:Maze-v0'}\n", "env.id imports the module foreign_module"),
    ],
)
def test_no_code_refuses_by_the_key(command, text, key, marker, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(text)
    where = ["--config", str(tmp_path / "config.yaml")] if command in ("train", "control") else [str(tmp_path)]
    error = refused(capsys, command, "--no-code", *where)
    assert "--no-code, but the configuration executes user code: " in error
    assert key in error
    assert not marker.exists()


def test_no_code_refuses_a_sweep_by_its_variant(tmp_path, capsys, marker):
    file = tmp_path / "sweep.yaml"
    file.write_text(
        f"{{kind: text, dir: {tmp_path / 'out'}, seeds: [1], variants: {{plain: {{}}, sly: {{{REWARD.strip()}}}}}}}"
    )
    error = refused(capsys, "sweep", "--no-code", str(file))
    assert "variant sly: --no-code, but the configuration executes user code: reward[0].function runs" in error
    assert not (tmp_path / "out").exists()


def test_no_code_lets_the_rest_run(tmp_path, capsys):
    (tmp_path / "used").write_text("")
    assert "holds a run or other files" in refused(capsys, "train", "--no-code", "--run.dir", str(tmp_path))
    assert "holds a run or other files" in refused(capsys, "control", "--no-code", "--run.dir", str(tmp_path))


HOSTILE = (
    "\x1b[2J\x1b]8;;http://x/\x1b\\\\link\x1b]8;;\x1b\\\\\u202egnp\r</script><img src=x onerror=alert(1)>"
    "\n---\nlicense: mit\n---\n[a](javascript:alert(1)) ![b](http://x/) `c` | d"
)
ACTIVE = ("\x1b", "\u202e", "\r", "\x9b")


def test_a_model_card_escapes_texts_of_others():
    from huggingface_hub import ModelCard
    from markdown_it import MarkdownIt

    from tokencredit.report.paper.card import model_card

    args = PPOConfig(model=ModelConfig(name=HOSTILE), prompts=PromptsConfig(text=HOSTILE))
    text = model_card(args, ["length", HOSTILE], {"iterations": 1, "stopped_by": "iterations", "reward_last": 1.0})
    card = ModelCard(text)
    assert card.data.to_dict().keys() == {"library_name", "tags", "pipeline_tag"}, "no path is a base model on the hub"
    page = MarkdownIt("commonmark").render(card.text)
    assert page.count("<img") == page.count("<script") == page.count("<a ") == page.count("<hr") == 0
    assert page.count("&lt;img src=x onerror=alert(1)&gt;") == 3
    assert not any(mark in text for mark in ACTIVE)
    played = model_card(args, [], {"iterations": 1, "stopped_by": "iterations"}, environment=HOSTILE)
    assert " episodes.\n" in played
    assert "- prompts:" not in played
    page = MarkdownIt("commonmark").render(ModelCard(played).text)
    assert page.count("<img") == page.count("<script") == page.count("<a ") == page.count("<hr") == 0


@pytest.mark.slow
def test_adversarial_texts_have_no_effect_in_any_command(tmp_path, capsys):
    """A whole run whose prompts and reward are named by somebody who means harm, and every command on it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": HOSTILE, "answer": HOSTILE}) + "\n")
    settings = {
        "prompts": {"dataset": str(tmp_path / "rows.jsonl")},
        "reward": [{"function": "length", "name": HOSTILE}],
        "rollout": {"batch_size": 4, "max_new_tokens": 4},
        "run": {"dir": str(tmp_path / "run"), "iterations": 1, "show_every": 1},
        "eval": {"samples": 4, "max_new_tokens": 4},
        "ppo": {"epochs": 1, "minibatches": 1},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    assert main(["train", "--config", str(tmp_path / "run.yaml")]) == 0
    for command in ("generate", "evaluate", "report", "doctor"):
        assert main([command, str(tmp_path / "run")]) == 0
    out, err = capsys.readouterr()
    assert out.count("<img src=x onerror=alert(1)>") > 5, "it is shown"
    assert not any(mark in out + err.replace("\rLoading", "").replace("\x1b[A", "") for mark in ACTIVE)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<img src=x" not in page
    assert not any(mark in page for mark in ACTIVE[:2])
    events = EventAccumulator(str(next((tmp_path / "run" / "tensorboard").rglob("events*"))))
    events.Reload()
    assert f"reward/{HOSTILE}" in events.Tags()["scalars"], "TensorBoard's page escapes its tags"


@pytest.mark.slow
def test_messages_escape_adversarial_texts(tmp_path, capsys):
    (tmp_path / "reward.py").write_text(f"def f(prompts, completions):\n    raise ValueError({HOSTILE!r})\n")
    flags = ["--reward", f"[{{function: '{tmp_path}/reward.py:f'}}]", "--run.dir", str(tmp_path / "run")]
    assert main(["train", *flags, "--rollout.batch_size", "4", "--rollout.max_new_tokens", "4"]) == 1
    assert main(["train", "--model.name", f"./{HOSTILE}"]) == 2
    assert main(["train", f"--{HOSTILE}", "1"]) == 2
    (tmp_path / "rows.jsonl").write_text(json.dumps({HOSTILE: 1}))
    assert main(["train", "--prompts.dataset", str(tmp_path / "rows.jsonl"), "--run.dir", str(tmp_path / "b")]) == 2
    err = capsys.readouterr().err
    assert err.count("onerror") >= 3
    assert not any(mark in err.replace("\rLoading", "") for mark in ACTIVE)
