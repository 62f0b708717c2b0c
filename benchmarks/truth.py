"""Truth of the credit: the main job with several critics, audited during training, over several seeds (`make truth`).

    python benchmarks/truth.py [--variants default separate …] [--seeds 1 2 3 4 5]

Each run is a separate process. Its figures go to benchmarks/findings-data/truth.json, from which `make findings`
makes the first chapter of benchmarks/findings.md; runs already there with the same settings are skipped. Times exclude
audits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tokencredit import Callback, PPOConfig, PPOTrainer
from tokencredit.settings.fields import flat
from tokencredit.settings.training import AuditConfig

DATA = Path(__file__).parent / "findings-data" / "truth.json"
AT = (5, 10, 20, 40)
"""Iterations after which credit is audited."""
COMPLETIONS, STATES = 96, 5
"""Size of an audit: many completions, since late in a run few of them hold all that values differ by."""
CONTINUATIONS = {5: 8, 10: 8, 20: 16, 40: 16}
"""Continuations per state; more where values hardly vary."""
RECIPE = yaml.safe_load((Path(__file__).parents[1] / "recipes" / "true-credit" / "reviews.yaml").read_text())
WITHOUT_CRITIC = {"critic.kind": "none", "rollout.per_prompt": 8}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "prefixes": {"critic.prefix_every": 1, "advantage.lam": "auto"},
    "true-credit": {"": RECIPE},
    "group_relative": {"advantage.estimator": "group_relative", **WITHOUT_CRITIC},
    "leave_one_out": {"advantage.estimator": "leave_one_out", **WITHOUT_CRITIC},
    "whole size": {"": RECIPE, "critic.layers": None},
    "separate": {"critic.kind": "separate"},
    "no pretraining": {"": RECIPE, "critic.pretrain": 0},
    "twice the rates": {"": RECIPE, "critic.trunk_lr": 1e-3, "critic.lr": 1e-3},
    "trunk at the policy's rate": {"": RECIPE, "critic.trunk_lr": 1e-4},
    "lam 0": {"": RECIPE, "advantage.lam": 0.0},
    "lam 0.95": {"": RECIPE, "advantage.lam": 0.95},
    "probe": {"": RECIPE, "critic.kind": "shared", "critic.detach": True, "critic.trunk_lr": None},
    "histogram": {"": RECIPE, "critic.loss": "histogram"},
}
"""Settings of each by key; with `""`, those of the recipe stand beneath them."""
KEPT = ("reward", "kl", "length", "ref_logprob", "distinct", "explained_variance", "lam", "seconds")


class Audits(Callback):
    """Audits at some iterations, timed apart from training."""

    def __init__(self) -> None:
        self.began, self.apart = time.perf_counter(), 0.0
        self.found: dict[int, dict[str, Any]] = {}
        self.clock: list[float] = []

    def after_iteration(self, trainer: PPOTrainer, metrics: dict[str, float], samples: list[dict[str, Any]]) -> None:
        number = int(metrics["iteration"])
        self.clock.append(time.perf_counter() - self.began - self.apart)
        if number not in AT or trainer.policy.critic is None:  # audit variants with a critic only
            return
        began = time.perf_counter()
        settings = AuditConfig(every=1, completions=COMPLETIONS, continuations=CONTINUATIONS[number], states=STATES)
        self.found[number] = replace(trainer.auditor, settings=settings, group=8).audit(number).judge(trainer.processes)
        self.apart += time.perf_counter() - began


def run(variant: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train and audit one run; returns its figures."""
    settings = {"seed": seed, "run.dir": str(folder), "run.trackers": [], "run.samples": 0}
    audits = Audits()
    args = PPOConfig.from_dict(settings_of(variant) | settings)
    trainer = PPOTrainer(args=args, callbacks=[audits])
    audits.began = time.perf_counter()
    trainer.train()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = {name: [float(f"{row[name]:.4g}") for row in rows] for name in KEPT if name in rows[0]}
    clock = [round(x, 2) for x in audits.clock]
    return {"settings": study_settings(variant)} | metrics | {"clock": clock, "audits": summary(audits.found)}


def settings_of(variant: str) -> dict[str, Any]:
    """The settings of a variant by key, the recipe's included."""
    own = dict(VARIANTS[variant])
    return flat(own.pop("", {})) | own


def study_settings(variant: str) -> dict[str, Any]:
    """The settings of a variant and of its audits, as stored with its runs."""
    continuations = {str(number): count for number, count in CONTINUATIONS.items()}
    audit = {"completions": COMPLETIONS, "states": STATES, "continuations": continuations}
    return settings_of(variant) | {"audit": audit}


def summary(found: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The stored figures of audits, by iteration."""
    kept: dict[str, Any] = {}
    for number, audit in found.items():
        critic, credit = audit["critic"], audit["credit"]
        names = ("explained_variance", "ranking", "slope", "spread", "rmse", "constant_rmse")
        kept[str(number)] = {
            "shown": credit["shown"],
            "noise": credit["noise"]["value"],
            "correlations": {name: one["correlation"]["value"] for name, one in credit["estimators"].items()},
            "signs": credit["estimators"][credit["shown"]]["sign_agreement"]["value"],
            "critic": None if critic is None else {name: critic[name]["value"] for name in names},
        }
    return kept


def main() -> int:
    """Run the missing runs, each in a separate process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--out", type=Path, default=DATA, help="The file to write.")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        with tempfile.TemporaryDirectory() as folder:
            figures = run(options.variants[0], options.seeds[0], Path(folder) / "run")
        options.one.write_text(json.dumps(figures))
        return 0
    kept = json.loads(options.out.read_text()) if options.out.is_file() else {}
    for seed in options.seeds:
        for variant in options.variants:
            if kept.get(variant, {}).get(str(seed), {}).get("settings") == study_settings(variant):
                continue
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "figures.json"
                command = [sys.executable, __file__, "--variants", variant, "--seeds", str(seed), "--one", str(out)]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ)
                kept.setdefault(variant, {})[str(seed)] = json.loads(out.read_text())
            text = json.dumps(kept, separators=(",", ":")).replace('},"', '},\n"')
            options.out.write_text(text + "\n")
            print(line(variant, seed, kept[variant][str(seed)]), flush=True)
    return 0


def line(variant: str, seed: int, figures: dict[str, Any]) -> str:
    """Format a run on one line: correlation of shown with true advantages and explained variance after each of `AT`."""
    cells = []
    for number, audit in figures["audits"].items():
        shown, critic = audit["correlations"][audit["shown"]], audit["critic"]
        explained = "" if critic is None else f"/{critic['explained_variance'] or float('nan'):.2f}"
        cells.append(f"{number}: {shown if shown is not None else float('nan'):.2f}{explained}")
    reward = sum(figures["reward"][-5:]) / 5
    kl = sum(figures["kl"][-5:]) / 5
    return f"{variant} {seed}  {'  '.join(cells)}  reward {reward:.3f}  KL {kl:.2f}  {figures['clock'][-1]:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
