"""Files of a comparison: their numbers are those of the runs, and figures fit a paper's column."""

import csv
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import tokencredit as tc
from tokencredit.cli import main
from tokencredit.errors import ConfigError
from tokencredit.report.comparison.compare import compare
from tokencredit.report.comparison.files import WIDTH, write_comparison
from tokencredit.report.comparison.stats import bootstrap, rank_p, spread
from tokencredit.report.reading import Run

ENDS = {0.5: (0.1, 0.2, 0.3, 0.4), 0.95: (0.7, 0.8, 0.9, 1.0)}
"""Last rewards of the runs, by λ."""


def run(lam, seed, end):
    rows = [{"iteration": i, "reward": end * i / 3, "tokens": 10, "seconds": 1.0, "kl": -0.5} for i in (1, 2, 3)]
    config = {"seed": seed, "advantage": {"lam": lam}, "model": {"name": "a_b"}, "run": {"dir": f"{lam}-{seed}"}}
    return Run(Path(f"runs/{lam}-{seed}"), config, rows, [], {"stopped_by": "iterations"})


@pytest.fixture(scope="module")
def comparison():
    return compare([run(lam, seed, end) for lam, ends in ENDS.items() for seed, end in enumerate(ends)])


@pytest.fixture(scope="module")
def folder(comparison, tmp_path_factory):
    """A folder with all formats but the page, whose tests are in test_page.py."""
    folder = tmp_path_factory.mktemp("files") / "new" / "comparison"
    assert write_comparison(comparison, folder, ["pdf", "svg", "csv", "json", "tex"]) == folder
    return folder


def test_compare_returns_plain_objects(comparison):
    assert tc.compare is compare
    low, high = (np.array(ends) for ends in ENDS.values())
    (found,) = comparison.differences
    assert (found.setting, found.other) == ("advantage.lam 0.5", "advantage.lam 0.95")
    assert found.difference == pytest.approx(-0.6)
    assert (found.low, found.high) == pytest.approx(bootstrap(spread, low, high))
    assert (found.p, found.verdict) == (rank_p(low, high), "more than noise")
    assert comparison.curves["iteration"][0].y.middle.tolist() == pytest.approx([0.25 / 3, 0.5 / 3, 0.25])
    assert comparison.verdict[0].startswith("advantage.lam 0.95 ends at the higher reward: 0.85, against 0.25")


def test_one_run_and_few_seeds_have_no_interval():
    one = compare([run(0.5, 1, 0.1), run(0.95, 1, 0.2)]).differences[0]
    assert (one.low, one.p, one.verdict) == (None, None, "one run per setting")
    few = compare([run(0.5, 1, 0.1), run(0.95, 1, 0.2), run(0.95, 2, 0.2)]).differences[0]
    assert few.verdict == "too few seeds"


def test_tables_have_the_outcomes_of_settings_and_runs(comparison):
    first = comparison.tables["settings"][0]
    assert (first["setting"], first["advantage.lam"], first["runs"]) == ("advantage.lam 0.5", "0.5", 4)
    assert first["reward_last"] == pytest.approx(0.25)
    assert 0.1 <= first["reward_last_low"] < 0.25 < first["reward_last_high"] < 0.4001
    runs = comparison.tables["runs"]
    assert [row["seed"] for row in runs] == [0, 1, 2, 3] * 2
    assert [row["reward_last"] for row in runs] == pytest.approx([end for ends in ENDS.values() for end in ends])
    assert {row["stopped_by"] for row in runs} == {"iterations"}


def test_each_format_has_its_files(folder):
    axes = ("iteration", "seconds", "tokens")
    figures = {f"{axis}.{ending}" for axis in axes for ending in ("pdf", "svg")}
    tables = {f"{name}.csv" for name in ("settings", "runs", "curves", "differences")}
    assert {file.name for file in folder.iterdir()} == figures | tables | {"comparison.json", "comparison.tex"}


def test_csv_and_json_hold_the_tables(folder, comparison):
    whole = json.loads((folder / "comparison.json").read_text())
    assert whole["verdict"] == comparison.verdict
    for name, rows in comparison.tables.items():
        assert whole[name] == rows
        with (folder / f"{name}.csv").open(newline="") as file:
            read = list(csv.DictReader(file))
        assert read == [{key: "" if value is None else str(value) for key, value in row.items()} for row in rows]


def test_a_figure_has_the_width_of_a_column_and_fonts_of_7_points_or_more(folder):
    text = (folder / "iteration.svg").read_text()
    assert re.search(r'<svg [^>]*width="([\d.]+)pt"', text)[1] == f"{72 * WIDTH:g}"
    sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", text)]  # user units, of which a point is one
    assert len(sizes) > 8
    assert min(sizes) >= 7
    assert "advantage.lam 0.95" in text, "texts are texts"
    assert b"/Type3" not in (folder / "iteration.pdf").read_bytes()


def test_the_same_runs_give_the_same_figures(folder, comparison, tmp_path):
    for ending in ("pdf", "svg"):
        again = write_comparison(comparison, tmp_path / f"again.{ending}")
        assert again.read_bytes() == (folder / f"iteration.{ending}").read_bytes()


def test_a_latex_table_escapes_names_and_sets_minus_signs(folder):
    text = (folder / "comparison.tex").read_text()
    assert text.startswith("% advantage.lam 0.95 ends at the higher reward")
    assert r"setting & runs & reward\_first & reward\_last & kl\_last \\" in text
    assert re.search(r"advantage\.lam 0\.5 & 4 & 0\.08\d \[[^&]*\] & 0\.25 \[[^&]*\] & \$-\$0\.50 \\\\", text)


def test_out_with_an_ending_is_that_file(comparison, tmp_path):
    for ending in ("svg", "csv", "json", "tex"):
        file = tmp_path / "paper" / f"x.{ending}"
        assert write_comparison(comparison, file) == file
        assert file.is_file()
    assert (tmp_path / "paper" / "x.csv").read_text().startswith("setting,advantage.lam,runs,reward_first,")


def test_unknown_formats_and_two_wishes_are_refused(comparison, run_folder, tmp_path, capsys):
    with pytest.raises(ConfigError, match="format is 'docx'; it must be of html, png, pdf, svg, csv, json, tex"):
        write_comparison(comparison, tmp_path, ["pdf", "docx"])
    with pytest.raises(ConfigError, match=r"x\.pdf', and format is given too"):
        write_comparison(comparison, tmp_path / "x.pdf", ["csv"])
    (tmp_path / "y.pdf").mkdir()
    with pytest.raises(ConfigError, match=r"cannot write .*y\.pdf': Is a directory; give another --out"):
        write_comparison(comparison, tmp_path / "y.pdf")
    assert main(["compare", str(run_folder), "--format", "csv,json", "--out", str(tmp_path / "z")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "z")
    assert main(["compare", "nowhere", "--out", "x.pdf", "--format", "pdf"]) == 2
    assert "'x.pdf', and format is given too" in capsys.readouterr().err


def test_tables_need_no_matplotlib_and_every_comparison_scipy(run_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    tables = ["--format", "html,csv,json,tex", "--out", str(tmp_path / "out")]
    assert main(["compare", str(run_folder), *tables]) == 0
    assert len(list((tmp_path / "out").iterdir())) == 7
    install = "which is not installed: pip install 'tokencredit[compare]'\n"
    capsys.readouterr()
    for given, name in (([], "png"), (["--format", "csv,svg"], "svg"), (["--out", "x.pdf"], "pdf")):
        assert main(["compare", "nowhere", *given]) == 2, "before any run is read"
        assert capsys.readouterr().err == f"tokencredit: format {name} needs Matplotlib, {install}"
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert main(["compare", "nowhere", *tables]) == 2
    assert capsys.readouterr().err == f"tokencredit: a comparison needs SciPy, {install}"
