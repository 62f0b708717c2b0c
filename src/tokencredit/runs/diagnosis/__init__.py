"""Diagnosis of a run: problems visible in its metrics, each with what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokencredit.runs.diagnosis.critic_checks import CRITIC_CHECKS
from tokencredit.runs.diagnosis.evidence import SETTLED, Evidence, Finding
from tokencredit.runs.diagnosis.policy_checks import POLICY_CHECKS
from tokencredit.runs.diagnosis.reward_checks import REWARD_CHECKS
from tokencredit.settings.run_kind import OFFLINE, run_kind_of

__all__ = ["CHECKS", "Finding", "diagnose", "no_finding"]

CHECKS = (*CRITIC_CHECKS, *POLICY_CHECKS, *REWARD_CHECKS)
"""All checks with the weights of their findings."""


def diagnose(metrics: Sequence[Mapping[str, Any]], config: Mapping[str, Any], *, ended: bool = True) -> list[Finding]:
    """Findings on a run, most important first; none on a run that learns from a data set, which has no checks.

    Args:
        metrics: one mapping per iteration, as in metrics.jsonl.
        config: the run's configuration in plain dicts.
        ended: true for a whole run; some checks need its end.
    """
    evidence = Evidence(metrics, config, ended)
    if not len(evidence) or evidence.run_kind in OFFLINE:
        return []
    findings = []
    for weight, check in CHECKS:
        if finding := check(evidence):
            findings.append(replace(finding, name=check.__name__, weight=weight))
    return sorted(findings, key=lambda finding: -finding.weight)


def no_finding(config: Mapping[str, Any], iterations: int) -> str:
    """The result for a run of this length without findings; most checks need `SETTLED` iterations."""
    run_kind = run_kind_of(config)
    if run_kind in OFFLINE:
        return f"there are no checks for runs of tokencredit {run_kind.command}"
    if iterations >= SETTLED:
        return "the checks find nothing wrong with this run"
    number = f"{iterations} iteration" + "s" * (iterations > 1)
    return f"the checks find nothing wrong in {number}, but most of them need at least {SETTLED}"
