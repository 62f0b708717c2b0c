"""A seeded generator of film reviews, each with its verdict.

A review is an opening, one to three sentences that develop it (some of which only make sense after the one before) and often a
closing. Three kinds: plain; with a concession; mixed, where the opening could go either way and the review must decide.
Every review says its verdict in so many words at least once, and never the opposite one.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokencredit.demo import phrases
from tokencredit.demo.aspects import ASPECTS, GENRES, LEADS, SITUATIONS, THEMES, Aspect

POSITIVE_SHARE = 0.75
_PRONOUNS = {
    "he": {"his": "his", "him": "him", "s": "s"},
    "she": {"his": "her", "him": "her", "s": "s"},
    "they": {"his": "their", "him": "them", "s": ""},
}
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_ARTICLE = re.compile(r"\ba~ (\w)")


@dataclass(frozen=True)
class Review:
    """A review's text and its verdict."""

    text: str
    positive: bool


def fill(template: str, rng: random.Random, slots: dict[str, str]) -> str:
    """Expand `[x|y]` choices, then `{name}` slots, then `a~` articles."""
    while choice := _CHOICE.search(template):
        template = template[: choice.start()] + rng.choice(choice[1].split("|")) + template[choice.end() :]
    text = template.format_map(slots)
    text = _ARTICLE.sub(lambda match: ("an " if match[1].lower() in "aeioh" else "a ") + match[1], text)
    return re.sub(" {2,}", " ", text)


def sentence(clause: str) -> str:
    """Give a clause its capital letter and its full stop."""
    return clause[0].upper() + clause[1:] + "."


@dataclass
class _Writer:
    """One review in the making: its verdict, its kind of film, and the parts of the film not yet spoken of."""

    rng: random.Random
    positive: bool
    slots: dict[str, str] = field(default_factory=dict)
    fresh: list[Aspect] = field(default_factory=list)
    topic: Aspect | None = None  # the part last judged in line with the verdict: the next sentence may give the reason
    decided: bool = False  # the verdict on the whole film has been said

    def __post_init__(self) -> None:
        genre = self.rng.choice(GENRES)
        self.genre = genre
        self.fresh = [*ASPECTS, *genre.aspects]
        self.rng.shuffle(self.fresh)
        self.slots = {"film": self.rng.choice(phrases.FILM_WORDS), "genre": genre.name, "genres": genre.plural}

    def say(self, templates: Sequence[str] | str) -> str:
        """Fill one of the templates, taking parts of the film that have not been spoken of."""
        template = templates if isinstance(templates, str) else self.rng.choice(templates)
        self.topic = None
        for key in "ABOP":
            if re.search(rf"{{{key}[_}}]", template):
                self._take(key)
        return fill(template, self.rng, self.slots)

    def _take(self, key: str) -> None:
        aspect = self.fresh.pop()
        good = self.positive == (key in "AB")
        first, second = self.rng.sample(aspect.good if good else aspect.bad, 2)
        bare = f"{first} {aspect.name}"
        self.slots |= {
            key: f"the {aspect.name}",
            f"{key}_adj": first,
            f"{key}_adj2": second,
            f"{key}_was": "were" if aspect.noun == "plural" else "was",
            f"{key}_bare": bare,
            f"{key}_some": f"a~ {bare}" if aspect.noun == "count" else bare,
        }
        if key in "AB":
            self.topic = aspect

    def opening(self) -> str:
        """The first sentence."""
        kinds = (self._judgement, self._mixed, self._feeling, self._verb, self._theme, self._part_first)
        return self.rng.choices(kinds, weights=(58, 16, 9, 8, 4, 5))[0]()

    def _subject(self) -> str:
        return self.rng.choice(phrases.SUBJECTS) + " was " + self.rng.choice(phrases.ADVERBS)

    def _judgement(self) -> str:
        self.decided = True
        adjectives = phrases.FILM_ADJECTIVES[self.positive]
        kind = self.rng.random()
        if kind < 0.45:
            predicate = self.rng.choice(adjectives)
        elif kind < 0.6:
            predicate = " and ".join(self.rng.sample(adjectives, 2))
        else:
            predicate = self.rng.choice(phrases.PREDICATES[self.positive])
        tail = self.rng.choice(phrases.TAILS[self.positive]) if self.rng.random() < 0.7 else ""
        return self.say(self._subject() + predicate + tail)

    def _mixed(self) -> str:
        mixed, turn = self.rng.choice(phrases.MIXED[self.positive]), self.rng.choice(phrases.TURNS[self.positive])
        if self.rng.random() < 0.5:
            self.decided = True
            return self.say(f"{self._subject()}{mixed}, {turn}")
        return self.say(f"{self._subject()}{mixed}, and {{O}} {{O_was}} {{O_adj}}")

    def _feeling(self) -> str:
        self.decided = True
        tail = self.rng.choice(("", " because {A} {A_was} so {A_adj}", ", and {A} {A_was} {A_adj}"))
        return self.say(phrases.FEELINGS[self.positive] + " this {film}" + tail)

    def _verb(self) -> str:
        self.decided = True
        tail = self.rng.choice(("", ", and {A} {A_was} {A_adj}", " with its {A_bare}"))
        return self.say(
            self.rng.choice(("this {film} ", "the {film} ")) + self.rng.choice(phrases.VERBS[self.positive]) + tail
        )

    def _theme(self) -> str:
        care = (
            ("it handled it with [care|wit|love]",) if self.positive else ("it had nothing [new|true] to say about it",)
        )
        joint = ", and " if self.positive else ", but "
        return self.say(self._subject() + "about " + self.rng.choice(THEMES) + joint + care[0])

    def _part_first(self) -> str:
        return self.say(phrases.ASPECT_SENTENCES[self.positive])

    def middle(self) -> list[str]:
        """One sentence, or two of which the second leans on the first."""
        if self.topic and self.rng.random() < 0.5:
            return [self._reason(self.topic)]
        kind = self.rng.choices(("part", "concession", "plot", "genre"), weights=(45, 25, 15, 15))[0]
        if kind == "part":
            said = self.say(phrases.ASPECT_SENTENCES[self.positive])
            return [said, self._reason(self.topic)] if self.topic and self.rng.random() < 0.6 else [said]
        if kind == "concession":
            return [self.say(phrases.CONCESSIONS[self.positive])]
        if kind == "plot":
            return self._plot()
        remarks = self.genre.good if self.positive else self.genre.bad
        return [self.say("As a~ {genre}, " + self.rng.choice(remarks))]

    def _reason(self, aspect: Aspect) -> str:
        return self.say(aspect.good_why if self.positive else aspect.bad_why)

    def _plot(self) -> list[str]:
        lead, pronoun = self.rng.choice(LEADS)
        self.slots |= _PRONOUNS[pronoun] | {"lead": lead}
        self.slots["situation"] = self.say(SITUATIONS)
        return [self.say(phrases.PLOTS), self.say(phrases.LEAD_REMARKS[self.positive])]

    def closing(self) -> str:
        """The last word."""
        self.decided = True
        return self.say(phrases.CLOSINGS[self.positive])


def review(rng: random.Random, positive_share: float = POSITIVE_SHARE) -> Review:
    """Draw one review; it is positive with probability `positive_share`."""
    writer = _Writer(rng, positive=rng.random() < positive_share)
    clauses = [writer.opening()]
    for _ in range(rng.choices((1, 2, 3), weights=(60, 30, 10))[0]):
        clauses += writer.middle()
    if not writer.decided or rng.random() < 0.35:
        clauses.append(writer.closing())
    return Review(" ".join(sentence(clause) for clause in clauses), writer.positive)


def reviews(count: int, seed: int, positive_share: float = POSITIVE_SHARE) -> list[Review]:
    """Draw `count` reviews from a generator with this seed."""
    rng = random.Random(seed)
    return [review(rng, positive_share) for _ in range(count)]
