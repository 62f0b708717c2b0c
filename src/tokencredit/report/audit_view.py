"""An audit on a run's page: the trust score in a sentence, tables of estimators and critic, chart data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokencredit.audit.verdict import (
    CRITIC,
    again,
    audit_command,
    credit_verdict,
    critic_caution,
    figure_text,
    measured,
    noisy,
    remedy,
    share,
    significant,
    text_parts,
    unknown,
)
from tokencredit.report.reading import OF_ESTIMATOR, Run
from tokencredit.runs.folder import saved
from tokencredit.runs.transcript import acted
from tokencredit.runs.untrusted import visible


def trust(run: Run) -> str:
    """The trust score as a sentence."""
    if run.audit is None:
        return f"The credit on this page has not been measured against true values; to measure it: {next_audit(run)}"
    advice = remedy(run.audit, audit_command(run.path, run.config), run.metrics, saved(run.path))
    return visible(f"{credit_verdict(run.audit)} {advice}".rstrip())


def trust_fact(run: Run) -> tuple[str, str]:
    """The trust score in a word or two, and a note on it."""
    if run.audit is None:
        return "not measured", "by an audit"
    credit = run.audit["credit"]
    if unknown(credit):
        return "not known", "the audit is too noisy or too small"
    correlation = credit["estimators"][credit["shown"]]["correlation"]
    value, interval = text_parts(correlation)
    return share(correlation).lower(), f"is real: correlation {value} ({interval})"


def next_audit(run: Run) -> str:
    """How to audit a run, or to audit it again."""
    command = audit_command(run.path, run.config)
    if run.audit is not None:
        return visible(again(run.audit, command))
    if command == "trainer.audit":
        return "trainer.audit() in Python, or audit.every"
    why = "" if run.python else ", since run.save_every: 0 saves no checkpoint to audit"
    return visible(command) or f"audit.every in a new run{why}"


def credit_error(run: Run, iteration: int) -> tuple[float, int] | None:
    """Standard error of an advantage in an iteration, and the nearest iteration with an audit, which measured it."""
    name = "audit/advantage_error"
    errors = {row["iteration"]: row[name] for row in run.metrics if row.get(name)}
    nearest = min(errors, key=lambda number: (abs(number - iteration), -number), default=None)
    return None if nearest is None else (errors[nearest], nearest)


def faded(run: Run) -> str | None:
    """Which tokens the page fades, and how many are significant; None if nothing is known of the error."""
    last = run.metrics[-1]["iteration"]
    if (found := credit_error(run, last)) is None:
        return None
    error, audited = found
    shown = [x for sample in run.samples if sample["iteration"] == last for x in acted(sample)["advantages"]]
    counted = f" {significant(shown, error, audited)}." if shown else ""
    return f"Advantages smaller than their standard error, by the nearest audit, are faded.{counted}"


def entry(audit: Mapping[str, Any], kept: int) -> str:
    """Name of the audited completions in the page's list of iterations."""
    name = "audit of the final policy" if audit["iteration"] is None else f"audit of iteration {audit['iteration']}"
    count = len(audit["samples"])
    return name if kept == count else f"{name} (first {kept} of {count})"


def view(audit: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Tables and chart data of an audit; None without one.

    Returns:
        `estimators`, rows of label, correlation, sign agreement and gain as texts; `significant`, the number of tokens
        whose signs are compared; `critic`, rows of name, value, interval and meaning, empty without a critic; `caution`
        on them if they are noise; `chart`, the numbers of both charts.
    """
    if audit is None:
        return None
    credit, critic = audit["credit"], audit["critic"]
    noise = noisy(credit)
    marks = {credit["shown"]: " (this run's)"}
    rows = [
        (
            visible(label) + marks.get(label, ""),
            *(figure_text(found[name], noisy=noise and name != "sign_agreement") for name in OF_ESTIMATOR),
        )
        for label, found in credit["estimators"].items()
    ]
    ends = {"low": None, "high": None} if noise else {}
    correlations = {visible(label): found["correlation"] | ends for label, found in credit["estimators"].items()}
    return {
        "size": measured(audit),
        "noise": figure_text(credit["noise"]),
        "estimators": rows,
        "significant": credit["significant"],
        "critic": [(name, *text_parts(critic[key]), meaning) for key, (name, meaning) in CRITIC.items() if critic],
        "caution": critic_caution(critic),
        "chart": {
            "shown": visible(credit["shown"]),
            "noisy": noise,
            "correlations": correlations,
            "reliability": [] if critic is None else critic["reliability"],
        },
    }
