"""Read and check the JSON lines of a run: metrics and samples."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokencredit.errors import ConfigError

FIRST_NUMBER = re.compile(rb'\{"iteration": (\d{1,18}),')
"""How a run begins each line, so that most of a long file need not be understood."""
LARGEST = 1e100
"""Largest magnitude accepted from a file."""


def is_number(value: Any) -> bool:
    """True for a finite number small enough that sums and products stay finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def is_count(value: Any) -> bool:
    """True for a valid iteration number, here and in a browser."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def is_text(value: Any) -> bool:
    """True for a text."""
    return isinstance(value, str)


def all_of(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A check for lists of such values."""
    return lambda values: isinstance(values, list) and all(map(kind, values))


SAMPLE: dict[str, Callable[[Any], bool]] = {
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
TRUTH = ("true_values", "true_value_errors", "true_advantages", "true_advantage_errors")
"""Fields of audited completions: the truth of each token and its standard errors; None where it was not measured."""
MAY_HAVE: dict[str, Callable[[Any], bool]] = {
    "values": all_of(is_number),
    "ref_logprobs": all_of(is_number),
    "new_logprobs": all_of(is_number),
    "bootstrap": is_number,
    **dict.fromkeys(TRUTH, all_of(lambda value: value is None or is_number(value))),
}
"""Fields in some runs: those with a critic, with a reference, with an update, after a cut, and of audits."""


def read_metrics(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of metrics.jsonl, one per iteration; None stands for what is not a finite number.

    Raises:
        ConfigError: a line that is no JSON object; the message names it.
    """
    for _, row in read_lines(file):
        if is_count(row.get("iteration")):
            yield {name: value if is_number(value) else None for name, value in row.items()}


def read_samples(file: Path, iterations: Container[int]) -> list[dict[str, Any]]:
    """The completions of these iterations in samples.jsonl.

    Raises:
        ConfigError: a line that is no completion; the message names it.
    """

    def skip(line: bytes) -> bool:
        found = FIRST_NUMBER.match(line)
        return found is not None and int(found[1]) not in iterations

    samples = []
    for where, sample in read_lines(file, skip):
        check_sample(where, sample)
        samples.append(sample)
    return samples


def check_sample(where: str, sample: Mapping[str, Any]) -> None:
    """Raise `ConfigError`, which begins with `where`, for a record that is no completion."""
    if wrong := next((name for name, fits in SAMPLE.items() if not fits(sample.get(name))), None):
        raise ConfigError(f"{where} has no {wrong}" + (" that can be read" if wrong in sample else ""))
    if wrong := next((name for name, fits in MAY_HAVE.items() if name in sample and not fits(sample[name])), None):
        raise ConfigError(f"{where} has no {wrong} that can be read")
    lists = [name for name in (*SAMPLE, *MAY_HAVE) if isinstance(sample.get(name), list)]
    if len({len(sample[name]) for name in lists}) != 1:
        raise ConfigError(f"{where} has lists of different lengths")


def read_lines(file: Path, skip: Callable[[bytes], bool] = lambda _: False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each record of a file of JSON lines stands, and the record; none if there is no such file.

    A last line without an end, which is still being written, is left out, and so is what `skip` says.

    Raises:
        ConfigError: a line that is no JSON object; the message names it.
    """
    if not file.is_file():
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n") and line.strip() and not skip(line):
                where = f"{file}, line {number}"
                yield where, read_object(where, line)


def read_object(where: Any, text: str | bytes) -> dict[str, Any]:
    """A JSON object, or a `ConfigError` that says where there is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is not a JSON object")
    return found
