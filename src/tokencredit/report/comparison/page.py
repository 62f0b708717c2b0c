"""The page of a comparison: self-contained HTML."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from tokencredit.errors import cut, pages_by_title
from tokencredit.report.comparison.compare import Comparison
from tokencredit.report.comparison.stats import (
    FEWEST,
    MISSING,
    SEED,
    Curve,
    RunGroup,
    cell,
    differing,
    names,
    repeated,
    stopped_by,
    values,
    varying,
)
from tokencredit.report.reading import REPORT
from tokencredit.report.templating import COLOURS, fill, rounded
from tokencredit.runs.summary import WINDOW
from tokencredit.runs.untrusted import visible

DASHES = {"solid": (), "dash": (6.0, 3.0), "dot": (1.5, 2.0), "dashdot": (6.0, 2.0, 1.5, 2.0)}
"""Dash styles by Plotly's names, with lengths of strokes and gaps; the next one is used once the colours run out."""
SHOWN = 200
"""Maximum characters of a setting in the table."""
MARKED = 20
"""Maximum points of a curve whose points are marked, as with rare audits."""
ENOUGH = 10
"""Number of runs from which a 95 % bootstrap interval has about that coverage; docs/compare.md has the figures."""


def render(comparison: Comparison, out: Path) -> str:
    """The page as HTML, for the folder `out`, from which it links to the runs' reports."""
    groups, curves, titles = comparison.groups, comparison.curves, comparison.axes
    keys = differing([group.settings for group in groups])
    cells = [[", ".join(cut(text, SHOWN) for text in values(group.settings, key)) for key in keys] for group in groups]
    runs = sum(len(group.runs) for group in groups)
    return fill(
        "comparison.html",
        name=f"{visible(comparison.metric)} of {runs} run" + "s" * (runs > 1),
        data={
            "metric": visible(comparison.metric),
            "axes": titles,
            "reach": reach(curves["iteration"]),
            "marked": MARKED,
            "groups": [
                style(number, group) | {"curves": {axis: curve_data(lines[number]) for axis, lines in curves.items()}}
                for number, group in enumerate(groups)
            ],
        },
        verdict=comparison.verdict,
        smooth=comparison.smooth,
        window=WINDOW,
        most=max(len(group.runs) for group in groups),
        fewest=FEWEST,
        bases=[basis(len(group.runs)) for group in groups],
        runs=[linked(group, out) for group in groups],
        notes=[
            notes(group, {titles[axis]: lines[number] for axis, lines in curves.items()})
            for number, group in enumerate(groups)
        ],
        outcomes=outcome_cells(comparison),
        settings=(keys, cells),
    )


def outcome_cells(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """The table of outcomes: column names, and a row of cells per setting."""
    columns = [[cell(found) for found in numbers] for numbers in comparison.outcomes.values()]
    columns.append([", ".join(sorted({stopped_by(run) for run in group.runs})) for group in comparison.groups])
    return [*comparison.outcomes, "stopped by"], [list(row) for row in zip(*columns, strict=True)]


def basis(count: int) -> str:
    """What a group's curve is, with this number of runs."""
    if count == 1:
        return "one run"
    if count < FEWEST:
        return f"the mean of {count} runs, too few for an interval"
    text = f"the interquartile mean of {count} runs and a bootstrap interval"
    return text + (pages_by_title(", which is too narrow for so few (docs/compare.md)") if count < ENOUGH else "")


def linked(group: RunGroup, out: Path) -> list[tuple[str, str, str | None]]:
    """Name, seed and link of each run; a link leads from `out` to the run's report, None without one."""
    return [
        (name, found.get(SEED, MISSING), link(run.path / REPORT, out))
        for name, run, found in zip(names([run.path for run in group.runs]), group.runs, group.settings, strict=True)
    ]


def link(page: Path, out: Path) -> str | None:
    """Relative address of a page, without characters that have a meaning in one; None if there is no such page."""
    return quote(os.fsencode(os.path.relpath(page, out))) if page.is_file() else None


def notes(group: RunGroup, lines: dict[str, Curve]) -> list[str]:
    """Limitations of a group's curve; `lines` are curves by axis title."""
    texts, called = [], names([run.path for run in group.runs])
    ends = [x[-1] for x, _ in lines["iterations"].runs]
    if min(ends) < max(ends):
        texts.append(f"The curve ends at iteration {min(ends):.0f}, where {called[ends.index(min(ends))]} ends.")
    texts += [
        f"No curve over {title}: its runs have no common range." for title, line in lines.items() if not len(line.x)
    ]
    if keys := varying(group):
        texts.append(f"Its runs also differ in {', '.join(keys)}.")
    return texts + [f"{one} and {two} are one sample twice, seed and all." for one, two in repeated(group)]


def style(number: int, group: RunGroup) -> dict[str, Any]:
    """Colour and dash of a group."""
    dash = list(DASHES)[number // len(COLOURS) % len(DASHES)]
    strokes = " ".join(map(str, DASHES[dash]))
    return {"label": visible(group.label), "colour": COLOURS[number % len(COLOURS)], "dash": dash, "strokes": strokes}


def curve_data(line: Curve) -> dict[str, Any]:
    """A curve as data for the page's script."""
    numbers = {"y": line.y.middle, "low": line.y.low, "high": line.y.high}
    return {
        "x": rounded(line.x.tolist(), 9),
        **{name: None if found is None else rounded(found.tolist()) for name, found in numbers.items()},
        "runs": [{"x": rounded(x.tolist(), 9), "y": rounded(y.tolist())} for x, y in line.runs],
    }


def reach(lines: Sequence[Curve]) -> list[float]:
    """Range of the y axis: the lowest to the highest point of any run, with a margin; bands lie within it."""
    y = np.concatenate([y for line in lines for _, y in line.runs])
    low, high = float(y.min()), float(y.max())
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.05
    return [low - margin, high + margin]
