"""The same run in 1, 2 and 4 processes, with DDP and sharded, and saved by some and gone on with by others: a table.

`make processes` runs everything, in about a quarter of an hour on two idle cores; the suite runs a part.
A number in the table is the largest difference of a loss of any iteration from those of one process.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from helpers.commands import python
from helpers.configs import text_config

ITERATIONS, SAVED = 5, 3
LOSSES = ("loss", "policy_loss", "value_loss", "critic_value_loss")


def write_odd_vocabulary(folder):
    """Write the built-in model with 2,049 rows of its tied embedding, which processes cannot share evenly."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tokencredit.text.models.model_loading import resolve

    builtin = resolve("builtin:reviews", "policy")
    lm = AutoModelForCausalLM.from_pretrained(builtin)
    lm.resize_token_embeddings(2049)
    lm.save_pretrained(folder)
    AutoTokenizer.from_pretrained(builtin).save_pretrained(folder)


def kinds(folder):
    """Settings of each kind of run; the folder has a folder of each, and the model `odd`."""
    from tokencredit.settings.model import CriticConfig, LoraConfig, ModelConfig
    from tokencredit.settings.rollout import OffPolicyConfig, RolloutConfig
    from tokencredit.settings.training import AdvantageConfig, EvalConfig, KLConfig, OptimConfig, UpdateConfig

    lora = ModelConfig(dtype="float32", lora=LoraConfig(rank=4))
    critics = {"shared critic": {}, "separate critic": {"kind": "separate"}}
    simple = {name: {"critic": CriticConfig(**critic, epochs=1, buffer=2)} for name, critic in critics.items()}
    return {
        **simple,
        **{f"LoRA, {name}": groups | {"model": lora} for name, groups in simple.items()},
        "odd vocabulary": {"model": ModelConfig(name=str(folder / "odd"), dtype="float32")},
        "two critics": {"critic": CriticConfig(kind="separate", members=2, clip=None, epochs=1)},
        "Muon, histograms": {
            "optim": OptimConfig(name="muon", warmup=0),
            "critic": CriticConfig(kind="separate", loss="histogram", epochs=1),
        },
        "exact KL in the loss": {"kl": KLConfig(place="loss", estimator="full")},
        "everything": {
            "rollout": RolloutConfig(batch_size=16, max_new_tokens=12, top_p=0.9),
            "off_policy": OffPolicyConfig(correct="clip", level="geometric", low=0.96),
            "ppo": UpdateConfig(epochs=2, minibatches=5, micro_batch_tokens=48, target_kl=0.05),
            "advantage": AdvantageConfig(whiten="minibatch"),
            "critic": CriticConfig(pretrain=2, places=[0.3, 0.6, 0.9], epochs=1, buffer=2),
            "eval": EvalConfig(every=2, samples=7, max_new_tokens=8),
        },
    }


def trainer(kind, folder, shard, iterations=ITERATIONS):
    """A trainer of a kind of run."""
    from helpers.configs import quiet
    from tokencredit.settings.rollout import RolloutConfig
    from tokencredit.settings.training import OptimConfig, UpdateConfig
    from tokencredit.text.ppo_trainer import PPOTrainer

    small = {
        "rollout": RolloutConfig(batch_size=16, max_new_tokens=12),
        "ppo": UpdateConfig(epochs=2, minibatches=4),
        "optim": OptimConfig(warmup=0),
        "run": quiet(folder, iterations, save_every=min(SAVED, iterations - 1), shard=shard),
    }
    return PPOTrainer(args=text_config(folder, **small | kinds(folder.parents[1])[kind]))


def train(names, folder, iterations=ITERATIONS):
    """Train each kind of run in the processes of this job."""
    for kind in names:
        for shard in layouts():
            trainer(kind, folder / kind / own(shard), shard, iterations).train()


def go_on(names, folder, sources, iterations=ITERATIONS):
    """Go on with runs that other processes saved, from their first checkpoint."""
    from tokencredit.distributed.processes import Processes

    processes = Processes()
    for kind in names:
        for source in sources:
            for shard in layouts():
                run = folder / kind / f"{source} → {own(shard)}"
                if processes.main:
                    shutil.copytree(folder / kind / source, run)
                    shutil.rmtree(run / "checkpoints" / f"{iterations:06d}")
                    (run / "summary.json").unlink()
                processes.wait()
                trainer(kind, run, shard, iterations).train(resume_from_checkpoint=True)


def layouts():
    """Values of `run.shard` that the number of processes allows."""
    from tokencredit.distributed.processes import Processes

    return ("none", "full") if Processes().count > 1 else ("none",)


def own(shard):
    """Name of this job's number of processes and layout."""
    from tokencredit.distributed.processes import Processes

    count = Processes().count
    return "1" if count == 1 else f"{count} {'DDP' if shard == 'none' else 'sharded'}"


def in_processes(count, *arguments):
    """Run this program in several processes, or in one."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", count) if count > 1 else ()
    done = python(*launch, __file__, *arguments, ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1", timeout=3600)
    if done.returncode:
        raise RuntimeError(done.stderr)


def losses(run):
    """The losses of a run, by name, of all iterations."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(1, len(rows) + 1)), run
    return {name: [row[name] for row in rows] for name in LOSSES if name in rows[0]}


def differences(folder, kind):
    """Of each run of a kind, the largest difference of each loss from the run in one process."""
    alone = losses(folder / kind / "1")
    found = {}
    for run in sorted(path for path in (folder / kind).iterdir() if path.name != "1"):
        now = losses(run)
        pairs = {name: zip(now[name], alone[name], strict=True) for name in alone}
        found[run.name] = {name: max(abs(a - b) for a, b in both) for name, both in pairs.items()}
    return found


def table(folder, names):
    """Print the differences of all runs."""
    print(f"{'run':<26} {'in processes':<24} " + " ".join(f"{name:>18}" for name in LOSSES))
    for kind in names:
        for run, found in differences(folder, kind).items():
            print(f"{kind:<26} {run:<24} " + " ".join(f"{found.get(name, float('nan')):>18.1e}" for name in LOSSES))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="*", default=None, help="kinds of runs; all by default")
    parser.add_argument("--counts", nargs="*", type=int, default=[1, 2, 4], help="numbers of processes")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help=argparse.SUPPRESS)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--sources", nargs="*", default=(), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is not None:  # one of the jobs
        if args.train:
            train(args.kinds, args.folder, args.iterations)
        go_on(args.kinds, args.folder, args.sources, args.iterations)
        return
    with tempfile.TemporaryDirectory() as folder:
        names = args.kinds or list(kinds(Path(folder)))
        write_odd_vocabulary(Path(folder) / "odd")
        for count in args.counts:
            in_processes(count, "--train", "--folder", folder, "--kinds", *names)
        most = max(args.counts)
        for count in args.counts:
            sources = ("--sources", f"{most} DDP", f"{most} sharded")
            in_processes(count, "--folder", folder, "--kinds", *names, *sources)
        table(Path(folder), names)


if __name__ == "__main__":
    main()
