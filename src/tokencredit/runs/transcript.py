"""Episodes of several turns in samples.jsonl: acted tokens, and who said what in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from tokencredit.runs.jsonl import ASSISTANT, ENDINGS, PER_TOKEN, PROBLEMS
from tokencredit.runs.summary import shortened
from tokencredit.runs.untrusted import visible, visible_lines

PHRASE = 3
"""Words per phrase, for counting repetitions."""
SIGN = "›"
"""Stands between a speaker's name and the text."""


class Speech(NamedTuple):
    """What one speaker said at once."""

    role: str
    text: str
    turn: Mapping[str, Any]
    """The turn's record, with its reward and problems."""
    start: int
    """Number of acted tokens before it."""
    end: int
    """Number of acted tokens up to its end."""


class Line(NamedTuple):
    """A line of a transcript, safe on a terminal."""

    text: str
    acted: bool
    """True for what the policy wrote."""


def of_iteration(samples: Sequence[Mapping[str, Any]], place: int) -> list[Mapping[str, Any]]:
    """The records of one iteration, that of the record at this place; none of none."""
    return [sample for sample in samples if sample["iteration"] == samples[place]["iteration"]]


def acted(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """A record whose lists per token hold acted tokens only, in order; unchanged if it is not of an episode."""
    if "mask" not in sample:
        return sample
    kept = [place for place, chosen in enumerate(sample["mask"]) if chosen]
    return {**sample, **{name: [sample[name][place] for place in kept] for name in PER_TOKEN if name in sample}}


def speeches(sample: Mapping[str, Any]) -> Iterator[Speech]:
    """What was said after an episode's prompt, in order, without empty observations."""
    before = [0, *accumulate(sample["mask"])]
    for turn in sample["turns"]:
        start, end = turn["start"], turn["end"]
        if turn["role"] == ASSISTANT or start < end:
            yield Speech(turn["role"], "".join(sample["tokens"][start:end]), turn, before[start], before[end])


def written(sample: Mapping[str, Any]) -> list[str]:
    """The texts of the policy: one per turn of an episode, or the completion."""
    if "turns" not in sample:
        return [sample["completion"]]
    return [speech.text for speech in speeches(sample) if speech.role == ASSISTANT]


def phrase_shares(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Share of the completions that contain a phrase of the policy's, by phrase; it is whole within one turn."""
    counts = Counter(phrase for sample in samples for phrase in set().union(*map(_phrases, written(sample))))
    return {phrase: count / len(samples) for phrase, count in counts.items()}


def _phrases(text: str) -> set[str]:
    parts = text.split()
    return {" ".join(parts[i : i + PHRASE]) for i in range(len(parts) - PHRASE + 1)}


def asked(sample: Mapping[str, Any], most: int | None = None) -> list[tuple[str, str]]:
    """Speaker and text of a sample's prompt: `prompt`, or of a conversation each role, without its template's markup.

    With `most` the text is shortened, and only a conversation's last message and what comes after it is shown.
    """
    spoken = [(visible(x["role"]).replace(SIGN, " "), x["content"]) for x in sample.get("messages", ())] or [
        ("prompt", sample["prompt"])
    ]
    if most is None:
        return spoken
    last = max((place for place, (role, _) in enumerate(spoken) if role == "user"), default=len(spoken) - 1)
    return [(role, shortened(text, most)) for role, text in spoken[last:]]


def conversation(sample: Mapping[str, Any], most: int | None = None) -> str:
    """A sample's prompt as text: as it is, or of a conversation a line `role › text` per message, up to the answer's.

    The sign after a role is escaped in texts, so that none can pass for a speaker.
    """
    if "messages" not in sample:
        return str(sample["prompt"])
    spoken = [(role, text.replace(SIGN, "\\u203a")) for role, text in asked(sample, most)]
    unfinished = spoken[-1][0] == ASSISTANT
    lines = [f"{role} {SIGN} {text}" for role, text in spoken]
    return "\n".join(lines if unfinished else [*lines, f"{ASSISTANT} {SIGN} "])


def transcript(sample: Mapping[str, Any], most: int | None = None) -> Iterator[Line]:
    """Lines of an episode: `prompt › …`, `assistant › …`, `environment › …`, problems, and how it ended.

    The first line of a speech has the speaker's name, and all others are indented. The sign after the name is escaped
    in texts, so that none can pass for a speaker, wherever a terminal wraps it.

    Args:
        sample: a record with `tokens`, `mask` and `turns`; `prompt`, `after` and `ending` are shown if they are there.
        most: shows the prompt, of a conversation its last user message, and each observation in one line of at most
            this many characters; None shows them whole.
    """
    if "prompt" in sample:
        for role, text in asked(sample, most):
            yield from _spoken(role, text, acted=False)
    for role, text, turn, *_ in speeches(sample):
        spoken = role == ASSISTANT
        yield from _spoken(role, text if spoken or most is None else shortened(text, most), acted=spoken)
        for problem in dict.fromkeys(turn.get("problems", ())):
            yield Line(f"  ({PROBLEMS[problem]})", acted=False)
    if "after" in sample:
        after = sample["after"]
        yield from _spoken("after the end", after if most is None else shortened(after, most), acted=False)
    if "ending" in sample:
        yield Line(f"  ({ENDINGS[sample['ending']]})", acted=False)


def _spoken(role: str, text: str, *, acted: bool) -> Iterator[Line]:
    first, *others = visible_lines(text.strip()).replace(SIGN, "\\u203a").split("\n")
    yield Line(f"{role} {SIGN} {first}", acted)
    for line in others:
        yield Line(" " * len(f"{role} {SIGN} ") + line, acted)
