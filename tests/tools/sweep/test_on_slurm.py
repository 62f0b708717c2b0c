"""Sweeps on Slurm: through submitit's local executor, and with programs that stand in for Slurm's commands."""

import os
import signal
import sys
import threading
from typing import ClassVar

import pytest

from helpers.commands import refused, wait_for
from helpers.files import count_lines
from tokencredit.cli import main
from tokencredit.errors import ConfigError
from tokencredit.tools.sweep import on_slurm
from tokencredit.tools.sweep.cluster_job import JobFolder
from tokencredit.tools.sweep.launch import Resources
from tokencredit.tools.sweep.on_slurm import Slurm, parameters
from tokencredit.tools.sweep.runner import sweep
from tokencredit.tools.sweep.sweep_file import read_sweep
from tools.sweep.test_runner import LONG, sweep_file

submitit = pytest.importorskip("submitit", reason="needs submitit: pip install tokencredit[slurm]")


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """A folder of Slurm's commands that write down their arguments; squeue lists what is in the file `queue`."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    says = {"sbatch": "echo Submitted batch job 7", "squeue": f"cat {folder}/queue", "scancel": "", "srun": ""}
    for name, does in says.items():
        (folder / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {folder}/calls\n{does}\n')
        (folder / name).chmod(0o755)
    (folder / "queue").write_text("7\n")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(on_slurm, "LIST_EVERY", -1.0)
    monkeypatch.setattr(on_slurm, "GRACE", 0.0)
    return folder


@pytest.fixture
def run(tmp_path):
    return read_sweep(sweep_file(tmp_path))[0]


def test_what_is_submitted_is_a_command_and_no_pickle(commands, run, tmp_path):
    given = parameters(["partition=gpu", "time=120", "exclusive=true", "setup=module load cuda"])
    job = Slurm(Resources(3, 2), given).start(run)
    script = (run.job / "7_submission.sh").read_text()
    flags = ("cpus-per-task=3", "gpus-per-node=2", "partition=gpu", "time=120", "exclusive", "job-name=plain/seed-1")
    for flag in flags:
        assert f"#SBATCH --{flag}\n" in script
    assert "\nmodule load cuda\n" in script
    assert f"--cpus-per-task=3 {sys.executable} -m tokencredit.tools.sweep.cluster_job {run.settings} " in script
    assert job.inherited is None
    Slurm(Resources(), {}).submit(run, JobFolder(run))
    assert "#SBATCH --time" not in (run.job / "7_submission.sh").read_text(), "the partition has one"
    assert not list(tmp_path.rglob("*.pkl"))


def test_a_job_in_the_queue_is_waited_for_and_one_that_left_it_ends(commands, run, monkeypatch):
    job = Slurm(Resources(), {}).start(run)
    assert job.poll() is None
    again = Slurm(Resources(), {}).start(run)
    assert again.inherited == "Slurm's job 7 of an earlier sweep is still in the queue"
    assert (commands / "calls").read_text().count("sbatch") == 1
    (commands / "queue").write_text("8\n")
    monkeypatch.setattr(on_slurm, "GRACE", 9.0)
    assert job.poll() is None, "a file of it may come to light yet"
    monkeypatch.setattr(on_slurm, "GRACE", 0.0)
    ended = job.poll()
    assert "Slurm's job 7 left the queue before it began: it was cancelled, or its node does not share" in ended.failure
    assert "; a sweep on a cluster needs one file system that all its nodes share" in ended.failure
    assert not ended.lost
    (run.job / f"status-{(run.job / 'signals').read_text().strip()}.json").write_text('{"node": "node-7"}')
    assert job.poll().failure == "Slurm's job 7 was lost on node-7"
    assert job.poll().lost


def test_a_queue_that_does_not_answer_tells_nothing(commands, run, capsys):
    job = Slurm(Resources(), {}).start(run)
    (commands / "squeue").write_text("#!/bin/sh\necho no controller >&2\nexit 1\n")
    assert job.poll() is None
    assert job.poll() is None
    assert "squeue does not answer: no controller; asking again" in capsys.readouterr().out


def test_a_waiting_job_is_withdrawn(commands, run):
    job = Slurm(Resources(), {}).start(run)
    job.send(2)
    assert "scancel --state=PENDING 7" in (commands / "calls").read_text()
    (commands / "queue").write_text("")
    assert job.poll().failure is None


def test_what_sbatch_refuses_is_the_failure_of_the_run(commands, run):
    (commands / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    with pytest.raises(OSError, match="invalid partition"):
        Slurm(Resources(), {"partition": "moon"}).start(run)


def test_parameters_and_machines_that_are_refused(run, tmp_path, capsys, monkeypatch):
    for given, why in [
        (["gpu"], "it must be KEY=VALUE"),
        (["nodes=2"], r"the key 'nodes'; it may be account, partition"),
        (["time=1", "time=2"], "has time twice"),
        (["comment=a\nb"], "a line break in comment"),
    ]:
        with pytest.raises(ConfigError, match=why):
            parameters(given)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs sbatch, srun, squeue of Slurm, which this machine does not have"):
        Slurm(Resources(), {})


def test_flags_without_an_effect_are_refused(tmp_path, capsys):
    file = str(sweep_file(tmp_path))
    assert "--cores has an effect only with --on ray or slurm" in refused(capsys, "sweep", file, "--cores", "2")
    assert "--gpus has an effect only" in refused(capsys, "sweep", file, "--gpus", "0")
    assert "--slurm has an effect only with --on slurm, and --on is ray" in refused(
        capsys, "sweep", file, "--on", "ray", "--slurm", "time=1"
    )
    assert "agents are trained on CPUs" in refused(capsys, "sweep", file, "--on", "ray", "--gpus", "1")
    assert "leave them out" in refused(capsys, "sweep", file, "--on", "ray", "--export", str(tmp_path / "x"))
    assert "leave them out" in refused(capsys, "sweep", file, "--jobs", "2", "--export", str(tmp_path / "x"))
    assert main(["sweep", file, "--on", "slurm", "--cores", "4", "--dry_run"]) == 0
    assert "on slurm: 4 CPU cores and no GPUs per run\n" in capsys.readouterr().out


class Noted(submitit.LocalExecutor):
    """submitit's executor on this machine; keeps its jobs, whose ids are those of processes."""

    jobs: ClassVar = []

    def _submit_command(self, command):
        self.jobs.append(super()._submit_command(command))
        return self.jobs[-1]


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # submitit leaves its processes to the interpreter's end
def test_a_sweep_of_jobs_stops_at_ctrl_c_goes_on_and_is_compared(commands, tmp_path, capsys, monkeypatch):
    runs = read_sweep(sweep_file(tmp_path, base=LONG))
    monkeypatch.setattr(submitit, "SlurmExecutor", Noted)
    monkeypatch.setattr(on_slurm, "queued", lambda: {job.job_id for job in Noted.jobs if not job.done()})

    def interrupt():
        wait_for(lambda: count_lines(runs[0].folder / "metrics.jsonl") > 1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        sweep(runs, Slurm(Resources(), {}), 1, "tokencredit sweep FILE --on slurm")
    thread.join()
    assert "resume with: tokencredit sweep FILE --on slurm" in capsys.readouterr().out
    assert runs[0].summary()["stopped_by"] == "interrupt"
    assert runs[0].state() == "to resume"

    sweep(runs, Slurm(Resources(), {}), None, "tokencredit sweep FILE --on slurm")
    assert runs[0].state() == "finished"
    assert "resumed after iteration" in runs[0].log.read_text()
    assert (tmp_path / "out" / "comparison" / "comparison.html").is_file()
    assert not list(tmp_path.rglob("*.pkl"))
