"""Write a comparison: a page, figures for a paper, and tables as CSV, JSON and LaTeX."""

from __future__ import annotations

import csv
import io
import json
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tokencredit.errors import ConfigError, importing
from tokencredit.report.comparison.compare import Comparison
from tokencredit.report.comparison.page import DASHES, MARKED, reach, render, style
from tokencredit.report.comparison.stats import cell, scipy_stats
from tokencredit.runs.folder import write_file
from tokencredit.runs.untrusted import visible

NAME = "comparison"
"""Name of the page and of other files of the whole comparison, in a folder."""
FIGURES = ("png", "pdf", "svg")
DEFAULT = ("html", "png")
"""Formats of a folder."""
WIDTH = 3.25
"""Width of a figure in inches: a column of a two-column paper."""
LEGEND = 44
"""Maximum characters in a line of a figure's legend."""
RC: Any = {
    **{"font.size": 8, "axes.labelsize": 8, "xtick.labelsize": 7.5, "ytick.labelsize": 7.5, "legend.fontsize": 7.5},
    **{"axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6},
    "pdf.fonttype": 42,  # TrueType, since publishers refuse Type 3
    "svg.fonttype": "none",  # text as text
}
LATEX = {character: f"\\{character}" for character in "&%$#_{}"}
LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
NOT_IN_A_PAPER = ("seconds", "iterations")
"""Outcomes left out of the LaTeX table, which has the width of a page."""


def write_comparison(comparison: Comparison, out: Path, formats: Sequence[str] | None = None) -> Path:
    """Write a comparison into a folder, or into one file.

    A folder, created if missing, gets a file per format, and for figures one per x axis, for `csv` one per table. It
    gets a page and pictures without `formats`. A file has its ending's format: a figure is over iterations, a table of
    outcomes per setting. Returns the page; without one, `out`.

    Raises:
        ConfigError: a format is unknown, or `out` cannot be written.
    """
    single = check_formats(out, formats)
    folder = out.parent if single else out
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if single:
            FORMATS[single](comparison, out, next(iter(comparison.axes)))
            return out
        for name in formats or DEFAULT:
            for part in parts(comparison, name):
                FORMATS[name](comparison, out / f"{part}.{name}", part)
    except OSError as error:
        raise ConfigError(
            f"cannot write {str(error.filename or out)!r}: {error.strerror}; give another --out"
        ) from error
    page = out / f"{NAME}.html"
    return page if "html" in (formats or DEFAULT) else out


def parts(comparison: Comparison, name: str) -> Iterable[str]:
    """Parts with a file each in this format: a figure per axis, a file per table; or one file of the whole."""
    if name in FIGURES:
        return comparison.axes
    return comparison.tables if name == "csv" else [NAME]


def check_formats(out: Path, formats: Sequence[str] | None) -> str | None:
    """The format of `out` if it is one file, else None; raises `ConfigError` as `write_comparison` does.

    Raises:
        NotInstalled: a comparison, or one of these formats, needs a missing package.
    """
    if unknown := [name for name in formats or () if name not in FORMATS]:
        raise ConfigError(f"format is {unknown[0]!r}; it must be of {', '.join(FORMATS)}, separated by commas")
    ending = out.suffix.removeprefix(".")
    single = ending if ending in FORMATS else None
    if ending.isalpha() and not single and not out.is_dir():
        raise ConfigError(f"out is {str(out)!r}; a file's ending must be of {', '.join(FORMATS)}, a folder has none")
    if single and formats is not None:
        raise ConfigError(f"out is the file {str(out)!r}, and format is given too; leave it out, or give a folder")
    scipy_stats()
    for name in [single] if single else formats or DEFAULT:
        if name in FIGURES:
            drawing(name)
    return single


def drawing(name: str) -> tuple[Any, Any]:
    """Matplotlib, and the settings of figures; raises `NotInstalled` without it, with the format's name."""
    with importing(f"format {name}", "Matplotlib", "tokencredit[compare]"):
        import matplotlib.figure

        from tokencredit.report.picture import PLAIN
    return matplotlib, PLAIN | RC


def write_page(comparison: Comparison, file: Path, _part: str) -> None:
    """Write the page."""
    write_file(file, render(comparison, file.parent))


def write_json(comparison: Comparison, file: Path, _part: str) -> None:
    """Write metric, verdict and all tables."""
    whole = {"metric": comparison.metric, "smooth": comparison.smooth, "verdict": comparison.verdict}
    write_file(file, json.dumps(whole | comparison.tables, indent=1, allow_nan=False) + "\n")


def write_csv(comparison: Comparison, file: Path, part: str) -> None:
    """Write a table."""
    tables = comparison.tables
    rows = tables.get(part, tables["settings"])
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: visible(x) if isinstance(x, str) else x for name, x in row.items()} for row in rows)
    write_file(file, text.getvalue())


def write_tex(comparison: Comparison, file: Path, _part: str) -> None:
    """Write the outcomes per setting as a LaTeX table, with the verdict as comments."""
    names = [name for name in comparison.outcomes if name not in NOT_IN_A_PAPER]
    head = ["setting", "runs", *names]
    rows = [
        [group.label, str(len(group.runs)), *(cell(comparison.outcomes[name][number]) for name in names)]
        for number, group in enumerate(comparison.groups)
    ]
    lines = [
        *(f"% {visible(sentence)}" for sentence in comparison.verdict),
        "% Brackets hold 95 % intervals. In the preamble: \\usepackage{booktabs}",
        f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        *("\\toprule", latex_row(head), "\\midrule"),
        *map(latex_row, rows),
        *("\\bottomrule", "\\end{tabular}", ""),
    ]
    write_file(file, "\n".join(lines))


def latex_row(cells: Sequence[str]) -> str:
    """A row of a LaTeX table; the first cell is a name, in which a minus sign stays a hyphen."""
    name, *numbers = ("".join(LATEX.get(character, character) for character in visible(text)) for text in cells)
    return " & ".join([name, *(re.sub(r"-(?=\d)", "$-$", text) for text in numbers)]) + r" \\"


def write_figure(comparison: Comparison, file: Path, axis: str) -> None:
    """Write the curves over an axis as a figure; names and settings are plain text in it."""
    labels = [textwrap.fill(visible(group.label), LEGEND) for group in comparison.groups]
    columns = 2 if len(labels) > 1 and max(map(len, labels)) <= LEGEND // 2 - 4 else 1
    height = max(sum(text.count("\n") + 1 for text in labels[column::columns]) for column in range(columns))
    ending = file.suffix.removeprefix(".")
    matplotlib, rc = drawing(ending)
    with matplotlib.rc_context(rc), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a missing glyph is drawn as a box
        picture = matplotlib.figure.Figure(figsize=(WIDTH, 2.2 + 0.14 * height), layout="constrained")
        lines = comparison.curves[axis]
        plot = picture.add_subplot(xlabel=comparison.axes[axis], ylabel=visible(comparison.metric), ylim=reach(lines))
        handles = []
        for number, (group, line) in enumerate(zip(comparison.groups, lines, strict=True)):
            look = style(number, group)
            colour, dash = look["colour"], (0, DASHES[look["dash"]] or None)
            if line.y.low is not None and line.y.high is not None:
                plot.fill_between(line.x, line.y.low, line.y.high, color=colour, alpha=0.25, linewidth=0, zorder=2)
            if len(line.runs) > 1:
                for x, y in line.runs:
                    small = "." if len(x) <= MARKED else None
                    plot.plot(x, y, color=colour, linewidth=0.35, alpha=0.6, zorder=3, marker=small, markersize=2)
            marker = "o" if len(line.x) <= MARKED else None
            options = {"color": colour, "linestyle": dash, "linewidth": 1.3, "marker": marker, "markersize": 3}
            handles += plot.plot(line.x, line.y.middle, zorder=4, **options)
        plot.grid(alpha=0.3, linewidth=0.5)
        plot.spines[["top", "right"]].set_visible(False)
        picture.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, borderaxespad=0.2)
        undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
        picture.savefig(file, dpi=300, metadata=undated.get(ending))


FORMATS: dict[str, Callable[[Comparison, Path, str], None]] = {
    "html": write_page,
    **dict.fromkeys(FIGURES, write_figure),
    "csv": write_csv,
    "json": write_json,
    "tex": write_tex,
}
"""Writers by ending; the last argument is the part of the comparison: an axis, or a table."""
