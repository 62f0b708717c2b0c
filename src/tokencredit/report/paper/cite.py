"""The part of an appendix that a paper needs about runs: a paragraph, changed settings and BibTeX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tokencredit.errors import ConfigError
from tokencredit.provenance.parts import label
from tokencredit.report.comparison.stats import (
    MISSING,
    SEED,
    UNREAD,
    RunGroup,
    group_runs,
    kinds_of,
    texts,
    values,
    without_seed,
)
from tokencredit.report.paper.card import bibtex, code
from tokencredit.report.reading import Run
from tokencredit.runs.folder import setting_of
from tokencredit.settings.run_kind import PARTS, RunKind, run_kind_of


def citation(runs: Sequence[Run]) -> str:
    """A text in Markdown: software, machine, seeds, a table of the settings that differ from the defaults, BibTeX.

    A run given twice counts once; raises `ConfigError` for runs of several kinds.
    """
    runs = list({run.path.resolve(): run for run in runs}.values())
    if len(kinds := kinds_of(runs)) > 1:
        raise ConfigError(f"{' and '.join(kinds.values())}; their settings differ: cite runs of one kind")
    made = [found if isinstance(found := run.summary.get("environment"), dict) else {} for run in runs]
    groups, run_kind = group_runs(runs), run_kind_of(runs[0].config)
    version = "; ".join(distinct(of(found, "versions.tokencredit") for found in made)) or "unknown version"
    sentences = [f"Trained with `tokencredit {run_kind.command}` {version}{commit(made, 'tokencredit')}."]
    if packages := "; ".join(distinct(versions(found) for found in made)):
        sentences.append(f"Software: {packages}.")
    if machines := "; ".join(distinct(machine(found) for found in made)):
        sentences.append(f"Hardware: {machines}.")
    if commands := distinct(str(found.get("command") or found.get("script") or "") for found in made):
        sentences.append(f"Started by {', '.join(map(code, commands))}{commit(made, 'repository')}.")
    if dates := sorted({of(found, key)[:10] for found in made for key in ("begun", "started", "ended")} - {""}):
        sentences.append(f"Dates: {dates[0]} to {dates[-1]}.")
    seeds = [", ".join(found.get(SEED, MISSING) for found in group.settings) for group in groups]
    listed = [f"- setting {number}: seeds {text}" for number, text in enumerate(seeds, start=1)]
    return "\n".join([" ".join(sentences), "", *listed, "", *table(groups, run_kind), "", *bibtex(version), ""])


def table(groups: Sequence[RunGroup], run_kind: RunKind) -> list[str]:
    """Rows of settings that differ from the defaults in a group, and of all parts of the user's, a column per group."""
    defaults = texts(asdict(run_kind.config()))
    keys = dict.fromkeys(key for group in groups for found in group.settings for key in without_seed(found))
    shown = [key for key in keys if {x for g in groups for x in values(g.settings, key)} - {defaults.get(key), UNREAD}]
    header = "| setting | default |" + "".join(f" {number} |" for number, _ in enumerate(groups, start=1))
    rows = [
        f"| {code(key)} | {cell([defaults.get(key, MISSING)])} | "
        + " | ".join(cell(values_of(group, key)) for group in groups)
        + " |"
        for key in shown
    ]
    return [header, "|---|---|" + "---|" * len(groups), *rows]


def values_of(group: RunGroup, key: str) -> list[str]:
    """Values of a setting in a group; an estimator, critic or loss of the user's with the name of its file."""
    parts = [run.parts[key] for run in group.runs if key in PARTS and key in run.parts]
    return distinct(map(label, parts)) or values(group.settings, key)


def cell(found: Sequence[str]) -> str:
    """Values as code in a cell of a table."""
    return ", ".join(code(text.replace("|", "\\|")) for text in found)


def of(found: Mapping[str, Any], key: str) -> str:
    """A text inside an environment of a run, by its dotted key; empty if there is none."""
    value = setting_of(found, key)
    return "" if value is None else str(value)


def distinct(found: Any) -> list[str]:
    """Texts that are not empty, each once."""
    return list(dict.fromkeys(filter(None, found)))


def versions(found: Mapping[str, Any]) -> str:
    """Versions of other packages, in a line."""
    known = found.get("versions")
    others = known.items() if isinstance(known, dict) else ()
    return ", ".join(f"{name} {x}" for name, x in others if name != "tokencredit")


def machine(found: Mapping[str, Any]) -> str:
    """Device, processor, threads and platform, in a line."""
    parts = [of(found, "device"), of(found, "processor"), of(found, "platform")]
    words = {"threads": "thread", "processes": "process"}
    counts = [f"{n} {one if n == '1' else many}" for many, one in words.items() if (n := of(found, many))]
    return ", ".join(filter(None, [*parts, *counts]))


def commit(made: Sequence[Mapping[str, Any]], key: str) -> str:
    """Commits of a repository, with the number of files that had changes; empty if none is known."""
    words = []
    for found in made:
        if whole := of(found, f"{key}.commit"):
            changed = of(found, f"{key}.changed_files")
            words.append(f"commit {whole[:12]}" + (f", changed files: {changed}" if changed not in ("", "0") else ""))
    return f" ({'; '.join(distinct(words))})" if words else ""
