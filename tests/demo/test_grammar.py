import random
import re

import pytest

from demo import phrases
from demo.aspects import ASPECTS
from demo.genres import GENRES
from demo.grammar import POSITIVE_SHARE, reviews
from demo.notation import fill

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def drawn():
    return reviews(6_000, seed=11)


def pattern(template: str) -> str:
    """A template as a regular expression: its choices become groups, its slots any text."""
    parts = re.split(r"(\[|\]|\||\{\w+\}|a~)", template)
    table = {"[": "(?:", "]": ")", "|": "|", "a~": "an?"}
    escaped = (table.get(part) or ("[^.]+?" if part.startswith("{") else re.escape(part)) for part in parts)
    return "".join(escaped).replace(r"\ ", " *")  # an empty choice takes its space with it


def verdict(positive: bool) -> re.Pattern[str]:
    """Whatever says outright that the whole film was good, or that it was bad."""
    adjectives = "|".join(phrases.FILM_ADJECTIVES[positive])
    subject = "(?:This|The) (?:movie|film|" + "|".join(genre.name for genre in GENRES) + ")"
    said = [f"^{subject} was (?:really |truly |genuinely |simply |so )?(?:{adjectives})\\b"]
    said += [f"^{subject} was (?:really |truly |genuinely |simply )?{pattern(p)}" for p in phrases.PREDICATES[positive]]
    said += [pattern(turn) for turn in phrases.TURNS[positive]]
    said += [pattern(opening) for opening in phrases.OPENINGS[positive] if "{adj}" not in opening]
    said += [f"I have (?:never|rarely|seldom) seen a (?:movie|film) so (?:{adjectives})\\b"]
    said += [f"(?:^|[.] ){pattern(closing)}[.]" for closing in phrases.CLOSINGS[positive]]
    said += [f"(?:^|[.] ){pattern(phrases.CLOSINGS_DESPITE[positive])}[.]"]
    return re.compile("|".join(said), re.IGNORECASE)


def test_the_same_seed_gives_the_same_reviews():
    assert reviews(50, seed=3) == reviews(50, seed=3)
    assert reviews(50, seed=3) != reviews(50, seed=4)


def test_three_in_four_reviews_are_positive_also_after_the_default_prompt(drawn):
    assert sum(r.positive for r in drawn) / len(drawn) == pytest.approx(POSITIVE_SHARE, abs=0.015)
    prompted = [r for r in drawn if r.text.startswith("This movie was really ")]
    assert len(prompted) > 0.1 * len(drawn)
    assert sum(r.positive for r in prompted) / len(prompted) == pytest.approx(POSITIVE_SHARE, abs=0.03)


@pytest.mark.proof
def test_every_review_says_its_verdict_and_never_the_other(drawn):
    praise, blame = verdict(True), verdict(False)
    for r in drawn[:2_000]:
        own, other = (praise, blame) if r.positive else (blame, praise)
        assert own.search(r.text), r.text
        assert not other.search(r.text), r.text


def test_the_words_for_the_whole_film_are_never_shared():
    assert not set(phrases.FILM_ADJECTIVES[True]) & set(phrases.FILM_ADJECTIVES[False])
    for part in ASPECTS + tuple(part for genre in GENRES for part in genre.aspects):
        assert not set(part.good) & set(part.bad), part.name


def test_reviews_are_clean_english(drawn):
    plural = "|".join(part.name for part in ASPECTS if part.noun == "plural")
    for r in drawn:
        assert not re.search(r"[\[\]{}|~_]|  |\s[.,:]|[.,:]{2}", r.text), r.text
        assert r.text == r.text.strip()
        assert r.text.endswith(".")
        assert r.text.isascii()
        sentences = r.text.rstrip(".").split(". ")
        assert len(set(sentences)) == len(sentences), r.text
        assert all(sentence[0].isupper() for sentence in sentences), r.text
        assert not re.search(rf"\bthe (?:{plural}) was\b", r.text, re.IGNORECASE), r.text
        for article, word in re.findall(r"\b([Aa]n?) (\w+)", r.text):
            vowel = word[0].lower() in "aeiou" or word.startswith(("honest", "hour"))
            assert (article.lower() == "an") == vowel, r.text


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("a~ {x} day", "an honest day"),
        ("a~ small {x} day", "a small honest day"),
        ("A~ {x} day", "An honest day"),
        ("one [|] day", "one day"),
        ("[[a|a]b|ab]", "ab"),
    ],
)
def test_fill(template, text):
    assert fill(template, random.Random(0), {"x": "honest"}) == text
