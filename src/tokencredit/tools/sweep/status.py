"""Status table of a sweep, and the time left."""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence

from rich.table import Table

from tokencredit.runs.history import mean
from tokencredit.runs.summary import duration, figure
from tokencredit.runs.untrusted import visible
from tokencredit.tools.sweep.sweep_file import Run


def say(text: str) -> None:
    """Print a line and flush it."""
    print(visible(text), flush=True)


def estimate(runs: Sequence[Run], left: int, jobs: int | None) -> str:
    """Time left, estimated from the finished runs; the time per run alone if a cluster decides how many run at once."""
    each = mean(run.summary()["seconds"] for run in runs if run.state() == "finished")
    if not left:
        return "nothing is left to run"
    if each is None:
        return "no time estimate before one is finished"
    if jobs is None:
        return f"{left} left, at {duration(each)} per run"
    return f"about {duration(each * left / min(jobs, left))} left, at {duration(each)} per run, {jobs} in parallel"


def outcome(run: Run) -> str:
    """Outcome of a run that did not fail, in a few words."""
    if run.state() != "finished":
        return "stopped, to be resumed"
    summary, name = run.summary(), run.run_kind.outcome
    first, last = (figure(summary[f"{name}_{end}"]) for end in ("first", "last"))
    return f"{name} {first} → {last}, {duration(summary['seconds'])}"


def table(runs: Sequence[Run], failures: Collection[Run]) -> Table:
    """Status table: one row per variant, with means over its seeds and the failed runs."""
    name = runs[0].run_kind.outcome
    status = Table()
    for title in ("variant", "seeds done", f"{name.replace('_', ' ')}, first → last", "time per run", "failed"):
        status.add_column(title, overflow="fold")
    for variant in dict.fromkeys(run.variant for run in runs):
        mine = [run for run in runs if run.variant == variant]
        summaries = [run.summary() for run in mine if run.state() == "finished"]
        first, last, seconds = (mean(x[key] for x in summaries) for key in (f"{name}_first", f"{name}_last", "seconds"))
        failed = ", ".join(f"seed {run.seed}" for run in mine if run in failures)
        figures = f"{figure(first)} → {figure(last)}" if summaries else ""
        time = "" if seconds is None else duration(seconds)
        status.add_row(variant, f"{len(summaries)} of {len(mine)}", figures, time, failed)
    return status


def trouble(run: Run, code: int) -> str:
    """Reason of a failure: exit code, and last line of the log."""
    lines = run.log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    cause = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
    return f"{cause}: {last.removeprefix('tokencredit: ')}"
