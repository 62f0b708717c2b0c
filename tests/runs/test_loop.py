"""Ways in which a run ends, with a small agent."""

import shutil

import pytest

from helpers.configs import control_config
from tokencredit.control.trainer import ControlTrainer
from tokencredit.errors import RunStopped


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
