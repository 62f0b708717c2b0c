"""A run's folder, read back: also while the run still writes, and after its machine went off."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tokencredit.runs.errors import ConfigError

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
    """Completions token by token, as `text.batch` describes them; none in a control run."""
    summary: dict[str, Any]
    """Empty while the run goes on."""

    @property
    def headline(self) -> str:
        """The metric that says how well it goes."""
        return "train/average_return" if "env" in self.config else "reward"


def read_run(path: Path) -> Run:
    """Read a run's folder.

    Raises:
        ConfigError: it is no run's folder, or has no iteration yet, or a file cannot be understood (which, and where).
    """
    if not (path / "config.yaml").is_file():
        raise ConfigError(f"{str(path)!r} is not a run's folder: it has no config.yaml")
    try:
        config = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path / 'config.yaml'}: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path / 'config.yaml'} holds no configuration")
    metrics = [line for line in read_lines(path / "metrics.jsonl") if isinstance(line.get("iteration"), int)]
    if not metrics:
        raise ConfigError(f"{str(path)!r} has no finished iteration yet")
    summary = path / "summary.json"
    found = read_object(summary, summary.read_text(encoding="utf-8", errors="replace")) if summary.is_file() else {}
    samples = read_lines(path / "samples.jsonl")
    for number, sample in enumerate(samples, start=1):
        if wrong := next((name for name, kind in SAMPLE.items() if not isinstance(sample.get(name), kind)), None):
            raise ConfigError(f"{path / 'samples.jsonl'}, sample {number} has no {wrong}")
        if len({len(sample[name]) for name, kind in SAMPLE.items() if kind is list}) != 1:
            raise ConfigError(f"{path / 'samples.jsonl'}, sample {number} has lists of different lengths")
    return Run(path, config, metrics, samples, found)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines, none if there is no such file; a last line without an end is left out.

    Raises:
        ConfigError: a line that is no JSON object; the message names it.
    """
    if not file.is_file():
        return []
    *lines, _ = file.read_bytes().split(b"\n")
    return [read_object(f"{file}, line {n}", line) for n, line in enumerate(lines, start=1) if line.strip()]


def read_object(where: Any, text: str | bytes) -> dict[str, Any]:
    """A JSON object, or a `ConfigError` that says where there is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is not a JSON object")
    return found
