"""Build worlds of real sentences to measure credit in: a small GPT-2 that writes them, and a classifier of them.

    python benchmarks/worlds.py subj DATA OUT      # DATA holds subj.subjective and subj.objective
    python benchmarks/worlds.py trec DATA OUT      # DATA holds TREC.train
    python benchmarks/worlds.py pairs OUT          # built-in reviews and a causal reward model of their pairs

OUT gets `policy`, `classifier`, and `world.json` with the settings of `tokencredit train`; with `--size tiny`, `small`
or `large`, a policy of another size beside them, and with `--size judge` one that rates the texts of all
(benchmarks/truth.py, "scaling: tiny"). The data sets are those of Pang and Lee 2004 (subjective sentences and plots of
films) and Li and Roth 2002 (questions by what they ask for); the classifier learns whole sentences only, as the field's
do.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DistilBertForSequenceClassification,
    DistilBertTokenizer,
    GPT2LMHeadModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).parents[1]))
from demo.training import (
    POLICIES,
    POSITIONS,
    Size,
    batches_of_like_length,
    distilbert,
    fit,
    fit_language_model,
    gpt2,
    padded,
    policy_tokenizer,
    sentiment_tokenizer,
    token_losses,
)

POLICY = Size(width=192, layers=4, readings=8, batch=32, lr=2e-3)
SIZES = {
    name: replace(POLICIES[size], readings=POLICY.readings, batch=POLICY.batch)
    for name, size in {"tiny": "tiny", "small": "small", "large": "large", "judge": "small"}.items()
}
"""Other sizes, those of the built-in world. The judge differs from `small` by its seed."""
CLASSIFIER = Size(width=96, layers=2, readings=6, batch=32, lr=1e-3)
WORLDS = {"subj": ("objective", None), "trec": ("LOC", ["What", "Which", "Name"])}
"""For each world the rewarded label and the prompts; None for the most common first two words of rewarded sentences. A
small model hardly ever writes a plot: P(subjective) would begin at 0.97. "How many" cannot ask for a place."""
PROMPTS = 8
HELD_OUT = 20
"""One in this many sentences is held out, to measure the classifier."""


def sentences(world: str, data: Path) -> list[tuple[str, str]]:
    """Sentences with their labels, without duplicates."""
    if world == "subj":
        rows = [(line, label) for label in ("objective", "subjective") for line in lines(data / f"subj.{label}")]
    else:
        rows = [(line.partition(" ")[2], line.partition(":")[0]) for line in lines(data / "TREC.train")]
    return sorted({text.strip(): label for text, label in rows}.items())


def lines(path: Path) -> list[str]:
    """The lines of a file whose bytes are not all UTF-8."""
    return path.read_text(encoding="latin-1").splitlines()


def openings(texts: list[str]) -> list[str]:
    """The most common first two words."""
    counts = Counter(" ".join(text.split()[:2]) for text in texts)
    return [opening for opening, _ in counts.most_common(PROMPTS)]


def train_policy(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, size: Size, seed: int, rng: random.Random, folder: Path
) -> None:
    """Train a GPT-2 on the sentences, and write it."""
    model = gpt2(tokenizer, size, POSITIONS, seed)
    ids = [[*row[: POSITIONS - 1], tokenizer.eos_token_id] for row in tokenizer(texts).input_ids]
    fit_language_model(model, ids * size.readings, size, rng)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def perplexity(folder: Path, texts: list[str]) -> float:
    """A policy's perplexity per token on sentences, with their end token."""
    model: GPT2LMHeadModel = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.eos_token_id
    losses = [
        token_losses(model, *padded([[*row[: POSITIONS - 1], end]], end)) for row in tokenizer(texts).input_ids if row
    ]
    return math.exp(torch.cat(losses).mean())


def train_classifier(
    rows: list[tuple[str, str]], labels: list[str], tokenizer: DistilBertTokenizer, seed: int
) -> DistilBertForSequenceClassification:
    """Train a DistilBERT to tell the labels of whole sentences apart."""
    model, rng = distilbert(tokenizer, labels, CLASSIFIER, seed), random.Random(seed)
    ids = tokenizer([text for text, _ in rows], truncation=True).input_ids
    numbered = [(row, labels.index(label)) for row, (_, label) in zip(ids, rows, strict=True)]

    def loss(batch: list[tuple[list[int], int]]) -> torch.Tensor:
        ids, mask = padded([row for row, _ in batch], tokenizer.pad_token_id)
        return nn.functional.cross_entropy(
            model(input_ids=ids, attention_mask=mask).logits, torch.tensor([label for _, label in batch])
        )

    rows_read = numbered * CLASSIFIER.readings
    fit(model, batches_of_like_length(rows_read, lambda row: len(row[0]), CLASSIFIER.batch, rng), loss, CLASSIFIER.lr)
    return model


def train_reward_model(out: Path) -> None:
    """Train a causal reward model on pairs of the built-in model's completions that the built-in classifier ranks."""
    pairs, run, name = str(out / "pairs.jsonl"), out / "run", "builtin:reviews"
    prompts = ["--prompts.text", "This movie was really"]
    reward = ["--reward", json.dumps([{"classifier": name, "label": "NEGATIVE"}])]
    groups = ["--groups", "800", "--samples", "4", "--pairs", "all", "--margin", "0.1"]
    steps = ["--run.iterations", "300", "--optim.lr", "3e-4", "--data.held_out", "0.05"]
    model = ["--model.name", name, "--data.dataset", pairs, "--run.dir", str(run)]
    for command in (["pairs", name, *prompts, *reward, *groups, "--out", pairs], ["reward-model", *model, *steps]):
        subprocess.run([sys.executable, "-m", "tokencredit", *command], check=True)
    (out / "world.json").write_text(json.dumps({"reward": [{"reward_model": str(run / "reward_model")}]}, indent=1))


def main() -> None:
    """Build one world."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="world", required=True)
    for name in (*WORLDS, "pairs"):
        command = commands.add_parser(name)
        if name in WORLDS:
            command.add_argument("data", type=Path)
            command.add_argument("--seed", type=int, default=0)
            command.add_argument("--size", choices=SIZES, help="only a policy of this size, with OUT's tokenizer")
        command.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.world == "pairs":
        train_reward_model(options.out)
        return
    disable_progress_bar()
    rewarded, prompts = WORLDS[options.world]
    rows = sentences(options.world, options.data)
    rng = random.Random(options.seed)
    rng.shuffle(rows)
    held_out, kept = rows[::HELD_OUT], [row for number, row in enumerate(rows) if number % HELD_OUT]
    texts = [text for text, _ in kept]
    if options.size is not None:
        tokenizer = AutoTokenizer.from_pretrained(options.out / "policy")
        seed = options.seed + (options.size == "judge")
        train_policy(texts, tokenizer, SIZES[options.size], seed, random.Random(seed), options.out / options.size)
        for name in ("policy", options.size):
            print(f"{name}: perplexity {perplexity(options.out / name, [text for text, _ in held_out]):.2f}")
        return

    train_policy(texts, policy_tokenizer(texts, 4_096), POLICY, options.seed, rng, options.out / "policy")
    labels = sorted({label for _, label in rows})
    reader = sentiment_tokenizer(texts)
    classifier = train_classifier(kept, labels, reader, options.seed)
    right = 0
    for text, label in held_out:
        logits = classifier(**reader(text, truncation=True, return_tensors="pt")).logits
        right += int(labels[int(logits.argmax())] == label)
    classifier.save_pretrained(options.out / "classifier")
    reader.save_pretrained(options.out / "classifier")
    settings = {
        "model.name": str(options.out / "policy"),
        "reward": [{"classifier": str(options.out / "classifier"), "label": rewarded}],
        "prompts.text": prompts or openings([text for text, label in kept if label == rewarded]),
    }
    (options.out / "world.json").write_text(json.dumps(settings, indent=1))
    print(f"{len(rows):,} sentences; the classifier is right on {right / len(held_out):.3f} of those held out")
    print(f"prompts {settings['prompts.text']}, reward P({rewarded})")


if __name__ == "__main__":
    main()
