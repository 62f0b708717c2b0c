"""A run's report: one self-contained HTML page, without network or server."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import pstdev
from typing import TYPE_CHECKING, Any

from tokencredit.audit.verdict import unknown
from tokencredit.core.losses import clip_range
from tokencredit.errors import NotInstalled
from tokencredit.report import agent_episode, audit_view
from tokencredit.report.curves import chart_of, constant, section_of, sections
from tokencredit.report.reading import REPORT, Run, read_run
from tokencredit.report.story import next_step, story
from tokencredit.report.templating import fill, readable, rounded, two_digits
from tokencredit.report.what_if import ALTERNATIVES, what_if
from tokencredit.runs.diagnosis import no_finding
from tokencredit.runs.folder import RunFolder
from tokencredit.runs.jsonl import ASSISTANT, ENDINGS, PROBLEMS, SCORED
from tokencredit.runs.summary import WINDOW
from tokencredit.runs.transcript import acted, conversation, phrase_shares, speeches
from tokencredit.runs.untrusted import visible
from tokencredit.settings.parts import is_own, label_of
from tokencredit.settings.run_kind import run_kind_of

if TYPE_CHECKING:  # it imports torch, which a page does not need
    from tokencredit.runs.recorder import RunRecord

LARGEST = 8 * 2**20
"""Maximum size of a page, in bytes."""
TOKENS = 20_000
"""Maximum tokens in the credit view, so that the page stays at a few megabytes."""
AUDITED = 4_000
"""Maximum tokens of audited completions, in addition."""
VARIES = 0.25
"""Share of the largest standard deviation of advantages from which an iteration's advantages vary."""
FLAT = 0.1
"""Standard deviation of values relative to that of advantages, below which a critic knows nothing yet."""
OBSERVATION = 2_000
"""Maximum characters shown of an observation."""
CHARACTERS = 25
"""Characters of observations that take as much of the page as a token with its numbers."""


def write_report(folder: Path) -> Path:
    """Write `report.html` into a run's folder; returns its path. Raises `ConfigError` for an invalid folder or file."""
    run, target = read_run(folder), RunFolder(str(folder))
    target.require_writable()
    target.write(REPORT, render(run))
    return folder / REPORT


def write_final_report(record: RunRecord) -> None:
    """Write the page of a run that ends, if it has an iteration; an event says if a package for it is missing."""
    if not (record.main and record.history):
        return
    folder = record.folder.path
    try:
        write_report(folder)
    except NotInstalled as error:
        record.event(f"no report.html: {error}, then tokencredit report {shlex.quote(str(folder))}")


def render(run: Run) -> str:
    """The page as HTML."""
    audit, samples, truths = audit_view.view(run.audit), credit(run), audited(run)
    known = run.audit is not None and not unknown(run.audit["credit"])
    episode = run.episode and agent_episode.view(run.episode)
    findings, charts = run.findings(), sections(run.metrics)
    scored = [sample for sample in run.samples if sample["iteration"] > run.since]
    headline = chart_of(run_kind_of(run.config).headline)
    main = charts.get(section_of(headline), {}).pop(headline, None)
    drawn = {title: [chart for chart in found.values() if constant(chart) is None] for title, found in charts.items()}
    return fill(
        "page.html",
        name=visible(run.path.resolve().name),
        story=story(run),
        findings=findings,
        next_step=next_step(run, findings),
        no_finding=no_finding(run.config, len(run.scored)),
        trust=audit_view.trust(run),
        faded=audit_view.faded(run),
        fade=fade(run, samples),
        passed_over=passed_over(samples, truths, known=known),
        audit=audit,
        critic=any("value" in sample["numbers"] for sample in (*samples, *truths)),
        episode=episode,
        episodes=any("turns" in sample for sample in (*samples, *truths)),
        by_turn=run.setting("advantage.unit") == "turn",
        data={
            "headline": main,
            "changes": marks(run),
            "since": run.since,
            "curves": [{"title": title, "charts": found} for title, found in drawn.items() if found],
            "credit": samples,
            "opened": opened(samples, truths, known=known),
            "audited": truths,
            "alternatives": alternatives_of(run),
            "audit": audit and audit["chart"],
            "episode": episode,
        },
        scored=bool(scored),
        phrases=phrases(scored),
        constants=[
            f"{chart['lines'][0]['name']} {two_digits(value)}"
            for found in charts.values()
            for chart in found.values()
            if (value := constant(chart)) is not None
        ],
    )


def marks(run: Run) -> list[dict[str, Any]]:
    """Lines in the curves where the reward, the prompts or the KL price changed: `x`, and `text` with the keys."""
    keys: dict[int, list[str]] = {}
    for after, key in run.changes:
        if after and key.startswith((*SCORED, "kl.")):
            keys.setdefault(after, []).append(key)
    return [{"x": after + 0.5, "text": visible(", ".join(names))} for after, names in keys.items()]


def credit(run: Run) -> list[dict[str, Any]]:
    """Samples of the credit view, within the limit: whole iterations, evenly spread, with the first and the last."""
    by_iteration: dict[int, list[Mapping[str, Any]]] = {}
    for sample in run.samples:
        by_iteration.setdefault(sample["iteration"], []).append(sample)
    numbers = list(by_iteration)
    most = max((sum(map(size, samples)) for samples in by_iteration.values()), default=0)
    limit = max(TOKENS // max(most, 1), 2)
    if len(numbers) > limit:
        numbers = [numbers[round(i * (len(numbers) - 1) / (limit - 1))] for i in range(limit)]
    return views(run, [sample for number in numbers for sample in by_iteration[number]])


def views(run: Run, samples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Samples of a run for the credit view."""
    numbers = {sample["iteration"] for sample in samples}
    errors = {number: (audit_view.credit_error(run, number) or (None,))[0] for number in numbers}
    return [credit_view(run, sample, errors[sample["iteration"]]) for sample in samples]


def clipped(run: Run, sample: Mapping[str, Any], ratios: Sequence[float]) -> list[float | None] | None:
    """1 at acted tokens whose gradient is clipped at these ratios, None at those outside the loss.

    None without any in the loss, and for a loss that clips no token or by other ratios: those of a policy between two,
    or over the tokens that filters left.
    """
    clip, used = run.setting("ppo.clip"), sample.get("loss_advantages", sample["advantages"])
    policies = [run.setting(f"off_policy.{name}") for name in ("proximal", "support")]
    others = run.setting("ppo.loss") not in (None, "clip") or "interpolated" in policies or "truncated" in policies
    if clip is None or others or all(x is None for x in used):
        return None
    low, high = clip_range((clip, run.setting("ppo.clip_high") or clip))
    dual = run.setting("ppo.dual_clip") or math.inf
    pairs = zip(ratios, used, strict=True)
    return [None if a is None else float(r > high if a > 0 else not low <= r <= dual) for r, a in pairs]


def opened(
    samples: Sequence[Mapping[str, Any]], truths: Sequence[Mapping[str, Any]] = (), *, known: bool = True
) -> list[int | str]:
    """The one or two entries that the credit view opens on, whose advantages vary: an audit or the first, and the last.

    They vary if their standard deviation over the shown tokens is at least `VARIES` times that of the entry with the
    largest. An untrained critic on rewards that hardly differ does not pass. An audit without a verdict (not `known`)
    is left out, since its truth is noise.
    """
    by_entry: dict[int | str, list[float]] = {}
    for sample in (*samples, *truths):
        by_entry.setdefault(sample["iteration"], []).extend(sample["numbers"]["advantage"])
    spread = {entry: pstdev(found) if found else 0.0 for entry, found in by_entry.items()}
    varying = [entry for entry, deviation in spread.items() if deviation >= VARIES * max(spread.values()) > 0]
    audits = {sample["iteration"] for sample in truths}
    iterations = [entry for entry in varying if entry not in audits]
    first = [entry for entry in varying if entry in audits and known] or iterations[:1]
    unclear = [sample["iteration"] for sample in samples or truths][-1:]
    return list(dict.fromkeys([*first, *iterations[-1:]] or unclear))


def passed_over(
    samples: Sequence[Mapping[str, Any]], truths: Sequence[Mapping[str, Any]] = (), *, known: bool = True
) -> str | None:
    """Why the view opens on another entry than the audit, the first or the last iteration; None if it does not."""
    shown, numbers = opened(samples, truths, known=known), [sample["iteration"] for sample in samples]
    iterations = [entry for entry in shown if entry in numbers]
    sides = [f"before {iterations[0]}"] if iterations == shown and iterations[:1] != numbers[:1] else []
    sides += [f"after {iterations[-1]}"] if iterations and iterations[-1] != numbers[-1] else []
    reasons = [f"on no iteration {' or '.join(sides)}: advantages hardly vary there"] if sides else []
    if truths and iterations == shown:
        reasons.append(f"not on the audit, since {'its advantages hardly vary' if known else 'it has no verdict'}")
    return f"The view opens {'; and '.join(reasons)}." if reasons else None


def fade(run: Run, samples: Sequence[Mapping[str, Any]]) -> str | None:
    """What the credit of the first iteration shows, if its critic knows nothing yet; None otherwise, and without λ."""
    estimator, lam, unit = (run.setting(f"advantage.{name}") for name in ("estimator", "lam", "unit"))
    if estimator not in (None, "gae", "decoupled_gae") or lam == 1 or unit == "turn":
        return None
    first = [sample["numbers"] for sample in samples if sample["iteration"] == run.metrics[0]["iteration"]]
    values = [x for numbers in first for x in numbers.get("value", ()) if x is not None]
    advantages = [x for numbers in first for x in numbers["advantage"]]
    if not values or pstdev(values) >= FLAT * pstdev(advantages):
        return None
    return (
        "In the first iteration the critic knows nothing yet: its values are the same for all tokens, so the credit "
        "there is the reward, which fades by γλ per token towards the start of the text (a horizon of 1/(1 − γλ) "
        "tokens). It does not yet tell which token earned the reward."
    )


def audited(run: Run) -> list[dict[str, Any]]:
    """Audited completions of the credit view, within the limit, the first ones."""
    kept: list[Mapping[str, Any]] = []
    for sample in (run.audit or {"samples": []})["samples"]:
        if sum(map(size, (*kept, sample))) > AUDITED:
            break
        kept.append(sample)
    name = audit_view.entry(run.audit, len(kept)) if run.audit else ""
    error = run.audit["metrics"].get("audit/advantage_error") if run.audit else None
    return [credit_view(run, {**sample, "iteration": name}, error) for sample in kept]


def learned_values(sample: Mapping[str, Any]) -> list[float | None]:
    """Values of an episode's acted tokens; None where the critic does not learn them, after the start of a turn."""
    starts = {speech.start for speech in speeches(sample) if speech.role == ASSISTANT}
    return [value if place in starts else None for place, value in enumerate(acted(sample)["values"])]


def size(sample: Mapping[str, Any]) -> int:
    """Size of a sample on the page, in tokens with numbers."""
    if "turns" not in sample:
        return len(sample["tokens"])
    observed = [speech.text for speech in speeches(sample) if speech.role != ASSISTANT] + [sample.get("after", "")]
    return len(acted(sample)["tokens"]) + sum(min(len(text), OBSERVATION) for text in observed) // CHARACTERS


def credit_view(run: Run, sample: Mapping[str, Any], error: float | None) -> dict[str, Any]:
    """One sample of the credit view: escaped texts, and a list of numbers per quantity and acted token.

    `error` is the standard error of an advantage.
    """
    episode, sample, by_turn = sample, acted(sample), run.setting("advantage.unit") == "turn"
    logprobs = sample["logprobs"]
    numbers, errors = {"advantage": sample["advantages"]}, {}
    if "true_advantages" in sample:
        numbers["true advantage"] = sample["true_advantages"]
        errors["true advantage"] = sample["true_advantage_errors"]
    if "values" in sample:  # with a critic
        numbers["value"] = learned_values(episode) if by_turn and "turns" in episode else sample["values"]
    if "true_values" in sample:
        numbers["true value"], errors["true value"] = sample["true_values"], sample["true_value_errors"]
    numbers |= {"reward": sample["rewards"], "log-probability": logprobs}
    if "ref_logprobs" in sample:
        numbers["log-ratio"] = [a - b for a, b in zip(logprobs, sample["ref_logprobs"], strict=True)]
    if "new_logprobs" in sample:
        drawn = run.setting("off_policy.proximal") == "behavior" and sample.get("behavior_logprobs")
        ratios = [math.exp(min(b - a, 20.0)) for a, b in zip(drawn or logprobs, sample["new_logprobs"], strict=True)]
        numbers["ratio after the update"] = ratios
        if (found := clipped(run, sample, ratios)) is not None:
            numbers["clipped"] = found
    if any(sample.get("age", [])):
        numbers["age"] = sample["age"]
    gamma = run.setting("advantage.gamma")
    own = own_estimator(run)
    alternatives = what_if(episode, 1.0 if gamma is None else float(gamma), by_turn=by_turn, own=own)
    return {
        "iteration": sample["iteration"],
        "prompt": readable(conversation(sample)),
        "reward": sample["reward"],
        "truncated": sample["truncated"],
        "chat": "messages" in sample,
        "closed": bool(sample["tokens"]) and not sample["completion"].endswith(sample["tokens"][-1]),
        "tokens": [readable(token) for token in sample["tokens"]],
        "numbers": rounded(numbers),
        "errors": rounded(errors),
        "error": rounded(error),
        "what_if": rounded([alternatives.get(x) for x in alternatives_of(run)]),
        **(turns_of(episode) if "turns" in episode else {}),
    }


def own_estimator(run: Run) -> str | None:
    """The name of an estimator of the user's; None for one of ours."""
    estimator = run.setting("advantage.estimator")
    return visible(label_of(estimator)) if is_own(estimator) else None


def alternatives_of(run: Run) -> list[str]:
    """Estimators of the what-if view by label, an own one first."""
    return [*filter(None, [own_estimator(run)]), *ALTERNATIVES]


def turns_of(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Turns of an episode for the credit view: the policy's as ranges of acted tokens, observations as texts.

    Returns:
        `turns`, each with `role`, and `start`, `end`, `reward` and `problems` or `text`; and `ending` in words, which
        is empty if unknown.
    """
    turns: list[dict[str, Any]] = []
    for speech in speeches(sample):
        if speech.role == ASSISTANT:
            turn = {"start": speech.start, "end": speech.end, "reward": speech.turn.get("reward")}
            turn |= {"problems": [PROBLEMS[name] for name in dict.fromkeys(speech.turn.get("problems", []))]}
        else:
            turn = observation(speech.text)
        turns.append({"role": speech.role} | turn)
    if "after" in sample:
        turns.append({"role": "after the end"} | observation(sample["after"]))
    return {"turns": turns, "ending": ENDINGS.get(sample.get("ending", ""), "")}


def observation(text: str) -> dict[str, Any]:
    """An observation, escaped and cut after `OBSERVATION` characters, and its whole `length`."""
    more = f"… and {len(text) - OBSERVATION:,} more characters" if len(text) > OBSERVATION else ""
    return {"text": readable(text[:OBSERVATION]) + more, "length": len(text)}


def phrases(samples: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Most frequent phrases of the last iterations' completions, with their shares in the first and the last ones."""
    numbers = list(dict.fromkeys(sample["iteration"] for sample in samples))
    before, after = ([s for s in samples if s["iteration"] in part] for part in (numbers[:WINDOW], numbers[-WINDOW:]))
    then, now = phrase_shares(before), phrase_shares(after)
    return [
        (visible(phrase), f"{then.get(phrase, 0.0):.0%}", f"{share:.0%}")
        for phrase, share in sorted(now.items(), key=lambda entry: (-entry[1], entry[0]))[:10]
        if share * len(after) > 1.5  # in more than one
    ]
