"""Compare several runs on one self-contained page, and in figures for a paper."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from tokencredit.errors import ConfigError
from tokencredit.report.comparison_stats import (
    FEWEST,
    MISSING,
    SEED,
    Curve,
    RunGroup,
    axes,
    choose_metric,
    curve,
    differing,
    group_runs,
    names,
    outcomes,
    repeated,
    values,
    varying,
    verdict,
)
from tokencredit.report.reading import REPORT, NoIteration, Run, read_run
from tokencredit.report.templating import fill
from tokencredit.runs.folder import RunFolder
from tokencredit.runs.summary import WINDOW
from tokencredit.runs.untrusted import visible

NAME = "comparison.html"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's colour-blind-safe palette, without black and yellow, which a page may hide."""
DASHES = {"solid": (), "dash": (6.0, 3.0), "dot": (1.5, 2.0), "dashdot": (6.0, 2.0, 1.5, 2.0)}
"""Dash styles by Plotly's names, with lengths of strokes and gaps; the next one is used once the colours run out."""
SHOWN, LEGEND = 200, 80
"""Maximum characters of a setting in the table, and of a name in a figure's legend."""
MARKED = 20
"""Maximum points of a curve whose points are marked, as with rare audits."""
ENOUGH = 10
"""Number of runs from which a 95 % bootstrap interval has about that coverage; docs/compare.md has the figures."""
Curves = dict[str, list[Curve]]
"""By axis, one curve per group."""


class Comparison(NamedTuple):
    """A comparison that was written."""

    page: Path
    verdict: list[str]
    """Sentences with untrusted text."""


def write_comparison(
    runs: Sequence[Path],
    *,
    metric: str | None = None,
    group_by: str | None = None,
    smooth: int = 1,
    out: Path = Path("comparison"),
) -> Comparison:
    """Write `comparison.html`, and a figure per x axis, into a folder.

    Args:
        runs: folders of runs, all of language models or all of agents; a run that is named twice counts once.
        metric: metric to compare; None for the reward, or an agent's return.
        group_by: dotted key whose value groups runs into one curve; None for all keys but seed and folder.
        smooth: window of each run's running mean.
        out: output folder, created if missing.

    Returns:
        The path of the page, and its verdict.

    Raises:
        ConfigError: a folder is not a run's, or the runs cannot be compared.
    """
    if not runs:
        raise ConfigError("no run to compare")
    if smooth < 1:
        raise ConfigError(f"smooth is {smooth}; it must be at least 1")
    loaded, empty = list[Run](), list[NoIteration]()
    for path in {path.resolve(): path for path in runs}.values():
        try:
            loaded.append(read_run(path, samples=False))
        except NoIteration as error:
            empty.append(error)
    if not loaded:
        raise empty[0]
    metric = choose_metric(loaded, metric)
    groups, titles = group_runs(loaded, group_by), axes(loaded)
    curves = {axis: [curve(group.runs, metric, axis, smooth) for group in groups] for axis in titles}
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {str(out)!r}: {error.strerror}; give another --out") from error
    for axis, lines in curves.items():
        draw(out / f"{axis}.png", groups, lines, titles[axis], metric)
    sentences = [*(f"left out: {error}" for error in empty), *verdict(groups, metric)]
    RunFolder(str(out)).write(NAME, render(groups, curves, sentences, titles, metric, smooth, out))
    return Comparison(out / NAME, sentences)


def render(
    groups: Sequence[RunGroup],
    curves: Curves,
    sentences: Sequence[str],
    titles: dict[str, str],
    metric: str,
    smooth: int,
    out: Path,
) -> str:
    """The page as HTML, for the folder `out`, from which it links to the runs' reports."""
    keys = differing([group.settings for group in groups])
    cells = [[", ".join(cut(text, SHOWN) for text in values(group.settings, key)) for key in keys] for group in groups]
    runs = sum(len(group.runs) for group in groups)
    return fill(
        "comparison.html",
        name=f"{visible(metric)} of {runs} run" + "s" * (runs > 1),
        data={
            "metric": visible(metric),
            "axes": titles,
            "reach": reach(curves["iteration"]),
            "marked": MARKED,
            "groups": [
                style(number, group) | {"curves": {axis: curve_data(lines[number]) for axis, lines in curves.items()}}
                for number, group in enumerate(groups)
            ],
        },
        verdict=sentences,
        smooth=smooth,
        window=WINDOW,
        most=max(len(group.runs) for group in groups),
        fewest=FEWEST,
        bases=[basis(len(group.runs)) for group in groups],
        runs=[linked(group, out) for group in groups],
        notes=[
            notes(group, {titles[axis]: lines[number] for axis, lines in curves.items()})
            for number, group in enumerate(groups)
        ],
        outcomes=outcomes(groups, metric),
        settings=(keys, cells),
    )


def basis(count: int) -> str:
    """What a group's curve is, with this number of runs."""
    if count == 1:
        return "one run"
    if count < FEWEST:
        return f"the mean of {count} runs, too few for an interval"
    text = f"the interquartile mean of {count} runs and a bootstrap interval"
    return text + (", which is too narrow for so few (docs/compare.md)" if count < ENOUGH else "")


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


def cut(text: str, most: int) -> str:
    """A text, cut to a length."""
    return text if len(text) <= most else text[: most - 2] + " …"


def style(number: int, group: RunGroup) -> dict[str, Any]:
    """Colour and dash of a group."""
    dash = list(DASHES)[number // len(COLOURS) % len(DASHES)]
    strokes = " ".join(map(str, DASHES[dash]))
    return {
        "label": visible(group.label),
        "colour": COLOURS[number % len(COLOURS)],
        "dash": dash,
        "strokes": strokes,
    }


def curve_data(line: Curve) -> dict[str, Any]:
    """A curve as data for the page's script."""
    numbers = {"y": line.y.middle, "low": line.y.low, "high": line.y.high}
    return {
        "x": rounded(line.x, 9),
        **{name: None if found is None else rounded(found, 5) for name, found in numbers.items()},
        "runs": [{"x": rounded(x, 9), "y": rounded(y, 5)} for x, y in line.runs],
    }


def rounded(found: np.ndarray, digits: int) -> list[float]:
    """Rounded numbers for the page."""
    return [float(f"{x:.{digits}g}") for x in found]


def reach(lines: Sequence[Curve]) -> list[float]:
    """Range of the y axis: the lowest to the highest point of any run, with a margin; bands lie within it."""
    y = np.concatenate([y for line in lines for _, y in line.runs])
    low, high = float(y.min()), float(y.max())
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.05
    return [low - margin, high + margin]


def draw(file: Path, groups: Sequence[RunGroup], lines: Sequence[Curve], title: str, metric: str) -> None:
    """Write the curves as a figure; names and settings are plain text in it."""
    labels = [cut(visible(group.label), LEGEND) for group in groups]
    columns = 2 if max(map(len, labels)) < LEGEND // 2 else 1
    # The reader's matplotlibrc may enable TeX, and `$` would begin a formula.
    with matplotlib.rc_context({"text.usetex": False, "text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a missing glyph is drawn as a box
        picture = Figure(figsize=(7, 4 + 0.2 * math.ceil(len(groups) / columns)), layout="constrained")
        plot = picture.add_subplot(xlabel=title, ylabel=visible(metric), ylim=reach(lines))
        handles = []
        for number, (group, line) in enumerate(zip(groups, lines, strict=True)):
            look = style(number, group)
            colour, dash = look["colour"], (0, DASHES[look["dash"]] or None)
            if line.y.low is not None and line.y.high is not None:
                plot.fill_between(line.x, line.y.low, line.y.high, color=colour, alpha=0.25, linewidth=0, zorder=2)
            if len(line.runs) > 1:
                for x, y in line.runs:
                    small = "." if len(x) <= MARKED else None
                    plot.plot(x, y, color=colour, linewidth=0.6, alpha=0.7, zorder=3, marker=small)
            marker = "o" if len(line.x) <= MARKED else None
            options = {"color": colour, "linestyle": dash, "linewidth": 2, "marker": marker, "zorder": 4}
            handles += plot.plot(line.x, line.y.middle, **options)
        plot.grid(alpha=0.3)
        plot.spines[["top", "right"]].set_visible(False)
        picture.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)
        picture.savefig(file, dpi=150)
