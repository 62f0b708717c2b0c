"""Evaluate the two built models on held-out reviews."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import (
    AutoTokenizer,
    DistilBertForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from demo.corpus import babble, cut
from demo.grammar import reviews
from demo.training import token_losses

PROMPT = "This movie was really"
NEW_TOKENS = 28
Model = TypeVar("Model", bound=PreTrainedModel)


def load(folder: Path, model_class: type[Model]) -> tuple[Model, PreTrainedTokenizerBase]:
    """Load a model in float32, in evaluation mode, and its tokenizer."""
    model = model_class.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def perplexity(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> float:
    """Perplexity per token of whole reviews between two end tokens."""
    end, losses = str(tokenizer.eos_token), []
    for text in texts:
        ids = tokenizer(end + text + end, return_tensors="pt", truncation=True).input_ids
        losses.append(token_losses(model, ids, torch.ones_like(ids, dtype=torch.bool)))
    return torch.cat(losses).mean().exp().item()


@torch.no_grad()
def negative_probability(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> torch.Tensor:
    """The classifier's probability that each text is negative, `[texts]`."""
    labels = model.config.label2id
    assert labels is not None  # a classifier's
    parts = []
    for start in range(0, len(texts), 250):
        inputs = tokenizer(list(texts[start : start + 250]), padding=True, truncation=True, return_tensors="pt")
        parts.append(model(**inputs).logits.softmax(-1)[:, int(labels["NEGATIVE"])])
    return torch.cat(parts)


def complete(
    model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerBase, prompt: str, count: int, seed: int
) -> tuple[list[str], torch.Tensor]:
    """Completions of a prompt at temperature 1, and their lengths in tokens, including the end token."""
    torch.manual_seed(seed)
    inputs = tokenizer([prompt] * count, return_tensors="pt")
    generate: Any = model.generate  # type: ignore[misc]  # Transformers' annotation takes a second self
    rows = generate(**inputs, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=NEW_TOKENS)
    rows = rows[:, inputs.input_ids.shape[1] :]
    ended = (rows == tokenizer.eos_token_id).int()
    lengths = (ended.cumsum(-1) - ended == 0).sum(-1)
    return tokenizer.batch_decode(rows, skip_special_tokens=True), lengths


def measure(folders: Mapping[str, Path], seed: int, held_out: int) -> tuple[dict[str, float], list[str]]:
    """Metrics of the folders `policy` and `sentiment`, and samples for the default prompt."""
    policy = load(folders["policy"], GPT2LMHeadModel)
    sentiment = load(folders["sentiment"], DistilBertForSequenceClassification)
    fresh = reviews(held_out, seed)
    texts = [review.text for review in fresh]
    blame = torch.tensor([not review.positive for review in fresh])
    rng = random.Random(seed)
    words = " ".join(texts).split()
    meaningless = [babble(text, words, rng) for text in texts]

    def accuracy(texts: list[str]) -> float:
        return ((negative_probability(*sentiment, texts) > 0.5) == blame).float().mean().item()

    completions, lengths = complete(*policy, PROMPT, count=held_out // 4, seed=seed)
    samples = [PROMPT + completion for completion in completions]
    figures = {
        "policy parameters": float(policy[0].num_parameters()),
        "sentiment parameters": float(sentiment[0].num_parameters()),
        "megabytes, both folders": sum(
            file.stat().st_size for folder in folders.values() for file in folder.iterdir() if file.suffix != ".md"
        )
        / 1e6,
        "perplexity a token, held-out": perplexity(*policy, texts[: held_out // 4]),
        "accuracy, whole reviews": accuracy(texts),
        "accuracy, reviews cut at a random place": accuracy([cut(text, rng) for text in texts]),
        "mean P(NEGATIVE) of babble": negative_probability(*sentiment, meaningless).mean().item(),
        "mean P(NEGATIVE) of samples": negative_probability(*sentiment, samples).mean().item(),
        f"mean length of samples, of {NEW_TOKENS} tokens": lengths.float().mean().item(),
        "distinct share of samples": len(set(samples)) / len(samples),
    }
    return figures, samples
