"""Peak memory of each process with whole and with sharded models, and the tables of it in RESULTS.md.

    python benchmarks/sharding.py [--size small|tiny] [--only NAME …]

One PPO iteration of policy, separate critic and reference model, from loading to `policy/`. Each process samples its
resident memory (`VmRSS` of /proc/self/status) every 5 ms, less that at the start of loading, which Python and the
libraries hold. MALLOC_MMAP_THRESHOLD_ makes the C library return large freed blocks to the system; else it keeps them,
and the peaks show that rather than the need. Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

SHAPES = {
    "small": {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12},
    "tiny": {"vocab_size": 1024, "n_embd": 64, "n_layer": 2, "n_head": 4},
}
"""Shapes of text_step.py, as keys of GPT-2's configuration."""
SHARDED = {"run.shard": "full"}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "two, whole models": (2, {}),
    "two, sharded, sampling gathered": (2, SHARDED),
    "two, sharded, sampling layers": (2, SHARDED | {"sharding.sampling": "layers"}),
}
"""Number of processes and further settings of each run."""
SETTINGS: dict[str, Any] = {
    "model.dtype": "float32",
    "critic.kind": "separate",
    "rollout.batch_size": 8,
    "rollout.max_new_tokens": 32,
    "rollout.stop_at_eos": False,
    "ppo.epochs": 2,
    "ppo.minibatches": 2,
    "run.iterations": 1,
    "run.save_every": 0,
    "run.samples": 0,
    "run.trackers": [],
    "prompts.text": ["This movie was really one of the films that I have seen in a"],
}


def resident() -> int:
    """Resident memory of this process, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


class Peak(threading.Thread):
    """Samples this process's memory until it is stopped; `of` is the peak of each stage, by name."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_memory, self.stage, self.of, self.stopped = resident(), "loading", dict[str, int](), False

    def run(self) -> None:
        """Sample every 5 ms."""
        while not self.stopped:
            self.of[self.stage] = max(self.of.get(self.stage, 0), resident() - self.start_memory)
            time.sleep(0.005)

    def begins(self, name: str) -> Any:
        """A callback's method that begins a stage."""
        return lambda trainer: setattr(self, "stage", name)


def work(model: Path, folder: Path, settings: dict[str, Any]) -> None:
    """Train in this process, one of a job, and write its peaks into the folder."""
    from tokencredit import PPOConfig, PPOTrainer
    from tokencredit.distributed.processes import Processes

    processes, peak = Processes(), Peak()
    for name in ("rollout", "reference", "reward", "update"):
        setattr(peak, f"before_{name}", peak.begins(name))
    peak.start()
    args = PPOConfig.from_dict(SETTINGS | settings | {"model.name": str(model), "run.dir": str(folder / "run")})
    trainer = PPOTrainer(None, lengths, args, callbacks=[peak])
    trainer.train()
    peak.stopped = True
    peak.join()
    (folder / f"peak-{processes.rank}.json").write_text(json.dumps(peak.of), encoding="utf-8")
    processes.close()


def lengths(completions: list[str], **columns: Any) -> list[float]:
    """A reward that costs no memory."""
    return [float(len(text)) for text in completions]


def make_model(folder: Path, size: str) -> None:
    """Write a model of random weights with the built-in tokenizer."""
    import torch
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    from tokencredit.text.models.model_loading import resolve

    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(**SHAPES[size], n_positions=1024, **ends)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve("builtin:reviews", "policy")).save_pretrained(folder)


def measure(model: Path, folder: Path, processes: int, settings: dict[str, Any]) -> list[dict[str, int]]:
    """Peaks of each process by stage, in bytes."""
    folder.mkdir()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *launcher, __file__, "--work", str(model), str(folder), json.dumps(settings)]
    variables = {"ACCELERATE_USE_CPU": "true", "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    return [json.loads((folder / f"peak-{rank}.json").read_text(encoding="utf-8")) for rank in range(processes)]


def table(size: str, names: list[str]) -> str:
    """The runs' peaks in GB, and their sum over processes relative to one process."""
    rows, one = [], 0.0
    with tempfile.TemporaryDirectory() as temporary:
        make_model(Path(temporary) / "model", size)
        for number, name in enumerate(names):
            peaks = measure(Path(temporary) / "model", Path(temporary) / str(number), *RUNS[name])
            total = sum(max(stages.values()) for stages in peaks) / 1e9
            one = one or total
            each = ", ".join(f"{max(stages.values()) / 1e9:.2f}" for stages in peaks)
            of_stages = ", ".join(f"{stage} {value / 1e9:.2f}" for stage, value in peaks[0].items())
            rows.append(f"| {name} | {each} | {total:.2f} | {total / one:.2f} | {of_stages} |")
            print(rows[-1], file=sys.stderr, flush=True)
    head = "| | peak GB of each process | sum | sum over one process's | of the first process by stage |"
    return "\n".join([head, "|---|---|---|---|---|", *rows])


def main() -> None:
    """Measure and print, or be one of the processes that are measured."""
    if sys.argv[1:2] == ["--work"]:
        model, folder, settings = sys.argv[2:]
        work(Path(model), Path(folder), json.loads(settings))
        return
    parser = argparse.ArgumentParser(description="Peak memory of sharded runs.")
    parser.add_argument("--size", choices=SHAPES, default="small")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    args = parser.parse_args()
    print(table(args.size, args.only))


if __name__ == "__main__":
    main()
