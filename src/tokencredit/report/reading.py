"""A run's folder, read back: also while the run still writes, and after its machine went off."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tokencredit.runs.diagnosis import WINDOW
from tokencredit.runs.errors import ConfigError
from tokencredit.runs.lines import read_lines, read_object
from tokencredit.runs.safe_yaml import load_yaml

ITERATIONS = 400
"""Whose completions are read, beside the first and the last: more would not fit into a page."""
FIRST_NUMBER = re.compile(rb'\{"iteration": (\d{1,18}),')
"""How a run begins each line, so that most of a long file need not be understood."""
LARGEST = 1e100
"""Where numbers of a file end, so that sums and products of them are numbers still."""


def is_number(value: Any) -> bool:
    """Whether it is a finite number, and none that leads out of them."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def is_count(value: Any) -> bool:
    """Whether it can be the number of an iteration, here and in a browser."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def is_text(value: Any) -> bool:
    """Whether it is a text."""
    return isinstance(value, str)


def all_of(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether it is a list of such values."""
    return lambda values: isinstance(values, list) and all(map(kind, values))


def is_term(value: Any) -> bool:
    """Whether it can be a term of a reward."""
    return isinstance(value, dict) and is_number(value.get("weight", 1.0))


SAMPLE: dict[str, Callable[[Any], bool]] = {
    "iteration": is_count,
    "prompt": is_text,
    "completion": is_text,
    "reward": is_number,
    "truncated": lambda value: isinstance(value, bool),
    "tokens": all_of(is_text),
    "logprobs": all_of(is_number),
    "values": all_of(is_number),
    "rewards": all_of(is_number),
    "advantages": all_of(is_number),
}
"""What a completion's record holds at least, and of which kind; the lists have an entry a token."""
MAY_HAVE = ("ref_logprobs", "new_logprobs")
"""Lists of numbers that it has in some runs."""
GROUPS = ("advantage", "env", "model", "optim", "ppo", "rollout")
"""Of a configuration: those that the page and the diagnosis look into."""
CONFIG: dict[str, tuple[Callable[[Any], bool], str]] = {
    "reward": (all_of(is_term), "a list of terms"),
    "advantage.gamma": (lambda value: is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    "ppo.clip": (lambda value: is_number(value) and 0 < value < 1, "a number between 0 and 1"),
    "ppo.epochs": (is_number, "a number"),
    "ppo.minibatches": (is_number, "a number"),
    "optim.warmup": (is_number, "a number"),
    "optim.max_grad_norm": (is_number, "a number"),
}
"""What they read there, unless it is null or missing."""


@dataclass(frozen=True)
class Run:
    """What the files of a run hold; `config` is as written, in plain dicts and lists."""

    path: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    """One dict an iteration; what is no finite number is None."""
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
    check_config(path / "config.yaml", config)
    metrics = [
        {name: value if is_number(value) else None for name, value in row.items()}
        for _, row in read_lines(path / "metrics.jsonl")
        if is_count(row.get("iteration"))
    ]
    if not metrics:
        raise ConfigError(f"{str(path)!r} has no finished iteration yet")
    summary = path / "summary.json"
    found = read_object(summary, summary.read_text(encoding="utf-8", errors="replace")) if summary.is_file() else {}
    if not is_text(found.get("stopped_by", "")):
        raise ConfigError(f"{summary}: stopped_by is no text")
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
        if wrong := next((name for name, fits in SAMPLE.items() if not fits(sample.get(name))), None):
            raise ConfigError(f"{where} has no {wrong}" + (" that can be read" if wrong in sample else ""))
        if wrong := next((name for name in MAY_HAVE if name in sample and not all_of(is_number)(sample[name])), None):
            raise ConfigError(f"{where} has no {wrong} that can be read")
        lists = [name for name in (*SAMPLE, *MAY_HAVE) if isinstance(sample.get(name), list)]
        if len({len(sample[name]) for name in lists}) != 1:
            raise ConfigError(f"{where} has lists of different lengths")
        samples.append(sample)
    return samples


def check_config(file: Path, config: dict[str, Any]) -> None:
    """Raise `ConfigError` for the first key of `GROUPS` and `CONFIG` that holds something else."""
    for name in GROUPS:
        if not isinstance(config.get(name, {}), dict):
            raise ConfigError(f"{file}: {name} is not a group of keys")
    for key, (fits, wanted) in CONFIG.items():
        group, _, name = key.rpartition(".")
        value = (config.get(group, {}) if group else config).get(name)
        if value is not None and not fits(value):
            raise ConfigError(f"{file}: {key} is not {wanted}")
