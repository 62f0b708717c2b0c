"""Diagnosis of a run: problems visible in its metrics, each with what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokencredit.errors import pages_by_title
from tokencredit.runs.diagnosis.critic_checks import CRITIC_CHECKS
from tokencredit.runs.diagnosis.evidence import SETTLED, Evidence, Finding
from tokencredit.runs.diagnosis.policy_checks import POLICY_CHECKS
from tokencredit.runs.diagnosis.reward_checks import REWARD_CHECKS
from tokencredit.runs.diagnosis.text_checks import TEXT_CHECKS
from tokencredit.runs.summary import in_iterations
from tokencredit.settings.run_kind import OFFLINE, run_kind_of

__all__ = ["CHECKS", "Finding", "diagnose", "no_finding"]

CHECKS = (*CRITIC_CHECKS, *POLICY_CHECKS, *REWARD_CHECKS, *TEXT_CHECKS)
"""All checks with the weights and sections of their findings."""
STILL = ("explained_variance", "clip_low", "flat_reward")
ENDS = ("truncated", "stop_unused")
HACKED = ("phrase_spreads", "kl_runaway", "entropy_collapse", "evaluation_disagrees")
EXPLAINS: dict[str, Sequence[str]] = {
    "environment_fails": ("constant_term", "equal_scores", *STILL),
    "ends_at_once": ("hollow_score", "constant_term", "equal_scores", *ENDS, *STILL),
    "discounted": ("kl_runaway", "clip_high", *STILL),
    "clip_high": ("entropy_explodes", "entropy_collapse", "kl_runaway", "equal_scores", *ENDS, *STILL),
    "entropy_explodes": ("hollow_score", "degenerate", "phrase_spreads", "kl_runaway", *ENDS, *STILL),
    "hollow_score": ("degenerate", *HACKED, *ENDS, *STILL),
    "degenerate": (*HACKED, *ENDS, *STILL),
    "entropy_collapse": ("kl_runaway", "equal_scores", *ENDS, *STILL),
    "kl_runaway": (*ENDS, *STILL),
    "evaluation_disagrees": ENDS,
    "constant_term": ("equal_scores", "not_moved", *STILL),
    "equal_scores": STILL,
    "not_moved": STILL,
    "still_warming": STILL,
    "critic_lags": ("explained_variance",),
    "clip_low": ("explained_variance", "flat_reward"),
    "explained_variance": ("flat_reward",),
    "stop_unused": ("truncated",),
}
"""Findings that follow from another one, by the name of that: only the cause is shown."""


def diagnose(
    metrics: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    *,
    ended: bool = True,
    samples: Sequence[Mapping[str, Any]] = (),
) -> list[Finding]:
    """Findings on a run, most important first; none on a run that learns from a data set, which has no checks.

    Args:
        metrics: one mapping per iteration, as in metrics.jsonl.
        config: the run's configuration in plain dicts.
        ended: true for a whole run; some checks need its end.
        samples: completions as in samples.jsonl, of the first and the last iterations at least.
    """
    evidence = Evidence(metrics, config, ended, samples)
    if not len(evidence) or evidence.run_kind in OFFLINE:
        return []
    findings = []
    for weight, check, section in CHECKS:
        if (finding := check(evidence)) and (cures := evidence.possible(finding.cures)):
            findings.append(
                replace(finding, name=check.__name__, weight=weight, section=pages_by_title(section), cures=cures)
            )
    explained = {name for finding in findings for name in EXPLAINS.get(finding.name, ())}
    causes = [finding for finding in findings if finding.name not in explained]
    return sorted(causes, key=lambda finding: -finding.weight)


def no_finding(config: Mapping[str, Any], iterations: int) -> str:
    """The result for a run of this length without findings; most checks need `SETTLED` iterations."""
    run_kind = run_kind_of(config)
    if run_kind in OFFLINE:
        return f"there are no checks for runs of tokencredit {run_kind.command}"
    if iterations >= SETTLED:
        return "the checks find nothing wrong with this run"
    return f"the checks find nothing wrong in {in_iterations(iterations)}, but most of them need at least {SETTLED}"
