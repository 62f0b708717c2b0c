"""Every sweep among the recipes can be run as it stands."""

import importlib.util
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


@pytest.mark.proof
@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_variant_of_a_recipe_trains_an_iteration(file, capsys, monkeypatch, tmp_path):
    if file.parent.name in ("planted-credit", "reasoning", "sao", "scaling"):
        pytest.skip("its policies are built by programs, in up to an hour")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    assert main(["sweep", str(file), "--seeds", "1", "--export", "variants"]) == 0
    command = "control" if yaml.safe_load(file.read_text()).get("kind") == "control" else "train"
    for number, variant in enumerate(sorted(Path("variants").glob("*.yaml"))):
        run = ["--run.iterations", "1", "--run.dir", f"runs/{number}", "--audit.at_end", "false"]
        assert main([command, "--config", str(variant), *run]) == 0, (variant, capsys.readouterr().err)


def test_a_reward_at_every_token_is_the_score_as_often_as_there_are_tokens():
    program = ROOT / "recipes" / "negative-sentiment" / "spread.py"
    spec = importlib.util.spec_from_file_location("spread", program)
    spread = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(spread)
    texts = [" dull.", " dull and bad."]
    bad, worse = spread.every_token(["This film was"] * 2, texts, [[1, 2], [1, 2, 3]], "builtin:reviews", "NEGATIVE")
    assert bad == bad[:1] * 2
    assert worse == worse[:1] * 3
    assert min(bad[0], worse[0]) > 0.5
