"""Read and check the JSON lines of a run: metrics and samples."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokencredit.errors import ConfigError

Check = Callable[[Any], bool]
FIRST_NUMBER = re.compile(rb'\{"iteration": (\d{1,18}),')
"""Start of each line; it allows most of a long file to be skipped without parsing."""
LARGEST = 1e100
"""Largest magnitude accepted from a file."""
TRUTH = ("true_values", "true_value_errors", "true_advantages", "true_advantage_errors")
"""Fields of audited completions: true values per token and their standard errors; None where not measured."""
ASSISTANT = "assistant"
"""Role of the policy; all others are observations."""
ROLES = (ASSISTANT, "tool", "user", "environment")
ENDINGS = {
    "done": "the environment ended the episode",
    "answer": "the policy answered without a tool call",
    "max_turns": "truncated: the last turn that env.max_turns allows",
    "length": "truncated: the tokens of the episode (rollout.max_new_tokens) or its answer (env.turn_tokens) are spent",
    "error": "truncated: the environment failed",
}
"""Endings of an episode, in words."""
PROBLEMS = {
    "malformed": "a tool call could not be parsed",
    "failed": "a call failed",
    "timeout": "a call timed out",
    "cut": "the observation was cut",
}
"""Problems of a turn, in words."""
PER_TOKEN = (
    "tokens",
    "logprobs",
    "behavior_logprobs",
    "new_logprobs",
    "ref_logprobs",
    "age",
    "values",
    "rewards",
    "advantages",
    *TRUTH,
)
"""Fields of a record with one entry per token."""


def is_number(value: Any) -> bool:
    """True for a finite number small enough that sums and products stay finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def is_count(value: Any) -> bool:
    """True for a valid iteration number, here and in a browser."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def is_text(value: Any) -> bool:
    """True for a text."""
    return isinstance(value, str)


def all_of(kind: Check, length: int | None = None) -> Check:
    """A check for lists, of this length if any, whose values pass this check."""
    return lambda values: isinstance(values, list) and length in (None, len(values)) and all(map(kind, values))


def one_of(names: Container[str]) -> Check:
    """A check for one of these names."""
    return lambda value: is_text(value) and value in names


def optional(kind: Check) -> Check:
    """A check for values that pass this check, or None."""
    return lambda value: value is None or kind(value)


def of(**kinds: Check) -> Check:
    """A check for objects whose values under these names pass their checks."""
    return lambda value: (
        isinstance(value, dict) and all(name in value and kind(value[name]) for name, kind in kinds.items())
    )


SAMPLE: dict[str, Check] = {
    "iteration": is_count,
    "prompt": is_text,
    "completion": is_text,
    "reward": is_number,
    "truncated": lambda value: isinstance(value, bool),
    "tokens": all_of(is_text),
    "logprobs": all_of(is_number),
    "rewards": all_of(is_number),
    "advantages": all_of(is_number),
}
"""Required fields of a completion's record, and their checks; lists have one entry per token."""


def is_turn(value: Any) -> bool:
    """True for a turn of an episode, wherever it starts and ends."""
    return (
        isinstance(value, dict)
        and one_of(ROLES)(value.get("role"))
        and is_count(value.get("start"))
        and is_count(value.get("end"))
        and is_number(value.get("reward", 0.0))
        and all_of(one_of(PROBLEMS))(value.get("problems", []))
    )


MAY_HAVE: dict[str, Check] = {
    "message": is_text,
    "values": all_of(is_number),
    "behavior_logprobs": all_of(is_number),
    "ref_logprobs": all_of(is_number),
    "new_logprobs": all_of(is_number),
    "age": all_of(is_count),
    "bootstrap": is_number,
    "mask": all_of(lambda value: is_count(value) and value < 2),
    "turns": all_of(is_turn),
    "ending": one_of(ENDINGS),
    "after": is_text,
    **dict.fromkeys(TRUTH, all_of(optional(is_number))),
}
"""Optional fields: of a conversation (its last user message), with a critic, with a reference model, after an update,
sampled ahead, after a truncation, of an episode of several turns, and of audits."""


def read_metrics(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of metrics.jsonl, one per iteration; None replaces values that are not finite numbers.

    Raises:
        ConfigError: a line is not a JSON object; the message names it.
    """
    for _, row in read_lines(file):
        if is_count(row.get("iteration")):
            yield {name: value if is_number(value) else None for name, value in row.items()}


def read_samples(file: Path, iterations: Container[int]) -> list[dict[str, Any]]:
    """Completions of these iterations in samples.jsonl.

    Raises:
        ConfigError: a line is not a completion; the message names it.
    """

    def skip(line: bytes) -> bool:
        match = FIRST_NUMBER.match(line)
        return match is not None and int(match[1]) not in iterations

    samples = []
    for where, sample in read_lines(file, skip):
        check_sample(where, sample)
        samples.append(sample)
    return samples


def check_sample(where: str, sample: Mapping[str, Any]) -> None:
    """Raise `ConfigError`, beginning with `where`, for an invalid completion record."""
    if wrong := next((name for name, fits in SAMPLE.items() if not fits(sample.get(name))), None):
        raise ConfigError(f"{where} has no {wrong}" + (" that can be read" if wrong in sample else ""))
    if wrong := next((name for name, fits in MAY_HAVE.items() if name in sample and not fits(sample[name])), None):
        raise ConfigError(f"{where} has no {wrong} that can be read")
    if len({len(sample[name]) for name in (*PER_TOKEN, "mask") if name in sample}) != 1:
        raise ConfigError(f"{where} has lists of different lengths")
    if "turns" in sample or "mask" in sample:
        check_turns(where, sample)


def check_turns(where: str, sample: Mapping[str, Any]) -> None:
    """Raise `ConfigError`, beginning with `where`, for turns that do not cover the tokens in order, or another mask."""
    length, mask = len(sample["tokens"]), list[int]()
    for number, turn in enumerate(sample.get("turns", [])):
        start, end = turn["start"], turn["end"]
        if not len(mask) == start <= end <= length:
            raise ConfigError(
                f"{where}: turns[{number}] is from {start} to {end}; it must start at {len(mask)}, and end by {length}"
            )
        mask += [int(turn["role"] == ASSISTANT)] * (end - start)
    if len(mask) != length:
        raise ConfigError(f"{where}: turns end at {len(mask)}; they must cover all {length} tokens")
    if mask != sample.get("mask"):
        raise ConfigError(f"{where}: mask is not 1 at the tokens of the role {ASSISTANT}, and 0 elsewhere")
    if not any(mask):
        raise ConfigError(f"{where}: no token is of the role {ASSISTANT}")


def require_fields(where: str, record: Mapping[str, Any], fields: Mapping[str, tuple[Check, str]]) -> None:
    """Raise `ConfigError`, beginning with `where`, for the first key that is missing or fails its check.

    `fields` has, by dotted key, its check and what it must be.
    """
    for key, (fits, wanted) in fields.items():
        group, _, name = key.rpartition(".")
        holder = record.get(group) if group else record
        if not isinstance(holder, dict) or name not in holder or not fits(holder[name]):
            raise ConfigError(f"{where}: {key} is not {wanted}")


def read_lines(file: Path, skip: Callable[[bytes], bool] = lambda _: False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location and record of each JSON line; nothing if the file does not exist.

    An incomplete last line, which is still being written, is left out, and so are lines for which `skip` is true.

    Raises:
        ConfigError: a line is not a JSON object; the message names it.
    """
    if not file.is_file():
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n") and line.strip() and not skip(line):
                where = f"{file}, line {number}"
                yield where, read_object(where, line)


def read_object(where: Any, text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object; raises `ConfigError` with its location."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is not a JSON object")
    return value
