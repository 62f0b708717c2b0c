"""Template notation of the review phrases.

`[x|y]` is a choice (an empty alternative is allowed, and choices nest), `{name}` a slot and `a~` the article "a" or
"an".
"""

import random
import re
from collections.abc import Mapping

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_ARTICLE = re.compile(r"\b(a)~ (?=(\w+))", re.IGNORECASE)
_VOWEL_SOUND = re.compile(
    r"[aeiou]|honest|hour", re.IGNORECASE
)  # no phrase here has a "one" or a "useful" after its article


def lines(text: str) -> tuple[str, ...]:
    """The phrases of a block of text, one per line."""
    return tuple(line.strip() for line in text.strip().splitlines())


def words(text: str) -> tuple[str, ...]:
    """The words of a block of text."""
    return tuple(text.split())


def fill(template: str, rng: random.Random, slots: Mapping[str, str]) -> str:
    """Expand the choices of a template, then its slots, then its articles."""
    while choice := _CHOICE.search(template):
        template = template[: choice.start()] + rng.choice(choice[1].split("|")) + template[choice.end() :]
    text = " ".join(template.format_map(slots).split())
    return _ARTICLE.sub(lambda match: match[1] + ("n " if _VOWEL_SOUND.match(match[2]) else " "), text)


def sentence(clause: str) -> str:
    """Capitalise a clause and add a full stop."""
    return clause[0].upper() + clause[1:] + "."
