"""Every sweep among the recipes can be run as it stands."""

import re
from pathlib import Path

import pytest
import yaml

from tokencredit.cli import main

ROOT = Path(__file__).parents[1]
SWEEPS = sorted(path for path in ROOT.glob("recipes/**/*.yaml") if re.search(r"^seeds:", path.read_text(), re.M))


AGENTS = sorted(
    path for path in ROOT.glob("recipes/**/*.yaml") if re.search(r"^ *env: .*\bid:", path.read_text(), re.M)
)
"""Recipes that name an environment: runs as they stand, and sweeps."""


@pytest.mark.parametrize("file", AGENTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_agents_are_evaluated_during_training(file):
    settings = yaml.safe_load(file.read_text())
    settings = settings.get("base", settings)
    every, iterations = settings["eval"]["every"], settings["run"]["iterations"]
    assert 5 <= iterations // every <= 10


@pytest.mark.slow
@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_dry_run_of_a_recipe_lists_its_runs(file, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # away from runs that somebody has begun
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")  # whose rewards are read
    assert main(["sweep", str(file), "--dry_run"]) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    begin = shown.count("to begin   ")
    assert begin >= 3
    assert f"{begin} runs: 0 finished, 0 to resume, {begin} to begin" in shown
