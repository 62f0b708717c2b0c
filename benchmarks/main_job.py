"""The main job, `tokencredit train` with default settings, over several seeds, compared with its targets.

    python benchmarks/main_job.py [--seeds 1 2 3 4 5]

Each run is a separate process. Afterwards 100 completions of the trained policy are compared with 100 of the starting
model, both scored by the starting model.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

import torch

from tokencredit.distributed.processes import Processes
from tokencredit.report.reading import read_run
from tokencredit.runs.diagnosis import diagnose
from tokencredit.settings.run_kind import read_config
from tokencredit.settings.text import PPOConfig
from tokencredit.text.batch import Batch
from tokencredit.text.data.prompts import Prompts
from tokencredit.text.models.run_models import load_run_models
from tokencredit.text.pipeline import Pipeline
from tokencredit.text.ppo_setup import build_pipeline
from tokencredit.text.rewards.terms import build_terms

COMPLETIONS = 100
TARGETS = {
    "reward before": "≤ 0.35",
    "reward after": "≥ 0.90",
    "seconds": "≤ 90",
    "KL, nats": "≤ 10",
    "distinct of 100": "≥ 90",
    "fluency lost, nats": "≤ 1.0",
    "length kept": "≥ 0.75",
    "peak GB": "≤ 1.5",
    "warnings": "≤ 0",
}


def train(seed: int, folder: Path) -> float:
    """Run the command; returns its peak memory in GB."""
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "tokencredit.cli", "train", "--seed", str(seed), "--run.dir", str(folder)],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT, 0o644)],
    )
    _, status, usage = os.wait4(pid, 0)
    if status:
        sys.exit(f"seed {seed}: the run failed; see {folder.with_suffix('.log')}")
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def write(pipeline: Pipeline, seed: int) -> Batch:
    """Completions of a policy, with their log-probabilities under its reference model."""
    config = PPOConfig()
    prompts = Prompts(config.prompts.texts(), pipeline.tokenizer).batch(0, COMPLETIONS)
    generator = torch.Generator().manual_seed(1000 + seed)
    uniforms = torch.rand(COMPLETIONS, config.rollout.max_new_tokens, generator=generator)
    return pipeline.collect(prompts, config.rollout, uniforms)


def load(run: Path, which: str) -> Pipeline:
    """The policy of a run, with its starting model as the reference."""
    config, processes = read_config(run / "config.yaml", PPOConfig), Processes()
    models = load_run_models(run, config, which, processes, reference=True)
    return build_pipeline(config, models, build_terms(config.reward, processes.device), processes)


def fluency(scored: Batch) -> float:
    """Mean log-probability per token under the starting model."""
    assert scored.reference.logprobs is not None
    return float(scored.reference.logprobs[scored.rollout.mask].mean())


def length(scored: Batch) -> float:
    """Mean tokens per completion."""
    return float(scored.rollout.mask.sum(1).float().mean())


def measure(seed: int, folder: Path) -> dict[str, float]:
    """One row of the table."""
    peak = train(seed, folder)
    summary = json.loads((folder / "summary.json").read_text())
    trained, base = (write(load(folder, which), seed) for which in ("policy", "base"))
    return {
        "reward before": summary["reward_first"],
        "reward after": summary["reward_last"],
        "seconds": summary["seconds"],
        "KL, nats": summary["kl_last"],
        "distinct of 100": len(set(trained.completions)),
        "fluency lost, nats": fluency(base) - fluency(trained),
        "length kept": length(trained) / length(base),
        "peak GB": peak,
        "warnings": warnings(folder),
    }


def warnings(folder: Path) -> int:
    """Number of distinct findings of the diagnosis, during the run and at its end."""
    run = read_run(folder, samples=False)
    last = len(run.metrics)
    found = (diagnose(run.metrics[:n], run.config, ended=n == last) for n in range(1, last + 1))
    return len({finding.name for findings in found for finding in findings})


def met(name: str, value: float) -> bool:
    """True if a figure meets its target."""
    sign, limit = TARGETS[name].split()
    return value <= float(limit) if sign == "≤" else value >= float(limit)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    seeds = parser.parse_args().seeds
    print(f"Python {platform.python_version()}, PyTorch {torch.__version__}, {os.cpu_count()} cores\n")
    print("| seed | " + " | ".join(TARGETS) + " |")
    print("|---" * (len(TARGETS) + 1) + "|")
    print("| target | " + " | ".join(TARGETS.values()) + " |")
    missed = 0
    with tempfile.TemporaryDirectory() as runs:
        for seed in seeds:
            row = measure(seed, Path(runs) / str(seed))
            cells = [f"{value:.3g}" + ("" if met(name, value) else " (missed)") for name, value in row.items()]
            missed += sum(not met(name, value) for name, value in row.items())
            print(f"| {seed} | " + " | ".join(cells) + " |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
