"""Every sweep among the recipes can be run as it stands."""

from pathlib import Path

import pytest
import yaml

from tokencredit.cli import main

ROOT = Path(__file__).parents[1]
SWEEPS = sorted(path for path in ROOT.glob("recipes/**/*.yaml") if "seeds" in yaml.safe_load(path.read_text()))


def test_there_are_sweeps():
    assert SWEEPS


@pytest.mark.slow
@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_dry_run_of_a_recipe_lists_its_runs(file, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # away from runs that somebody has begun
    assert main(["sweep", str(file), "--dry_run"]) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    begin = shown.count("to begin   ")
    assert begin >= 3
    assert f"{begin} runs: 0 finished, 0 to resume, {begin} to begin" in shown
