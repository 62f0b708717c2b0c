"""Runs of several kinds in the processes of a job, and goings-on of runs that others saved; a program, too.

`python processes.py FOLDER KIND ITERATIONS [SOURCE...]` trains a kind of run, and goes on with the runs of `SOURCE`.
"""

import shutil
import sys
from pathlib import Path

from helpers.configs import quiet, text_config
from helpers.files import read_metrics
from tokencredit.distributed.processes import Processes
from tokencredit.settings.model import CriticConfig, LoraConfig, ModelConfig
from tokencredit.settings.rollout import OffPolicyConfig, RolloutConfig
from tokencredit.settings.training import AdvantageConfig, EvalConfig, KLConfig, OptimConfig, UpdateConfig
from tokencredit.text.ppo_trainer import PPOTrainer

LOSSES = ("loss", "policy_loss", "value_loss", "critic_value_loss")
SHARED, SEPARATE = CriticConfig(epochs=1), CriticConfig(kind="separate", epochs=1)
LORA = {"model": ModelConfig(dtype="float32", lora=LoraConfig(rank=4))}
KINDS = {
    "shared critic": {"critic": SHARED},
    "separate critic": {"critic": SEPARATE},
    "LoRA, shared critic": {"critic": SHARED} | LORA,
    "LoRA, separate critic": {"critic": SEPARATE} | LORA,
    "odd vocabulary": {},
    "Muon, histograms": {
        "optim": OptimConfig(name="muon", warmup=0),
        "critic": CriticConfig(kind="separate", loss="histogram", epochs=1),
    },
    "exact KL in the loss": {"kl": KLConfig(place="loss", estimator="full")},
    "everything": {
        "rollout": RolloutConfig(batch_size=8, max_new_tokens=8, top_p=0.9),
        "off_policy": OffPolicyConfig(correct="clip", level="geometric", bounds=[0.96, 2.0]),
        "ppo": UpdateConfig(epochs=2, minibatches=3, micro_batch_tokens=32, target_kl=0.05),
        "advantage": AdvantageConfig(whiten="minibatch"),
        "critic": CriticConfig(pretrain=1, epochs=1),
        "eval": EvalConfig(every=2, samples=7, max_new_tokens=4),
    },
}


def write_odd_vocabulary(folder):
    """Write the built-in model with 2,049 rows of its tied embedding, which processes cannot share evenly."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tokencredit.text.models.model_loading import resolve

    builtin = resolve("builtin:reviews", "policy")
    lm = AutoModelForCausalLM.from_pretrained(builtin)
    lm.resize_token_embeddings(2049)
    lm.save_pretrained(folder)
    AutoTokenizer.from_pretrained(builtin).save_pretrained(folder)


def trainer(kind, folder, shard, iterations):
    """A trainer of a kind of run."""
    small = {
        "rollout": RolloutConfig(batch_size=16, max_new_tokens=12),
        "ppo": UpdateConfig(epochs=2, minibatches=4),
        "optim": OptimConfig(warmup=0),
        "run": quiet(folder, iterations, save_every=min(3, iterations - 1), shard=shard),
    }
    if kind == "odd vocabulary":
        small["model"] = ModelConfig(name=str(folder.parent / "odd"), dtype="float32")
    return PPOTrainer(args=text_config(folder, **small | KINDS[kind]))


def layouts(processes):
    """Names of this number of processes with each `run.shard` that it allows, by that value."""
    count = processes.count
    return {"none": "1"} if count == 1 else {"none": f"{count} DDP", "full": f"{count} sharded"}


def train(folder, kind, iterations):
    """Train a kind of run in the processes of this job."""
    for shard, name in layouts(Processes()).items():
        trainer(kind, folder / name, shard, iterations).train()


def go_on(folder, kind, iterations, sources):
    """Go on with runs that other processes saved, from their first checkpoint."""
    processes = Processes()
    for source in sources:
        for shard, name in layouts(processes).items():
            run = folder / f"{source} → {name}"
            if processes.main:
                shutil.copytree(folder / source, run)
                shutil.rmtree(run / "checkpoints" / f"{iterations:06d}")
                (run / "summary.json").unlink()
            processes.wait()
            trainer(kind, run, shard, iterations).train(resume_from_checkpoint=True)


def differences(folder):
    """Of each run, the largest difference of each loss from the run in one process."""
    alone, found = read_metrics(folder / "1"), {}
    for run in sorted(path for path in folder.iterdir() if (path / "metrics.jsonl").exists() and path.name != "1"):
        pairs = list(zip(read_metrics(run), alone, strict=True))
        assert all(now["iteration"] == row["iteration"] for now, row in pairs), run
        names = [name for name in LOSSES if name in alone[0]]
        found[run.name] = {name: max(abs(now[name] - row[name]) for now, row in pairs) for name in names}
    return found


if __name__ == "__main__":
    place, kind, number, *sources = sys.argv[1:]
    if not sources:
        train(Path(place), kind, int(number))
    go_on(Path(place), kind, int(number), sources)
