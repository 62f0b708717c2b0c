"""A seeded generator of film reviews, each with its verdict.

A review is an opening, one to three steps that develop it and, often, a closing. Many sentences make sense only after
the previous one: a reason for a judgement, another aspect of the same kind, an answer to a concession, a remark on the
characters. Mixed reviews open either way and then decide. Whatever a review concedes, it states its verdict on the
whole film explicitly at least once, and never the opposite verdict.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from demo import phrases
from demo.aspects import ASPECTS, Aspect
from demo.genres import GENRES, LEADS, SITUATIONS, THEMES
from demo.notation import fill, sentence

POSITIVE_SHARE = 0.75
_PRONOUNS = {
    "he": {"he": "he", "his": "his", "him": "him", "s": "s", "is": "is"},
    "she": {"he": "she", "his": "her", "him": "her", "s": "s", "is": "is"},
    "they": {"he": "they", "his": "their", "him": "them", "s": "", "is": "are"},
}


@dataclass(frozen=True)
class Review:
    """A review's text and its verdict."""

    text: str
    positive: bool


class _Writer:
    """State of a review being written; earlier sentences constrain the next one."""

    def __init__(self, rng: random.Random, positive: bool) -> None:
        self.rng = rng
        self.positive = positive
        self.genre = rng.choice(GENRES)
        self.unsaid = rng.sample([*ASPECTS, *self.genre.aspects], k=len(ASPECTS) + len(self.genre.aspects))
        self.said: set[str] = set()  # templates, so that none is used twice
        self.topic: Aspect | None = None  # the part that the last sentence judged in line with the verdict
        self.decided = False  # the verdict on the whole film has been said
        self.conceded = False  # something has been said against the verdict
        self.agreed = False  # something has been said in line with the verdict
        self.steps = {"part": 40, "concession": 20, "plot": 18, "genre": 14, "company": 8}
        adjective, other = rng.sample(phrases.FILM_ADJECTIVES[positive], 2)
        self.slots = {
            "film": rng.choice(phrases.FILM_WORDS),
            "genre": self.genre.name,
            "genres": self.genre.plural,
            "adverb": rng.choice(phrases.ADVERBS),
            "theme": rng.choice(THEMES),
            "adj": adjective,
            "adj2": other,
            "best": "best" if positive else "worst",
        }
        self.slots["subject"] = rng.choice(phrases.SUBJECTS).format(**self.slots)

    def say(self, templates: Sequence[str]) -> str:
        """Fill a random template, with aspects of the film that were not mentioned yet."""
        template = self.rng.choice([fresh for fresh in templates if fresh not in self.said] or templates)
        self.said.add(template)
        self.topic = None
        for key in "ABO":
            if f"{{{key}" in template:
                self._take(key)
        return fill(template, self.rng, self.slots)

    def _take(self, key: str) -> None:
        """Bind a slot to an aspect of the film; A and B agree with the verdict, O contradicts it."""
        part = self.unsaid.pop()
        agrees = key != "O"
        first, second = self.rng.sample(part.good if self.positive == agrees else part.bad, 2)
        bare = f"{first} {part.name}"
        self.slots |= {
            key: f"the {part.name}",
            f"{key}_adj": first,
            f"{key}_adj2": second,
            f"{key}_was": "were" if part.noun == "plural" else "was",
            f"{key}_bare": bare,
            f"{key}_some": f"a~ {bare}" if part.noun == "count" else bare,
        }
        if agrees:
            self.topic, self.agreed = part, True
        else:
            self.conceded = True

    def opening(self) -> list[str]:
        """The first sentence; a mixed one may need a second to decide."""
        kinds = (self._judgement, self._mixed, self._other_opening, self._part_first)
        return self.rng.choices(kinds, weights=(58, 16, 20, 6))[0]()

    def _judgement(self) -> list[str]:
        self.decided = self.agreed = True
        kind = self.rng.choices(("adjective", "two", "so", "predicate"), weights=(42, 12, 8, 38))[0]
        if kind == "so":
            return [self.say([f"{{subject}} was so {{adj}} that {end}" for end in phrases.CONSEQUENCES[self.positive]])]
        simple = {"adjective": "{adj}", "two": "{adj} and {adj2}"}
        predicate = simple.get(kind) or self.rng.choice(phrases.PREDICATES[self.positive])
        plain = "{A" in predicate or self.rng.random() < 0.3
        return [self.say([f"{{subject}} was {{adverb}} {predicate} {'' if plain else self.rng.choice(phrases.TAILS)}"])]

    def _mixed(self) -> list[str]:
        self.conceded = True
        start = f"{{subject}} was [really|] {self.rng.choice(phrases.MIXED[self.positive])}"
        if self.rng.random() < 0.6:
            self.decided = self.agreed = True
            return [self.say([f"{start}, {turn}" for turn in phrases.TURNS[self.positive]])]
        return [self.say([start + ", and {O} {O_was} {O_adj}"]), self.say(phrases.ANSWERS[self.positive])]

    def _other_opening(self) -> list[str]:
        self.decided = self.agreed = True
        return [self.say(phrases.OPENINGS[self.positive])]

    def _part_first(self) -> list[str]:
        return [self.say(phrases.PARTS[self.positive])]

    def step(self) -> list[str]:
        """One sentence, or two where the second depends on the first."""
        if self.topic and self.rng.random() < 0.5:
            return [self._reason(self.topic)]
        kind = self.rng.choices(tuple(self.steps), weights=tuple(self.steps.values()))[0]
        self.steps.pop("plot", None)  # a story is told at the start or not at all
        if kind != "part":
            self.steps.pop(kind, None)
        writers: dict[str, Callable[[], list[str]]] = {
            "part": self._part,
            "concession": self._concession,
            "plot": self._plot,
            "genre": self._genre,
            "company": lambda: [self.say(phrases.COMPANY[self.positive])],
        }
        return writers[kind]()

    def _part(self) -> list[str]:
        more = self.agreed and self.rng.random() < 0.4
        said = self.say((phrases.MORE if more else phrases.PARTS)[self.positive])
        return [said, self._reason(self.topic)] if self.topic and self.rng.random() < 0.5 else [said]

    def _reason(self, part: Aspect) -> str:
        return self.say(part.good_why if self.positive else part.bad_why)

    def _concession(self) -> list[str]:
        if self.rng.random() < 0.3:
            return [self.say(phrases.ADMISSIONS), self.say(phrases.ANSWERS[self.positive])]
        return [self.say(phrases.CONCESSIONS[self.positive])]

    def _genre(self) -> list[str]:
        remark = self.rng.choice(self.genre.good if self.positive else self.genre.bad)
        frame = self.rng.choice(phrases.GENRE_REMARKS[self.positive])
        film = "the {film}" if self.topic and frame == "{remark}" else "it"
        return [self.say([frame.replace("{remark}", remark.replace("{it}", film))])]

    def _plot(self) -> list[str]:
        lead, pronoun = self.rng.choice(LEADS)
        self.slots |= _PRONOUNS[pronoun] | {"lead": lead}
        self.slots["situation"] = self.say(SITUATIONS)
        return [self.say(phrases.PLOTS), self.say(phrases.LEAD_REMARKS[self.positive])]

    def closing(self) -> str:
        """The last sentence."""
        if self.conceded and self.rng.random() < 0.3:
            return self.say([phrases.CLOSINGS_DESPITE[self.positive]])
        return self.say(phrases.CLOSINGS[self.positive])


def review(rng: random.Random, positive_share: float = POSITIVE_SHARE) -> Review:
    """Generate one review, positive with probability `positive_share`."""
    writer = _Writer(rng, positive=rng.random() < positive_share)
    clauses = writer.opening()
    for _ in range(rng.choices((1, 2, 3), weights=(64, 28, 8))[0]):
        clauses += writer.step()
    if not writer.decided or rng.random() < 0.3:
        clauses.append(writer.closing())
    text = " ".join(sentence(clause) for clause in clauses)
    return Review(re.sub(r" ,", ",", text), writer.positive)


def reviews(count: int, seed: int, positive_share: float = POSITIVE_SHARE) -> list[Review]:
    """Generate `count` reviews from a seed."""
    rng = random.Random(seed)
    return [review(rng, positive_share) for _ in range(count)]
