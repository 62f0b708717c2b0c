"""Metrics of episodes, and their part of sample records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from transformers import PreTrainedTokenizerBase

from tokencredit.distributed.processes import Processes
from tokencredit.runs.untrusted import visible
from tokencredit.text.turns.episode import Ending, Problem
from tokencredit.text.turns.play import Played, Transcript, text_of

EVENTS: dict[Problem, str] = {
    "malformed": "a tool call could not be parsed",
    "failed": "a call of an environment or tool failed",
    "timeout": "a call of an environment or tool exceeded env.timeout",
    "cut": "an observation was cut to env.observation_tokens",
}
"""Problems with a turn, in words."""


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
                about = turn.malformed or text_of(reply)
                lines.setdefault(f"env/{problem}", f"{EVENTS[problem]}: {about[:200]}")
        if transcript.unfit is not None:
            tokens, room = transcript.unfit
            lines.setdefault(
                "env/ending/length",
                f"an observation has {tokens} tokens, and {room} were left of rollout.max_new_tokens, with one for the "
                "next turn: its episode ended there",
            )
    return {metric: visible(f"{line} (the first case; {metric} counts all)") for metric, line in lines.items()}


def played_record(played: Played, row: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """An episode that is not scored, in the fields of a sample's record that show it: prompt, tokens, turns, ending."""
    rollout = played.rollout
    length = int(rollout.response_lengths()[row])
    shown = {"prompt": played.prompts.texts[row], "tokens": rollout.tokens(row, tokenizer)}
    return shown | {"mask": rollout.mask[row, :length].int().tolist()} | episode_record(played.transcripts[row])


def episode_record(transcript: Transcript) -> dict[str, Any]:
    """The part of a sample's record that tells its turns: who spoke which tokens, rewards, problems, and the ending."""
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
