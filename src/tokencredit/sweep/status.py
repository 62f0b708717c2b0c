"""A sweep's status table, and the time that is left."""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence

from rich.table import Table

from tokencredit.runs.history import mean
from tokencredit.runs.summary import duration, figure
from tokencredit.sweep.plan import Run


def estimate(runs: Sequence[Run], left: int, jobs: int) -> str:
    """How long the runs that are left will take, by those that are finished."""
    each = mean(run.summary()["seconds"] for run in runs if run.state() == "finished")
    if not left:
        return "nothing is left to run"
    if each is None:
        return "how long they take is known once one is finished"
    return f"about {duration(each * left / min(jobs, left))} left, at {duration(each)} per run and {jobs} at a time"


def outcome(run: Run) -> str:
    """The outcome of a run that did not fail, in a few words."""
    if run.state() != "finished":
        return "stopped, to be resumed"
    summary, name = run.summary(), run.world.outcome
    first, last = (figure(summary[f"{name}_{end}"]) for end in ("first", "last"))
    return f"{name} {first} → {last}, {duration(summary['seconds'])}"


def table(runs: Sequence[Run], failures: Collection[Run]) -> Table:
    """The status of a sweep: one line per variant, with means over its seeds and the runs that failed."""
    name = runs[0].world.outcome
    shown = Table()
    for title in ("variant", "seeds done", f"{name.replace('_', ' ')}, first → last", "time per run", "failed"):
        shown.add_column(title, overflow="fold")
    for variant in dict.fromkeys(run.variant for run in runs):
        mine = [run for run in runs if run.variant == variant]
        found = [run.summary() for run in mine if run.state() == "finished"]
        first, last, seconds = (mean(x[key] for x in found) for key in (f"{name}_first", f"{name}_last", "seconds"))
        failed = ", ".join(f"seed {run.seed}" for run in mine if run in failures)
        figures = f"{figure(first)} → {figure(last)}" if found else ""
        time = "" if seconds is None else duration(seconds)
        shown.add_row(variant, f"{len(found)} of {len(mine)}", figures, time, failed)
    return shown


def trouble(run: Run, code: int) -> str:
    """The reason why a run failed: its exit code, and the last line of its log."""
    lines = run.log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
    return f"{how}: {last.removeprefix('tokencredit: ')}"
