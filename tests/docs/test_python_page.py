"""docs/python.md: each snippet is a program that runs as it stands and prints what the page shows."""

import re
import shutil
from pathlib import Path

import pytest

import tokencredit as tc

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
SECTIONS = {text.partition("\n")[0]: text for text in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}
SNIPPETS = {
    title: re.search(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", text, flags=re.DOTALL)
    for title, text in SECTIONS.items()
    if "```python" in text
}


def execute(title, folder, monkeypatch):
    monkeypatch.chdir(folder)
    exec(compile(SNIPPETS[title][1], f"docs/python.md, {title}", "exec"), {"__name__": "__main__"})


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A folder with the run of the first snippet."""
    folder = tmp_path_factory.mktemp("python")
    with pytest.MonkeyPatch.context() as monkeypatch:
        execute("Train", folder, monkeypatch)
    return folder


def test_the_first_run_is_what_the_others_read(first):
    summary = tc.read_run(first / "runs" / "first").summary
    assert summary["reward_last"] > summary["reward_first"]


LONG = ("Several turns", "LoRA", "A configuration from YAML", "Callbacks")


@pytest.mark.parametrize(
    "title",
    [pytest.param(title, marks=pytest.mark.proof if title in LONG else ()) for title in SNIPPETS if title != "Train"],
)
def test_a_snippet_runs_as_it_stands(title, first, tmp_path, monkeypatch, capsys):
    if "runs/first" in SNIPPETS[title][1]:
        shutil.copytree(first, tmp_path, dirs_exist_ok=True)
    execute(title, tmp_path, monkeypatch)
    shown = SNIPPETS[title][2]
    assert shown is None or capsys.readouterr().out.endswith(shown)


def test_the_table_of_names_is_complete():
    named = set(re.findall(r"`(\w+)`", SECTIONS["Names"]))
    assert set(dir(tc)) <= named


def test_the_table_of_callbacks_is_complete():
    methods = re.findall(r"`((?:before|after)_\w+)`", re.sub(r"`(?:before|after)_`", "", SECTIONS["Callbacks"]))
    assert set(methods) == {name for name in vars(tc.Callback) if not name.startswith("_")}
