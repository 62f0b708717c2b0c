"""Transcripts of episodes: what reward functions receive of them, their metrics, events and sample records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_args

import torch

from tokencredit.distributed.processes import Processes
from tokencredit.runs.untrusted import visible
from tokencredit.text.data.prompts import Prompt
from tokencredit.text.rewards.texts import answer
from tokencredit.text.rewards.texts import messages as as_messages
from tokencredit.text.turns.protocols.episode import Ending, Episode, Message, Problem, Reply, Turn
from tokencredit.text.turns.protocols.factories import EnvironmentFailed

EVENTS: dict[Problem, str] = {
    "malformed": "a tool call could not be parsed",
    "failed": "a call of an environment or tool failed",
    "timeout": "a call of an environment or tool exceeded env.timeout",
    "cut": "an observation was cut to env.observation_tokens",
}
"""Problems with a turn, in words."""


class Span(NamedTuple):
    """Tokens of one speaker, `start` to `end − 1` of those after the prompt."""

    role: str
    start: int
    end: int


@dataclass
class Transcript:
    """One episode as it happened."""

    episode: Episode
    turns: list[Turn] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    """The reply to each turn."""
    spans: list[Span] = field(default_factory=list)
    """All tokens after the prompt, in order."""
    ending: Ending | None = None
    overflow: tuple[int, int] | None = None
    """Tokens of an observation that did not fit, and of the room for it."""
    following: list[int] = field(default_factory=list)
    """Tokens of the observation after the last turn, if the turns ran out and another would have fit."""

    def completion(self, prompt: Prompt, rendered: str, text: str) -> str | list[Message]:
        """The episode after its prompt, as reward functions receive it: the text, or all messages in order.

        The first message includes the prompt's prefill, as `rendered` for the model.
        """
        if isinstance(prompt, str):
            return text
        messages: list[Message] = []
        for turn, reply in zip(self.turns, self.replies, strict=True):
            messages.append(turn.message or {"role": "assistant", "content": turn.text})
            messages += as_messages(reply.observation, "user") if reply.observation else []
        begun = answer(prompt, rendered, messages[0]["content"])["content"]
        return [messages[0] | {"content": begun}, *messages[1:]]

    def turn_rewards(self) -> list[tuple[int, float]]:
        """Number of sampled tokens and reward of each turn."""
        return [(len(turn.ids), reply.reward or 0.0) for turn, reply in zip(self.turns, self.replies, strict=True)]

    def after(self) -> str:
        """The text of the observation after the last turn, which is not among the tokens."""
        return self.replies[-1].text()


def columns(transcripts: Sequence[Transcript]) -> dict[str, list[Any]]:
    """Columns of episodes for reward functions."""
    return {
        "environments": [transcript.episode.environment for transcript in transcripts],
        "turn_rewards": [transcript.turn_rewards() for transcript in transcripts],
    }


def episode_metrics(
    transcripts: Sequence[Transcript], processes: Processes, device: torch.device | str
) -> dict[str, float]:
    """Metrics of the episodes of all processes.

    Returns:
        `env/turns` and `env/calls`, turns and tool calls per episode; `env/ending/NAME`, the share of episodes with
        each ending; `env/malformed`, `env/failed`, `env/timeout` and `env/cut`, the share of turns with each problem.
    """
    endings, problems = get_args(Ending), get_args(Problem)
    turns = [turn for transcript in transcripts for turn in transcript.turns]
    replies = [reply for transcript in transcripts for reply in transcript.replies]
    counts = [
        len(transcripts),
        len(turns),
        sum(len((turn.message or {}).get("tool_calls") or ()) for turn in turns),
        *(sum(transcript.ending == name for transcript in transcripts) for name in endings),
        *(sum(name in reply.problems for reply in replies) for name in problems),
    ]
    sums = processes.sum(torch.tensor(counts, dtype=torch.float64, device=device)).tolist()
    rows, turn_count, calls, *rest = sums
    return {
        "env/turns": turn_count / rows,
        "env/calls": calls / rows,
        **{f"env/ending/{name}": count / rows for name, count in zip(endings, rest, strict=False)},
        **{f"env/{name}": count / turn_count for name, count in zip(problems, rest[len(endings) :], strict=True)},
    }


def episode_events(transcripts: Sequence[Transcript]) -> dict[str, str]:
    """A line on the first case of each kind of problem in a batch of episodes, by the metric that counts them all."""
    lines: dict[str, str] = {}
    for transcript in transcripts:
        for turn, reply in zip(transcript.turns, transcript.replies, strict=True):
            for problem in reply.problems:
                about = turn.malformed or reply.text()
                lines.setdefault(f"env/{problem}", f"{EVENTS[problem]}: {about[:200]}")
        if transcript.overflow is not None:
            tokens, room = transcript.overflow
            lines.setdefault(
                "env/ending/length",
                f"an observation has {tokens} tokens, and {room} were left of rollout.max_new_tokens, with one for the "
                "next turn: its episode ended there",
            )
    return {metric: visible(f"{line} (the first case; {metric} counts all)") for metric, line in lines.items()}


def refuse_failed(transcripts: Sequence[Transcript], processes: Processes) -> None:
    """Raise `EnvironmentFailed`, in every process, if the environment failed in every episode of all processes."""
    if processes.all(all(transcript.ending == "error" for transcript in transcripts)):
        first = transcripts[0]
        raise EnvironmentFailed(
            f"the environment failed in every episode of a batch, the first time in turn {len(first.replies)}: "
            f"{visible(first.after()[:500])}"
        )


def episode_record(transcript: Transcript) -> dict[str, Any]:
    """The part of a sample's record on its turns: who spoke which tokens, rewards, problems, and the ending."""
    replies = iter(transcript.replies)
    turns: list[dict[str, Any]] = []
    for span in transcript.spans:
        turn: dict[str, Any] = span._asdict()
        if span.role == "assistant":
            reply = next(replies)
            turn |= {} if reply.reward is None else {"reward": reply.reward}
            turn |= {"problems": list(reply.problems)} if reply.problems else {}
        turns.append(turn)
    after = transcript.after()
    return {"turns": turns, "ending": transcript.ending, **({"after": after} if after else {})}
