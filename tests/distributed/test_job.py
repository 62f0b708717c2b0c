"""Processes join the job of a launcher whose store outlives restarts, as torchrun's does."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from helpers.commands import wait_for
from tokencredit.distributed.job import Job
from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError, ProcessLost, RunStopped


@pytest.fixture
def store(monkeypatch):
    """The store of a launcher with two processes."""
    hosted = TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    settings = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(hosted.port)}
    for name, value in (settings | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    return hosted


def join(store, timeout=20.0):
    """Both processes, as threads."""
    jobs = []
    with ThreadPoolExecutor() as threads:
        for rank in ("1", "0"):
            key = f"tokencredit/here/{rank}"
            before = store.get(key) if store.check([key]) else None
            os.environ["RANK"] = rank
            jobs.append(threads.submit(Job, timeout))
            wait_for(lambda key=key, before=before: store.check([key]) and store.get(key) != before)
    return [job.result() for job in reversed(jobs)]


def test_each_start_has_a_store_of_its_own_beside_what_killed_ones_left(store, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    first = join(store)
    assert {job.start for job in first} == {first[0].start}
    assert [(member.rank, member.pid) for member in first[1].members] == [(0, os.getpid()), (1, os.getpid())]
    assert [job.starts for job in first] == [1, 1]
    assert first[0].restarted_because() is None
    first[0].store.set("key", "of the first start")
    assert first[1].store.get("key") == b"of the first start"
    assert first[1].ended("the connection was lost")
    assert not first[1].store.check(["end/0"]), "it was killed"

    second = join(store)
    assert {job.start for job in second} == {second[0].start} != {first[0].start}
    assert [job.starts for job in second] == [2, 2]
    assert not second[0].store.check(["key"])
    assert second[0].id == second[1].id == first[0].id
    why = second[0].restarted_because()
    assert why.startswith("restarted by the launcher (start 2): the connection was lost; process 0 (pid ")
    assert why.endswith("ended without a message, as if killed")
    assert "process 1" not in why


def test_one_process_says_an_error_that_both_have(store, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    main, other = join(store)
    assert other.ended("a wrong setting")
    assert not main.ended("a wrong setting")
    assert main.ended("something else")


def test_one_process_says_an_error_of_process_0_that_all_agreed_on(store, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    main, other = join(store)
    assert other.ended("process 0: the disk is full")
    assert not main.ended("the disk is full")


def failed_in(part):
    error = RunStopped("it raised")
    error.stopped_by, error.parts = "an environment that failed", part
    return error


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), ConfigError("the folder is in use"), failed_in("env.factory")]
)
def test_all_processes_raise_the_kind_of_error_that_one_had(error, monkeypatch):
    processes, said = Processes(), []
    monkeypatch.setattr(processes, "texts", lambda text: said.append(text) or [text])
    kinds = OSError, ConfigError, RunStopped
    with pytest.raises(type(error)) as caught, processes.agreed(*kinds):
        raise error
    assert caught.value is error
    monkeypatch.setattr(processes, "texts", lambda text: [*said, text])
    with pytest.raises(type(error), match=f"process 0: .*{error.args[-1]}") as caught, processes.agreed(*kinds):
        pass
    names = "stopped_by", "parts"
    assert [getattr(caught.value, x, "") for x in names] == [getattr(error, x, "") for x in names]
    assert len(said) == 1, "one exchange, whatever the kind"


def test_a_job_of_a_store_that_ends_with_a_start_has_torchruns_name(store, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_PORT", "0")
    names = []
    for name in ("my-run", "none"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
        names.append(Job(1.0).id)
    assert names == ["my-run", None]


def test_processes_that_were_not_joined_are_refused(monkeypatch):
    Processes()
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"^a launcher started 2 processes .*; set ACCELERATE_USE_CPU=true, or"):
        Processes()


def test_processes_meet_only_if_all_come(store, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    main, other = join(store, timeout=0.4)
    assert not main.meet("an error")
    assert other.meet("an error"), "the first one came too"
    assert not main.meet("an error"), "the other did not come again"


def test_a_process_that_does_not_start_is_named(store, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(
        ProcessLost, match=r"^process 1 of this job of 2 did not start within 0\.1 seconds \(run\.timeout"
    ):
        Job(0.1)


@pytest.mark.slow
def test_a_store_that_cannot_be_reached_is_named(store, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ProcessLost, match=r"^the job's store at 127\.0\.0\.1:1 cannot be reached: "):
        Job(0.1)
