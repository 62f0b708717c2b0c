"""A run's folder, read back: also while the run still writes, and after its machine went off."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tokencredit.runs.diagnosis import WINDOW
from tokencredit.runs.errors import ConfigError
from tokencredit.runs.safe_yaml import load_yaml

ITERATIONS = 400
"""Whose completions are read, beside the first and the last: more would not fit into a page."""
FIRST_NUMBER = re.compile(rb'\{"iteration": (\d{1,18}),')
"""How a run begins each line, so that most of a long file need not be understood."""
SAMPLE: dict[str, Any] = {
    "iteration": int,
    "prompt": str,
    "completion": str,
    "reward": int | float,
    "truncated": bool,
    "tokens": list,
    "logprobs": list,
    "values": list,
    "rewards": list,
    "advantages": list,
}
"""What a completion's record holds at least, and of which kind; the lists have an entry a token."""


@dataclass(frozen=True)
class Run:
    """What the files of a run hold; `config` is as written, in plain dicts and lists."""

    path: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    """One dict an iteration; a number that was not finite is None."""
    samples: list[dict[str, Any]]
    """Completions token by token, as `text.batch` describes them, of at most `ITERATIONS`; none in a control run."""
    summary: dict[str, Any]
    """Empty while the run goes on."""


def read_run(path: Path, *, samples: bool = True) -> Run:
    """Read a run's folder; its completions, which are much the most of it, only if they are wanted.

    Raises:
        ConfigError: it is no run's folder, or has no iteration yet, or a file cannot be understood (which, and where).
    """
    if not (path / "config.yaml").is_file():
        raise ConfigError(f"{str(path)!r} is not a run's folder: it has no config.yaml")
    try:
        config = load_yaml((path / "config.yaml").read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path / 'config.yaml'}: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path / 'config.yaml'} holds no configuration")
    metrics = [row for _, row in read_lines(path / "metrics.jsonl") if isinstance(row.get("iteration"), int)]
    if not metrics:
        raise ConfigError(f"{str(path)!r} has no finished iteration yet")
    summary = path / "summary.json"
    found = read_object(summary, summary.read_text(encoding="utf-8", errors="replace")) if summary.is_file() else {}
    kept = read_samples(path / "samples.jsonl", [row["iteration"] for row in metrics]) if samples else []
    return Run(path, config, metrics, kept, found)


def read_samples(file: Path, iterations: Sequence[int]) -> list[dict[str, Any]]:
    """The completions of the first iterations, of the last ones, and of others evenly spread between them.

    Raises:
        ConfigError: a line that is no completion; the message names it.
    """
    step = -(-len(iterations) // ITERATIONS)
    wanted = {*iterations[:WINDOW], *iterations[::step], *iterations[-WINDOW:]}

    def skip(line: bytes) -> bool:
        found = FIRST_NUMBER.match(line)
        return found is not None and int(found[1]) not in wanted

    samples = []
    for where, sample in read_lines(file, skip):
        if wrong := next((name for name, kind in SAMPLE.items() if not isinstance(sample.get(name), kind)), None):
            raise ConfigError(f"{where} has no {wrong}")
        if len({len(sample[name]) for name, kind in SAMPLE.items() if kind is list}) != 1:
            raise ConfigError(f"{where} has lists of different lengths")
        samples.append(sample)
    return samples


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
