"""The verdict of an audit in sentences, for the screen and the page."""

from __future__ import annotations

import math
import shlex
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokencredit.audit.estimates import reads_lam
from tokencredit.errors import pages_by_title
from tokencredit.settings.run_kind import CONTROL, run_kind_of

SIGNIFICANT = 2.0
"""Standard errors beyond which an advantage, or a difference in the truth, counts as significant."""
NOISY = 0.5
"""Share of noise in a measured truth above which figures and their intervals are no evidence. Measured: an audit with a
share of 0.73 gave a false finding on a run with a correct critic."""
MIN_ROWS = 6
"""Fewest completions or episodes with intervals. A bootstrap interval stays within the range of the rows, and n rows
all lie on one side of a median with probability 2^(1-n): 6 % for five, so that no such interval reaches 95 %."""

ENOUGH = 16
"""Completions or episodes of the next audit, after one with fewer than `MIN_ROWS`."""
REAL = 0.5
"""Correlation below which little of the credit, a quarter, is real."""
VARIED = 1.5
"""Ratio of two iterations' standard deviations of advantages from which one varies more."""
CRITIC = {
    "explained_variance": ("explained variance", "1 for a perfect critic, 0 for a constant, below 0 for a worse one"),
    "rmse": ("root mean squared error", "in units of reward"),
    "constant_rmse": ("RMSE of the best constant", "the standard deviation of the true values"),
    "bias": ("bias", "mean of value minus true value, in units of reward"),
    "slope": (
        "slope",
        "change of the true value per unit of value: 1 if calibrated, below 1 if differences are overstated",
    ),
    "spread": ("spread", "standard deviation of the values over that of the true values: near 0 for a flat critic"),
    "ranking": ("ranking", "share of clearly different pairs of states that are ordered correctly; 0.5 is chance"),
    "ranking_within": ("ranking within a row", "the same for two states of one completion or episode"),
    "noise": ("noise", "share of sampling noise in the measured variance of true values, which is subtracted"),
}
"""Names of the critic's figures, and their meaning."""


def unknown(credit: Mapping[str, Any]) -> bool:
    """True if an audit cannot tell how much of the credit is real: it is too noisy, or has too few rows."""
    correlation = credit["estimators"][credit["shown"]]["correlation"]
    return None in (correlation["value"], correlation["low"]) or noisy(credit)


def noisy(credit: Mapping[str, Any]) -> bool:
    """True if most of the variance of an audit's true advantages is noise."""
    noise = credit["noise"]["value"]
    return noise is not None and noise > NOISY


def credit_verdict(audit: Mapping[str, Any]) -> str:
    """The share of real credit in the contents of an audit.json, or why it cannot tell; holds untrusted text."""
    credit = audit["credit"]
    noise, correlation = credit["noise"]["value"], credit["estimators"][credit["shown"]]["correlation"]
    if correlation["value"] is None:
        why = "noise in the true values may explain the whole result"
        if noise is None or noise <= NOISY:  # nothing to correlate
            why = "the true advantages do not vary" if noise is None else "the shown ones are all alike"
        return f"The share of real credit in this run is unknown: {why} ({measured(audit)})."
    value, interval = text_parts(correlation)
    within = f"{interval}, " if interval and not noisy(credit) else ""
    correlates = f"advantages ({credit['shown']}) correlate {value} with the true ones ({within}{measured(audit)})"
    if noisy(credit):
        return f"This audit is {too_noisy(noise)}; {correlates}."
    if audited_rows(audit["settings"]) < MIN_ROWS:
        return (
            f"This audit is too small to say how much of this run's credit is real: intervals need at least {MIN_ROWS} "
            f"{rows_name(audit)}; {correlates}."
        )
    return f"{share(correlation)} of this run's credit is real: {correlates}."


def audit_command(run: Path, config: Mapping[str, Any]) -> str:
    """How an audit of this run begins: `tokencredit audit RUN` or `trainer.audit`; empty if only a new run has one.

    An agent's trainer has no audit on request.
    """
    if config.get("python"):
        return "" if run_kind_of(config) is CONTROL else "trainer.audit"
    saves = (config.get("run") or {}).get("save_every") != 0
    return f"tokencredit audit {shlex.quote(str(run))}" if saves else ""


def again(audit: Mapping[str, Any], command: str) -> str:
    """The command or call of an audit of this size, with as many continuations as leave little noise.

    `audit` are the contents of an audit.json, and `command` is that of `audit_command`.
    """
    noise, rows = audit["credit"]["noise"]["value"], audited_rows(audit["settings"])
    noise = 0.6 if noise is None else noise
    odds = noise / (1 - noise) if noise < 0.9 else 9.0  # an estimate, and above 1 by chance
    # Noise falls as one over the continuations; 0.3 of the variance leaves room for the error of its estimate.
    continuations = math.ceil(audit["continuations"] * max(1.0, odds * 0.7 / 0.3))
    if not command:
        size = f" and audit.{rows_name(audit)}: {ENOUGH}" * (rows < MIN_ROWS)
        return f"audit.every with audit.continuations: {continuations}{size} in a new run"
    size = {"completions": rows if rows >= MIN_ROWS else ENOUGH}
    size |= {"states": audit["settings"]["states"]} if "states" in audit["settings"] else {}
    size |= {"continuations": continuations}
    if command.startswith("tokencredit "):
        return " ".join([command, *(f"--{name} {'all' if x is None else x}" for name, x in size.items())])
    return f"{command}(AuditConfig({', '.join(f'{name}={x}' for name, x in size.items())}))"


def truer(audit: Mapping[str, Any], rows: Sequence[Mapping[str, Any]] = ()) -> str:
    """What to try where an audit says that little of the credit is real; empty if it does not. Untrusted text."""
    credit, agents = audit["credit"], rows_name(audit) == "episodes"
    shown = credit["shown"]
    if unknown(credit) or credit["estimators"][shown]["correlation"]["value"] >= REAL:
        return ""
    gains = {label: found["gain"] for label, found in credit["estimators"].items() if label != shown}
    gains = {label: gain for label, gain in gains.items() if None not in (gain["value"], gain["low"])}
    best = max(gains, key=lambda label: gains[label]["low"], default="")
    better = bool(best) and gains[best]["low"] > 0
    ways = [f"{best}, whose correlation is {gains[best]['value']:.2f} higher"] if better else []
    if not (agents or any("critic_share" in row or "env/turns" in row for row in rows)):
        kind = "critic.kind, " * (audit["critic"] is None)
        ways.append(f"scores of prefixes ({kind}critic.prefix_every: 1)")
    ways.append(f"larger batches ({'steps, env.number' if agents else 'rollout.batch_size'})")
    chosen = any("lam" in row for row in rows)  # by `advantage.lam: auto`, as the best of the data
    ways += ["another λ (advantage.lam)"] if reads_lam(shown) and not (better or chosen) else []
    *others, last = ways
    return f"try {', '.join(others)}{' or ' * bool(others)}{last}: {pages_by_title('docs/audit.md#untrue-credit')}"


def remedy(
    audit: Mapping[str, Any], command: str, rows: Sequence[Mapping[str, Any]] = (), saved: Container[float] = ()
) -> str:
    """What to do about an audit without a verdict, or about credit that is not real; empty if neither is so.

    `audit` and `command` are as in `again`. `rows` are the run's metrics, of which the iterations `saved` have a
    checkpoint: credit whose advantages vary more than those of the audited iteration is easier to measure.
    """
    ways, credit = truer(audit, rows), audit["credit"]
    alike = credit["estimators"][credit["shown"]]["correlation"]["value"] is None and not noisy(credit)
    alike = alike and not audit.get("limits")  # which may have left too little to see a difference
    if alike or not (ways or unknown(credit)):
        return ""
    spread = {row["iteration"]: row.get("advantage_std") or 0.0 for row in rows}
    earlier = max((number for number in spread if number in saved), key=lambda x: spread[x], default=None)
    now = spread.get(audit["iteration"] or max(spread, default=0), 0.0)
    varied = command.startswith("tokencredit ") and earlier is not None and spread[earlier] > VARIED * now
    checkpoint = f" (advantages vary more at --checkpoint {earlier:.0f})" if varied else ""
    if ways:
        return f"To make more of it true, {ways}{checkpoint}."
    limits = [f"{str(round(x, 1)).removesuffix('.0')} {name}" for name, x in audit.get("limits", {}).items()]
    ended = f"The limit of {' and '.join(limits)} ended this audit. " if limits else ""
    return f"{ended}To measure it: {again(audit, command)}{checkpoint}"  # a command is copied without a full stop


def significant(advantages: Sequence[float], error: float, iteration: int) -> str:
    """How many of the advantages of the last iteration's samples are beyond two standard errors, as a sentence.

    `error` is the root mean squared error of advantages in the audit of `iteration`.
    """
    count = sum(abs(x) > SIGNIFICANT * error for x in advantages)
    return (
        f"{count:,} of {len(advantages):,} tokens in the last iteration's samples have a significant advantage: beyond "
        f"{SIGNIFICANT:.0f} standard errors of {error:.2g}, by the audit of iteration {iteration}"
    )


def too_noisy(noise: float) -> str:
    """The verdict on an audit with this share of noise, above `NOISY`."""
    return (
        f"too noisy to say how much of this run's credit is real: {100 * noise:.0f} % of the variance of its true "
        "advantages is sampling noise"
    )


def critic_caution(critic: Mapping[str, Any] | None) -> str | None:
    """A caution if noise or nearly equal true values leave the critic without a verdict; None otherwise."""
    if critic is None:
        return None
    noise = critic["noise"]["value"] or 0.0
    if noise <= NOISY:
        if critic["explained_variance"]["value"] is not None or critic["rmse"]["value"] is None:
            return None
        return "The true values hardly vary here, so the critic cannot be judged by them."
    return (
        f"The critic's figures are too noisy to judge it: {100 * noise:.0f} % of the variance of its true values is "
        "sampling noise."
    )


def share(correlation: Mapping[str, Any]) -> str:
    """The squared correlation, as the beginning of a sentence that claims no more than its interval."""
    value, high = correlation["value"], correlation["high"]
    if value <= 0:
        return "None" if high is None or high <= 0 else "It is not shown that any"
    percent = 100 * min(value, 1.0) ** 2
    if percent >= 1 or high is None:
        return f"About {percent:.0f} %"
    return f"At most {math.ceil(100 * min(max(value, high), 1.0) ** 2)} %"


def measured(audit: Mapping[str, Any]) -> str:
    """The size of an audit, as text."""
    steps = "steps" if rows_name(audit) == "episodes" else "tokens"
    when = "of the final policy" if audit["iteration"] is None else f"at iteration {audit['iteration']}"
    return (
        f"{audit['credit']['tokens']:,} {steps} of {audited_rows(audit['settings']):,} {rows_name(audit)} {when}, "
        f"{audit['continuations']:.3g} continuations per state"
    )


def rows_name(audit: Mapping[str, Any]) -> str:
    """The audited rows: completions, or an agent's episodes."""
    return "episodes" if "episodes" in audit["settings"] else "completions"


def audited_rows(settings: Mapping[str, Any]) -> Any:
    """Number of completions or episodes of an audit with these settings; None if not given."""
    return settings.get("completions", settings.get("episodes"))


def text_parts(figure: Mapping[str, Any]) -> tuple[str, str]:
    """A figure and its interval as texts: two decimals, or two digits if all is below 0.01.

    An unknown interval is empty.
    """
    if figure["value"] is None:
        return "not known", ""
    ends = [figure[end] for end in ("value", "low", "high")]
    small = 0 < max(abs(x) for x in ends if x is not None) < 0.01
    # Adding 0.0 leaves no minus sign at a rounded zero.
    value, low, high = (None if x is None else f"{x + 0.0:.2g}" if small else f"{round(x, 2) + 0.0:.2f}" for x in ends)
    return str(value), "" if low is None or high is None else f"{low} to {high}"


def figure_text(figure: Mapping[str, Any], *, noisy: bool = False) -> str:
    """A figure as text, with its interval, or if it is noise with a word that it is."""
    value, interval = text_parts(figure)
    if noisy and figure["value"] is not None:
        return f"{value}, too noisy"
    return f"{value} ({interval})" if interval else value
