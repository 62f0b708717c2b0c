"""Read and check a run's audit.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokencredit.audit.verdict import audited_rows
from tokencredit.errors import ConfigError
from tokencredit.runs.jsonl import TRUTH, all_of, check_sample, is_count, is_number, is_text, read_object

NAME = "audit.json"
OF_ESTIMATOR = ("correlation", "sign_agreement", "gain")
"""Figures of each estimator."""
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
"""Figures of the critic."""


def is_known(value: Any) -> bool:
    """True for a number, or None for an unknown one."""
    return value is None or is_number(value)


def has(kind: Callable[[Any], bool], *names: str) -> Callable[[Any], bool]:
    """A check for objects with valid values under these names."""
    return lambda value: isinstance(value, dict) and all(name in value and kind(value[name]) for name in names)


is_figure = has(is_known, "value", "low", "high")
is_bin = has(is_known, "predicted", "true", "low", "high", "states")


def is_table(value: Any) -> bool:
    """True for figures by estimator."""
    return isinstance(value, dict) and all(map(has(is_figure, *OF_ESTIMATOR), value.values()))


def is_metrics(value: Any) -> bool:
    """True for an audit's metrics."""
    return isinstance(value, dict) and all(name.startswith("audit/") and is_number(x) for name, x in value.items())


def is_size(value: Any) -> bool:
    """True for an audit's settings."""
    return isinstance(value, dict) and is_count(audited_rows(value))


FIGURE = "an object with value, low and high, each a number or null"
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "iteration": (lambda value: value is None or is_count(value), "the number of an iteration, or null"),
    "settings": (is_size, "an object with completions or episodes, a count"),
    "continuations": (is_number, "a number"),
    "credit.tokens": (is_count, "a count"),
    "credit.noise": (is_figure, FIGURE),
    "credit.estimators": (is_table, f"an object of estimators, each with {', '.join(OF_ESTIMATOR)}: {FIGURE}"),
    "metrics": (is_metrics, "an object of numbers whose names begin with audit/"),
    "samples": (lambda value: isinstance(value, list), "a list"),
}
CRITIC: dict[str, tuple[Callable[[Any], bool], str]] = {
    **{f"critic.{name}": (is_figure, FIGURE) for name in OF_CRITIC},
    "critic.states": (is_count, "a count"),
    "critic.reliability": (all_of(is_bin), "a list of objects with predicted, true, low, high and states"),
}
"""Fields of an audit with a critic; without one, `critic` is null."""


def read_audit(file: Path) -> dict[str, Any] | None:
    """The audit in this file; None if the file does not exist.

    Raises:
        ConfigError: the file is invalid; the message names the key.
    """
    if not file.is_file():
        return None
    audit = read_object(file, file.read_text(encoding="utf-8", errors="replace"))
    for key, (fits, wanted) in (FIELDS if audit.get("critic") is None else FIELDS | CRITIC).items():
        group, _, name = key.rpartition(".")
        holder = audit.get(group) if group else audit
        if not isinstance(holder, dict) or name not in holder or not fits(holder[name]):
            raise ConfigError(f"{file}: {key} is not {wanted}")
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
    rows = [dict(row) for row in metrics]
    numbers = [row["iteration"] for row in rows]
    if audit["iteration"] is None:
        rows[-1] |= audit["metrics"]
    elif audit["iteration"] in numbers:
        rows[numbers.index(audit["iteration"])] |= audit["metrics"]
    return rows
