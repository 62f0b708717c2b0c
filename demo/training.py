"""Train the two built-in models and their tokenizers."""

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    DistilBertTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Tokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from demo.corpus import graded_texts, rows_of_reviews
from demo.grammar import Review

END = "<|endoftext|>"
POSITIONS = 128
HEAD_WIDTH = 32
Row = TypeVar("Row")
Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Size:
    """Shape of a transformer and its training: `readings` epochs over the reviews, `batch` rows per step."""

    width: int
    layers: int
    readings: int
    batch: int
    lr: float


POLICIES = {
    "tiny": Size(width=64, layers=2, readings=1, batch=8, lr=2e-3),
    "small": Size(width=128, layers=2, readings=1, batch=8, lr=2e-3),
    "medium": Size(width=224, layers=2, readings=1, batch=8, lr=2e-3),
    "large": Size(width=320, layers=4, readings=1, batch=8, lr=1e-3),
}
"""Sizes of policies; the built-in one is medium."""
SENTIMENT = Size(width=96, layers=2, readings=2, batch=64, lr=1e-3)


def policy_tokenizer(texts: Sequence[str], vocabulary: int = 2_048) -> GPT2Tokenizer:
    """Train a byte-level BPE tokenizer; `<|endoftext|>` is BOS, EOS and padding token, as in GPT-2."""
    untrained = GPT2Tokenizer(pad_token=END)
    tokenizer: GPT2Tokenizer = untrained.train_new_from_iterator(texts, vocabulary, show_progress=False)
    tokenizer.model_max_length = POSITIONS
    return tokenizer


def train_policy(texts: Sequence[str], tokenizer: GPT2Tokenizer, size: Size, seed: int) -> GPT2LMHeadModel:
    """Train a GPT-2 on the texts."""
    model, end = gpt2(tokenizer, size, POSITIONS, seed), tokenizer.eos_token_id
    rng = random.Random(seed)
    ids = tokenizer(list(texts)).input_ids
    rows = [row for _ in range(size.readings) for row in rows_of_reviews(ids, end, rng, longest=POSITIONS)]
    fit_language_model(model, rows, size, rng)
    return model


def gpt2(tokenizer: PreTrainedTokenizerBase, size: Size, positions: int, seed: int) -> GPT2LMHeadModel:
    """A GPT-2 with random weights."""
    torch.manual_seed(seed)
    end = tokenizer.eos_token_id
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=positions,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.width // HEAD_WIDTH,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def fit_language_model(model: GPT2LMHeadModel, rows: Sequence[list[int]], size: Size, rng: random.Random) -> None:
    """Train a language model on rows of token ids for one epoch."""
    end = model.config.eos_token_id
    assert isinstance(end, int)

    def loss(batch: list[list[int]]) -> torch.Tensor:
        return token_losses(model, *padded(batch, end)).mean()

    fit(model, batches_of_like_length(rows, len, size.batch, rng), loss, size.lr)


def token_losses(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Negative log-probability, in nats, of every non-padding token except the first of each row."""
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return losses[mask[:, 1:].flatten()]


def sentiment_tokenizer(texts: Sequence[str]) -> DistilBertTokenizer:
    """A lower-case WordPiece tokenizer with every word of the texts, and single characters for all other words.

    The library's own WordPiece trainer breaks ties at random, so two builds with the same seed would differ.
    """
    counts = Counter(piece for text in texts for piece in re.findall(r"\w+|[^\w\s]", text.lower()))
    words = sorted(counts, key=lambda word: (-counts[word], word))
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1) if not chr(code).isupper()]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters), *words]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    return DistilBertTokenizer(vocab=vocabulary, model_max_length=POSITIONS)


def distilbert(
    tokenizer: DistilBertTokenizer, labels: Sequence[str], size: Size, seed: int
) -> DistilBertForSequenceClassification:
    """A DistilBERT classifier with random weights."""
    torch.manual_seed(seed)
    config = DistilBertConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=POSITIONS,
        dim=size.width,
        hidden_dim=4 * size.width,
        n_layers=size.layers,
        n_heads=size.width // HEAD_WIDTH,
        pad_token_id=tokenizer.pad_token_id,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
    )
    return DistilBertForSequenceClassification(config)


def train_sentiment(
    drawn: Sequence[Review], tokenizer: DistilBertTokenizer, size: Size, seed: int
) -> DistilBertForSequenceClassification:
    """Train a DistilBERT to classify reviews as positive or negative."""
    model = distilbert(tokenizer, ["NEGATIVE", "POSITIVE"], size, seed)
    rng = random.Random(seed)
    # Each epoch truncates and corrupts the reviews anew.
    texts, positive = zip(*(text for _ in range(size.readings) for text in graded_texts(drawn, rng)), strict=True)
    rows = list(zip(tokenizer(list(texts), truncation=True).input_ids, positive, strict=True))

    def loss(batch: list[tuple[list[int], float]]) -> torch.Tensor:
        ids, mask = padded([row for row, _ in batch], tokenizer.pad_token_id)
        target = torch.tensor([[1 - share, share] for _, share in batch])
        return nn.functional.cross_entropy(model(input_ids=ids, attention_mask=mask).logits, target)

    fit(model, batches_of_like_length(rows, lambda row: len(row[0]), size.batch, rng), loss, size.lr)
    return model


def batches_of_like_length(
    rows: Sequence[Row], length: Callable[[Row], int], size: int, rng: random.Random
) -> list[list[Row]]:
    """Batches of rows of similar length, to reduce padding, in random order."""
    order = sorted(rows, key=lambda row: length(row) + rng.random())
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    rng.shuffle(batches)
    return batches


def padded(rows: Sequence[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and the bool padding mask (true at tokens), both `[batch, time]`."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return ids, torch.arange(width) < lengths[:, None]


def fit(model: torch.nn.Module, batches: Sequence[Batch], loss_of: Callable[[Batch], torch.Tensor], lr: float) -> None:
    """Train for one epoch over the batches with AdamW, a short warm-up and a cosine decay to zero."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    warmup = max(1, len(batches) // 20)
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = lr * min(
            (step + 1) / warmup, math.cos(math.pi / 2 * step / len(batches)) ** 2
        )
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 500 == 0:
            print(f"  batch {step} of {len(batches)}: loss {loss.item():.3f}", flush=True)
    model.eval()
