"""Replays of recorded episodes: the environment is reset with the same row and seed, and answers the same turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from tokencredit.audit.fresh_randomness import NotReplayed, generators, redraw
from tokencredit.text.data.prompts import Prompt
from tokencredit.text.turns.episode_record import Transcript
from tokencredit.text.turns.protocols.episode import Episode, Reply, fit


@dataclass(frozen=True)
class EpisodeStart:
    """A state of a recorded episode."""

    transcript: Transcript
    prompt: Prompt
    at: int
    """Tokens before the state, after the prompt. Directly after a turn the environment has not answered it yet."""
    seed: int | None = None
    """Seed of the environment's randomness from the state on; None goes on with its own."""

    def begin(self, episode: Episode) -> tuple[Transcript, int]:
        """The transcript up to the state, for another episode, and the index of the first token of its next turn."""
        recorded, begun = self.transcript, Transcript(episode)
        for span in recorded.spans:
            if span.role == "assistant":
                if self.at < span.end:
                    return begun, span.start
                begun.turns.append(recorded.turns[len(begun.turns)])
            begun.spans.append(span)
            if self.at == span.end and span.role == "assistant":
                break
            begun.replies = recorded.replies[: len(begun.turns)]
        return begun, self.at


@dataclass(frozen=True)
class Replayed:
    """An environment's answers in a replay."""

    prompt: Prompt
    replies: Sequence[Reply]
    random: bool
    """True if the environment holds random number generators, so that its later answers may differ."""


def replay(episode: Episode, begun: Transcript, seed: int | None) -> Replayed:
    """Reset the environment, and answer the turns that have replies; a seed then replaces its randomness."""
    prompt = episode.start()
    replies = [episode.reply(turn) for turn in begun.turns[: len(begun.replies)]]
    random = bool(generators(episode.environment))
    if seed is not None and random:
        redraw(episode.environment, seed)
    return Replayed(prompt, replies, random)


def require_equal(
    replayed: Replayed, start: EpisodeStart, begun: Transcript, tokens: int, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise `NotReplayed` if an answer, with observations of at most so many `tokens`, is not the recorded one."""
    different = None if replayed.prompt == start.prompt else "the prompt"
    for number, (reply, recorded) in enumerate(zip(replayed.replies, begun.replies, strict=True)):
        if different is None and reply != recorded and fit(reply, tokens, tokenizer) != recorded:
            different = f"the answer to turn {number + 1}"
    if different is not None:
        raise NotReplayed(
            f"{begun.episode.instance.factory.label} cannot be audited: reset with an episode's row and seed and given "
            f"its turns again, it differs in {different}; an audit replays episodes, so all randomness must come from "
            "the seed that reset receives, and nothing may be kept from earlier episodes"
        )
