"""Two processes, started again as torchrun would: killed and stopped ones, and mistakes that no restart cures."""

import os
import random
import re

import pytest
import torch

from helpers import commands
from helpers.elastic import COMMAND, death, forked, restarts, torchrun
from helpers.files import read_events
from helpers.runs import assert_same
from helpers.warm import together

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")
SHORT = ("--run.iterations", "4")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run left in peace, by two processes without torchrun."""
    folder = tmp_path_factory.mktemp("elastic") / "whole"
    done = two(folder)
    assert done.returncode == 0, done.stderr
    return folder


def two(folder, *arguments, starts=1):
    command = [*commands.COMMAND, *COMMAND, *SHORT, "--run.dir", folder, *arguments]
    return together(2, *command, starts=starts, ACCELERATE_USE_CPU="true")


@pytest.mark.proof
@pytest.mark.parametrize("launch", [forked, torchrun])
def test_a_job_resumes_after_killed_and_stopped_processes_bit_for_bit(launch, whole, tmp_path, monkeypatch):
    """Without run.dir: all starts agree on one folder."""
    monkeypatch.chdir(tmp_path)
    deaths = [death("update", 1, visit=2), death("save", 0, signal="SIGSTOP")]
    code, said = launch(tmp_path / "run", *COMMAND, *SHORT, "--run.timeout", 10, deaths=deaths, restarts=2)
    assert code == 0, said
    (run,) = (tmp_path / "runs").iterdir()
    assert_same(whole, run)
    assert not any("goes on in" in event for event in read_events(run)), "as many processes as before"
    killed, stopped = restarts(run)
    assert re.search(r"process 1 \(pid \d+ on \S+\) ended without a message, as if killed", killed)
    named = r"process 0 \(pid \d+ on \S+\) gave no sign of life for 10 seconds \(run\.timeout\)"
    assert re.search(named, stopped)
    assert len(re.findall(rf"^tokencredit: {named}", said, re.MULTILINE)) == 1, "one process says it, once"
    assert "Traceback" not in said
    assert not list(run.rglob(".*.part")), "nothing half written is left"


def test_the_folder_of_another_run_is_refused(whole):
    files = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    done = two(whole)
    assert done.returncode == 2
    refusals = re.findall("^tokencredit: run.dir .* holds a run or other files already", done.stderr, re.MULTILINE)
    assert len(refusals) == 1, "one process says it"
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == files


JUDGE = """
import os

def judge(completions, **columns):
    if os.environ["RANK"] == "1":
        raise RuntimeError("the service of process 1 is down")
    return [0.0 for _ in completions]
"""


def test_a_reward_that_fails_in_one_process_stops_both_and_saves_and_no_restart_tries_again(tmp_path):
    (tmp_path / "judge.py").write_text(JUDGE)
    reward = f"[{{function: '{tmp_path / 'judge.py'}:judge', retries: 0}}]"
    done = two(tmp_path / "run", "--reward", reward, starts=2)
    assert done.returncode != 0
    said = done.stderr
    reason = "^tokencredit: stopped in iteration 1: .*the service of process 1 is down"
    assert len(re.findall(reason, said, re.MULTILINE)) == 1, "one process says it"
    assert (tmp_path / "run" / "policy").is_dir()
    assert len(re.findall("^tokencredit: not tried again after the error of an earlier start", said, re.MULTILINE)) == 1


KILLS = int(os.environ.get("KILLS", "0"))
PLACES = ("start", "rollout", "update", "save", "evaluation")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Folders of runs that are left in peace, by `run.shard`."""
    folders = {shard: tmp_path_factory.mktemp("undisturbed") / shard for shard in ("none", "full")}
    for shard, folder in folders.items():
        assert two(folder, "--run.iterations", "14", "--run.shard", shard).returncode == 0
    return folders


@pytest.mark.proof
@pytest.mark.skipif(not KILLS, reason="`make chaos` sets KILLS")
@pytest.mark.parametrize("shard", ["none", "full"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", PLACES)
def test_a_job_goes_on_after_kills_at_each_place(place, rank, shard, undisturbed, tmp_path):
    """With a checkpoint every two iterations, some kills lose an iteration and some none."""
    chance, kills = random.Random(0), min(KILLS, 5 if shard == "none" else 2)
    if place == "start":
        deaths = [death(place, rank, after=chance.uniform(0, 10)) for _ in range(kills)]
        if rank == 0:  # between the files of a new folder
            deaths[0] = death("folder", rank, visit=chance.randint(1, 4), after=None)
    else:
        most = 2 if place in ("rollout", "update") else 1
        deaths = [
            death(place, rank, visit=chance.randint(1, most), after=chance.uniform(0, 0.2) if number % 2 else None)
            for number in range(kills)
        ]
    options = ("--run.iterations", 14, "--run.shard", shard, "--run.dir", tmp_path / "run")
    timeout = 180.0 * (kills + 1)
    code, said = torchrun(tmp_path / "run", *COMMAND, *options, deaths=deaths, restarts=kills, timeout=timeout)
    assert code == 0, said
    assert_same(undisturbed[shard], tmp_path / "run")
