"""Agents in two processes take the steps of one: environments, statistics, minibatches, checkpoints."""

import json
import re
import shutil
from contextlib import contextmanager

import pytest
import torch
import yaml

from helpers.commands import COMMAND
from helpers.files import read_metrics, without_times
from helpers.warm import together
from tokencredit.cli import main
from tokencredit.control.control_trainer import refuse_unsplit
from tokencredit.control.environment_wrappers import AgreedSteps
from tokencredit.control.vector_environments import make_envs
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.settings.control import ControlConfig, EnvConfig

SETTINGS = {
    "env": {"id": "CartPole-v1", "number": 4, "normalize_observations": True, "normalize_rewards": True},
    "steps": 64,
    "eval": {"every": 3, "episodes": 2},
    "ppo": {"epochs": 3, "minibatches": 4},
    "run": {"iterations": 3, "save_every": 2, "trackers": []},
}


NEEDS_GLOO = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")


class Three:
    count = 3
    device = torch.device("cpu")

    @contextmanager
    def agreed(self, *kinds):
        yield
        raise kinds[-1]("process 1: a wheel came off")


def in_two(*arguments, cwd=None):
    """Run the command in two processes."""
    return together(2, *COMMAND, *arguments, cwd=cwd, ACCELERATE_USE_CPU="true")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same run by one process, `one`, and by two, `two`."""
    place = tmp_path_factory.mktemp("processes")
    (place / "config.yaml").write_text(yaml.safe_dump(SETTINGS))
    arguments = ("control", "--config", str(place / "config.yaml"), "--run.dir")
    assert main([*arguments, str(place / "one")]) == 0
    done = in_two(*arguments, place / "two")
    assert done.returncode == 0, done.stderr
    return place


def assert_same(one, other):
    """Metrics that differ by rounding only."""
    for before, after in zip(without_times(read_metrics(one)), without_times(read_metrics(other)), strict=True):
        assert after == pytest.approx(before, rel=1e-6, abs=1e-6, nan_ok=True)


@NEEDS_GLOO
def test_two_processes_take_the_steps_of_one_and_either_goes_on_from_the_other(folder):
    assert_same(folder / "one", folder / "two")
    shutil.rmtree(folder / "two" / "checkpoints" / "000003")
    (folder / "two" / "summary.json").unlink()
    shutil.copytree(folder / "two", folder / "again")
    assert in_two("control", "--resume", folder / "again").returncode == 0
    assert without_times(read_metrics(folder / "again")) == without_times(read_metrics(folder / "two"))
    assert main(["control", "--resume", str(folder / "two")]) == 0
    assert_same(folder / "one", folder / "two")
    assert json.loads((folder / "two" / "summary.json").read_text())["iterations"] == 3


def test_environments_that_cannot_be_split_are_refused():
    with pytest.raises(ConfigError, match=r"env.number is 4; 3 processes share"):
        refuse_unsplit(ControlConfig(env=EnvConfig("CartPole-v1", number=4)), Three())


@NEEDS_GLOO
@pytest.mark.proof  # test_elastic.py: an error in one process stops both
def test_an_environment_that_raises_in_one_process_stops_all_and_each_has_the_main_ones_evaluations(tmp_path):
    # Process 1 would find iteration 2 the best, and save a checkpoint alone, if it evaluated by itself.
    options = {"env.id": "helpers.unsteady:Unsteady-v0", "env.number": 4, "seed": 1, "steps": 16, "eval.every": 1}
    options |= {"eval.episodes": 2, "run.save_every": 100, "run.iterations": 5, "run.timeout": 20, "run.dir": "run"}
    flags = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    done = in_two("control", *flags, "--run.trackers", "[]", cwd=tmp_path)
    assert done.returncode == 1
    # Either process may be the one that prints.
    message = r"stopped in iteration 3: (process 1: )?the environment with seed 4 raised RuntimeError: a wheel came off"
    assert re.search(message, done.stderr)
    assert len(read_metrics(tmp_path / "run")) == 2
    assert (tmp_path / "run" / "policy" / "agent.safetensors").is_file()


def test_with_shared_statistics_a_step_fails_in_all_processes_if_it_does_in_one():
    envs = AgreedSteps(make_envs(EnvConfig("CartPole-v1"), 2, 0.99), Three())
    with pytest.raises(RunStopped, match="process 1: a wheel came off"):
        envs.reset(seed=1)
    with pytest.raises(RunStopped, match="process 1: a wheel came off"):
        envs.step(envs.action_space.sample())
    envs.close()
