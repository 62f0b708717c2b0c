"""Messages name pages of the documentation by their titles: an installed package has no files of them."""

import re
from pathlib import Path

import pytest

import tokencredit
from tokencredit.errors import PAGES, ConfigError, pages_by_title

DOCS = Path(__file__).parent.parent / "docs"


def test_the_titles_are_those_of_the_pages_that_the_code_names():
    files = Path(tokencredit.__file__).parent.rglob("*.py")
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    assert set(re.findall(r"\bdocs/([\w-]+)\.md", code)) == PAGES.keys()
    for name, title in PAGES.items():
        assert (DOCS / f"{name}.md").read_text(encoding="utf-8").startswith(f"# {title}\n")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("give it (docs/from-trl.md)", 'give it (docs page "Coming from TRL")'),
        ("see docs/python.md#your-own-model", 'see docs page "Python", under "your own model"'),
        ("'docs/report.md' cannot be read", "'docs/report.md' cannot be read"),
        ("mine/docs/report.md", "mine/docs/report.md"),
    ],
)
def test_a_page_is_named_by_its_title_and_a_file_of_the_user_by_its_path(text, shown):
    assert pages_by_title(text) == shown
    assert str(ConfigError(text)) == shown
