"""Ways in which a run ends, with a small agent."""

import json
import math
import re
import shutil
import signal

import pytest

from helpers.commands import unread
from helpers.configs import control_config, quiet, quiet_agent, text_config
from helpers.files import read_events
from helpers.proofs import proofs
from tokencredit import Callback
from tokencredit.control.control_trainer import ControlTrainer
from tokencredit.errors import ConfigError, EngineLost, RunStopped
from tokencredit.runs.jsonl import read_metrics
from tokencredit.runs.loop import load
from tokencredit.text.ppo_trainer import PPOTrainer


def before_iteration(trainer, number, action):
    """Let something happen as an iteration begins."""
    iteration = trainer.iteration

    def changed(now):
        if now == number:
            action()
        return iteration(now)

    trainer.iteration = changed
    return trainer


@pytest.mark.parametrize("number", [1, 2])
def test_a_folder_that_is_gone_stays_away(number, tmp_path):
    run = tmp_path / "run"
    trainer = before_iteration(ControlTrainer(control_config(run, 3)), number, lambda: shutil.rmtree(run))
    with pytest.raises(
        RunStopped, match=rf"^stopped in iteration {number}: the run's folder '.*run' is gone"
    ) as caught:
        trainer.train()
    assert "resume the run under its new path" in str(caught.value)
    assert not run.exists()


def test_a_failed_run_suggests_to_resume_it_and_nothing_else(tmp_path, capsys):
    def fail():
        raise RunStopped("no reward")

    trainer = before_iteration(ControlTrainer(control_config(tmp_path / "run", 3)), 1, fail)
    with pytest.raises(
        RunStopped, match=r"no reward; no checkpoint .* anew; resume with: tokencredit control --resume .*run$"
    ):
        trainer.train()
    assert "tokencredit play" not in capsys.readouterr().out
    ControlTrainer(control_config(tmp_path / "other")).train()
    assert "tokencredit play" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "save_every", "promise"),
    [
        (2, 1, "stopped at once; resume with: tokencredit control --resume"),
        (1, 0, "no checkpoint is saved yet, so resuming begins anew; resume with:"),
        *proofs(
            (2, 5, "no checkpoint is saved yet, so resuming begins anew; resume with: tokencredit control --resume")
        ),
        (2, 0, "no checkpoint is saved, so it cannot be resumed: run.save_every is 0; begin a new run"),
    ],
)
def test_a_second_interrupt_promises_what_resuming_does(number, save_every, promise, tmp_path, capsys):
    def interrupt_twice():
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    config = control_config(tmp_path / "run", run=quiet_agent(tmp_path / "run", 3, save_every=save_every))
    with pytest.raises(KeyboardInterrupt):
        before_iteration(ControlTrainer(config), number, interrupt_twice).train()
    assert promise in capsys.readouterr().out
    if "cannot be resumed" in promise:
        with pytest.raises(ConfigError, match=r"has no checkpoint: run\.save_every is 0"):
            ControlTrainer(config).train(resume_from_checkpoint=True)
        return
    ControlTrainer(config).train(resume_from_checkpoint=True)
    assert ("no checkpoint yet: the run begins anew" in capsys.readouterr().out) == ("anew" in promise)


def test_a_setting_that_user_code_refuses_in_a_run_fails_the_run(tmp_path):
    """ConfigError, and with it exit code 2, is left to commands that write nothing."""

    def refuse():
        raise ConfigError("my key is 3; it must be 4")

    trainer = before_iteration(ControlTrainer(control_config(tmp_path / "run", 3)), 2, refuse)
    with pytest.raises(RunStopped, match=r"^stopped in iteration 2: my key is 3; it must be 4; "):
        trainer.train()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_by"] == "an invalid setting"


@pytest.mark.parametrize(
    ("error", "raised", "told"),
    [
        (KeyError("total"), KeyError, "stopped in iteration 2: KeyError: 'total'; "),
        (SystemExit(3), RunStopped, r"stopped in iteration 2: sys\.exit\(3\) was called; "),
        (MemoryError(), RunStopped, "stopped in iteration 2: MemoryError: ; "),
    ],
)
def test_whatever_ends_a_run_what_was_trained_is_written_first(error, raised, told, tmp_path):
    run = tmp_path / "run"

    def fail():
        raise error

    trainer = before_iteration(ControlTrainer(control_config(run, 3)), 2, fail)
    with pytest.raises(raised) as caught:
        trainer.train()
    [line] = [*getattr(caught.value, "__notes__", []), *([str(caught.value)] if raised is RunStopped else [])]
    assert re.match(told, line)
    assert "resume with: tokencredit control --resume" in line
    assert (run / "policy" / "agent.safetensors").is_file()
    assert json.loads((run / "summary.json").read_text())["stopped_by"] == "an error"


def test_a_run_that_fails_in_its_last_evaluation_is_not_to_be_resumed(tmp_path, monkeypatch):
    def fail(_):
        raise RunStopped("the simulator is lost")

    trainer = ControlTrainer(control_config(tmp_path / "run", 1))
    monkeypatch.setattr(trainer, "evaluate", fail)
    with pytest.raises(RunStopped, match=r"lost; '.*run' has done all its 1 iterations; raise run\.iterations to con"):
        trainer.train()


def test_a_failing_callback_is_named_after_policy_summary_and_checkpoint_are_saved(tmp_path):
    class Watcher(Callback):
        def before_reward(self, trainer):
            if len(trainer.record.history) == 1:
                {}["total"]

    run = tmp_path / "run"
    with pytest.raises(RunStopped) as caught:
        PPOTrainer(args=text_config(run, run=quiet(run, 3, save_every=5)), callbacks=[Watcher()]).train()
    told = (
        r"stopped in iteration 2: before_reward of the callback Watcher raised KeyError: 'total' at .*test_loop\.py:\d+"
    )
    assert re.match(told, str(caught.value))
    assert (run / "policy" / "model.safetensors").is_file()
    assert (run / "summary.json").is_file()
    assert [folder.name for folder in (run / "checkpoints").iterdir()] == ["000001"]


def test_a_run_goes_on_when_nobody_reads_its_output_any_more(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    with unread(monkeypatch):
        assert ControlTrainer(control_config(run, 3)).train().iterations == 3
    assert capsys.readouterr().err == "tokencredit: nobody reads this output any more; the work goes on\n"
    assert (run / "policy").is_dir()
    assert len([*read_metrics(run / "metrics.jsonl")]) == 3


def test_a_timeout_of_ones_own_has_no_effect_in_one_process_and_that_is_said(tmp_path):
    ControlTrainer(control_config(tmp_path, 1, run=quiet_agent(tmp_path / "run", 1, timeout=60.0))).train()
    assert read_events(tmp_path / "run") == ["run.timeout is 60, which has no effect in one process"]


def test_a_run_with_arguments_from_python_is_resumed_from_there(tmp_path):
    def undefined(completions, **columns):
        return [math.nan] * len(completions)

    with pytest.raises(RunStopped) as caught:
        PPOTrainer(
            reward_funcs=undefined, args=text_config(tmp_path / "run", run=quiet(tmp_path / "run", 3, save_every=5))
        ).train()
    assert "tokencredit train --resume" not in str(caught.value)
    assert f"run your script again with args.run.dir = '{tmp_path / 'run'}' (TRL's output_dir)" in str(caught.value)


class Trainer:
    """Restores no checkpoint."""

    def __init__(self, error):
        self.error = error

    def load(self, state, changed):
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError("policy"), ConfigError),
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection reset"), RuntimeError),
        (EngineLost("the server is gone"), EngineLost),
    ],
)
def test_only_a_checkpoint_that_does_not_fit_is_said_not_to_fit(error, kind):
    with pytest.raises(kind) as raised:
        load(Trainer(error), {}, set())
    assert isinstance(raised.value, ConfigError) == ("the checkpoint does not fit this run" in str(raised.value))
    assert type(raised.value) is kind
