"""Several processes do what one does: gloo on the processor, two of them, as a launcher starts them."""

import json
import platform

import pytest
import torch
from safetensors.torch import load_file

from helpers import processes
from helpers.commands import COMMAND
from helpers.files import TIMES, read_events, read_metrics
from helpers.warm import python, together

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")

FREED = """
import torch
from pathlib import Path
from tokencredit.distributed.processes import return_freed_memory

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

return_freed_memory()
torch.ones(2**22)  # glibc would keep blocks up to this size from here on
before, large, small = held(), [], []
for _ in range(200):
    large.append(torch.ones(2**18))
    small.append(torch.ones(2**8))
print(held() - before)
del large
print(held() - before)
"""
"""Frees blocks of 1 MB that lie between others, and prints the memory held before and after."""

CLOSED = """
import torch
from pathlib import Path
from tokencredit.distributed.processes import Processes

def threads():
    return [name for file in Path("/proc/self/task").glob("*/comm") if "gloo" in (name := file.read_text().strip())]

processes = Processes(60)
model = processes.wrap(torch.nn.Linear(3, 3))
model(torch.ones(1, 3)).sum().backward()
before = len(threads())
processes.close()
print(f"{before > 0} {threads()}\\n", end="")
"""
"""Trains a wrapped model, leaves the job, and prints the threads of its process group before and after."""


def job(count, *arguments):
    """Run the program of `helpers.processes` in several processes."""
    done = together(count, processes.__file__, *arguments, timeout=3600, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of two iterations: in one process, in two with DDP and sharded, and resumed by one after the first."""
    folder, kind = tmp_path_factory.mktemp("runs"), "everything"
    processes.train(folder, kind, 2)
    job(2, folder, kind, 2)
    processes.go_on(folder, kind, 2, ["2 sharded"])
    return folder


def test_the_losses_are_those_of_one_process(runs):
    found = processes.differences(runs)
    assert set(found) == {"2 DDP", "2 sharded", "2 sharded → 1"}
    for run, losses in found.items():
        assert set(losses) == set(processes.LOSSES)
        assert losses == pytest.approx(dict.fromkeys(losses, 0.0), abs=1e-6), run


@pytest.mark.proof
@pytest.mark.parametrize("kind", processes.KINDS)
def test_the_losses_in_one_two_and_four_processes_are_equal(kind, tmp_path):
    """`make processes` runs these; a larger difference than that of rounding would be one of the algorithm."""
    processes.write_odd_vocabulary(tmp_path / "odd")
    processes.train(tmp_path, kind, 5)
    job(2, tmp_path, kind, 5)
    job(4, tmp_path, kind, 5)
    processes.go_on(tmp_path, kind, 5, ["4 DDP", "4 sharded"])
    for count in (2, 4):
        job(count, tmp_path, kind, 5, "4 DDP", "4 sharded")
    found = processes.differences(tmp_path)
    assert len(found) == 2 + 2 + 2 * (1 + 2 + 2)
    for run, losses in found.items():
        assert losses == pytest.approx(dict.fromkeys(losses, 0.0), abs=1e-4), run
    assert not any("goes on in" in event for event in read_events(tmp_path / "4 sharded → 4 DDP"))


def test_evaluations_and_weights_are_those_of_one_process(runs):
    """Of 7 prompts, which two processes cannot share evenly."""
    alone = read_metrics(runs / "1")
    for run in ("2 DDP", "2 sharded", "2 sharded → 1"):
        for one, two in zip(alone, read_metrics(runs / run), strict=True):
            starts = ("eval/", "pretrain/", "reward", "log_ratio", "behavior", "weight")
            numbers = {name: x for name, x in one.items() if name.startswith(starts) and name not in TIMES}
            assert {"weight_ess", "behavior_kl"} <= set(numbers)
            assert {name: two[name] for name in numbers} == pytest.approx(numbers, rel=1e-4, abs=1e-5), run
        weights, expected = (load_file(runs / name / "policy" / "model.safetensors") for name in (run, "1"))
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, atol=1e-4, rtol=1e-3)


def test_another_number_of_processes_is_an_event(runs):
    line = "the run goes on in 1 process; the checkpoint is of 2. Minibatches and samples stay the same; "
    assert any(event.startswith(line) for event in read_events(runs / "2 sharded → 1"))


def test_the_first_process_chooses_the_number_format_for_all(tmp_path):
    few = ["--rollout.batch_size", "4", "--rollout.max_new_tokens", "4", "--ppo.minibatches", "1"]
    few += ["--run.iterations", "1", "--run.show_every", "0", "--run.dir"]
    # Without a GPU, processes are joined on the CPU without being told.
    cpu = {"ACCELERATE_USE_CPU": "true"} if torch.accelerator.is_available() else {}
    done = together(2, *COMMAND, "train", *few, tmp_path / "two", **cpu)
    assert done.returncode == 0, done.stderr
    chosen = json.loads((tmp_path / "two" / "choices.json").read_text())["model.dtype"]
    assert done.stdout.count("model.dtype auto: ") == done.stdout.count(f"model.dtype auto: {chosen}, ") == 1


@pytest.mark.skipif(platform.system() != "Linux", reason="threads are listed in /proc")
def test_a_job_that_is_left_has_no_threads_of_its_process_group_though_a_model_is_kept():
    """Left ones end with the last owner of the group, which may hold the lock that they wait for: a hang."""
    done = together(2, "-c", CLOSED, ACCELERATE_USE_CPU="true")
    assert (done.returncode, done.stdout) == (0, "True []\n" * 2), done.stderr


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_freed_blocks_between_others_are_returned_to_the_system():
    held, after = map(int, python("-c", FREED).stdout.split())
    assert held > 2e8
    assert after < 5e6
