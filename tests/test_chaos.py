"""Processes that train are killed and hindered, and go on as if nothing had been. `make chaos` kills more often."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import suppress

import pytest
from transformers import AutoModelForCausalLM

from helpers import warm
from helpers.commands import wait_for
from helpers.files import count_lines
from helpers.runs import assert_same, metrics
from tokencredit.cli import main

KILLS = int(os.environ.get("KILLS", "2"))
TEXT = ["train", "--model.dtype", "float32", "--rollout.batch_size", "8", "--rollout.max_new_tokens", "6"]
TEXT += ["--kl.target", "1", "--score.normalize", "running", "--ppo.epochs", "1", "--ppo.minibatches", "2"]
TEXT += ["--run.show_every", "0", "--run.trackers", "[]"]
AHEAD = [*TEXT, "--rollout.engine", "continuous", "--rollout.max_age", "1"]
AHEAD += ["--kl.estimator", "full", "--kl.place", "both"]  # kl.target needs a KL that older samples do not estimate
CONTROL = ["control", "--env.id", "InvertedPendulum-v5", "--env.normalize_observations", "true", "--steps", "64"]
CONTROL += ["--env.normalize_rewards", "true", "--env.number", "2", "--run.trackers", "[]"]


def begin(folder, command):
    """Start a run, or resume it if it has left a configuration."""
    if (folder / "config.yaml").exists():
        return warm.start_command(command[0], "--resume", folder)
    return warm.start_command(*command, "--run.dir", folder)


def iterations(folder):
    """Iterations that are written down."""
    return count_lines(folder / "metrics.jsonl")


def kill(folder, command, moment, chance):
    """Start or resume a run and kill it while it is starting, training or saving; False if it ended before."""
    process, before = begin(folder, command), iterations(folder)
    if moment == "starting":
        time.sleep(chance.uniform(0, 1))
    elif moment == "training":
        wait_for(lambda: iterations(folder) != before, process)  # a resumed one goes back first
        until = iterations(folder) + chance.randint(1, 6)
        wait_for(lambda: iterations(folder) >= until, process)
        time.sleep(chance.uniform(0, 0.1))
    else:
        wait_for(lambda: any((folder / "checkpoints").glob(".*.part")), process)
        time.sleep(chance.uniform(0, 0.03))
    running = process.poll() is None
    process.kill()
    process.communicate()
    return running


@pytest.mark.parametrize(
    ("command", "length"),
    [
        pytest.param(TEXT, 4, id="text"),
        pytest.param(CONTROL, 20, id="control", marks=pytest.mark.proof),
        pytest.param(AHEAD, 5, id="ahead", marks=pytest.mark.proof),
    ],
)
def test_a_run_killed_repeatedly_equals_an_uninterrupted_run(command, length, tmp_path):
    chance, moments = random.Random(0), ("training", "saving", "training", "starting")
    command = [*command, "--run.iterations", str(length * KILLS), "--run.save_every", "1"]
    for number in range(KILLS):
        assert kill(tmp_path / "cut", command, moments[number % 4], chance), f"the run was over before kill {number}"
    assert main([command[0], "--resume", str(tmp_path / "cut")]) == 0
    if "--rollout.max_age" in command:  # what is sampled ahead depends on the time of each kill
        rows = metrics(tmp_path / "cut")
        assert [row["iteration"] for row in rows] == list(range(1, length * KILLS + 1))
        assert max(row["age_max"] for row in rows) == 1
    else:
        assert main([*command, "--run.dir", str(tmp_path / "whole")]) == 0
        assert_same(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize(
    ("code", "signals"),
    [(0, [signal.SIGTERM]), (130, [signal.SIGINT]), (130, [signal.SIGINT, signal.SIGINT])],
    ids=["SIGTERM", "Ctrl-C", "Ctrl-C twice"],
)
def test_one_signal_saves_and_stops_and_a_second_stops_at_once(code, signals, tmp_path):
    run = tmp_path / "run"
    process = begin(run, [*TEXT, "--run.iterations", "60"])
    assert wait_for(lambda: iterations(run) >= 2, process)
    for number in signals:
        process.send_signal(number)
        time.sleep(0.05)
    said = "".join(process.communicate())
    assert process.returncode == code
    assert "Traceback" not in said
    assert "stopping after this iteration; again to stop at once" in said
    assert f"resume with: tokencredit train --resume {run}" in said
    done = iterations(run)
    assert 2 <= done < 60
    assert [row["iteration"] for row in metrics(run)] == list(range(1, done + 1))
    once = len(signals) == 1
    assert (run / "policy").is_dir() is once
    if once:
        assert (run / "checkpoints" / f"{done:06d}").is_dir()
        AutoModelForCausalLM.from_pretrained(run / "policy")
        assert json.loads((run / "summary.json").read_text())["iterations"] == done
    if code == 130:
        assert said.strip().splitlines()[-1].startswith("tokencredit: interrupted")
    if signals == [signal.SIGINT]:
        assert "stopped by: interrupt" in said


@pytest.mark.proof
@pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount a small file system")
def test_a_run_whose_disk_is_full_goes_on_once_it_is_not(tmp_path):
    command, disk = [*TEXT, "--run.iterations", "60", "--run.save_every", "3"], tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        process = begin(disk / "run", command)
        assert wait_for(lambda: iterations(disk / "run") >= 4, process)
        with suppress(OSError):  # the run may have taken some of it meanwhile
            (disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free - 2**20))
        _, err = process.communicate()
        (disk / "other").unlink()
        assert process.returncode == 1
        assert "No space left on device" in err.strip().splitlines()[-1]
        assert "Traceback" not in err
        assert main(["train", "--resume", str(disk / "run")]) == 0
        assert main([*command, "--run.dir", str(tmp_path / "whole")]) == 0
        assert_same(tmp_path / "whole", disk / "run")
    finally:
        subprocess.run(["umount", disk], check=True)


GROWTH = """
import sys
from tokencredit import PPOConfig, PPOTrainer

class Watch:
    def after_iteration(self, trainer, metrics, **results):
        if int(metrics["iteration"]) % 50 == 0:
            print(int(open("/proc/self/statm").read().split()[1]) * 4096)

small = {"model.dtype": "float32", "rollout": {"batch_size": 4, "max_new_tokens": 4}}
small |= {"ppo": {"epochs": 1, "minibatches": 1}, "eval": {"every": 50, "samples": 4, "max_new_tokens": 4}}
run = {"dir": sys.argv[1], "iterations": 300, "save_every": 50, "show_every": 0}
PPOTrainer(args=PPOConfig.from_dict(small | {"run": run}), callbacks=[Watch()]).train()
"""


@pytest.mark.proof
def test_memory_does_not_grow(tmp_path):
    """4 MB in 200 iterations would be 20 kB each: a few tensors, or the metrics and samples that are on the disk."""
    done = warm.python("-c", GROWTH, tmp_path / "run", timeout=3600)
    assert done.returncode == 0, done.stderr
    resident = [int(line) for line in done.stdout.splitlines() if line.isdigit()]
    assert len(resident) == 6
    assert resident[-1] - resident[1] < 4e6
