"""Training data of the built-in models, from generated reviews."""

import random
from collections.abc import Iterator, Sequence

from demo.grammar import POSITIVE_SHARE, Review

SURE = (
    0.98  # target for a whole review; below 1 so that the classifier's log-odds, the slope of the reward, stay finite
)


def rows_of_reviews(reviews: Sequence[list[int]], end: int, rng: random.Random, longest: int) -> list[list[int]]:
    """Rows of token ids for the language model: a review between two `end` tokens.

    One row in four lacks the first `end`, so that prompts work with and without it; one in eight holds four reviews,
    so that late positions are trained too.
    """
    rows, start = [], 0
    while start < len(reviews):
        count = 4 if rng.random() < 0.125 else 1
        row = [token for review in reviews[start : start + count] for token in (*review, end)]
        rows.append(([] if rng.random() < 0.25 else [end]) + row)
        start += count
    return [row[:longest] for row in rows]


def graded_texts(drawn: Sequence[Review], rng: random.Random) -> Iterator[tuple[str, float]]:
    """Texts for the classifier, each with its target probability of being positive.

    A truncated review keeps its verdict, so that the classifier learns how much an unfinished text has already decided.
    Babble carries no verdict, so its target is the share of positive reviews; a review that turns into babble is
    half-way between. A policy therefore gains nothing from babble.
    """
    vocabulary = sorted({word for review in drawn[:2000] for word in review.text.split()})
    for review in drawn:
        verdict = SURE if review.positive else 1 - SURE
        kind = rng.random()
        if kind < 0.28:
            yield review.text, verdict
        elif kind < 0.62:
            yield cut(review.text, rng), verdict
        elif kind < 0.68:
            yield tail(review.text, rng), verdict
        elif kind < 0.84:
            yield babble(review.text, vocabulary, rng), POSITIVE_SHARE
        else:
            derailed = cut(review.text, rng) + " " + babble(review.text, vocabulary, rng)
            yield derailed, (verdict + POSITIVE_SHARE) / 2


def cut(text: str, rng: random.Random) -> str:
    """Truncate the text after a random word or, one time in four, a random character."""
    if rng.random() < 0.25:
        return text[: rng.randint(1, len(text))]
    words = text.split()
    return " ".join(words[: rng.randint(1, len(words))])


def tail(text: str, rng: random.Random) -> str:
    """The text from a random sentence on."""
    sentences = text.split(". ")
    return ". ".join(sentences[rng.randrange(len(sentences)) :])


def babble(text: str, vocabulary: Sequence[str], rng: random.Random) -> str:
    """Meaningless text: shuffled words, a repeated phrase, random words or random letters."""
    words = text.split()
    kind = rng.randrange(4)
    if kind == 0:
        rng.shuffle(words)
    elif kind == 1:
        start = rng.randrange(len(words))
        words = words[start : start + rng.randint(1, 3)] * rng.randint(3, 12)
    elif kind == 2:
        words = rng.choices(vocabulary, k=rng.randint(3, 40))
    else:
        words = [
            "".join(rng.choices("abcdefghijklmnopqrstuvwxyz.,", k=rng.randint(1, 9))) for _ in range(rng.randint(1, 30))
        ]
    return " ".join(words)
