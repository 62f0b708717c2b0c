"""The estimators that an audit compares: the run's own, and all others that its data allow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tokencredit.core.estimator_table import ESTIMATORS, Estimator, EstimatorFunction, inputs_named
from tokencredit.settings.parts import name_of

LAMBDAS = (0.5, 0.9, 0.95)
TD, MONTE_CARLO = "td (gae, λ = 0)", "monte_carlo (gae, λ = 1)"
"""Labels of the two ends of GAE."""


class Variant(NamedTuple):
    """An estimator with its settings."""

    name: str | EstimatorFunction
    options: Mapping[str, Any]
    critic: bool = True
    """Uses the critic's values."""


def label(name: str | EstimatorFunction, options: Mapping[str, Any]) -> str:
    """Label of a variant in tables, such as `gae, λ = 0.95`, or `my_gae (my_estimators.py), λ = 0.95`."""
    if name in ("gae", "td", "monte_carlo"):
        lam = {"td": 0.0, "monte_carlo": 1.0}[name] if name != "gae" else float(options["lam"])
        return {0.0: TD, 1.0: MONTE_CARLO}.get(lam, f"gae, λ = {lam:.3g}")
    shown = {"lam": "λ", "alpha": "α", "n": "n"}
    settings = [f"{shown[key]} = {options[key]:g}" for key in spec_of(name).settings if key in shown]
    return ", ".join([name if isinstance(name, str) else name_of(name, without=inputs_named(name)), *settings])


def reads_lam(label: str) -> bool:
    """True for the label of an estimator with the setting λ; the two ends of GAE may be estimators without it."""
    return "λ" in label and label not in (TD, MONTE_CARLO)


def spec_of(name: str | EstimatorFunction) -> Estimator:
    """The inputs of an estimator."""
    return ESTIMATORS[name] if isinstance(name, str) else Estimator.of(name)


def variants(
    name: str | EstimatorFunction, options: Mapping[str, Any], *, values: bool, texts: bool, groups: bool
) -> dict[str, Variant]:
    """All estimators by label; the first is the run's own, `name` with its `options`.

    `values`: the run has a critic; `texts`: rows have one score each, as critic-free estimators need; `groups`: the
    rollout holds several completions per prompt.
    """
    listed = [Variant(name, options)]
    listed += [Variant(other, options) for other in ("td", "monte_carlo", "n_step", "length_adaptive_gae")]
    listed += [Variant("gae", {**options, "lam": lam}) for lam in LAMBDAS]
    listed += [Variant(other, options, critic=False) for other in ("reward_to_go", "total_return")]
    if texts:
        listed.append(Variant("uniform", options, critic=False))
    if groups:
        listed += [Variant(other, options, critic=False) for other in ("group_relative", "leave_one_out")]
    by_label: dict[str, Variant] = {}
    for variant in listed:
        if values or spec_of(variant.name).critic != "required":
            by_label.setdefault(label(variant.name, variant.options), variant)
    return by_label
