"""Build the world `builtin:reviews` from nothing: `python -m tokencredit.demo.build`.

Two ordinary Hugging Face folders come out: `policy`, a small GPT-2 that writes film reviews, and `sentiment`, a small DistilBERT
that tells praise from blame. Both learn from `tokencredit.demo.grammar` alone.
"""

import argparse
import math
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertTokenizer,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Tokenizer,
)

from tokencredit.demo.corpus import cut, graded_texts, packed_texts
from tokencredit.demo.grammar import reviews

HERE = Path(__file__).parent / "reviews"
END = "<|endoftext|>"
PROMPT = "This movie was really"
POSITIONS = 128
Row = TypeVar("Row")
Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Recipe:
    """How large the two models are and how much they read."""

    policy_reviews: int = 60_000
    policy_vocabulary: int = 1_536
    policy_width: int = 160
    policy_layers: int = 4
    sentiment_reviews: int = 60_000
    sentiment_width: int = 96
    sentiment_layers: int = 2
    tokenizer_reviews: int = 20_000
    held_out: int = 2_000
    samples: int = 500


def train_policy(recipe: Recipe, seed: int) -> tuple[GPT2LMHeadModel, GPT2Tokenizer]:
    """Train the language model and its byte-level BPE tokenizer."""
    texts = [review.text for review in reviews(recipe.policy_reviews, seed)]
    tokenizer = GPT2Tokenizer(pad_token=END).train_new_from_iterator(
        texts[: recipe.tokenizer_reviews], recipe.policy_vocabulary, new_special_tokens=[END]
    )
    tokenizer.model_max_length = POSITIONS
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=POSITIONS,
        n_embd=recipe.policy_width,
        n_layer=recipe.policy_layers,
        n_head=recipe.policy_width // 32,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    model = GPT2LMHeadModel(config)
    rng = random.Random(seed)
    rows = [tokenizer(text).input_ids[:POSITIONS] for text in packed_texts(texts, END, rng)]
    batches = list(length_buckets(rows, rng, size=64))

    def loss(batch: list[list[int]]) -> torch.Tensor:
        ids, mask = padded(batch, tokenizer.pad_token_id)
        return next_token_loss(model, ids, mask).mean()

    fit(model, batches, loss, lr=2e-3)
    return model, tokenizer


def train_sentiment(recipe: Recipe, seed: int) -> tuple[DistilBertForSequenceClassification, BertTokenizer]:
    """Train the classifier and its lower-cased WordPiece tokenizer."""
    rng = random.Random(seed)
    drawn = reviews(recipe.sentiment_reviews, seed)
    tokenizer = BertTokenizer(vocab=word_pieces([review.text for review in drawn[: recipe.tokenizer_reviews]]))
    tokenizer.model_max_length = POSITIONS
    torch.manual_seed(seed)
    config = DistilBertConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=POSITIONS,
        dim=recipe.sentiment_width,
        hidden_dim=4 * recipe.sentiment_width,
        n_layers=recipe.sentiment_layers,
        n_heads=recipe.sentiment_width // 32,
        pad_token_id=tokenizer.pad_token_id,
        id2label={0: "NEGATIVE", 1: "POSITIVE"},
        label2id={"NEGATIVE": 0, "POSITIVE": 1},
    )
    model = DistilBertForSequenceClassification(config)
    rows = [(tokenizer(text, truncation=True).input_ids, positive) for text, positive in graded_texts(drawn, rng)]
    batches = list(length_buckets(rows, rng, size=64, length=lambda row: len(row[0])))

    def loss(batch: list[tuple[list[int], float]]) -> torch.Tensor:
        ids, mask = padded([row for row, _ in batch], tokenizer.pad_token_id)
        target = torch.tensor([[1 - positive, positive] for _, positive in batch])
        return F.cross_entropy(model(input_ids=ids, attention_mask=mask).logits, target)

    fit(model, batches, loss, lr=1e-3)
    return model, tokenizer


def word_pieces(texts: Sequence[str]) -> dict[str, int]:
    """A WordPiece vocabulary: every word of the texts, and single letters to spell any other word with.

    The library's WordPiece trainer breaks ties at random, so two builds with one seed would differ.
    """
    counts = Counter(piece for text in texts for piece in re.findall(r"\w+|[^\w\s]", text.lower()))
    words = sorted(counts, key=lambda word: (-counts[word], word))
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1) if not chr(code).isupper()]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters), *words]
    return {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}


def length_buckets(
    rows: Sequence[Row], rng: random.Random, size: int, length: Callable[[Row], int] = len
) -> Iterator[list[Row]]:
    """Batches of rows of nearly one length, in random order, so that little is padding."""
    order = sorted(range(len(rows)), key=lambda index: length(rows[index]) + rng.random())
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    rng.shuffle(batches)
    for batch in batches:
        yield [rows[index] for index in batch]


def padded(rows: Sequence[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and their attention mask, `[batch, time]`."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids, mask


def next_token_loss(model: GPT2LMHeadModel, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The negative log-probability, in nats, of every real token but the first."""
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    return losses[mask[:, 1:].flatten().bool()]


def fit(model: torch.nn.Module, batches: Sequence[Batch], loss_of: Callable[[Batch], torch.Tensor], lr: float) -> None:
    """One pass over the batches with AdamW, a short warm-up and a cosine decay to zero."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, len(batches) // 20)
    for step, batch in enumerate(batches):
        scale = min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * step / len(batches))))
        optimizer.param_groups[0]["lr"] = lr * scale
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"  step {step}/{len(batches)}  loss {loss.item():.4f}", flush=True)
    model.eval()


@torch.no_grad()
def perplexity(model: GPT2LMHeadModel, tokenizer: GPT2Tokenizer, texts: Iterable[str]) -> float:
    """Per token, over whole reviews with the end tokens around them."""
    losses = []
    for text in texts:
        ids = torch.tensor([tokenizer(END + text + END).input_ids[:POSITIONS]])
        losses.append(next_token_loss(model, ids, torch.ones_like(ids)))
    return torch.cat(losses).mean().exp().item()


@torch.no_grad()
def positive_probability(
    model: DistilBertForSequenceClassification, tokenizer: BertTokenizer, texts: Sequence[str]
) -> torch.Tensor:
    """The classifier's probability that each text is positive."""
    parts = []
    for start in range(0, len(texts), 200):
        inputs = tokenizer(list(texts[start : start + 200]), padding=True, truncation=True, return_tensors="pt")
        logits = model(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask).logits
        parts.append(logits.softmax(-1)[:, model.config.label2id["POSITIVE"]])
    return torch.cat(parts)


def complete(
    model: GPT2LMHeadModel, tokenizer: GPT2Tokenizer, prompt: str, count: int, max_new_tokens: int, seed: int
) -> tuple[list[str], list[int]]:
    """Completions at temperature 1, with their lengths in tokens, the end token counted."""
    torch.manual_seed(seed)
    ids = tokenizer(prompt, return_tensors="pt").input_ids.repeat(count, 1)
    out = model.generate(ids, do_sample=True, top_k=0, max_new_tokens=max_new_tokens)[:, ids.shape[1] :]
    ended = (out == tokenizer.eos_token_id).int()
    lengths = ((ended.cumsum(-1) - ended) == 0).sum(-1).tolist()
    return tokenizer.batch_decode(out, skip_special_tokens=True), lengths


def save(model: torch.nn.Module, tokenizer: GPT2Tokenizer | BertTokenizer, folder: Path) -> None:
    """Write an ordinary Hugging Face folder with half-precision weights."""
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def evaluate(out: Path, recipe: Recipe, seed: int) -> dict[str, float | list[str]]:
    """Measure the two saved folders, loaded as any other model is, on reviews they have not read."""
    policy = AutoModelForCausalLM.from_pretrained(out / "policy", dtype=torch.float32)
    policy_tokenizer = AutoTokenizer.from_pretrained(out / "policy")
    sentiment = AutoModelForSequenceClassification.from_pretrained(out / "sentiment", dtype=torch.float32)
    sentiment_tokenizer = AutoTokenizer.from_pretrained(out / "sentiment")
    fresh = reviews(recipe.held_out, seed + 1)
    truth = torch.tensor([review.positive for review in fresh])
    rng = random.Random(seed)

    def accuracy(texts: list[str]) -> float:
        return ((positive_probability(sentiment, sentiment_tokenizer, texts) > 0.5) == truth).float().mean().item()

    completions, lengths = complete(policy, policy_tokenizer, PROMPT, recipe.samples, 28, seed)
    negative = 1 - positive_probability(sentiment, sentiment_tokenizer, [PROMPT + text for text in completions])
    return {
        "policy_parameters": sum(weights.numel() for weights in policy.parameters()),
        "sentiment_parameters": sum(weights.numel() for weights in sentiment.parameters()),
        "perplexity": perplexity(policy, policy_tokenizer, [review.text for review in fresh[:500]]),
        "accuracy": accuracy([review.text for review in fresh]),
        "accuracy_cut": accuracy([cut(review.text, rng) for review in fresh]),
        "negative_mean": negative.mean().item(),
        "length_mean": sum(lengths) / len(lengths),
        "distinct_share": len(set(completions)) / len(completions),
        "megabytes": sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) / 1e6,
        "samples": [PROMPT + text for text in completions[:8]],
    }


def build(out: Path, seed: int, recipe: Recipe) -> dict[str, float | list[str]]:
    """Make both folders under `out` and measure them."""
    print("the language model")
    save(*train_policy(recipe, seed), out / "policy")
    print("the classifier")
    save(*train_sentiment(recipe, seed), out / "sentiment")
    return evaluate(out, recipe, seed)


def main() -> None:
    """Build with the given seed and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE, help="where the folders policy and sentiment go")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.perf_counter()
    report = build(args.out, args.seed, Recipe())
    for name, value in report.items():
        print(f"{name:22}", "\n  " + "\n  ".join(value) if isinstance(value, list) else f"{value:.4g}")
    print(f"{'minutes':22} {(time.perf_counter() - start) / 60:.1f}")


if __name__ == "__main__":
    main()
