"""Settings, estimators, modules and links that the pages name are the real ones."""

import re
from pathlib import Path

import pytest

from tokencredit.core.estimator_table import ESTIMATORS
from tokencredit.settings.text import PPOConfig

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


def test_what_the_architecture_names_in_a_file_is_there():
    named = re.findall(r"`([a-z_/]+/\w+\.py)`: (?:the )?`([\w.]+)`", ARCHITECTURE)
    assert len(named) >= 5
    for path, name in named:
        if not path.endswith("NEW.py"):
            assert re.search(rf"\b{name.split('.')[-1]}\b", (PACKAGE / path).read_text(encoding="utf-8")), (path, name)


def test_the_learning_rates_of_the_page_are_the_defaults_and_those_of_the_tests():
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    named = {key: float(rate) for key, rate in re.findall(r"`(optim\.lr|critic\.lr)` \((\S+)\)", page)}
    assert named == {"optim.lr": PPOConfig().optim.lr, "critic.lr": PPOConfig().critic.lr}
    tests = (ROOT / "tests" / "test_sick_runs.py").read_text(encoding="utf-8")
    rows = [row[2:] for row in table(page, "| finding | rate |")]
    assert len(rows) == 3
    for found, cure in rows:
        key = re.search(r"`(.*?)`", found)[1]
        assert [x for x in re.findall(r"\d\S*\d", f"{found} {cure}") if f'"{key}": {x}' not in tests] == []
