"""A run at a glance, for the head of its page: what was trained, on what, with which outcome, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import NamedTuple

from tokencredit.audit.verdict import truer, unknown
from tokencredit.report.audit_view import next_audit, trust_fact
from tokencredit.report.reading import Run
from tokencredit.report.templating import two_digits
from tokencredit.runs.diagnosis import Finding
from tokencredit.runs.jsonl import PRICED, scored_anew
from tokencredit.runs.summary import (
    SHAPED,
    UNSHAPED,
    attained,
    averaged,
    duration,
    ends,
    final_mean,
    headline,
    in_iterations,
    rise_in_words,
)
from tokencredit.runs.untrusted import visible
from tokencredit.settings.parts import is_own, label_of
from tokencredit.settings.run_kind import CONTROL, OFFLINE, run_kind_of

OWN_PARTS = {"advantage.estimator": "estimator", "critic.kind": "critic", "ppo.loss": "loss"}
"""Words for the parts of a user, by key."""


class Fact(NamedTuple):
    """An entry of the head: a name or number that can be read at a glance, with a label above and a note below."""

    label: str
    text: str
    note: str = ""


def story(run: Run) -> list[Fact]:
    """The run in short, from model and reward to outcome and trust."""
    metrics, run_kind = run.metrics, run_kind_of(run.config)
    scored = run.scored
    if run_kind is CONTROL:
        facts = [Fact("trained", f"an agent in {run.setting('env.id')}")]
    elif run_kind in OFFLINE:
        facts = [
            Fact("trained", str(run.setting("model.name"))),
            Fact("with", f"tokencredit {run_kind.command}"),
            Fact("on the data set", str(run.setting("data.dataset") or "from Python")),
        ]
    else:
        facts = [Fact("trained", str(run.setting("model.name")))]
        if environment := environment_of(run):
            facts.append(Fact("in the environment", environment))
        if (listed := terms(run)) or not environment:
            facts.append(Fact("on the reward", ", ".join(listed) or "not known yet"))
    own = {f"with the {word}": run.setting(key) for key, word in OWN_PARTS.items()}
    facts += [Fact(word, visible(label_of(part))) for word, part in own.items() if is_own(part)]

    def change(name: str) -> str:
        return " → ".join(map(two_digits, ends(scored, name)))

    facts.append(outcome(run))
    if final_mean(scored, "kl") is not None:
        facts.append(Fact("KL to the reference", change("kl"), "nats per sequence"))
    elif final_mean(scored, "log_ratio") is not None:
        facts.append(
            Fact("log-ratio to the reference", change("log_ratio"), "nats per sequence, of filtered or older samples")
        )
    if (share := attained(metrics)) is not None and not scored_anew(run.changes, PRICED):
        figure, _, rest = share.partition(" of ")
        facts.append(Fact("reached", figure, f"of {rest}"))
    if run_kind not in OFFLINE:
        facts.append(Fact("true credit", *trust_fact(run)))
    count, time = in_iterations(len(metrics)), duration(run.seconds)
    facts.append(Fact("time", time, count))
    stopped = run.summary.get("stopped_by")
    if stopped is None:
        facts.append(Fact("state", "not finished", "this page shows its files so far"))
    elif stopped != "iterations":
        facts.append(Fact("stopped by", str(stopped)))
    return [Fact(*map(visible, fact)) for fact in facts]


def outcome(run: Run) -> Fact:
    """The headline metric at the start and the end, its rise, and a shaped reward before it was shaped."""
    scored, run_kind = run.scored, run_kind_of(run.config)
    if not scored:
        return Fact(run_kind.headline, "none yet", f"what is scored changed after iteration {run.since}")
    name, _ = headline(scored, run_kind)
    change, before = (" → ".join(map(two_digits, ends(scored, x))) for x in (name, run_kind.headline))
    notes = [rise_in_words(scored, run_kind, run.config, two_digits), averaged(len(run.metrics), run.since)]
    notes += [f"{UNSHAPED}: {before}"] * (name == SHAPED)
    return Fact(name.rpartition("/")[2].replace("_", " "), change, "; ".join(filter(None, notes)))


def next_step(run: Run, findings: Sequence[Finding]) -> str | None:
    """What to do next: the first change of the gravest finding, else an audit, else to use the policy."""
    if findings:
        return findings[0].cures[0]
    run_kind = run_kind_of(run.config)
    if run_kind in OFFLINE:
        return None
    if run.audit is None or unknown(run.audit["credit"]):
        return next_audit(run)
    if ways := truer(run.audit, run.metrics):
        return visible(f"to make more of the credit true, {ways}")
    return visible(f"tokencredit {run_kind.sampler} {shlex.quote(str(run.path))}")


def environment_of(run: Run) -> str:
    """The environment or the tools of episodes of several turns; empty for single completions."""
    names = [str(name)] if (name := run.setting("env.factory")) else []
    if tools := run.setting("tools"):
        names.append(f"tools {', '.join(map(str, tools))}")
    return " with ".join(names) or ("from Python" if run.episodic else "")


def terms(run: Run) -> list[str]:
    """Names of the reward terms, or of their models and functions; a classifier's with its label."""
    if run.episodic or "reward_funcs" in run.python:  # the configuration may lack some
        names = dict.fromkeys(name for row in run.scored for name in row)
        return [name.removeprefix("reward/") for name in names if name.startswith("reward/")]
    kinds = ("name", "function", "classifier", "reward_model")
    listed = run.setting("reward") or []
    found = [next((str(term[kind]) for kind in kinds if term.get(kind)), "?") for term in listed]
    return [f"{name}: {term['label']}" if term.get("label") else name for name, term in zip(found, listed, strict=True)]
