"""Format an audit's numbers for audit.json and for the `audit/…` metrics in metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from tokencredit.audit.agreement import share_real
from tokencredit.audit.estimates import MONTE_CARLO, TD
from tokencredit.audit.truth import Truth

DECIMALS = 6


def audit_metrics(credit: Mapping[str, Any], critic: Mapping[str, Any] | None) -> dict[str, float]:
    """The metrics of an audit, without undefined figures.

    Returns:
        `audit/correlation` of the shown advantages with the true ones, with the bounds of its interval
        (`audit/correlation_low`, `audit/correlation_high`), and `audit/trust`, the share of their variance that is
        real; `audit/sign_agreement`; `audit/noise` of the truth; `audit/raise_lam` and `audit/lower_lam`, lower bounds
        of the gain in correlation with λ = 1 and λ = 0. For the critic: `audit/explained_variance` and its upper bound
        `audit/explained_variance_high`, `audit/slope`, `audit/bias`, `audit/spread` and its upper bound,
        `audit/ranking`, and `audit/value_noise`, the share of noise in the true values.
    """
    estimators, shown = credit["estimators"], credit["estimators"][credit["shown"]]
    correlation = shown["correlation"]["value"]
    figures: dict[str, float | None] = {
        "correlation": correlation,
        "correlation_low": shown["correlation"]["low"],
        "correlation_high": shown["correlation"]["high"],
        "trust": share_real(correlation),
        "sign_agreement": shown["sign_agreement"]["value"],
        "noise": credit["noise"]["value"],
    }
    for name, label in {"raise_lam": MONTE_CARLO, "lower_lam": TD}.items():
        if label in estimators and label != credit["shown"]:
            figures[name] = estimators[label]["gain"]["low"]
    if critic is not None:
        figures["value_noise"] = critic["noise"]["value"]
        names = ("explained_variance", "slope", "bias", "spread", "ranking")
        figures |= {name: critic[name]["value"] for name in names}
        figures |= {f"{name}_high": critic[name]["high"] for name in ("explained_variance", "spread")}
    return {f"audit/{name}": value for name, value in figures.items() if value is not None}


def true_numbers(truth: Truth, row: int, length: int) -> dict[str, list[float | None]]:
    """True values and advantages of a row's steps, with standard errors; None where unknown."""
    names = {
        "true_values": truth.values,
        "true_value_errors": truth.value_errors,
        "true_advantages": truth.advantages,
        "true_advantage_errors": truth.advantage_errors,
    }
    return {name: _numbers(x[row, :length]) for name, x in names.items()}


def _numbers(x: torch.Tensor) -> list[float | None]:
    return [round(value, DECIMALS) if math.isfinite(value) else None for value in x.tolist()]
