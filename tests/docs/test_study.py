"""The study behind benchmarks/findings.md is run from the recipes, and its metrics are kept."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers import forking
from helpers.files import read_metrics
from tokencredit.cli import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("study", ROOT / "benchmarks" / "study.py")
study = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(study)


def test_every_study_is_a_recipe_and_has_kept_metrics_or_the_page_says_that_it_has_none():
    page = (ROOT / "benchmarks" / "findings.md").read_text(encoding="utf-8")
    for name, recipe in study.STUDIES.items():
        assert (ROOT / study.RECIPES / recipe).is_file()
        without = f"<!-- table {name} -->\nNo runs of this study are kept yet.\n" in page
        assert (study.DATA / f"{name}.json").is_file() != without


@pytest.mark.proof
def test_a_study_is_run_with_fewer_seeds_and_its_metrics_are_kept(tmp_path, monkeypatch):
    (tmp_path / "cartpole.yaml").write_text(
        """
kind: control
dir: runs/few
seeds: [7, 8]
base: {env: {id: CartPole-v1, number: 2}, steps: 16, eval: {episodes: 1}, run: {iterations: 2, trackers: []}}
grid: {advantage.lam: [0, 1]}
"""
    )
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "cartpole.yaml", "--seeds", "1", "--export", "files"]) == 0
    assert main(["control", "--config", "files/lam=0-seed-7.yaml"]) == 0  # which leaves one run to the study
    monkeypatch.setattr(study, "RECIPES", tmp_path)
    monkeypatch.setattr(study, "DATA", tmp_path / "kept")
    monkeypatch.setattr(study, "STUDIES", {"few": "cartpole.yaml"})
    monkeypatch.setattr("sys.argv", ["study.py", "few", "--seeds", "1", "--jobs", "1"])

    def run(command, check):
        assert command[:2] == [sys.executable, "-m"]
        return forking.python(*command[2:])

    monkeypatch.setattr(study, "subprocess", SimpleNamespace(run=run))
    assert study.main() == 0
    kept = json.loads((tmp_path / "kept" / "few.json").read_text())
    assert {variant: list(runs) for variant, runs in kept.items()} == {"lam=0": ["7"], "lam=1": ["7"]}
    summary = tmp_path / "runs/few/lam=0/seed-7/summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"stopped_by": "interrupt", "iterations": 1}))
    assert study.keep("few") == tmp_path / "kept" / "new" / "few.json"
    assert json.loads((tmp_path / "kept" / "few.json").read_text()) == kept, "kept data stay"
    fewer = study.keep("few", replace=True)
    assert fewer == tmp_path / "kept" / "new" / "few.json", "fewer runs replace none"
    kept = json.loads(fewer.read_text())
    assert list(kept) == ["lam=1"], "what was cut short is no result"
    metrics = read_metrics(tmp_path / "runs/few/lam=1/seed-7")
    assert kept["lam=1"]["7"]["value_loss"] == pytest.approx([m["value_loss"] for m in metrics], rel=1e-3)


def test_an_unknown_study_is_named(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["study.py", "many"])
    with pytest.raises(SystemExit):
        study.main()
    assert "there is no study many" in capsys.readouterr().err


def test_known_words_are_those_of_the_reviews(monkeypatch):
    known = frozenset({("a", "b", "c", "d"), ("b", "c", "d", "e")})
    monkeypatch.setattr(study, "known_words", lambda: known)
    samples = [{"prompt": "a b", "completion": " c d e f"}, {"prompt": "a b", "completion": ""}]
    assert study.known_share(samples) == pytest.approx(2 / 3)  # abcd and bcde of these and cdef
    assert study.known_share([]) is None
