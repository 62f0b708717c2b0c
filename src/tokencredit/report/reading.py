"""Read a run's folder, also while it is written, or after a crash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokencredit.audit.verdict import audited_rows
from tokencredit.errors import ConfigError
from tokencredit.runs.folder import AUDIT, apply_choices, read_choices, setting_of
from tokencredit.runs.jsonl import (
    TRUTH,
    Check,
    all_of,
    check_sample,
    is_count,
    is_number,
    is_text,
    of,
    optional,
    read_metrics,
    read_object,
    read_samples,
    require_fields,
)
from tokencredit.runs.summary import WINDOW
from tokencredit.settings.source import run_config_file
from tokencredit.settings.yaml import read_yaml

REPORT = "report.html"
"""The report in a run's folder."""
ITERATIONS = 400
"""Number of iterations whose completions are read, besides the first and the last: more would not fit into a page."""


GROUPS = ("advantage", "env", "model", "optim", "ppo", "rollout")
"""Groups of settings that the page and the diagnosis read."""
CONFIG: dict[str, tuple[Check, str]] = {
    "reward": (
        all_of(lambda term: isinstance(term, dict) and is_number(term.get("weight", 1.0))),
        "a list of terms",
    ),
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

OF_ESTIMATOR = ("correlation", "sign_agreement", "gain")
"""Figures of each estimator in an audit."""
OF_CRITIC = (
    "explained_variance",
    "rmse",
    "constant_rmse",
    "bias",
    "slope",
    "spread",
    "noise",
    "ranking",
    "ranking_within",
)
"""Figures of the critic in an audit."""
KNOWN = optional(is_number)
FIGURE = of(value=KNOWN, low=KNOWN, high=KNOWN), "an object with value, low and high, each a number or null"
ESTIMATOR = of(**dict.fromkeys(OF_ESTIMATOR, FIGURE[0]))
BIN = of(predicted=KNOWN, true=KNOWN, low=KNOWN, high=KNOWN, states=KNOWN)
AUDITED: dict[str, tuple[Check, str]] = {
    "iteration": (optional(is_count), "the number of an iteration, or null"),
    "settings": (
        lambda value: isinstance(value, dict) and is_count(audited_rows(value)),
        "an object with completions or episodes, a count",
    ),
    "continuations": (is_number, "a number"),
    "credit.tokens": (is_count, "a count"),
    "credit.noise": FIGURE,
    "credit.estimators": (
        lambda value: isinstance(value, dict) and all(map(ESTIMATOR, value.values())),
        f"an object of estimators, each with {', '.join(OF_ESTIMATOR)}: {FIGURE[1]}",
    ),
    "metrics": (
        lambda value: (
            isinstance(value, dict) and all(k.startswith("audit/") and is_number(x) for k, x in value.items())
        ),
        "an object of numbers whose names begin with audit/",
    ),
    "samples": (lambda value: isinstance(value, list), "a list"),
}
AUDITED_CRITIC: dict[str, tuple[Check, str]] = {
    **{f"critic.{name}": FIGURE for name in OF_CRITIC},
    "critic.states": (is_count, "a count"),
    "critic.reliability": (all_of(BIN), "a list of objects with predicted, true, low, high and states"),
}
"""Fields of an audit with a critic; without one, `critic` is null."""


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
    """The newest audit, as `AUDITED` describes it; None if there is none."""

    def setting(self, key: str) -> Any:
        """A setting by its key; None if the run has none."""
        return setting_of(self.config, key)

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


def read_audit(file: Path) -> dict[str, Any] | None:
    """The audit in this file; None if the file does not exist.

    Raises:
        ConfigError: the file is invalid; the message names the key.
    """
    if not file.is_file():
        return None
    audit = read_object(file, file.read_text(encoding="utf-8", errors="replace"))
    require_fields(str(file), audit, AUDITED if audit.get("critic") is None else AUDITED | AUDITED_CRITIC)
    shown = audit["credit"].get("shown")
    if not is_text(shown) or shown not in audit["credit"]["estimators"]:
        raise ConfigError(f"{file}: credit.shown is none of credit.estimators")
    for number, sample in enumerate(audit["samples"]):
        where = f"{file}: samples[{number}]"
        if not isinstance(sample, dict):
            raise ConfigError(f"{where} is not an object")
        check_sample(where, sample | {"iteration": 0})  # the iteration is the audit's
        if missing := next((name for name in TRUTH if name not in sample), None):
            raise ConfigError(f"{where} has no {missing}")
    return audit


def with_audit(metrics: Sequence[Mapping[str, Any]], audit: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of metrics with an audit's merged into the row of its iteration, or the last row for the final policy.

    An iteration without a row, such as 0 after pretraining, changes none.
    """
    number = metrics[-1]["iteration"] if audit["iteration"] is None else audit["iteration"]
    return [{**row, **(audit["metrics"] if row["iteration"] == number else {})} for row in metrics]
