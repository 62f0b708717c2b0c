"""Parts of the site made while it is built: reference, gallery, notebooks, formulas as MathML, and llms.txt."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from site_gallery import copy_pages, gallery_page
from site_reference import reference_pages
from sphinx import addnodes
from sphinx.application import Sphinx

REFERENCE = Path(__file__).parent / "reference"
"""Folder of the generated pages, which git ignores."""
EXECUTED = Path(__file__).parents[1] / "build" / "notebooks"
"""Folder of the notebooks with their outputs, as `make notebooks` leaves them."""


def write_reference(_app: Sphinx) -> None:
    """Write the pages of the reference and the gallery that changed, and remove those that are no more."""
    REFERENCE.mkdir(exist_ok=True)
    pages = dict(reference_pages()) | {"gallery.md": gallery_page()}
    for old in REFERENCE.iterdir():
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        file = REFERENCE / name
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")


def list_notebooks(app: Sphinx, page: str, text: list[str]) -> None:
    """Put notebooks behind the first page of the navigation, if there are any: an empty glob would be a warning."""
    if page == "index":
        notebooks = sorted(name for name in app.env.found_docs if name.startswith("notebooks/"))
        text[0] = text[0].replace("\nfirst\n", "\n".join(["", "first", *notebooks, ""]))


def with_outputs(_app: Sphinx, page: str, text: list[str]) -> None:
    """Show a notebook with its outputs, if its code was executed as it is now; its text may have changed since."""
    executed = EXECUTED / f"{Path(page).name}.ipynb"
    if page.startswith("notebooks/") and executed.is_file():
        ran, cells = json.loads(executed.read_text(encoding="utf-8")), json.loads(text[0])["cells"]
        if sources(ran["cells"]) == sources(cells):
            code = (cell for cell in ran["cells"] if cell["cell_type"] == "code")
            text[0] = json.dumps(ran | {"cells": [next(code) if x["cell_type"] == "code" else x for x in cells]})


def sources(cells: list[Any]) -> list[str]:
    """The code of a notebook's cells."""
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def mathml(translator: Any, node: nodes.Element) -> None:
    """Write a formula as MathML, which browsers show without a script."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    translator.body.append(convert(node.astext(), display=display))
    raise nodes.SkipNode


def finish(app: Sphinx, error: Exception | None) -> None:
    """Add the pages of the gallery's runs and llms.txt."""
    if error is None:
        copy_pages(Path(app.outdir))
        write_llms(app)


def write_llms(app: Sphinx) -> None:
    """Write llms.txt: what the site is, and its pages with a line on each."""
    lines = ["# Tokencredit", "", f"> {first_sentence(app, 'index')}"]
    for toctree in app.env.get_doctree("index").findall(addnodes.toctree):
        lines += ["", f"## {toctree['caption']}", ""]
        for title, page in toctree["entries"]:
            name = title or app.env.titles[page].astext()
            lines.append(f"- [{name}]({address(app, page)}): {first_sentence(app, page)}")
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def address(app: Sphinx, page: str) -> str:
    """Address of a page's Markdown on the site; of the page itself, if its source only names other files."""
    file = Path(app.env.doc2path(page))
    plain = file.suffix == ".md" and "{include}" not in file.read_text(encoding="utf-8")
    return f"_sources/{page}.md" if plain else f"{page}.html"


def first_sentence(app: Sphinx, page: str) -> str:
    """The first sentence of a page's text."""
    text = " ".join(next(iter(app.env.get_doctree(page).findall(nodes.paragraph))).astext().split())
    return re.split(r"(?<=\.)\s", text)[0].rstrip(":")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the parts."""
    app.connect("builder-inited", write_reference)
    app.connect("source-read", list_notebooks)
    app.connect("source-read", with_outputs)
    app.connect("build-finished", finish)
    app.add_node(nodes.math, override=True, html=(mathml, None))
    app.add_node(nodes.math_block, override=True, html=(mathml, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
