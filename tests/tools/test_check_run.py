"""What can be known of a run before its first rollout, in one list."""

import json

import pytest

from helpers.models import with_chat_template
from tokencredit.cli import main
from tokencredit.errors import ConfigError
from tokencredit.settings.text import PPOConfig
from tokencredit.tools.check_run import Known, check, check_folder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    return with_chat_template(tmp_path_factory.mktemp("chat"))


def listed(capsys, *options):
    """Exit code, findings and the last line of `tokencredit train --check`."""
    code = main(["train", "--check", *map(str, options)])
    shown = capsys.readouterr()
    return code, [line.split(maxsplit=2) for line in shown.out.splitlines()], shown.err


def test_a_run_that_can_start_has_no_error_and_writes_nothing(tmp_path, capsys):
    code, lines, errors = listed(capsys, "--run.dir", tmp_path / "run", "--kl.coef", "0.1")
    assert (code, errors) == (0, "")
    assert {part for _, part, _ in lines} == {"settings", "folder", "model", "prompts", "reward", "memory"}
    assert {state for state, *_ in lines} == {"ok"}
    assert any("for two made-up completions" in text for _, part, text in lines if part == "reward")
    assert not (tmp_path / "run").exists()
    (tmp_path / "file").touch()
    known = Known(PPOConfig.from_dict({"run.dir": str(tmp_path / "file" / "run")}))
    with pytest.raises(ConfigError, match=r"file' is no folder that can be written to; set run\.dir"):
        [*check_folder(known)]


def test_all_that_is_wrong_is_listed(tmp_path, capsys, monkeypatch):
    """Two settings, the prompts, a reward and the hub, in one call; what is right is listed too."""
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: (_ for _ in ()).throw(OSError(-2, "Name not known")))
    monkeypatch.setenv("HF_TOKEN", "secret")
    (tmp_path / "f.py").write_text("def f(completions, answer):\n    raise ValueError('bad')\n")
    reward = json.dumps([{"function": "length"}, {"function": f"{tmp_path}/f.py:f"}])
    wrong = {"ppo.minibatches": 100, "kl.horizon": 5, "prompts.dataset": tmp_path / "no.jsonl", "reward": reward}
    wrong |= {"run.push_to_hub": "me/policy", "run.dir": tmp_path / "run"}
    code, lines, errors = listed(capsys, *(x for key, value in wrong.items() for x in (f"--{key}", value)))
    failed = [(part, text) for state, part, text in lines if state == "error"]
    assert code == 1
    assert [part for part, _ in failed] == ["settings", "settings", "prompts", "hub"]
    for start in ("ppo.minibatches is 100", "kl.horizon is 5", "prompts.dataset is"):
        assert any(text.startswith(start) for _, text in failed)
    assert "the hub cannot be reached" in failed[3][1]
    assert f"{len(failed)} of these must be changed before this run can start" in errors


def test_what_was_found_is_listed_before_a_refusal_that_ends_the_check(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("python: {reward_funcs: f}\n")
    code, lines, errors = listed(capsys, "--config", tmp_path / "run.yaml", "--rollout.per_prompt", "3")
    assert (code, [text.split(";")[0] for _, _, text in lines]) == (2, ["rollout.per_prompt is 3"])
    assert "was given as an object of Python" in errors


def test_the_defaults_of_refused_settings_are_not_listed(tmp_path, capsys):
    _, lines, _ = listed(capsys, "--reward", "mine.py:good", "--run.dir", tmp_path / "run")
    assert [(state, part) for state, part, _ in lines if part in ("settings", "reward")] == [("error", "settings")]


def test_messages_on_a_folder_in_use_name_flags_only_to_the_command(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    (told,) = (x.text for x in check(PPOConfig.from_dict({"run.dir": str(tmp_path)})) if x.part == "folder")
    assert "--" not in told
    _, lines, _ = listed(capsys, "--run.dir", tmp_path)
    assert any("give another --run.dir" in text for _, part, text in lines if part == "folder")


def test_a_reward_that_fails_is_an_error_and_the_others_are_called(tmp_path):
    def broken(completions):
        raise ValueError("bad")

    def named(completions, prompt_ids, completion_ids, completion_mask):
        return [float(len(prompt) + sum(mask)) for prompt, mask in zip(prompt_ids, completion_mask, strict=True)]

    config = PPOConfig.from_dict({"run.dir": str(tmp_path / "run")})
    found = [x for x in check(config, reward_funcs=["length", broken, named]) if x.part == "reward"]
    assert [x.state for x in found] == ["ok", "error", "ok"]
    assert "broken" in found[1].text


def test_a_critic_of_another_vocabulary_is_an_error(tmp_path):
    settings = {"critic": {"kind": "separate", "name": "builtin:grid"}, "run.dir": str(tmp_path / "run")}
    (found,) = (x for x in check(PPOConfig.from_dict(settings)) if (x.state, x.part) == ("error", "model"))
    assert "critic.name is 'builtin:grid', whose tokenizer has other ids" in found.text


@pytest.mark.parametrize("role", [None, "user"])
def test_plain_prompts_of_a_chat_model_are_a_warning_unless_they_are_messages(role, chat_folder, tmp_path):
    settings = {"model.name": str(chat_folder), "prompts.role": role, "prompts.text": "Good?"}
    found = check(PPOConfig.from_dict(settings | {"run.dir": str(tmp_path / "run")}))
    warned = [x.text for x in found if x.state == "warning" and x.part == "prompts"]
    assert [("set prompts.role: user" in text) for text in warned] == [True] * (role is None)


def test_packages_of_trackers_and_engine_that_are_missing_are_errors_each(tmp_path):
    missing = {"run.trackers": ["wandb"], "rollout.engine": "vllm"}
    found = check(PPOConfig.from_dict(missing | {"run.dir": str(tmp_path / "run")}), reward_funcs=["length"])
    errors = [x.text for x in found if x.part == "packages"]
    assert [error.split()[0].rstrip(":") for error in errors] == ["rollout.engine", "run.trackers"]
    assert all("is not installed: pip install" in error for error in errors)
