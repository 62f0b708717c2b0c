"""Ready-made reward functions.

Each factory here checks its settings and returns a reward function with the common signature
`f(prompts, completions, **columns)`, which returns one number per completion, or None where it does not apply. In a
configuration the settings are `kwargs`: `{function: count, kwargs: {text: "."}}`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pickle import UnpicklingError
from typing import Any

from safetensors import SafetensorError

from tokencredit.errors import ConfigError, importing
from tokencredit.text.rewards.texts import Text, Texts, plain

RewardFunction = Callable[..., Any]
"""`f(prompts, completions, **columns) -> list[float | None | list[float]]`, or the same as a coroutine function."""

WORD = re.compile(r"\w+(?:['’-]\w+)*")


def words(text: Text) -> list[str]:
    """Case-folded words: runs of letters and digits with inner apostrophes and hyphens, so "Don't!" is one word."""
    return WORD.findall(plain(text).casefold())


def distinct_share(completion: Text, n: int) -> float | None:
    """Distinct word n-grams as a share of all; None for fewer than `n` words."""
    items = words(completion)
    ngrams = list(zip(*(items[start:] for start in range(n)), strict=False))
    return len(set(ngrams)) / len(ngrams) if ngrams else None


def length(unit: str = "words") -> RewardFunction:
    """Length of the completion in `words`, `characters` or sampled `tokens`, including the end-of-sequence token."""
    parts: dict[str, Callable[[Text], Sequence[str]]] = {"words": words, "characters": plain}
    if unit not in (*parts, "tokens"):
        raise ConfigError(f"unit is {unit!r}; it must be one of words, characters, tokens")

    def length(prompts: Texts, completions: Texts, completion_ids: Any = None, **columns: Any) -> list[float]:
        if unit == "tokens":
            sampled = columns.get("completion_mask", [[1] * len(ids) for ids in completion_ids])
            return [float(sum(row)) for row in sampled]
        return [float(len(parts[unit](completion))) for completion in completions]

    return length


def count(text: str) -> RewardFunction:
    """Number of non-overlapping occurrences of `text` in the completion, case-sensitive."""
    if not isinstance(text, str) or not text:
        raise ConfigError(f"text is {text!r}; it must be a string of at least one character")

    def count(prompts: Texts, completions: Texts, **columns: Any) -> list[float]:
        return [float(plain(completion).count(text)) for completion in completions]

    return count


def regex(pattern: str) -> RewardFunction:
    """1 if Python's `re.search` finds the pattern in the completion, else 0.

    Flags are part of the pattern: `(?i)` ignores case, `(?s)` lets a dot match a newline.
    """
    try:
        compiled = re.compile(pattern)
    except (re.error, TypeError, OverflowError) as error:
        raise ConfigError(f"pattern is {pattern!r}, which is not a valid regular expression: {error}") from error

    def regex(prompts: Texts, completions: Texts, **columns: Any) -> list[float]:
        return [float(compiled.search(plain(completion)) is not None) for completion in completions]

    return regex


def lexicon_sentiment() -> RewardFunction:
    """VADER's compound score of the completion, from −1 (negative) to 1 (positive).

    Words have fixed scores, modified by negations, intensifiers, capitals and exclamation marks: Hutto and Gilbert
    2014, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media Text". English only.
    """
    with importing("lexicon_sentiment", "vaderSentiment", "tokencredit[lexicon]"):
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    analyzer = SentimentIntensityAnalyzer()

    def lexicon_sentiment(prompts: Texts, completions: Texts, **columns: Any) -> list[float]:
        return [analyzer.polarity_scores(plain(completion))["compound"] for completion in completions]

    return lexicon_sentiment


def repetition(n: int = 3) -> RewardFunction:
    """Share of the completion's word n-grams that repeat an earlier one: 1 − distinct / all.

    0 for a completion of fewer than `n` words. With a negative weight it is a penalty.
    """
    _require_positive(n)

    def repetition(prompts: Texts, completions: Texts, **columns: Any) -> list[float]:
        shares = [distinct_share(completion, n) for completion in completions]
        return [0.0 if share is None else 1 - share for share in shares]

    return repetition


def distinct(n: int = 2) -> RewardFunction:
    """Distinct-n within the completion: distinct word n-grams as a share of all.

    None for a completion of fewer than `n` words, so that short texts are not rewarded. Li et al. 2016 (arXiv
    1510.03055), section 5.
    """
    _require_positive(n)

    def distinct(prompts: Texts, completions: Texts, **columns: Any) -> list[float | None]:
        return [distinct_share(completion, n) for completion in completions]

    return distinct


def reference_fluency() -> RewardFunction:
    """Mean log-prob of the completion's tokens under the reference model, in nats per token: at most 0.

    It pulls towards the starting model's most likely, often dull, texts.
    """

    def reference_fluency(prompts: Texts, completions: Texts, ref_logprobs: Any, **columns: Any) -> list[float | None]:
        return [sum(row) / len(row) if row else None for row in ref_logprobs]

    return reference_fluency


def similarity(model: str = "sentence-transformers/all-MiniLM-L6-v2", batch_size: int = 64) -> RewardFunction:
    """Mean cosine similarity of the completion's sentence embedding to those of the rest of its batch: −1 to 1.

    With a negative weight it rewards completions that differ in meaning. The batch is that of one process; in a batch
    of one the similarity is None. `model` is a hub id or folder of Sentence Transformers.
    """
    with importing("similarity", "Sentence Transformers", "tokencredit[similarity]"):
        from sentence_transformers import SentenceTransformer
    try:
        encoder = SentenceTransformer(model, model_kwargs={"use_safetensors": True, "dtype": "float32"})
    except (OSError, ValueError, RuntimeError, SafetensorError, UnpicklingError) as error:
        raise ConfigError(f"cannot load a sentence embedding model from {model!r}: {error}") from error

    def similarity(prompts: Texts, completions: Texts, **columns: Any) -> list[float | None]:
        if len(completions) < 2:
            return [None] * len(completions)
        embeddings = encoder.encode(
            [plain(completion) for completion in completions],
            batch_size=batch_size,
            normalize_embeddings=True,
            convert_to_tensor=True,
            show_progress_bar=False,
        ).float()
        cosines = embeddings @ embeddings.T
        return ((cosines.sum(1) - cosines.diagonal()) / (len(completions) - 1)).tolist()

    return similarity


READY_MADE: dict[str, Callable[..., RewardFunction]] = {
    factory.__name__: factory
    for factory in (length, count, regex, lexicon_sentiment, repetition, distinct, reference_fluency, similarity)
}
"""Factories by their names in a configuration."""


def _require_positive(n: int) -> None:
    if not isinstance(n, int) or n < 1:
        raise ConfigError(f"n is {n!r}; it must be a whole number of at least 1")
