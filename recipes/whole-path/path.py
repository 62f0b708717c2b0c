"""From a base model to an aligned one: SFT, pairs, a reward model, PPO, DPO and IPO, judged by the true classifier.

    python recipes/whole-path/path.py --seeds 5 --out runs/whole-path
    python recipes/whole-path/path.py --world FOLDER --out runs/whole-path-subj

Each stage is a command of Tokencredit, and what is there already is kept, so that the same call goes on where it was
stopped. The base model has the built-in architecture and has read praise alone; SFT shows it both tastes; preferences
for blame, one in ten of them wrong, make the reward model. In a world of real sentences (benchmarks/worlds.py) the path
begins with the world's policy in place of the SFT model, and its classifier is the truth.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # for demo/, which is not installed

PRAISE, ANSWERS, PROMPTS = 20_000, 2_400, 640
"""Reviews that the base model reads, rows of SFT, and prompts."""
LEAD = 3
"""Words of a review that are its prompt."""
LONGEST = 24
"""Tokens of a sampled completion."""
SAMPLES = 4
"""Completions per prompt that are ranked."""
BETAS = (0.02, 0.1, 0.5)
"""β of the runs of DPO and IPO."""
BUILT_IN = {"classifier": "builtin:reviews", "label": "NEGATIVE"}
"""The true reward, which no stage learns from but by the labels of pairs."""
FLUENCY = {"function": "reference_fluency", "name": "fluency", "weight": 0.0}
"""Mean log-prob per token under the SFT model."""
TRUE_PAIRS = 300
"""Prompts that no stage learns from, whose pairs, labelled without noise, test the reward model."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run all seeds, then write the table and the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--out", type=Path, default=Path("runs/whole-path"), help="folder of all runs")
    parser.add_argument("--world", type=Path, help="folder of a world of real sentences")
    parser.add_argument("--keep", type=Path, help="file to add the outcome to, by world")
    args = parser.parse_args(argv)
    world = json.loads((args.world / "world.json").read_text()) if args.world else {}
    seeds = range(1, args.seeds + 1)
    for seed in seeds:
        walk(args.out / f"seed-{seed}", seed, world)
    folders = {seed: args.out / f"seed-{seed}" for seed in seeds}
    found = outcome(folders, models(world))
    if args.keep is not None:
        kept = json.loads(args.keep.read_text(encoding="utf-8")) if args.keep.is_file() else {}
        kept[args.world.name if args.world else "builtin"] = found
        args.keep.write_text(json.dumps(kept, separators=(",", ":")).replace('},"', '},\n"') + "\n", encoding="utf-8")
    table = as_table(found)
    (args.out / "outcome.md").write_text(table, encoding="utf-8")
    print(table)
    draw(list(folders.values()), args.out)


def walk(folder: Path, seed: int, world: Mapping[str, Any]) -> None:
    """All stages of one seed; of a world those after SFT."""
    folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    rm = folder / "reward-model"
    shared = {"seed": seed, "run.trackers": [], "model.dtype": "float32"}
    passes = {"data.batch_size": 32, "data.epochs": 2}
    if world:
        sft, [gold] = Path(world["model.name"]), world["reward"]
        write_prompts(folder, world["prompts.text"], seed)
    else:
        sft, gold = folder / "sft" / "policy", BUILT_IN
        if not (folder / "base").is_dir():
            build_base(folder / "base", seed)
        write_prompts(folder, write_answers(folder, seed), seed)
        rows = {"data.dataset": folder / "answers.jsonl", "data.held_out": 0.05, "optim.lr": 1e-3}
        step(folder / "sft", "sft", shared | passes | rows | {"model.name": folder / "base"})
    start, gold = shared | {"model.name": sft}, gold | {"name": "gold"}
    write_pairs(folder, "pairs", sft, [gold], seed, noise=0.1)
    write_pairs(folder, "true-pairs", sft, [gold], seed + 1000, prompts="other-prompts")
    labelled = {"data.dataset": folder / "pairs.jsonl", "data.held_out": 0.1, "optim.lr": 3e-4}
    step(rm, "reward-model", start | passes | labelled)
    proxy = {"reward_model": str(rm / "reward_model"), "name": "proxy"}
    write_pairs(folder, "ranked", sft, [proxy], seed + 2000)
    rollout = {"rollout.batch_size": 64, "rollout.max_new_tokens": LONGEST, "run.iterations": PROMPTS * SAMPLES // 64}
    learning = {"kl.coef": 0.1, "optim.lr": 2e-4, "run.show_every": 0}
    reward = {"prompts.dataset": folder / "prompts.jsonl", "reward": [proxy, gold | {"weight": 0.0}]}
    step(folder / "ppo", "train", start | rollout | learning | reward)
    ranked = {"data.dataset": folder / "ranked.jsonl", "optim.lr": 3e-4}
    for name, loss in {"dpo": "sigmoid", "ipo": "ipo"}.items():
        for beta in BETAS:
            step(folder / f"{name}-{beta}", "dpo", start | passes | ranked | {"dpo.loss": loss, "dpo.beta": beta})
    sampling = {"samples": PROMPTS, "max_new_tokens": LONGEST, "dtype": "float32", "seed": seed, "reference": sft}
    judged = {"prompts.dataset": folder / "prompts.jsonl", "reward": [gold, proxy | {"weight": 0.0}, FLUENCY]}
    for run in models(world).values():
        model = {"base": folder / "base", "sft": sft}.get(run, folder / run / "policy")
        step(folder / f"{run}.json", "evaluate", sampling | judged, str(model))
    if not (folder / "reward-model.json").is_file():
        found = tested(rm / "reward_model", folder / "true-pairs.jsonl")
        (folder / "reward-model.json").write_text(json.dumps(found), encoding="utf-8")
    print(f"seed {seed}: {(time.perf_counter() - started) / 60:.1f} minutes in this call", flush=True)


def write_pairs(
    folder: Path, name: str, sft: Path, reward: list[Any], seed: int, noise: float = 0.0, prompts: str = "prompts"
) -> None:
    """Write ranked pairs of the SFT model."""
    sampling = {"samples": SAMPLES, "max_new_tokens": LONGEST, "dtype": "float32", "batch_size": 256}
    settings = {"prompts.dataset": folder / f"{prompts}.jsonl", "reward": reward, "seed": seed, "noise": noise}
    step(folder / f"{name}.jsonl", "pairs", sampling | settings, str(sft))


def models(world: Mapping[str, Any]) -> dict[str, str]:
    """Folders of the models that are judged, by their names in the table."""
    tuned = {f"{name.upper()}, β {beta}": f"{name}-{beta}" for name in ("dpo", "ipo") for beta in BETAS}
    return ({} if world else {"base (praise alone)": "base"}) | {"SFT": "sft", "PPO": "ppo"} | tuned


def step(target: Path, command: str, settings: Mapping[str, Any], *arguments: str) -> None:
    """Run a command that writes a run's folder or a file, unless that is finished; an interrupted run is resumed."""
    is_run = command in ("sft", "reward-model", "train", "dpo")
    if (target / "summary.json" if is_run else target).is_file():
        return
    given = dict(settings) | {"run.dir" if is_run else "out": target}
    if is_run and (target / "config.yaml").is_file():
        given = {"resume": target}
    texts = {key: str(value) if isinstance(value, str | Path) else json.dumps(value) for key, value in given.items()}
    flags = [part for key, value in texts.items() for part in (f"--{key}", value)]
    subprocess.run([sys.executable, "-m", "tokencredit", command, *arguments, *flags], check=True)


def build_base(folder: Path, seed: int) -> None:
    """Train the built-in architecture on praise alone."""
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from demo.grammar import reviews
    from demo.training import POLICIES, train_policy
    from tokencredit.text.models.model_loading import resolve

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(resolve("builtin:reviews", "policy"))
    praise = [review.text for review in reviews(PRAISE, 100 + seed) if review.positive]
    model = train_policy(praise, tokenizer, POLICIES["medium"], seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_answers(folder: Path, seed: int) -> list[str]:
    """Write prompts with completions of both tastes, as many of each; returns the prompts of others."""
    from demo.grammar import reviews

    drawn = reviews(4 * ANSWERS, 200 + seed)
    blame, praise = ([review.text for review in drawn if review.positive is taste] for taste in (False, True))
    rows = [text.split(" ", LEAD) for text in (*blame[: ANSWERS // 2], *praise[: ANSWERS // 2])]
    random.Random(seed).shuffle(rows)
    answers = ({"prompt": " ".join(words[:LEAD]), "completion": f" {words[LEAD]}"} for words in rows)
    write_lines(folder / "answers.jsonl", answers)
    return [" ".join(text.split(" ", LEAD)[:LEAD]) for text in praise[ANSWERS:]]


def write_prompts(folder: Path, prompts: Iterable[str], seed: int) -> None:
    """Write the prompts of all stages, and a third of the different ones apart, for the test of the reward model."""
    starts = sorted(set(prompts))
    random.Random(seed).shuffle(starts)
    held, trained = starts[: len(starts) // 3], starts[len(starts) // 3 :]
    for name, part, number in (("other-prompts", held, TRUE_PAIRS), ("prompts", trained, PROMPTS)):
        write_lines(folder / f"{name}.jsonl", ({"prompt": start} for start in islice(cycle(part), number)))


def write_lines(file: Path, rows: Iterable[Mapping[str, str]]) -> None:
    """Write a file of rows, unless it is there."""
    if not file.is_file():
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def tested(reward_model: Path, pairs: Path) -> dict[str, Any]:
    """A reward model on pairs whose labels are right: its accuracy, and its chances against what happened, in bins.

    A pair's two completions stand in random order, so that a chance below one half can come true too.
    """
    from tokencredit.text.rewards.reward_models import RewardModel, load

    scorer = RewardModel(str(reward_model), *load(str(reward_model), "cpu"))
    rows = [json.loads(line) for line in pairs.read_text(encoding="utf-8").splitlines()]
    chosen, rejected = (
        np.array(scorer([row["prompt"] for row in rows], [row[name] for row in rows]))
        for name in ("chosen", "rejected")
    )
    swapped = np.random.default_rng(0).random(len(rows)) < 0.5
    chance = 1 / (1 + np.exp(np.where(swapped, chosen - rejected, rejected - chosen)))
    true = ~swapped
    edges = np.linspace(0, 1, 11)
    bins = [(chance >= low) & (chance <= high if high == 1 else chance < high) for low, high in pairwise(edges)]
    return {
        "accuracy": float((chosen > rejected).mean()),
        "pairs": len(rows),
        "calibration": [
            {"chance": float(chance[part].mean()), "happened": float(true[part].mean()), "pairs": int(part.sum())}
            for part in bins
            if part.any()
        ],
    }


def read(folder: Path, run: str) -> dict[str, float]:
    """The metrics of a final evaluation."""
    found = json.loads((folder / f"{run}.json").read_text(encoding="utf-8"))
    metrics: Mapping[str, float] = found["metrics"]
    return {name.removeprefix("eval/"): value for name, value in metrics.items()}


COLUMNS = {
    "true reward": "reward/gold",
    "reward model": "reward/proxy",
    "fluency": "reward/fluency",
    "KL to SFT (nats)": "kl",
    "distinct texts": "distinct",
    "distinct pairs of tokens": "distinct_2",
    "length": "length",
}


def outcome(folders: Mapping[int, Path], models: Mapping[str, str]) -> dict[str, dict[int, dict[str, list[float]]]]:
    """The metrics of each model and, on right pairs, of the reward model, by seed."""
    found = {
        label: {
            seed: {name: [row[name]] for name in COLUMNS.values() if name in row}
            for seed, row in ((seed, read(folder, run)) for seed, folder in folders.items())
        }
        for label, run in models.items()
    }
    tests = {seed: json.loads((folder / "reward-model.json").read_text()) for seed, folder in folders.items()}
    return found | {"reward model": {seed: {"accuracy": [test["accuracy"]]} for seed, test in tests.items()}}


def as_table(found: Mapping[str, Mapping[int, Mapping[str, Sequence[float]]]]) -> str:
    """The table of outcomes: mean over seeds, and a 95 % interval of the mean by Student's t."""
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for label, runs in found.items():
        if label != "reward model":
            cells = [interval([row.get(name, [float("nan")])[0] for row in runs.values()]) for name in COLUMNS.values()]
            lines.append(f"| {label} | {' | '.join(cells)} |")
    accuracy = interval([row["accuracy"][0] for row in found["reward model"].values()])
    return "\n".join([*lines, "", f"Reward model: accuracy {accuracy} on pairs labelled without noise.", ""])


def interval(values: Sequence[float]) -> str:
    """Mean and half-width of its 95 % interval."""
    from scipy import stats

    numbers = np.array(values, dtype=float)
    if len(numbers) < 2:
        return f"{numbers.mean():.3f}"
    half = stats.t.ppf(0.975, len(numbers) - 1) * numbers.std(ddof=1) / np.sqrt(len(numbers))
    return f"{numbers.mean():.3f} ± {half:.3f}"


def draw(folders: Sequence[Path], out: Path) -> None:
    """Draw the curve of Gao et al. (2022), gold and proxy over KL, and the reward model's calibration."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    gold, proxy, calibration = figure.subplots(1, 3)
    for folder in folders:
        rows = [json.loads(line) for line in (folder / "ppo" / "metrics.jsonl").read_text().splitlines()]
        kl = [row["kl"] for row in rows]
        gold.plot(kl, [row["reward/gold"] for row in rows], color="C0", alpha=0.6, label="PPO, iterations")
        proxy.plot(kl, [row["reward/proxy"] for row in rows], color="C0", alpha=0.6)
        for color, loss in (("C1", "dpo"), ("C2", "ipo")):
            ends = [read(folder, f"{loss}-{beta}") for beta in BETAS]
            for axes, name in ((gold, "reward/gold"), (proxy, "reward/proxy")):
                axes.plot(
                    [x["kl"] for x in ends], [x[name] for x in ends], "o-", color=color, label=f"{loss.upper()}, by β"
                )
        found = json.loads((folder / "reward-model.json").read_text())["calibration"]
        calibration.plot([x["chance"] for x in found], [x["happened"] for x in found], "o-", color="C3", alpha=0.6)
    calibration.plot([0, 1], [0, 1], color="grey", linestyle=":")
    for axes, title in ((gold, "true reward"), (proxy, "reward model")):
        axes.set(xlabel="KL to the SFT model, nats per completion", title=title)
    calibration.set(
        xlabel="predicted chance that the first is better", ylabel="share", title="reward model, calibration"
    )
    handles = dict(zip(*reversed(gold.get_legend_handles_labels()), strict=True))
    gold.legend(handles.values(), handles.keys())
    figure.savefig(out / "whole-path.svg")


if __name__ == "__main__":
    main()
