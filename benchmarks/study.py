"""Run the studies behind benchmarks/findings.md, and keep their metrics in benchmarks/findings-data/ (`make study`).

Each study is a recipe's sweep, which resumes where it stopped. The metrics of its finished runs go into
findings-data/new/ where findings-data/ holds the study already, unless `--replace` is given.
`python benchmarks/study.py hacking --seeds 3 --jobs 2` does one of them with the first three seeds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from demo.build import REVIEWS
from demo.grammar import reviews
from tokencredit.distributed.signals import INTERRUPTED
from tokencredit.report.reading import Run, read_run
from tokencredit.settings.reader import read_yaml
from tokencredit.tools.sweep.sweep_file import read_sweep

DATA = Path(__file__).parent / "findings-data"
RECIPES = Path("recipes")
MODELS = Path("runs/models")
PLANTED = RECIPES / "planted-credit" / "world.py"
"""Program that builds the policies of `PLANTED_STUDIES` and measures their credit."""
PLANTED_STUDIES = ("planted-credit", "planted-kinds")
REASONING = RECIPES / "reasoning" / "sums.py"
BUILDERS = dict.fromkeys(PLANTED_STUDIES, PLANTED) | dict.fromkeys(("reasoning", "reasoning-ladder", "sao"), REASONING)
"""Programs that build the policies of studies, if they are not there."""
PLANTED_KEPT = ("reward", "explained_variance")
SIZES = ("tiny", "small", "large")
"""Policies of the scaling study that are not built in."""
STUDIES = {
    "negative-sentiment": "negative-sentiment/sweep.yaml",
    "at-kl-0.5": "negative-sentiment/at-kl-0.5.yaml",
    "spread": "negative-sentiment/spread.yaml",
    "hacking": "negative-sentiment/hacking.yaml",
    "claims": "negative-sentiment/claims.yaml",
    "write-up": "negative-sentiment/write-up.yaml",
    "estimators-text": "estimators/text.yaml",
    "estimators-cartpole": "estimators/cartpole.yaml",
    "humanoid": "humanoid-lambda/sweep.yaml",
    "pendulum": "humanoid-lambda/pendulum.yaml",
    "cartpole-lambda": "humanoid-lambda/cartpole.yaml",
    "locomotion-lambda": "humanoid-lambda/locomotion.yaml",
    "scaling": "scaling/sweep.yaml",
    "planted-credit": "planted-credit/sweep.yaml",
    "planted-kinds": "planted-credit/kinds.yaml",
    "turns": "turns/sweep.yaml",
    "turns-sentences": "turns/sentences.yaml",
    "ages": "ages/sweep.yaml",
    "ages-large-steps": "ages/large-steps.yaml",
    "reasoning": "reasoning/sweep.yaml",
    "reasoning-ladder": "reasoning/ladder.yaml",
    "sao": "sao/sweep.yaml",
}
KEPT = ("reward", "reward_std", "kl", "kl_coef", "entropy", "ref_logprob", "length", "truncated", "distinct")
KEPT += ("distinct_2", "repetition", "value_loss", "explained_variance", "advantage_std", "clip_fraction", "grad_norm")
KEPT += ("reward/NEGATIVE", "train/average_return", "total_steps", "eval/average_return", "tokens", "env/turns")
KEPT += ("reward/story", "critic_value_loss", "age_mean", "behavior_kl", "weight_mean", "weight_zero")
KEPT += ("eval/reward", "pretrain/tokens", "pretrain/explained_variance", "masked", "loss/positive_nll")
WORDS = 4


def run(study: str, seeds: int | None, jobs: int) -> int:
    """Run the missing runs of a study, from the repository's root; returns the exit code."""
    commands = [[str(BUILDERS[study])]] if study in BUILDERS else []
    if study == "scaling":
        missing = [size for size in SIZES if not (MODELS / size / "policy" / "README.md").is_file()]
        commands = [["-m", "demo.build", "--size", size, "--out", str(MODELS / size)] for size in missing]
    sweep = ["-m", "tokencredit.cli", "sweep", str(RECIPES / STUDIES[study]), "--jobs", str(jobs)]
    if seeds:
        recipe = read_yaml(RECIPES / STUDIES[study])
        sweep += ["--seeds", str(min(seeds, len(recipe["seeds"])))]
    for command in [*commands, sweep]:
        code = subprocess.run([sys.executable, *command], check=False).returncode
        if code:
            break
    return code


def keep(study: str, replace: bool = False) -> Path:
    """Write the metrics of all finished runs of a study into one file, by variant and seed; returns the file.

    It is beside kept data, in a folder `new`, unless they are to be replaced by no fewer runs.
    """
    kept: dict[str, dict[int, object]] = {}
    for planned in read_sweep(RECIPES / STUDIES[study]):
        if planned.state() != "finished":
            continue
        run = read_run(planned.folder)
        names = PLANTED_KEPT if study in PLANTED_STUDIES else KEPT
        measured = {name for row in run.metrics for name in row}
        rows = {name: [shorter(row.get(name)) for row in run.metrics] for name in names if name in measured}
        if study in PLANTED_STUDIES:
            rows |= {name: [shorter(value)] for name, value in planted_credit(planned.folder, run).items()}
        elif run.samples:
            texts = [[s for s in run.samples if s["iteration"] == row["iteration"]] for row in run.metrics]
            rows["value"] = [shorter(mean_value(samples)) for samples in texts]
            rows["known"] = [shorter(known_share(samples)) for samples in texts]
            rows["last_text"] = run.samples[-1]["prompt"] + run.samples[-1]["completion"]
        kept.setdefault(planned.variant, {})[planned.seed] = rows
    text = json.dumps(kept, separators=(",", ":"), ensure_ascii=False).replace('},"', '},\n"')
    file = DATA / f"{study}.json"
    if file.exists() and (not replace or count(json.loads(file.read_text())) > count(kept)):
        file = DATA / "new" / file.name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n", encoding="utf-8")
    return file


def count(kept: Mapping[str, Mapping[int | str, object]]) -> int:
    """Number of runs."""
    return sum(len(runs) for runs in kept.values())


def planted_credit(folder: Path, run: Run) -> dict[str, float | None]:
    """The measures of the recipe's `credit_shares`, None where there is no credit; and all tokens, pretraining too."""
    spec = importlib.util.spec_from_file_location("planted_credit", PLANTED)
    world = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(world)
    shares = {name: value if math.isfinite(value) else None for name, value in world.credit_shares(folder).items()}
    return shares | {"tokens": sum(row["tokens"] + row.get("pretrain/tokens", 0) for row in run.metrics)}


def shorter(value: float | None) -> float | None:
    """Round to four digits, the most that a figure shows."""
    return None if value is None else float(f"{value:.4g}")


def mean_value(samples: Sequence[Mapping[str, object]]) -> float | None:
    """The critic's mean value over the tokens of kept completions."""
    values = [value for sample in samples for value in sample.get("values", ())]
    return sum(values) / len(values) if values else None


def known_share(samples: Sequence[Mapping[str, str]]) -> float | None:
    """Share of the texts' 4-grams that occur in the training reviews of the built-in models.

    It asks no model, so it judges models of all sizes alike. Fresh reviews of the same grammar reach 0.977.
    """
    found = [
        words in known_words() for sample in samples for words in in_a_row(sample["prompt"] + sample["completion"])
    ]
    return sum(found) / len(found) if found else None


def in_a_row(text: str) -> list[tuple[str, ...]]:
    """All word 4-grams of a text, with punctuation."""
    words = text.split()
    return list(zip(*(words[start:] for start in range(WORDS)), strict=False))


@cache
def known_words() -> frozenset[tuple[str, ...]]:
    """All 4-grams of the reviews that the built-in models were trained on."""
    return frozenset(words for review in reviews(REVIEWS, seed=0) for words in in_a_row(review.text))


def main() -> int:
    """Run and store the named studies, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"of {', '.join(STUDIES)}; all if none is named")
    parser.add_argument("--seeds", type=int, help="only so many of each recipe's seeds, the first ones")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--keep_only", action="store_true", help="run nothing; keep what is finished")
    parser.add_argument("--replace", action="store_true", help="replace kept metrics, rather than write beside them")
    args = parser.parse_args()
    if unknown := set(args.studies) - set(STUDIES):
        parser.error(f"there is no study {', '.join(sorted(unknown))}; there are {', '.join(STUDIES)}")
    failed = False
    for study in args.studies or STUDIES:
        code = 0 if args.keep_only else run(study, args.seeds, args.jobs)
        if code in (INTERRUPTED, -signal.SIGINT):
            return INTERRUPTED
        print(f"{study}: {keep(study, args.replace)}")
        failed |= code != 0
    return int(failed)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: None)  # the sweep handles Ctrl-C, so that its runs can save
    sys.exit(main())
