"""Audit credit during training, and measure the objective, in several worlds over several seeds.

    python benchmarks/truth.py [--worlds builtin subj=FOLDER trec=FOLDER] [--variants default …] [--seeds 1 2 3 4 5]

A variant is a name below, or settings, such as `advantage.estimator=mine.py:by_entropy`, with a comma between several,
or one of a study of benchmarks/study.py, such as `"hacking: no-kl"`, with the world's policy, prompts and reward, and
for `"scaling: tiny"` with the world's policy of that size and its judge. `make truth` does it in the built-in world;
the folders of the others are made by benchmarks/worlds.py. Each run is a separate process. Its figures go to
benchmarks/findings-data/worlds.json, from which `make findings` makes the first chapter of benchmarks/findings.md; runs
already there with the same settings are skipped. Times exclude audits. The README's table comes last; with `--seeds`
and nothing after it no run is made.
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
from functools import cache
from pathlib import Path
from typing import Any

import torch
from study import STUDIES, shorter
from transformers import AutoModelForCausalLM, PreTrainedModel

from demo.training import padded, token_losses
from tokencredit import Callback, PPOConfig, PPOTrainer
from tokencredit.provenance.parts import describe
from tokencredit.settings.fields import flat
from tokencredit.settings.reader import load_yaml, read_yaml
from tokencredit.settings.run_kind import own_parts
from tokencredit.settings.training import AuditConfig
from tokencredit.tools.limit_run import limit_of_settings
from tokencredit.user_code.parts import loaded_parts

DATA = Path(__file__).parent / "findings-data" / "worlds.json"
AUDITS = {number: AuditConfig(every=1, completions=48, states=4, continuations=8) for number in (5, 10, 20)}
"""Audits by iteration."""
LARGE = {
    5: AUDITS[5],
    10: AuditConfig(every=1, completions=48, states=4, continuations=16),
    20: AuditConfig(every=1, completions=96, states=4, continuations=16),
}
"""Audits of `first 20`: the more the policy has learned, the less its states differ, and the more samples it takes."""
BASE = {"run.iterations": 60, "run.trackers": [], "run.samples": 0, "run.save_every": 0, "audit.at_end": False}
RECIPES = Path(__file__).parents[1] / "recipes"
RECIPE = read_yaml(RECIPES / "true-credit" / "reviews.yaml")
NOT_OF_RECIPE = ("model.name", "prompts.text", "reward", "run.show_every")
"""Keys of a sweep's base that a world or `BASE` decides."""
BUILT_IN_REWARD = {"classifier": "builtin:reviews", "label": "NEGATIVE"}
"""The reward of those sweeps, for which a world has its own."""
WITHOUT_CRITIC = {"critic.kind": "none", "rollout.per_prompt": 8}
LEARNED = {"critic.prefix_every": 0, "advantage.lam": 0.95}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "first 20": {"run.iterations": 20},
    "learned critic": LEARNED,
    "fit alone": {"critic.coef": 0},
    "separate critic": {"critic.kind": "separate"},
    "true-credit": {**flat(RECIPE), "critic.prefix_every": 0},
    "KL in both": {"kl.place": "both", "kl.estimator": "full"},
    "group_relative": {"advantage.estimator": "group_relative", **WITHOUT_CRITIC},
    "leave_one_out": {"advantage.estimator": "leave_one_out", **WITHOUT_CRITIC},
}
"""Settings of each by key."""
CHANGES: dict[str, dict[str, Any]] = {
    "base": {},
    "kl 0.025": {"kl.coef": 0.025},
    "entropy 0.01": {"ppo.entropy_coef": 0.01},
    "kl_ent": {"kl.coef": 0.025, "ppo.entropy_coef": 0.01},
    "clip 0.3": {"ppo.clip": 0.3},
    "clip 0.1": {"ppo.clip": 0.1},
    "temperature 2": {"rollout.temperature": 2.0},
    "gentle": {"optim.max_grad_norm": 0.5, "optim.lr": 8e-5, "critic.lr": 8e-4},
    "temperature 0.5": {"rollout.temperature": 0.5},
    "learned": LEARNED,
    "learned, orthogonal head": {**LEARNED, "critic.init": "orthogonal"},
    "learned, no value clip": {**LEARNED, "critic.clip": None},
    "learned, whitened scores": {**LEARNED, "score.normalize": "batch"},
    "learned, keep mean": {**LEARNED, "score.normalize": "batch", "score.shift_mean": False},
}
"""Changes to the default and, from `learned` on, to a learned critic, in runs of 20 iterations without audits."""
VARIANTS |= {name: {"run.iterations": 20} | change for name, change in CHANGES.items()}
LIMIT, SAMPLES = "limit", 2048
"""Key of a world's limit beside its variants, and the reference's completions that it is estimated from."""
KEPT = (
    "reward",
    "kl",
    "kl_coef",
    "length",
    "ref_logprob",
    "distinct",
    "distinct_2",
    "entropy",
    "value_loss",
    "value_mean",
    "explained_variance",
    "lam",
    "critic_share",
    "seconds",
    "attainable",
    "age_mean",
    "reward/fluency",
)


class Audits(Callback):
    """Audits at some iterations, timed apart from training."""

    def __init__(self, audits: dict[int, AuditConfig]) -> None:
        self.audits = audits
        self.began, self.apart = time.perf_counter(), 0.0
        self.found: dict[int, dict[str, Any]] = {}
        self.clock: list[float] = []

    def after_iteration(self, trainer: PPOTrainer, metrics: dict[str, float], samples: list[dict[str, Any]]) -> None:
        number = int(metrics["iteration"])
        self.clock.append(time.perf_counter() - self.began - self.apart)
        # Variants with a critic, and those of the user's own parts.
        if number not in self.audits or (trainer.policy.critic is None and not own_parts(trainer.args)):
            return
        began = time.perf_counter()
        auditor = replace(trainer.auditor, settings=self.audits[number])
        self.found[number] = auditor.audit(number).judge(trainer.processes)
        self.apart += time.perf_counter() - began


def run(world: str, variant: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train and audit one run; returns its figures."""
    audits = Audits(audits_of(variant))
    own, changes = world_settings(world), settings_of(variant)
    if own and "reward" in changes:
        changes = changes | {"reward": in_world(changes["reward"], own["reward"][0])}
    if variant.startswith("scaling: "):
        changes = changes | of_size(Path(world.partition("=")[2]), variant.partition(": ")[2], own.get("reward", []))
    args = PPOConfig.from_dict(own | BASE | changes | {"seed": seed, "run.dir": str(folder)})
    trainer = PPOTrainer(args=args, callbacks=[audits])
    audits.began = time.perf_counter()
    trainer.train()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    there = {name for row in rows for name in row}
    metrics = {name: [shorter(row.get(name)) for row in rows] for name in KEPT if name in there}
    clock = [round(x, 2) for x in audits.clock]
    return {"settings": study_settings(variant)} | metrics | {"clock": clock, "audits": summary(audits.found)}


def world_settings(world: str) -> dict[str, Any]:
    """The settings of a world, `NAME=FOLDER`, or of the built-in one."""
    name, _, folder = world.partition("=")
    if not folder and name != "builtin":
        sys.exit(f"--worlds {world}: give {world}=FOLDER, as benchmarks/worlds.py builds it")
    settings: dict[str, Any] = json.loads((Path(folder) / "world.json").read_text()) if folder else {}
    return settings


def in_world(reward: Any, term: dict[str, Any]) -> Any:
    """A reward, or a part of it, with a world's classifier and label in place of the built-in world's."""
    if isinstance(reward, list):
        return [in_world(x, term) for x in reward]
    if not isinstance(reward, dict):
        return reward
    if reward.get("classifier") != BUILT_IN_REWARD["classifier"]:
        return {key: in_world(x, term) for key, x in reward.items()}
    if reward.get("label") != BUILT_IN_REWARD["label"]:
        sys.exit(f"the reward {reward} has no counterpart in other worlds")
    return reward | term


def of_size(folder: Path, size: str, reward: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings for a world's policy of a size, whose texts its judge rates beside the reward."""
    policy, judge = folder / ("policy" if size == "medium" else size), folder / "judge"
    for model in (policy, judge):
        if not model.is_dir():
            sys.exit(f"{model} is missing: build it by benchmarks/worlds.py with --size {model.name}")
    rating = {"function": f"{__file__}:fluency", "kwargs": {"judge": str(judge)}, "weight": 0.0}
    return {"model.name": str(policy), "reward": [*reward, rating]}


@torch.no_grad()
def fluency(
    prompts: list[str], completions: list[str], prompt_ids: list[list[int]], completion_ids: list[list[int]], judge: str
) -> list[float]:
    """Mean log-probability of each completion's tokens under a judge of the same tokenizer, in nats."""
    starts, rows = [len(ids) for ids in prompt_ids], [a + b for a, b in zip(prompt_ids, completion_ids, strict=True)]
    ids, mask = padded(rows, 0)
    losses = token_losses(loaded(judge), ids, mask).split([len(row) - 1 for row in rows])
    return [-float(row[start - 1 :].mean()) for row, start in zip(losses, starts, strict=True)]


@cache
def loaded(folder: str) -> PreTrainedModel:
    """A language model for evaluation."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model


def settings_of(variant: str) -> dict[str, Any]:
    """The settings of a variant by its name, of a recipe's, or as `key=value`."""
    if variant in VARIANTS:
        return VARIANTS[variant]
    if of_recipe(variant):
        study, _, name = variant.partition(": ")
        return recipe_settings(RECIPES / STUDIES[study], name)
    pairs = [text.partition("=") for text in variant.split(",")]
    if not all(equals for _, equals, _ in pairs):
        sys.exit(f"--variants {variant}: give key=value, or one of {', '.join(VARIANTS)}")
    return {key: load_yaml(value) for key, _, value in pairs}


def of_recipe(variant: str) -> bool:
    """True for a variant of a study's recipe, such as `hacking: no-kl`; `ppo.kwargs={beta: 0.3}` is a setting."""
    study, colon, _ = variant.partition(": ")
    return bool(colon) and study in STUDIES


def recipe_settings(file: Path, name: str) -> dict[str, Any]:
    """The settings of a variant of a sweep, without those that a world sets."""
    sweep = read_yaml(file)
    if name not in sweep["variants"]:
        sys.exit(f"{file} has no variant {name}; it has {', '.join(sweep['variants'])}")
    base, changes = sweep["base"], sweep["variants"][name]
    base = read_yaml(file.parent / base) if isinstance(base, str) else base
    reward = changes.get("reward", base.get("reward", [BUILT_IN_REWARD]))
    kept = {key: x for key, x in flat(base).items() if not key.startswith(NOT_OF_RECIPE)}
    changes = flat({key: x for key, x in changes.items() if key != "reward"})
    if file == RECIPES / STUDIES["scaling"]:
        changes.pop("model.name")  # see `of_size`
    if any(key.startswith(NOT_OF_RECIPE) for key in changes):
        sys.exit(f"{file}: variant {name} sets a policy or prompts, as worlds do")
    return kept | changes | ({} if reward == [BUILT_IN_REWARD] else {"reward": reward})


def study_settings(variant: str) -> dict[str, Any]:
    """The settings of a variant and of its audits, as stored with its runs."""
    audits = {str(number): [x.completions, x.states, x.continuations] for number, x in audits_of(variant).items()}
    settings = settings_of(variant)
    parts = loaded_parts(PPOConfig.from_dict(settings))
    own = {key: describe(part)["digest"] for key, part in parts.items()}
    return {"run.iterations": BASE["run.iterations"], "audits": audits} | settings | ({"sources": own} if own else {})


def audits_of(variant: str) -> dict[int, AuditConfig]:
    """The audits of a variant."""
    if variant in CHANGES or of_recipe(variant):
        return {}
    return LARGE if variant == "first 20" else AUDITS


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
    parser.add_argument("--worlds", nargs="+", default=["builtin"], help="builtin, or NAME=FOLDER of a world.")
    parser.add_argument("--variants", nargs="+", default=["default", "learned critic"])
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3, 4, 5])
    parser.add_argument("--out", type=Path, default=DATA, help="The file to write.")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        with tempfile.TemporaryDirectory() as folder:
            figures = run(options.worlds[0], options.variants[0], options.seeds[0], Path(folder) / "run")
        options.one.write_text(json.dumps(figures))
        return 0
    for world in options.worlds:
        keep_limit(options.out, world)
    for seed in options.seeds:
        for world in options.worlds:
            for variant in options.variants:
                keep(options.out, world, variant, seed)
    from findings import readme_table  # which imports Matplotlib

    print("", *readme_table(read(options.out)), sep="\n")
    return 0


def keep(out: Path, world: str, variant: str, seed: int) -> None:
    """Add the figures of one run to the file, unless it has them."""
    name, own = world.partition("=")[0], study_settings(variant)
    if read(out).get(name, {}).get(variant, {}).get(str(seed), {}).get("settings") == own:
        return
    with tempfile.TemporaryDirectory() as folder:
        one = Path(folder) / "figures.json"
        which = ["--worlds", world, "--variants", variant, "--seeds", str(seed), "--one", str(one)]
        subprocess.run([sys.executable, __file__, *which], check=True, stdout=subprocess.DEVNULL, env=os.environ)
        figures = json.loads(one.read_text())
    kept = read(out)  # another process may have added to it
    kept.setdefault(name, {}).setdefault(variant, {})[str(seed)] = figures
    write(out, kept)
    print(name, line(variant, seed, figures), flush=True)


def keep_limit(out: Path, world: str) -> None:
    """Add the best objective that any policy can reach in a world, and the reference's, unless the file has them."""
    kept, name = read(out), world.partition("=")[0]
    if LIMIT not in kept.get(name, {}):
        with tempfile.TemporaryDirectory() as folder:
            args = PPOConfig.from_dict(world_settings(world) | {"run.dir": f"{folder}/run"})
            best = limit_of_settings(args, SAMPLES)
        figures = {"best": best.objective, "low": best.low, "high": best.high, "reference": best.start}
        kept.setdefault(name, {})[LIMIT] = {key: round(x, 4) for key, x in figures.items()}
        write(out, kept)


def write(out: Path, kept: dict[str, Any]) -> None:
    """Write the figures, a line per run."""
    part = out.with_suffix(".part")
    part.write_text(json.dumps(kept, separators=(",", ":")).replace('},"', '},\n"') + "\n")
    part.replace(out)


def read(out: Path) -> dict[str, Any]:
    """The figures that a file has, by world, variant and seed, and each world's limit."""
    kept: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {}
    return kept


def line(variant: str, seed: int, figures: dict[str, Any]) -> str:
    """Format a run on one line.

    Correlation of shown with true advantages and explained variance at each audit, and reward less the price of KL
    after 15 and 60 iterations, of a run that measured a KL.
    """
    cells = []
    for number, audit in figures["audits"].items():
        shown, critic = audit["correlations"][audit["shown"]], audit["critic"]
        explained = "" if critic is None else f"/{critic['explained_variance'] or float('nan'):.2f}"
        cells.append(f"{number}: {shown if shown is not None else float('nan'):.2f}{explained}")
    if "kl" in figures:
        after = [n for n in (15, 60) if n <= len(figures["reward"])]
        ends = "/".join(f"{mean(figures['reward'], n) - 0.05 * mean(figures['kl'], n):.3f}" for n in after)
        cells.append(f"objective {ends}  KL {sum(figures['kl'][-5:]) / 5:.2f}")
    return "  ".join([f"{variant} {seed}", *cells, f"{figures['clock'][-1]:.0f} s"])


def mean(values: list[float], at: int) -> float:
    """The mean of three iterations up to one."""
    return sum(values[at - 3 : at]) / 3


if __name__ == "__main__":
    sys.exit(main())
