"""Sphinx configuration of `make docs`. The source folder is the repository's root, so that links between pages hold."""

import sys
from pathlib import Path

import tokencredit

sys.path.insert(0, str(Path(__file__).parent))  # for site_parts.py

project, author, release = "Tokencredit", "The Tokencredit authors", tokencredit.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "site_parts"]
root_doc = "index"
include_patterns = [
    *("index.md", "first.md"),
    *("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
    *("docs/*.md", "docs/reference/**", "benchmarks/*.md", "examples/README.md", "recipes/*/README.md"),
    "notebooks/*.ipynb",
]
exclude_patterns = [".*", "build", "runs", "src", "tests"]  # not walked

html_theme = "furo"
html_show_copyright = False
html_title = f"Tokencredit {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_sourcelink_suffix = ""  # llms.txt links to the sources, which are Markdown

myst_enable_extensions = ["attrs_inline", "deflist", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # `make notebooks` leaves copies with outputs
nb_output_stderr = "remove"  # tqdm's advice to install widgets

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
default_role = "code"  # docstrings write `name` for code
nitpick_ignore_regex = [("py:.*", ".*")]  # types of other packages, of which no inventory can be had offline
