"""Ways in which a run ends, with a small agent."""

import math
import shutil

import pytest

from helpers.configs import control_config, text_config
from tokencredit.control.trainer import ControlTrainer
from tokencredit.errors import RunStopped
from tokencredit.text.trainer import PPOTrainer


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
    assert "--resume and its new path" in str(caught.value)
    assert not run.exists()


def test_a_failed_run_suggests_to_resume_it_and_nothing_else(tmp_path, capsys):
    def fail():
        raise RunStopped("no reward")

    trainer = before_iteration(ControlTrainer(control_config(tmp_path / "run", 3)), 1, fail)
    with pytest.raises(RunStopped, match=r"no reward; resume with: tokencredit control --resume .*run$"):
        trainer.train()
    assert "tokencredit play" not in capsys.readouterr().out
    ControlTrainer(control_config(tmp_path / "other")).train()
    assert "tokencredit play" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_with_arguments_from_python_is_resumed_from_there(tmp_path):
    def undefined(completions, **columns):
        return [math.nan] * len(completions)

    with pytest.raises(RunStopped) as caught:
        PPOTrainer(reward_funcs=undefined, args=text_config(tmp_path / "run", 3)).train()
    assert "tokencredit train --resume" not in str(caught.value)
    assert f"run.dir '{tmp_path / 'run'}': train(resume_from_checkpoint=True)" in str(caught.value)
