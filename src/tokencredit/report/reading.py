"""Read a run's folder, also while it is written, or after a crash."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokencredit.errors import ConfigError
from tokencredit.report.audit_file import NAME as AUDIT
from tokencredit.report.audit_file import read_audit, with_audit
from tokencredit.runs.folder import apply_choices, read_choices
from tokencredit.runs.jsonl import all_of, is_number, is_text, read_metrics, read_object, read_samples
from tokencredit.runs.summary import WINDOW
from tokencredit.settings.run_file import run_config_file
from tokencredit.settings.yaml import read_yaml

REPORT = "report.html"
"""The report in a run's folder."""
ITERATIONS = 400
"""Number of iterations whose completions are read, besides the first and the last: more would not fit into a page."""


def is_term(value: Any) -> bool:
    """True for a reward term."""
    return isinstance(value, dict) and is_number(value.get("weight", 1.0))


GROUPS = ("advantage", "env", "model", "optim", "ppo", "rollout")
"""Groups of settings that the page and the diagnosis read."""
CONFIG: dict[str, tuple[Callable[[Any], bool], str]] = {
    "reward": (all_of(is_term), "a list of terms"),
    "tools": (all_of(is_text), "a list of texts"),
    "advantage.gamma": (lambda value: is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    "ppo.clip": (lambda value: is_number(value) and 0 < value < 1, "a number between 0 and 1"),
    "ppo.clip_high": (lambda value: is_number(value) and value > 0, "a number above 0"),
    "ppo.epochs": (is_number, "a number"),
    "ppo.minibatches": (is_number, "a number"),
    "optim.warmup": (is_number, "a number"),
    "optim.max_grad_norm": (is_number, "a number"),
}
"""Checks of these settings, unless null or missing."""


@dataclass(frozen=True)
class Run:
    """Contents of a run's files; `config`, in plain dicts and lists, has the run's choices in place of `auto`."""

    path: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    """One dict per iteration, with the metrics of `audit` merged in; None replaces values that are not finite
    numbers."""
    samples: list[dict[str, Any]]
    """Completions token by token, as `text.batch` describes them, of at most `ITERATIONS`; empty for an agent."""
    summary: dict[str, Any]
    """Empty while the run is training."""
    audit: dict[str, Any] | None = None
    """The newest audit, as `report.audit_file` describes it; None if there is none."""

    @property
    def episodic(self) -> bool:
        """True if completions are episodes of several turns."""
        return any("env/turns" in row for row in self.metrics)


def read_run(path: str | Path, *, samples: bool = True) -> Run:
    """Read a run's folder; completions, by far the largest part, are optional.

    Raises:
        ConfigError: it is not a run's folder, has no iteration yet, or a file is invalid; the message says where.
    """
    path = Path(path)
    config = read_yaml(run_config_file(path))
    if not isinstance(config, dict):
        raise ConfigError(f"{path / 'config.yaml'} holds no configuration")
    check_config(path / "config.yaml", config)
    metrics = list(read_metrics(path / "metrics.jsonl"))
    if not metrics:
        raise ConfigError(f"{str(path)!r} has no finished iteration yet")
    summary = path / "summary.json"
    outcome = read_object(summary, summary.read_text(encoding="utf-8", errors="replace")) if summary.is_file() else {}
    if not is_text(outcome.get("stopped_by", "")):
        raise ConfigError(f"{summary}: stopped_by is not a text")
    kept = read_samples(path / "samples.jsonl", chosen([row["iteration"] for row in metrics])) if samples else []
    audit = read_audit(path / AUDIT)
    if audit is not None:
        metrics = with_audit(metrics, audit)
    return Run(path, apply_choices(config, read_choices(path)), metrics, kept, outcome, audit)


def chosen(iterations: Sequence[int]) -> set[int]:
    """Iterations whose completions are read: the first and last ones, and others evenly spread between them."""
    step = -(-len(iterations) // ITERATIONS)
    return {*iterations[:WINDOW], *iterations[::step], *iterations[-WINDOW:]}


def check_config(file: Path, config: dict[str, Any]) -> None:
    """Raise `ConfigError` for the first key of `GROUPS` and `CONFIG` with an invalid value."""
    for name in GROUPS:
        if not isinstance(config.get(name, {}), dict):
            raise ConfigError(f"{file}: {name} is not a group of keys")
    for key, (fits, wanted) in CONFIG.items():
        group, _, name = key.rpartition(".")
        value = (config.get(group, {}) if group else config).get(name)
        if value is not None and not fits(value):
            raise ConfigError(f"{file}: {key} is not {wanted}")
