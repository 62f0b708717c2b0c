"""benchmarks/gpu.py at its smallest size: every part but the compiled one gives its rows, on a bare machine too."""

import json
from pathlib import Path

import pytest

from helpers import warm
from helpers.commands import python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks" / "gpu.py"
BARE = "import runpy, sys; sys.path.insert(0, {tests!r}); import bare; sys.meta_path.insert(0, bare.Hiding); "
BARE += "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def run(folder, *arguments, begin=warm.python, program=(PROGRAM,)):
    out = folder / "gpu.json"
    done = begin(*program, "--size", "smallest", "--out", out, *arguments)
    return done, json.loads(out.read_text()) if out.exists() else None


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    bare = ("-c", BARE.format(tests=str(ROOT / "tests")), PROGRAM)
    parts = ("ceilings", "correctness", "main", "decoding", "side_by_side", "engines", "variants", "others", "growth")
    done, results = run(tmp_path_factory.mktemp("gpu"), "--parts", *parts, begin=python, program=bare)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row["part"] for row in results["rows"]} == set(parts)
    for row in results["rows"]:
        assert row["name"] in done.stdout, "each row is printed"
    return results


@pytest.mark.proof
def test_what_is_exact_is_exact_on_a_cpu(results):
    rows = [row for row in results["rows"] if row["part"] == "correctness" and row["goal"] is not None]
    assert len(rows) == 12, "six for each of two models"
    assert [row["name"] for row in rows if not row["met"]] == []


@pytest.mark.proof
def test_kernels_and_waits_are_counted(results):
    rows = {(row["part"], row["name"]): row["value"] for row in results["rows"]}
    assert rows["decoding", "static cache, waits per step"] == 1, "on a CPU each step looks which rows go on"
    assert 100 < rows["decoding", "static cache, launches per step"] < 250
    assert 2 <= rows["main", "waits per minibatch"] <= 7
    assert 200 < rows["main", "kernels per minibatch"] < 900
    assert 0 < rows["main", "outside the stages"] < 60


def test_parts_without_time_are_named_and_the_table_prints_the_file(tmp_path):
    done, results = run(tmp_path, "--parts", "ceilings", "main", "--minutes", "0")
    assert done.returncode == 0, done.stderr
    assert [row["name"] for row in results["rows"]] == ["left out, no time was left"] * 2
    table = warm.python(PROGRAM, "--table", tmp_path / "gpu.json").stdout
    assert table.count("| left out, no time was left |") == 2


def test_a_folder_without_wheels_is_refused(tmp_path):
    done, _ = run(tmp_path, "--wheels", str(tmp_path))
    assert done.returncode == 1
    assert f"--wheels {tmp_path} holds no wheel" in done.stderr
