"""A small part of `make chaos`: real processes, really killed."""

import json
import random
import signal
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import chaos
from chaos import (
    CONTROL,
    LENGTHS,
    TEXT,
    VARIANTS,
    assert_same,
    cut_sweep,
    finish_sweep,
    growth,
    killed,
    metrics,
    stopped,
    sweep_file,
)
from helpers import warm
from tokencredit.cli import main

pytestmark = pytest.mark.slow


@pytest.fixture
def _warm(monkeypatch):
    """Runs start as forks: these tests are about their middle and their end."""
    monkeypatch.setattr(chaos, "start_command", warm.start_command)
    monkeypatch.setattr(chaos, "python", warm.python)


@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize(
    ("command", "iterations"),
    [pytest.param(TEXT, 10, id="text"), pytest.param(CONTROL, 40, id="control", marks=pytest.mark.proof)],
)
def test_killed_in_training_and_while_saving_a_run_ends_as_if_it_had_not_been(command, iterations, tmp_path):
    command = [*command, "--run.iterations", str(iterations), "--run.save_every", "1"]
    assert main([*command, "--run.dir", str(tmp_path / "whole")]) == 0
    for moment in ("training", "saving"):
        moments = killed(tmp_path / "cut", command, 1, random.Random(0), moment)
        assert moments[moment] == 1
    assert main([command[0], "--resume", str(tmp_path / "cut")]) == 0
    assert_same(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize(
    ("code", "signals"),
    [(0, [signal.SIGTERM]), (130, [signal.SIGINT]), (130, [signal.SIGINT, signal.SIGINT])],
    ids=["SIGTERM", "Ctrl-C", "Ctrl-C twice"],
)
def test_signals_save_first_and_then_stop_at_once(code, signals, tmp_path):
    command = [*TEXT, "--run.iterations", "60"]
    found, said = stopped(tmp_path / "run", command, *signals)
    assert found == code
    assert "stopping after this iteration; again to stop at once" in said
    assert f"resume with: tokencredit train --resume {tmp_path / 'run'}" in said
    done = len(metrics(tmp_path / "run"))
    assert 2 <= done < 60
    assert [row["iteration"] for row in metrics(tmp_path / "run")] == list(range(1, done + 1))
    once = len(signals) == 1
    assert (tmp_path / "run" / "policy").is_dir() is once
    if once:
        assert (tmp_path / "run" / "checkpoints" / f"{done:06d}").is_dir()
        AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "policy")
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["iterations"] == done
    if code == 130:
        assert said.strip().splitlines()[-1].startswith("tokencredit: interrupted")
    if signals == [signal.SIGINT]:
        assert "stopped by: interrupt" in said


SMALL = {"rollout": {"batch_size": 8, "max_new_tokens": 6}}


@pytest.mark.proof
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds processes in /proc")
def test_a_sweep_of_language_models_goes_on_after_a_kill(tmp_path):
    """With the number format left open; tests/sweep/test_runner.py does the same with agents."""
    file = sweep_file(tmp_path, "text", **SMALL)
    cut_sweep(file, random.Random(0), LENGTHS["text"]["save_every"] + 1)
    finish_sweep(file)
    assert main(["sweep", str(tmp_path / "whole.yaml"), "--export", str(tmp_path / "files")]) == 0
    for name in VARIANTS:
        uninterrupted = tmp_path / "whole" / name / "seed-1"
        config = tmp_path / "files" / f"{name}-seed-1.yaml"
        assert main(["train", "--config", str(config), "--run.dir", str(uninterrupted)]) == 0
    cut = tmp_path / "run"
    assert_same(tmp_path / "whole", cut)
    events = [(cut / name / "seed-1" / "events.jsonl").read_text() for name in VARIANTS]
    assert "resumed after iteration" in events[0]
    assert all("model.dtype auto: " in text for text in events)


@pytest.mark.proof
@pytest.mark.usefixtures("_warm")
def test_memory_does_not_grow(tmp_path):
    """4 MB in 200 iterations would be 20 kB each: a few tensors, or the metrics and samples that are on the disk."""
    assert growth(tmp_path / "run", 300) < 4
