"""Runs and commands with vLLM, in processes of their own. `make test-vllm` runs them."""

import json

import pytest

pytest.importorskip("vllm")

from helpers.commands import COMMAND, TWO_PROCESSES, command, python

pytestmark = pytest.mark.slow
OPTIONS = {
    "rollout.engine": "vllm",
    "rollout.batch_size": 16,
    "rollout.max_new_tokens": 12,
    "model.dtype": "float32",
    "run.trackers": "[]",
    "run.save_every": 1,
    "critic.kind": "separate",
}


def flags(**options):
    chosen = OPTIONS | {key.replace("__", "."): value for key, value in options.items()}
    return [part for key, value in chosen.items() for part in (f"--{key}", value)]


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two iterations, resumed for a third."""
    folder = tmp_path_factory.mktemp("vllm") / "run"
    first = command("train", *flags(run__iterations=2, run__dir=folder))
    assert first.returncode == 0, first.stderr
    second = command("train", "--resume", folder, "--run.iterations", 3)
    assert second.returncode == 0, second.stderr
    return folder, first, second


def test_a_run_trains_and_resumes(run):
    folder, first, second = run
    assert [record["iteration"] for record in metrics(folder)] == [1, 2, 3]
    assert "resumed after iteration 2" in second.stdout
    assert not [line for line in (first.stderr + second.stderr).splitlines() if "Loading weights" not in line]
    assert "INFO" not in first.stdout
    assert (folder / "policy" / "model.safetensors").is_file()


def test_generate_and_evaluate_sample_with_it(run):
    folder, *_ = run
    generated = command("generate", folder, "--engine", "vllm", "-n", 3)
    assert generated.returncode == 0, generated.stderr
    assert generated.stdout.count("This movie was really") >= 3
    evaluated = command("evaluate", folder, "--engine", "vllm", "--samples", 8)
    assert evaluated.returncode == 0, evaluated.stderr
    assert "reward" in evaluated.stdout


SHARDED = {"run__shard": "full", "critic__kind": "shared", "model__lora__rank": 2}


@pytest.mark.parametrize("settings", [{}, SHARDED, {"run__shard": "full", "sharding__sampling": "layers"}])
def test_each_process_of_a_job_has_its_own(settings, tmp_path):
    """The proof of each sync shows that sharded weights arrived whole, with the adapter."""
    options = flags(run__iterations=2, run__dir=tmp_path / "run", **settings)
    done = python(*TWO_PROCESSES, *COMMAND, "train", *options, ACCELERATE_USE_CPU="true", timeout=600)
    assert done.returncode == 0, done.stderr
    assert [record["iteration"] for record in metrics(tmp_path / "run")] == [1, 2]
