"""The same messages to several models: turns, continuations, seeds and what is shown."""

import io
import sys

import pytest
from rich.console import Console

from helpers.commands import refused
from helpers.configs import quiet, text_config
from helpers.models import with_chat_template
from tokencredit.cli import main
from tokencredit.errors import ConfigError
from tokencredit.settings.run_kind import read_source
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.tools.chat import Speaker, answer, chat, load_speaker, show
from tokencredit.tools.load_run import load
from tokencredit.tools.scoring_options import LONGEST, SamplingOptions


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    return with_chat_template(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats") / "run"
    PPOTrainer(args=text_config(folder, run=quiet(folder, save_every=0))).train()
    return folder


def speaker(name, which="policy", longest=6, temperature=1.0, seed=1) -> Speaker:
    options = SamplingOptions(max_new_tokens=longest, temperature=temperature, seed=seed)
    return load_speaker(read_source(str(name)), which, options)


@pytest.mark.slow
def test_a_model_with_a_chat_template_sees_the_conversation(chat_folder):
    one = speaker(chat_folder)
    [first] = answer([one], "Good?")
    assert one.read("Sure?").texts == [f"user: Good?\nassistant: {first}\nuser: Sure?\nassistant:"]
    answer([one], "Sure?")
    assert [turn["role"] for turn in one.history] == ["user", "assistant"] * 2


def test_a_model_without_one_continues_each_message(capsys):
    one = speaker("builtin:reviews")
    answer([one], "The film was")
    assert one.read("I had").texts == ["I had"]


def test_a_reply_is_what_generate_writes(run):
    [reply] = answer([speaker(run, longest=8)], "The film was")
    assert [reply] == load(run).generate("The film was", max_new_tokens=8, temperature=1.0)


def test_the_seed_decides_and_is_the_same_for_each_model(run):
    first = answer([speaker(run, "base"), speaker("builtin:reviews")], "The film was")
    assert first[0] == first[1], "one model by two names"
    assert answer([speaker("builtin:reviews", seed=2)], "The film was")[0] != first[0]


@pytest.mark.slow
def test_old_turns_make_room_for_new_ones(chat_folder):
    one = speaker(chat_folder, longest=40)
    for message in ("first " * 10, "second " * 10, "third " * 10):
        answer([one], message)
    text = one.read("fourth").texts[0]
    assert "first" not in text
    assert text.endswith("user: fourth\nassistant:")
    with pytest.raises(ConfigError, match=r"the message has \d+ tokens, and 88 fit into the context of '.*' beside"):
        one.read("word " * 300)


def test_limits_are_the_runs_or_those_of_a_chat(run, model_folders):
    assert speaker(run, longest=None).policy.config.rollout.max_new_tokens == 8
    bare = speaker(model_folders["gpt2"], longest=None)
    assert bare.policy.config.rollout.max_new_tokens == 32 < LONGEST, "half of its context"


def test_a_chat_ends_at_quit_forgets_at_new_and_outlives_a_message_that_does_not_fit(chat_folder):
    one, out, complaints = speaker(chat_folder), io.StringIO(), []
    lines = iter(["Good?\n", "\n", "word " * 300, "/new\n", "Sure?\r\n", " /quit \n", "never"])
    chat([one], lines, Console(file=out), complaints.append)
    assert [turn["content"] for turn in one.history if turn["role"] == "user"] == ["Sure?"]
    assert len(out.getvalue().splitlines()) == 2
    assert len(complaints) == 1
    assert list(lines) == ["never"]


HOSTILE = "\x1b[2J\u202e[bold]x[/bold]\nnext"


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [True, False])
def test_what_models_say_does_nothing_to_the_terminal(terminal, chat_folder):
    one, other = speaker(chat_folder), speaker(chat_folder)
    one.name = "\x1b[31m[red]name"
    out = io.StringIO()
    show([one, other], [HOSTILE, "plain"], Console(file=out, force_terminal=terminal, width=100, color_system=None))
    text = out.getvalue()
    assert "\x1b[2J" not in text
    assert "\x1b[31m" not in text
    assert "\u202e" not in text
    assert r"\x1b[2J\u202e[bold]x[/bold]" in text
    assert "[red]name" in text
    row = next(line for line in text.splitlines() if "[bold]" in line)
    assert ("plain" in row) is terminal, "side by side on a terminal, one per line elsewhere"


def test_the_command_shows_base_policy_and_others(run, capsys, monkeypatch):
    settings = ["--max_new_tokens", "5", "--base", "--beside", "builtin:reviews", str(run)]
    names = [f"{run} (base)", str(run), "builtin:reviews", str(run)]
    (run / "best").symlink_to("policy")
    assert speaker(run, "best").name == f"{run} (best)", "beside the last policy"
    assert main(["chat", str(run), *settings, "--message", "The film was"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.partition(":  ")[0] for line in shown] == names
    assert shown[0].partition(":  ")[2] == shown[2].partition(":  ")[2]
    monkeypatch.setattr(sys, "stdin", io.StringIO("The film was\nI had\n"))
    assert main(["chat", str(run), *settings]) == 0
    again = capsys.readouterr().out.splitlines()
    assert again[:4] == shown
    assert len(again) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "chat needs MODEL, the folder of a run or a model, or a hub id"),
        (["x", "--message", " "], "--message is empty; give a text, or leave it out to read standard input"),
        (["builtin:reviews", "--base"], "--base needs a run; 'builtin:reviews' is a model"),
        (["builtin:reviews", "--beside", "."], "'.' is neither a run's folder nor a model's"),
        (["builtin:reviews", "--temperature", "-1"], "temperature is -1.0; it must be at least 0"),
        (["builtin:reviews", "--messag", "x"], "unknown option --messag; did you mean --message?"),
    ],
)
def test_mistakes_are_answered_in_one_line(arguments, message, capsys):
    assert message in refused(capsys, "chat", *arguments)


def test_a_message_that_does_not_fit_is_one_line(capsys):
    message = refused(capsys, "chat", "builtin:reviews", "--message", "word " * 300)
    assert "and 64 fit into the context of 'builtin:reviews' beside --max_new_tokens 64" in message
