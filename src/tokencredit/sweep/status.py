"""What came out of a sweep's runs, and what they say of those that are left, for a person."""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence

from rich.table import Table

from tokencredit.runs.diagnosis import headline
from tokencredit.sweep.plan import Run


def estimate(runs: Sequence[Run], left: int, jobs: int) -> str:
    """How long the runs that are left will take, by those that are finished."""
    seconds = [run.summary()["seconds"] for run in runs if run.state() == "finished"]
    if not left:
        return "nothing is left to run"
    if not seconds:
        return "how long they take is known once one is finished"
    each = sum(seconds) / len(seconds)
    return f"about {clock(each * left / min(jobs, left))} left, at {each:.0f} s a run and {jobs} at a time"


def clock(seconds: float) -> str:
    """A time that a person can plan with."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def told(run: Run) -> str:
    """What became of a run that did not fail, in a few words."""
    if run.state() != "finished":
        return "stopped, to be resumed"
    summary, name = run.summary(), name_of(run)
    return f"{name} {number(summary[f'{name}_first'])} → {number(summary[f'{name}_last'])}, {summary['seconds']:.0f} s"


def name_of(run: Run) -> str:
    """What a run's summary calls how well it went."""
    return headline(run.config).split("/")[-1]


def number(value: float | None) -> str:
    """A figure for a person."""
    return "none" if value is None else f"{value:.4g}"


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of those that there are."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def table(runs: Sequence[Run], failures: Collection[Run]) -> Table:
    """What came out: a line a variant, with means over its seeds, and which runs failed."""
    name = name_of(runs[0])
    shown = Table()
    for title in ("variant", "seeds done", f"{name.replace('_', ' ')}, first → last", "seconds a run", "failed"):
        shown.add_column(title, overflow="fold")
    for variant in dict.fromkeys(run.variant for run in runs):
        mine = [run for run in runs if run.variant == variant]
        found = [run.summary() for run in mine if run.state() == "finished"]
        first, last, seconds = (mean([x[key] for x in found]) for key in (f"{name}_first", f"{name}_last", "seconds"))
        failed = ", ".join(f"seed {run.seed}" for run in mine if run in failures)
        figures = f"{number(first)} → {number(last)}" if found else ""
        shown.add_row(variant, f"{len(found)} of {len(mine)}", figures, f"{seconds:.0f}" if found else "", failed)
    return shown


def trouble(run: Run, code: int) -> str:
    """Why a run failed: its exit code, and the last line that it said."""
    lines = run.log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
    return f"{how}: {last.removeprefix('tokencredit: ')}"
