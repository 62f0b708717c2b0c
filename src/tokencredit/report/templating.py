"""Fill the page templates."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader

from tokencredit.errors import NotInstalled
from tokencredit.runs.untrusted import visible

SHADES = {"light": ("94 60 153", "230 97 1"), "dark": ("140 110 220", "230 120 20")}
"""Colours of negative and positive numbers: purple and orange, which people with any colour vision tell apart."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's colour-blind-safe palette, without black and yellow, which a page may hide."""


def fill(template: str, **values: Any) -> str:
    """A self-contained page from a template; raises `NotInstalled` if it has charts, and Plotly is missing."""
    return _pages().get_template(template).render(**values)


@cache
def _pages() -> Environment:
    """The templates, each compiled once per process."""
    # Autoescape for text in the page; `tojson` for its data, which escapes HTML's special characters.
    pages = Environment(loader=PackageLoader("tokencredit.report"), autoescape=True)
    pages.filters |= {"visible": visible, "readable": readable, "two_digits": two_digits, "shade": shade}
    pages.globals |= {"plotly": plotly, "shades": SHADES, "colours": COLOURS}
    pages.policies["json.dumps_kwargs"] = {"sort_keys": False}
    return pages


def plotly() -> str:
    """Plotly's script, of 5 MB, to be part of a page; raises `NotInstalled` without it."""
    try:
        return (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    except (ImportError, OSError) as error:
        raise NotInstalled("a page", "plotly") from error


def readable(text: str) -> str:
    """A model's text with marked line ends and escaped unprintable characters."""
    return "⏎\n".join(map(visible, text.split("\n")))


def shade(share: float) -> str:
    """CSS colour of a number, by its share of the largest; page.js has the same."""
    return f"rgb({SHADES['light'][share >= 0]} / {opacity(share):.3f})"


def opacity(share: float) -> float:
    """Opacity of a number's colour, by its share of the largest: ever thinner towards 0."""
    return 0.7 * min(abs(share), 1.0)


def rounded(value: Any, digits: int = 5) -> Any:
    """A tree of lists and dicts with its floats rounded to significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {key: rounded(x, digits) for key, x in value.items()}
    return [rounded(x, digits) for x in value] if isinstance(value, list) else value


def two_digits(value: float | None) -> str:
    """Format a number: `0.91`, `12.70`, `0.020`, `302`, `2,309`, `1.2e+06`; page scripts do the same."""
    if value is None:
        return "none"
    size = abs(value)
    if size >= 1e6 or 0 < size < 0.0995:  # from there on 0.10
        return f"{value:#.2g}"
    return f"{value + 0.0:,.0f}" if size >= 100 or value == int(value) else f"{value:.2f}"
