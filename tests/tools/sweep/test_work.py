"""The loop of a sweep over jobs that a cluster takes away, with launchers that train nothing."""

import json
from pathlib import Path

import pytest
import yaml

from tokencredit.errors import RunStopped
from tokencredit.tools.sweep import launch, runner
from tokencredit.tools.sweep.launch import Ended, Resources
from tokencredit.tools.sweep.runner import Scheduler, sweep
from tokencredit.tools.sweep.sweep_file import first_seeds, read_sweep

BASE = {"run": {"iterations": 3, "save_every": 1}}
LOST = Ended("lost with node-7", lost=True)


class Scripted:
    """A launcher whose jobs end one after another as a script says; a number is a new checkpoint before that."""

    pause = 0.0

    def __init__(self, *script):
        self.script, self.started = list(script), 0

    def start(self, run):
        self.started += 1
        job = ScriptedJob()
        ending = self.script.pop(0)
        if isinstance(ending, int):
            (run.folder / "checkpoints" / f"{ending:06d}").mkdir(parents=True)
            ending = LOST
        elif ending.failure is None:
            run.folder.mkdir(parents=True, exist_ok=True)
            ends = {f"average_return_{end}": 1.0 for end in ("first", "last")}
            summary = {"iterations": 3, "stopped_by": "iterations", "seconds": 1.0, **ends}
            (run.folder / "summary.json").write_text(json.dumps(summary))
        job.ending = ending
        return job

    def close(self):
        pass


class ScriptedJob:
    inherited = None

    def poll(self):
        return self.ending


@pytest.fixture
def runs(tmp_path):
    asked = {"kind": "control", "dir": str(tmp_path / "out"), "seeds": [1], "base": BASE, "variants": {"plain": {}}}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(asked))
    (tmp_path / "out").mkdir()
    return read_sweep(Path(tmp_path / "sweep.yaml"))


def test_a_lost_run_goes_on_in_another_job(runs, capsys):
    launcher = Scripted(LOST, LOST, Ended())
    scheduler = Scheduler(runs, launcher, None)
    assert scheduler.run() is None
    assert launcher.started == 3
    assert not scheduler.failures
    assert "plain/seed-1: lost with node-7; continuing it in another job" in capsys.readouterr().out


def test_a_run_that_is_lost_again_and_again_fails_unless_it_gets_further_each_time(runs, capsys):
    stuck = Scripted(LOST, LOST, LOST)
    scheduler = Scheduler(runs, stuck, None)
    scheduler.run()
    assert scheduler.failures == {runs[0]: "lost with node-7"}
    assert stuck.started == 3
    onward = Scripted(LOST, 1, LOST, 2, LOST, Ended())
    scheduler = Scheduler(runs, onward, None)
    scheduler.run()
    assert onward.started == 6
    assert not scheduler.failures


@pytest.mark.slow
def test_a_failure_of_the_run_itself_is_not_repeated(runs, capsys):
    launcher = Scripted(Ended("exit code 1: no"))
    with pytest.raises(RunStopped, match=r"1 of 1 runs failed; retry them with: tokencredit sweep F --on ray"):
        sweep(runs, launcher, None, "tokencredit sweep F --on ray")
    assert launcher.started == 1
    assert json.loads((runs[0].folder.parents[1] / "sweep.json").read_text())[0]["failure"] == "exit code 1: no"


@pytest.mark.slow
def test_a_run_that_another_process_stopped_is_not_left_without_a_word(runs, capsys, monkeypatch):
    monkeypatch.setattr(Scripted, "start", lambda self, run: self)  # it leaves no summary
    monkeypatch.setattr(Scripted, "inherited", None, raising=False)
    monkeypatch.setattr(Scripted, "poll", lambda self: Ended(), raising=False)
    with pytest.raises(RunStopped, match=r"^1 of 1 runs were stopped; retry them with: tokencredit sweep F"):
        sweep(runs, Scripted(), None, "tokencredit sweep F")
    assert "stopped, to be resumed" in capsys.readouterr().out


def test_the_first_seeds_of_a_sweep_are_compared_with_its_other_finished_runs(tmp_path, monkeypatch):
    asked = {"kind": "control", "dir": str(tmp_path / "out"), "seeds": [1, 2], "base": BASE, "variants": {"plain": {}}}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(asked))
    every = read_sweep(tmp_path / "sweep.yaml")
    Scripted(Ended()).start(every[1])
    compared = []
    monkeypatch.setattr(runner, "compare", lambda done, out: compared.extend(done))
    sweep(first_seeds(every, 1), Scripted(Ended()), None, "tokencredit sweep F --seeds=1", every)
    assert compared == every
    states = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert [(row["run"], row["state"]) for row in states] == [(run.name, "finished") for run in every]


def test_resources_are_threads_and_gpus():
    assert Resources(8, 2).environment() == {"OMP_NUM_THREADS": "4"}, "one process per GPU"
    assert Resources(2, 0).environment() == {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}
    assert str(Resources(1, 2)) == "1 CPU core and 2 GPUs"
    assert str(Resources(2, 0)) == "2 CPU cores and no GPUs"


def test_several_gpus_are_several_processes(runs, monkeypatch):
    begun = []
    monkeypatch.setattr(launch.subprocess, "Popen", lambda command, **_: begun.append(command))
    launch.start(runs[0], {}, processes=2)
    launch.start(runs[0], {})
    module = ["-m", "tokencredit.cli", "control", "--config", str(runs[0].settings), "--run.dir", str(runs[0].folder)]
    assert begun[0][1:] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *module]
    assert begun[1][1:] == module
