"""Read and check the JSON lines of a run: metrics and samples."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tokencredit.errors import ConfigError
from tokencredit.settings.rollout import SamplingConfig

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
EVENTS = "events.jsonl"
REWARDED = ("reward", "prompts", "train_dataset", "tools", "env.factory", "environment_factory")
"""Beginnings of settings and arguments that decide what is rewarded, in training and in evaluations."""
SCORED = (*REWARDED, "score.")
"""Beginnings of settings and arguments without which scores cannot be compared."""
LIMITS = ("env.max_turns", "env.turn_tokens", "env.observation_tokens", "env.timeout")
"""Settings that decide how far an episode may go."""
PRICED = (*SCORED, *LIMITS, "rollout.", "kl.")
"""The same for the attainable: a change of one of these moves it."""
EVALUATION = ("text", "dataset", "split", "best_of", "max_new_tokens", "temperature", "greedy")
"""The same of settings under `eval`, for the results of evaluations."""
PROBLEMS = {
    "malformed": "a tool call could not be parsed",
    "failed": "a call failed",
    "timeout": "a call timed out",
    "cut": "the observation was cut",
}
"""Problems of a turn, in words."""
PER_TOKEN = (
    "tokens",
    "token_ids",
    "logprobs",
    "behavior_logprobs",
    "new_logprobs",
    "ref_logprobs",
    "age",
    "values",
    "rewards",
    "advantages",
    "loss_advantages",
    "returns",
    *TRUTH,
)
"""Fields of a record with one entry per token."""


@dataclass(frozen=True)
class Leaf:
    """The form of a JSON value without parts."""

    fits: Callable[[Any], bool]
    wanted: str
    """What it must be, in words."""
    column: str = "string"
    """Type of its column in a Parquet file."""


Form = Leaf | Mapping[str, Any] | Sequence[Any]
"""The form of a JSON value: a `Leaf`; a dict of forms by key, with `?` after a key that may be missing, and `*` for any
key; or a list of one form and, if it is fixed, the length."""


def mismatch(value: Any, form: Form) -> str | None:
    """The first part of a value that does not have the form, such as `.turns[0].start is not a count`; None if none."""
    if isinstance(form, Leaf):
        return None if form.fits(value) else f" is not {form.wanted}"
    if isinstance(form, Mapping):
        if not isinstance(value, dict):
            return " is not an object"
        for key, part in form.items():
            name = key.removesuffix("?")
            for place in value if key == "*" else [name] if name == key or name in value else []:
                if wrong := mismatch(value.get(place, ...), part):  # no form fits `...`
                    return f".{place}{wrong}"
        return None
    if not isinstance(value, list):
        return " is not a list"
    if len(form) > 1 and len(value) != form[1]:
        return f" has {len(value)} entries, not {form[1]}"
    return next((f"[{i}]{wrong}" for i, x in enumerate(value) if (wrong := mismatch(x, form[0]))), None)


def require(where: Any, value: Any, form: Form) -> None:
    """Raise `ConfigError`, beginning with `where`, for the first part of a value that does not have the form."""
    if wrong := mismatch(value, form):
        raise ConfigError(f"{where}: {wrong.removeprefix('.')}")


def is_number(value: Any) -> bool:
    """True for a finite number small enough that sums and products stay finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def is_count(value: Any) -> bool:
    """True for a valid iteration number, here and in a browser."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def one_of(names: Collection[str]) -> Leaf:
    """The form of one of these names."""
    return Leaf(lambda value: isinstance(value, str) and value in names, f"one of {', '.join(names)}")


NUMBER, COUNT = Leaf(is_number, "a number", "float64"), Leaf(is_count, "a count", "int64")
TEXT = Leaf(lambda value: isinstance(value, str), "a text")
KNOWN = Leaf(lambda value: value is None or is_number(value), "a number or null", "float64")
SAMPLE: dict[str, Form] = {
    "iteration": COUNT,
    "prompt": TEXT,
    "completion": TEXT,
    "reward": NUMBER,
    "truncated": Leaf(lambda value: isinstance(value, bool), "true or false", "bool"),
    "tokens": [TEXT],
    "logprobs": [NUMBER],
    "rewards": [NUMBER],
    "advantages": [NUMBER],
    "messages?": [{"role": TEXT, "content": TEXT}],  # of a conversation
    "token_ids?": [COUNT],
    "returns?": [NUMBER],
    "values?": [NUMBER],  # with a critic
    "behavior_logprobs?": [NUMBER],
    "ref_logprobs?": [NUMBER],  # with a reference model
    "new_logprobs?": [NUMBER],  # after an update
    "loss_advantages?": [KNOWN],  # as the loss used them; null at tokens outside it
    "age?": [COUNT],  # sampled ahead
    "bootstrap?": NUMBER,  # after a truncation
    "mask?": [Leaf(lambda value: is_count(value) and value < 2, "0 or 1", "int64")],  # from here on of episodes
    "turns?": [
        {"role": one_of(ROLES), "start": COUNT, "end": COUNT, "reward?": NUMBER, "problems?": [one_of(PROBLEMS)]}
    ],
    "ending?": one_of(ENDINGS),
    "after?": TEXT,
    **{f"{name}?": [KNOWN] for name in TRUTH},  # of audits
}
"""A completion's record; lists have one entry per token."""


def read_metrics(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of metrics.jsonl, one per iteration; None replaces values that are not finite numbers.

    Raises:
        ConfigError: a line is not a JSON object; the message names it.
    """
    for _, row in read_lines(file):
        if is_count(row.get("iteration")):
            yield {name: value if is_number(value) else None for name, value in row.items()}


def read_changes(file: Path) -> list[tuple[int, str]]:
    """Changes of a resumed run in events.jsonl: the iteration before each, and the setting or argument.

    Those of iterations that were done again, from an older checkpoint, count from there.
    """
    changes: list[tuple[int, str]] = []
    for _, event in read_lines(file):
        after: Any = event.get("after_iteration")
        if is_count(after):
            changes = [(min(earlier, after), name) for earlier, name in changes]
            changes += [(after, key)] if isinstance(key := event.get("changed"), str) else []
    return changes


def scored_anew(changes: Sequence[tuple[int, str]], keys: tuple[str, ...] = SCORED) -> int:
    """The iteration after which scores are of another reward, or of other prompts, than those before it."""
    others = [after for after, key in changes if key.startswith(keys) and not same_score(key)]
    return max(others, default=0)


def same_score(key: str) -> bool:
    """True for the key of a setting of a reward term that leaves its score the same."""
    return re.fullmatch(r"reward\[\d+\]\.(name|retries|timeout|batch_size|dtype)", key) is not None


def evaluated_anew(changes: Sequence[tuple[int, str]], config: Mapping[str, Any]) -> int:
    """The iteration after which evaluations are of something else than before it; `config` is the run's."""
    own: Mapping[str, Any] = config.get("eval") or {}  # whose values replace those of rollouts
    drawn = [f"rollout.{item.name}" for item in fields(SamplingConfig) if own.get(item.name) is None]
    return scored_anew(changes, (*REWARDED, *LIMITS, "eval_dataset", *drawn, *(f"eval.{name}" for name in EVALUATION)))


def comparable(rows: Sequence[Mapping[str, Any]], since: int, evaluated: int) -> Sequence[Mapping[str, Any]]:
    """Rows since `scored_anew`, those before `evaluated_anew` without their evaluations."""
    early = [{k: x for k, x in row.items() if not k.startswith("eval/")} for row in rows[since:evaluated]]
    return [*early, *rows[max(since, evaluated) :]] if since or evaluated else rows


def read_samples(file: Path, iterations: Collection[int]) -> list[dict[str, Any]]:
    """Completions of these iterations in samples.jsonl; raises `ConfigError` with a line that is not one."""

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
    require(where, sample, SAMPLE)
    lengths = {len(sample[name]) for name in (*PER_TOKEN, "mask") if name in sample}
    if len(lengths) != 1 or 0 in lengths:
        raise ConfigError(f"{where}: its lists have {'different lengths' if len(lengths) > 1 else 'no token'}")
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
