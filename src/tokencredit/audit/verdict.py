"""The verdict of an audit in sentences, for the screen and the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

SIGNIFICANT = 2.0
"""Standard errors beyond which an advantage, or a difference in the truth, counts as significant."""
NOISY = 0.5
"""Share of noise in a measured truth above which figures and their intervals are no evidence. Measured: an audit with a
share of 0.73 gave a false finding on a run with a correct critic."""
MIN_ROWS = 6
"""Fewest completions or episodes with intervals. A bootstrap interval stays within the range of the rows, and n rows
all lie on one side of a median with probability 2^(1-n): 6 % for five, so that no such interval reaches 95 %."""


def unknown(credit: Mapping[str, Any]) -> bool:
    """True if an audit cannot tell how much of the credit is real: it is too noisy, or has too few rows."""
    return credit["estimators"][credit["shown"]]["correlation"]["low"] is None or noisy(credit)


def noisy(credit: Mapping[str, Any]) -> bool:
    """True if most of the variance of an audit's true advantages is noise."""
    noise = credit["noise"]["value"]
    return noise is not None and noise > NOISY


def credit_verdict(audit: Mapping[str, Any]) -> str:
    """The share of real credit in the contents of an audit.json, or why it cannot tell; holds untrusted text."""
    credit = audit["credit"]
    noise, correlation = credit["noise"]["value"], credit["estimators"][credit["shown"]]["correlation"]
    if correlation["value"] is None:
        return (
            "The share of real credit in this run is unknown: noise in the true values may explain the whole result "
            f"({measured(audit)}). {_advice(audit, noise)}"
        )
    value, interval = text_parts(correlation)
    within = f"{interval}, " if interval and not noisy(credit) else ""
    correlates = f"advantages ({credit['shown']}) correlate {value} with the true ones ({within}{measured(audit)})"
    if noisy(credit):
        return f"This audit is {too_noisy(noise)}; {correlates}. {_advice(audit, noise)}"
    if audited_rows(audit["settings"]) < MIN_ROWS:
        return (
            f"This audit is too small to say how much of this run's credit is real: intervals need at least {MIN_ROWS} "
            f"{rows_name(audit)}; {correlates}. Audit with more --completions."
        )
    return f"{share(correlation)} of this run's credit is real: {correlates}."


def _advice(audit: Mapping[str, Any], noise: float | None) -> str:
    """The size of an audit with less noise, beyond the limits that ended this one."""
    # Noise falls as one over the continuations; 0.4 of the variance leaves room for the error of its estimate.
    more = noise / (1 - noise) * 0.6 / 0.4 if noise is not None and noise < 1 else None
    count = "many more" if more is None else f"about {math.ceil(audit['continuations'] * more)}"
    sentences = [f"Audit with {count} --continuations."]
    for name, limit in audit.get("limits", {}).items():
        enough = "more" if more is None else f"about {math.ceil(limit * more)}"
        reached = str(round(limit, 1)).removesuffix(".0")
        sentences.append(f"The limit of {reached} {name} ended this audit: give {enough} --{name}, or no limit.")
    return " ".join(sentences)


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
    return (
        f"{audit['credit']['tokens']:,} {steps} of {audited_rows(audit['settings']):,} {rows_name(audit)} "
        f"{when(audit)}, {audit['continuations']:.3g} continuations per state"
    )


def when(audit: Mapping[str, Any]) -> str:
    """The audited policy, as text."""
    return "of the final policy" if audit["iteration"] is None else f"at iteration {audit['iteration']}"


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
