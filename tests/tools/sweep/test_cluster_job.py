"""A run's job on a cluster, as a process of its own: signals from the cluster and its files."""

import signal
from contextlib import contextmanager

import pytest

from helpers import forking
from helpers.commands import wait_for
from helpers.files import count_lines
from tokencredit.tools.sweep.cluster_job import NOT_SHARED, JobFolder, command
from tokencredit.tools.sweep.launch import Resources
from tokencredit.tools.sweep.sweep_file import read_sweep
from tools.sweep.test_runner import LONG, sweep_file

pytestmark = pytest.mark.slow

ENDLESS = LONG | {"run": LONG["run"] | {"iterations": 100_000}}


@contextmanager
def begin(run, token):
    """A job as a cluster starts it; killed at the end, upon which its process stops too."""
    _, module, *arguments = command(run, token, Resources())
    with forking.start(module, *arguments) as job:
        try:
            yield job
        finally:
            job.kill()


@pytest.mark.proof
def test_a_job_stops_for_the_cluster_and_only_one_trains_a_run(tmp_path):
    (run,) = read_sweep(sweep_file(tmp_path, base=ENDLESS))
    folder = JobFolder(run)
    with begin(run, folder.prepare()) as first:
        assert wait_for(lambda: count_lines(run.folder / "metrics.jsonl") > 1, first)
        assert folder.ended() is None
        assert folder.status()["node"]
        first.send_signal(signal.SIGUSR2)
        assert first.wait(120) == 0, "it has saved"
    assert folder.ended().lost, "time is over: another job may go on"
    assert folder.ended().failure.startswith("stopped by the cluster on ")
    assert run.state() == "to resume"

    with begin(run, folder.prepare()) as second:
        assert folder.ended() is None, "the first job's status counts no more"
        lines = count_lines(run.folder / "metrics.jsonl")
        assert wait_for(lambda: count_lines(run.folder / "metrics.jsonl") > lines, second)
        with begin(run, folder.prepare()) as third:  # the sweep believes that the second is dead, and it is not
            assert second.wait(120) == 0, "it makes room"
            lines = count_lines(run.folder / "metrics.jsonl")
            assert wait_for(lambda: count_lines(run.folder / "metrics.jsonl") > lines, third)
            (run.folder / "summary.json").unlink(missing_ok=True)
            third.kill()  # as Ray does to its worker's children, and not to theirs
    assert wait_for(lambda: (run.folder / "summary.json").is_file(), seconds=120)
    assert run.summary()["stopped_by"] == "SIGTERM", "the process has noticed, and saved"
    assert run.log.read_text().count("resumed after iteration") == 2


def test_a_job_without_the_folder_of_its_sweep_says_so(tmp_path):
    (run,) = read_sweep(sweep_file(tmp_path))
    folder = JobFolder(run)
    folder.prepare()
    with begin(run, "another-token") as job:
        assert "is not the sweep's on" in job.communicate(timeout=120)[1]
    assert job.returncode == NOT_SHARED
    assert not run.folder.exists()
    assert folder.status() == {}
    folder.path.joinpath("signals").unlink()
    assert folder.status() == {}
    assert folder.ended() is None
    assert list(run.job.iterdir()) == []
