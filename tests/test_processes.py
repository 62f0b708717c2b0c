"""Several processes do what one does: gloo on the processor, two of them, as a launcher starts them."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from chaos import assert_same
from helpers.commands import COMMAND, TWO_PROCESSES, python
from helpers.files import read_metrics, without_times
from tokencredit.cli import main

pytestmark = pytest.mark.slow

OPTIONS = [
    "--model.dtype",
    "float32",
    "--rollout.batch_size",
    "16",
    "--rollout.max_new_tokens",
    "10",
    "--ppo.minibatches",
    "1",
]
OPTIONS += ["--eval.every", "3", "--eval.samples", "16", "--eval.max_new_tokens", "8"]
OPTIONS += ["--critic.epochs", "2", "--critic.buffer", "1", "--critic.places", "[0.3, 0.6, 0.9]"]
OPTIONS += ["--ppo.micro_batch_tokens", "48", "--run.iterations", "3", "--run.show_every", "0"]
OPTIONS += ["--critic.pretrain", "2", "--run.save_every", "2", "--run.dir"]


def train_alone(folder, options=OPTIONS):
    """Train in this process."""
    assert main(["train", *options, str(folder)]) == 0
    return written(folder)


def train_together(folder, options=OPTIONS):
    """Train in two processes; their output, too."""
    done = python(*TWO_PROCESSES, *COMMAND, "train", *options, folder, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr
    return done.stdout, *written(folder)


def written(folder):
    """The metrics and the policy's weights of a run."""
    return read_metrics(folder), load_file(folder / "policy" / "model.safetensors")


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")
def test_two_processes_train_as_one_does_and_resume_together_or_as_one(tmp_path):
    alone, policy = train_alone(tmp_path / "one")
    shown, together, policy_together = train_together(tmp_path / "two")
    assert shown.count("iteration 3/3") == 1, "one process speaks"
    assert [m["iteration"] for m in together] == [1, 2, 3], "one process writes"
    for one, two in zip(without_times(alone), together, strict=True):
        for name in one:
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-4), name
    for name, weights in policy.items():
        torch.testing.assert_close(policy_together[name], weights, atol=1e-4, rtol=1e-3)

    two = tmp_path / "two"
    for name in ("cut", "fewer"):
        shutil.copytree(two, tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints" / "000003")
        (tmp_path / name / "summary.json").unlink()
    shown, *_ = train_together(tmp_path / "cut", ["--resume"])
    assert shown.count("resumed after iteration 2") == 1
    assert_same(two, tmp_path / "cut")
    # One process goes on where two were; random numbers are spread otherwise, so the iteration is another one.
    resumed, _ = train_alone(tmp_path / "fewer", ["--resume"])
    assert resumed[:2] == together[:2]
    assert [m["iteration"] for m in resumed] == [1, 2, 3]


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")
def test_two_critics_learn_alike_in_two_processes(tmp_path):
    """Micro-batches are so small that most have no row of one of the critics."""
    options = [*OPTIONS[:8], "--critic.kind", "separate", "--critic.members", "2", "--critic.clip", "null"]
    options += ["--critic.epochs", "1", "--ppo.micro_batch_tokens", "24", "--run.iterations", "1", "--run.dir"]
    alone, _ = train_alone(tmp_path / "one", options)
    _, together, _ = train_together(tmp_path / "two", options)
    for one, two in zip(alone, together, strict=True):
        for name in ("value_loss", "critic_value_loss", "grad_norm", "explained_variance", "reward"):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-4), name
    for part in ("value_head.safetensors", "value_head-2.safetensors", "critic-2/model.safetensors"):
        weights, expected = (load_file(tmp_path / run / "policy" / part) for run in ("two", "one"))
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, atol=1e-4, rtol=1e-3)


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")
def test_the_first_process_chooses_the_number_format_for_all(tmp_path):
    few = ["--rollout.batch_size", "4", "--rollout.max_new_tokens", "4", "--ppo.minibatches", "1"]
    few += ["--run.iterations", "1", "--run.show_every", "0", "--run.dir"]
    shown, *_ = train_together(tmp_path / "two", few)
    chosen = json.loads((tmp_path / "two" / "choices.json").read_text())["model.dtype"]
    assert shown.count("model.dtype auto: ") == shown.count(f"model.dtype auto: {chosen}, ") == 1
