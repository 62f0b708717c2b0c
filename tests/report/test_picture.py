"""Pictures of a completion with its credit: shades, line breaks, fonts, and texts that attack them."""

import json
import re
import shutil
import struct
from xml.etree import ElementTree

import pytest
from matplotlib.font_manager import FontEntry, fontManager

from helpers.commands import refused
from helpers.episodes import HOSTILE, grid
from tokencredit.cli import main
from tokencredit.report import picture
from tokencredit.report.notebook import Sample, read_run
from tokencredit.report.picture import DOTS, FONT, Piece, draw, lines
from tokencredit.report.templating import SHADES

RAMP = 24
"""Shaded pieces of the legend."""


@pytest.fixture
def run(run_folder):
    return read_run(run_folder)


def shades(svg):
    """Fill colours of a picture's boxes in order, without the legend's, and their opacities."""
    found = re.findall(r'style="fill: (#\w+); fill-opacity: ([\d.]+)', svg)
    return [(colour, float(strength)) for colour, strength in found][: len(found) - RAMP]


def size(png):
    """Width and height of a PNG."""
    assert png.startswith(b"\x89PNG")
    return struct.unpack(">II", png[16:24])


def test_the_command_draws_a_completion_in_the_pages_colours_on_its_iterations_scale(run_folder, tmp_path, capsys):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    assert main(["picture", str(folder), "--iteration", "1", "--row", "2", "--width", "20"]) == 0
    assert capsys.readouterr().out.split() == [str(folder / "picture.svg"), str(folder / "picture.png")]
    records = map(json.loads, (folder / "samples.jsonl").read_text().splitlines())
    samples = [record for record in records if record["iteration"] == 1]
    largest = max(abs(x) for sample in samples for x in sample["advantages"])
    found = shades((folder / "picture.svg").read_text())
    below, above = ("#" + "".join(f"{int(x):02x}" for x in shade.split()) for shade in SHADES["light"])
    expected = [(above if x >= 0 else below, 0.7 * abs(x) / largest) for x in samples[1]["advantages"]]
    assert [colour for colour, _ in found] == [colour for colour, _ in expected]
    assert [x for _, x in found] == pytest.approx([x for _, x in expected], abs=1e-3)
    assert size((folder / "picture.png").read_bytes())[0] == 20 * DOTS
    before = (folder / "picture.svg").read_bytes()
    assert main(["picture", str(folder), "--iteration", "1", "--row", "2", "--width", "20"]) == 0
    assert (folder / "picture.svg").read_bytes() == before


def test_without_a_row_the_completion_whose_credit_varies_most_is_drawn_and_named(run_folder, tmp_path, capsys):
    folder, change = shutil.copytree(run_folder, tmp_path / "run"), {0: 1.0, 1: 3.0, 2: -9.0, 3: 2.0}
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for place, row in enumerate(rows[-4:]):  # the third has the largest numbers, all equal
        row["advantages"] = [change[place] * (1 if place == 2 else i % 2) for i in range(len(row["tokens"]))]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["picture", str(folder)]) == 0
    *files, said = capsys.readouterr().out.splitlines()
    assert said == "completion 2 of 4 of iteration 3: its credit varies most; --row takes another"
    drawn = (folder / "picture.svg").read_bytes()
    assert main(["picture", str(folder), "--row", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == files
    assert (folder / "picture.svg").read_bytes() == drawn


def test_what_is_not_there_is_refused(run_folder, tmp_path, capsys):
    run = str(run_folder)
    assert "--row is 9; the run keeps 4 completions of iteration 3" in refused(capsys, "picture", run, "--row", "9")
    assert "keeps completions of 1, 2, 3" in refused(capsys, "picture", run, "--iteration", "7")
    assert "it must end in .svg or .png" in refused(capsys, "picture", run, "--out", str(tmp_path / "a.gif"))
    assert "No such file" in refused(capsys, "picture", run, "--out", str(tmp_path / "none" / "a.svg"))
    assert "at least 2" in refused(capsys, "picture", run, "--width", "1")
    bare = shutil.copytree(run_folder, tmp_path / "run")
    (bare / "picture.svg").mkdir()
    assert f"cannot write '{bare / 'picture.svg'}': Is a directory" in refused(capsys, "picture", str(bare))
    (bare / "samples.jsonl").unlink()
    assert "keeps no completions; runs of tokencredit train keep" in refused(capsys, "picture", str(bare))


def test_an_episode_has_its_speakers_and_no_text_is_markup(run, tmp_path):
    played = grid(messages=[{"role": "user", "content": HOSTILE}])
    played["tokens"][3] = HOSTILE
    file = tmp_path / "a <b>.svg"
    Sample(run, played).picture(file)
    svg = file.read_text()
    tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(svg).iter()}
    assert not tags & {"script", "img", "b", "image", "foreignObject", "a"}
    assert "\x1b" not in svg
    assert "environment › " in svg  # texts are comments beside their outlines
    assert svg.count("assistant › ") == 2


def test_lines_break_at_spaces_and_cjk_characters_and_in_words_that_are_wide():
    block = [Piece("one two"), Piece("three 你好世界"), Piece("x" * 25), Piece("\nend")]
    broken = list(lines(block, 10, len))
    texts = ["".join(piece.text for piece in line) for line in broken]
    assert texts == ["one ", "twothree 你", "好世界xxxxxxx", "xxxxxxxxxx", "xxxxxxxx", "end"]
    assert [piece.text for piece in broken[1]] == ["two", "three 你"]


def test_characters_of_no_font_are_named(monkeypatch, tmp_path):
    broken = tmp_path / "broken.ttf"
    broken.write_bytes(b"no font")
    lost = [FontEntry(fname=str(file), name="Lost") for file in (tmp_path / "gone.ttf", broken)]
    own = [font for font in fontManager.ttflist if font.name == FONT]
    monkeypatch.setattr(fontManager, "ttflist", [*own, *lost])  # as Matplotlib's cache lists them
    sample = {"about": "$x_1$ 你", "prompt": "Наука ", "parts": [{"role": "", "tokens": []}]}
    assert draw(sample, "1", "svg", 6.5)[1] == "你"


def test_a_long_picture_has_fewer_dots(monkeypatch):
    monkeypatch.setattr(picture, "MAX_DOTS", 1000)
    token = {"text": " word", "share": 0.5, "faint": False}
    long = {"about": "", "prompt": "", "parts": [{"role": "", "tokens": [token] * 100}]}
    width, height = size(draw(long, "1", "png", 2)[0])
    assert height <= 1000
    assert width < 2 * DOTS
