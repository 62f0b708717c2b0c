"""Parts of the site made while it is built: reference, gallery and notebooks; `make docs` is strict about the rest."""

import json
import re
from pathlib import Path

import pytest

import tokencredit as tc
from docs import site_gallery
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


def test_the_gallery_has_the_picture_outcome_and_page_of_runs_that_are_there(monkeypatch, tmp_path):
    monkeypatch.setattr(site_gallery, "RUNS", tmp_path)
    without = site_gallery.gallery_page()
    assert "without them" in without
    assert without.count("\n## ") == without.count("```sh") == len(site_gallery.CARDS) >= 7
    card, agent = (next(card for card in site_gallery.CARDS if card.name == name) for name in ("main-job", "cartpole"))
    small = {"run.iterations": 1, "run.trackers": []}
    text = small | {"run.dir": str(card.run), "rollout.batch_size": 4, "rollout.max_new_tokens": 4}
    tc.PPOTrainer(args=tc.PPOConfig.from_dict(text)).train()
    settings = small | {"env.id": "CartPole-v1", "steps": 64, "run.dir": str(agent.run)}
    tc.ControlTrainer(tc.ControlConfig.from_dict(settings)).train()
    for run in (card.run, agent.run):
        (run / site_gallery.PICTURE).write_text("<svg/>")
    page = site_gallery.gallery_page()
    assert "without them" not in page
    for name, outcome in (("main-job", "reward"), ("cartpole", "average return")):
        part = next(part for part in page.split("\n## ") if f"gallery/{name}.html" in part)
        assert re.search(rf"^{outcome} .* → .*; time ", part, re.MULTILINE)
        assert f"{name}/picture.svg)" in part
    site_gallery.copy_pages(tmp_path / "site")
    assert sorted(file.name for file in (tmp_path / "site" / "gallery").iterdir()) == ["cartpole.html", "main-job.html"]


def test_a_notebook_has_its_outputs_unless_its_code_has_changed_since(monkeypatch, tmp_path):
    for package in ("sphinx", "latex2mathml"):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend(ROOT / "docs")
    import site_parts

    monkeypatch.setattr(site_parts, "EXECUTED", tmp_path)
    stored = (ROOT / "notebooks" / "2-gae-by-hand.ipynb").read_text(encoding="utf-8")
    executed = json.loads(stored)
    code = next(cell for cell in executed["cells"] if cell["cell_type"] == "code")
    code["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "done"}]
    (tmp_path / "2-gae-by-hand.ipynb").write_text(json.dumps(executed), encoding="utf-8")

    def shown(page, text):
        found = [text]
        site_parts.with_outputs(None, page, found)
        return found[0]

    assert "done" in shown("notebooks/2-gae-by-hand", stored)
    retitled = shown(
        "notebooks/2-gae-by-hand", stored.replace(executed["cells"][0]["source"][0].rstrip(), "# Another", 1)
    )
    assert "# Another" in retitled
    assert "done" in retitled
    changed = stored.replace(code["source"][0].rstrip(), "import this", 1)
    assert changed != stored
    assert shown("notebooks/2-gae-by-hand", changed) == changed
    assert shown("docs/report", "text") == "text"
