"""Settings, estimators, modules and links that the pages name are the real ones."""

import re
from pathlib import Path

import pytest

from tokencredit.core.estimator_table import ESTIMATORS
from tokencredit.settings.renamed_keys import MOVED

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "tokencredit"
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
PAGES = [
    *ROOT.glob("*.md"),
    *(page for folder in ("docs", "recipes", "examples", "benchmarks") for page in (ROOT / folder).rglob("*.md")),
]
CRITIC = {"required": "required", "baseline": "optional", "unused": "none"}


def table(text: str, header: str) -> list[list[str]]:
    """The cells of the rows of a table."""
    lines = text[text.index(header) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_names_a_setting_by_its_old_key(page):
    text = page.read_text(encoding="utf-8")
    if page.name == "CHANGELOG.md":
        text = re.sub(r"^- Settings moved:.*?(?=^- )", "", text, flags=re.DOTALL | re.MULTILINE)
    assert [key for key in MOVED if re.search(rf"\b{re.escape(key)}\b(?!\.)", text)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_links_to_is_there(page):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_table_of_estimators_is_that_of_the_code():
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    rows = {row[0].strip("`"): row[1:] for row in table(page, "| estimator | critic |")}
    assert rows == {
        name: [
            CRITIC[needs.critic],
            "yes" * needs.group,
            "yes" * needs.baseline,
            ", ".join(f"`{key}`" for key in needs.settings),
        ]
        for name, needs in ESTIMATORS.items()
    }


def test_every_module_has_a_place_in_the_architecture():
    modules = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    block, names = ARCHITECTURE.split("```")[1], set(re.findall(r"\w+", ARCHITECTURE))
    assert [str(path.relative_to(PACKAGE)) for path in modules if path.stem not in names] == []
    assert set(re.findall(r"\w+\.py\b", block)) <= {path.name for path in modules}
    packages = {path.parent.relative_to(PACKAGE).name for path in PACKAGE.rglob("__init__.py")} - {""}
    assert [name for name in packages if f"{name}/" not in ARCHITECTURE] == []


def test_a_new_choice_goes_into_at_most_three_files():
    rows = table(ARCHITECTURE, "| to add |")
    assert {"an engine", "an estimator", "a reward kind", "a critic kind", "a policy loss", "a metric"} <= {
        row[0] for row in rows
    }
    for what, files in rows:
        paths = set(re.findall(r"`([a-z_/]+/\w+\.py)`", files))
        assert 1 <= len(paths) <= 3, what
        assert all((PACKAGE / path).is_file() for path in paths if not path.endswith("NEW.py")), what


def test_what_the_architecture_names_in_a_file_is_there():
    named = re.findall(r"`([a-z_/]+/\w+\.py)`: (?:the )?`([\w.]+)`", ARCHITECTURE)
    assert len(named) >= 5
    for path, name in named:
        if not path.endswith("NEW.py"):
            assert re.search(rf"\b{name.split('.')[-1]}\b", (PACKAGE / path).read_text(encoding="utf-8")), (path, name)
