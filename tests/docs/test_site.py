"""The reference on the site has every setting and every public name; `make docs` is strict about the rest."""

import re
from pathlib import Path

import pytest

import tokencredit as tc
from docs.site_reference import reference_pages
from tokencredit import core
from tokencredit.settings.data import KINDS
from tokencredit.settings.fields import settings_of
from tokencredit.settings.run_kind import RUN_KINDS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages():
    return dict(reference_pages())


@pytest.mark.parametrize("kind", RUN_KINDS.values(), ids=lambda kind: kind.name)
def test_a_page_of_settings_has_every_key_with_its_meaning(kind, pages):
    page = pages[f"{kind.command}.md"]
    keys = set(re.findall(r"^(?:`|## |\*\*)([\w.]+)", page, flags=re.MULTILINE))
    terms = {key for term in KINDS.values() for key in settings_of(term)} if kind.name == "text" else set()
    assert keys - {"reward"} == {*settings_of(kind.config), *terms} - {"reward"}
    assert "\n: *" not in page, "a key without a meaning"


def test_an_entry_has_default_range_and_conditions(pages):
    assert (
        "`advantage.n: 5`\n: Steps of the n_step return. *(a whole number, at least 1)* Needs `estimator: n_step, own`."
        in (pages["train.md"])
    )
    assert '`reward: [{"classifier": "builtin:reviews", "label": "NEGATIVE"}]`' in pages["train.md"]


def test_every_public_name_is_documented_once(pages):
    documented = [
        name for page in pages.values() for name in re.findall(r"^\.\. auto\w+:: ([\w.]+)", page, re.MULTILINE)
    ]
    names = [name.rpartition(".")[2] for name in documented]
    assert sorted(names) == sorted([*(set(tc.__all__) - {"core"}), *core.__all__])


def test_every_page_has_its_place_in_the_navigation():
    listed = re.findall(r"^(?:.* <)?([\w./-]+)>?$", (ROOT / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    pages = [page.relative_to(ROOT).with_suffix("") for page in (ROOT / "docs").glob("*.md")]
    assert sorted(map(str, pages)) == sorted(name for name in listed if re.fullmatch(r"docs/[\w-]+", name))
