"""recipes/whole-path: all its stages, on little data."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.files import read_jsonl
from tokencredit.cli import main

pytestmark = pytest.mark.slow


@pytest.fixture
def path(monkeypatch):
    """The recipe, with commands in this process."""
    file = Path(__file__).parents[1] / "recipes" / "whole-path" / "path.py"
    spec = importlib.util.spec_from_file_location("whole_path", file)
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    sizes = {"PRAISE": 160, "ANSWERS": 64, "PROMPTS": 32, "TRUE_PAIRS": 8, "SAMPLES": 2, "LONGEST": 8, "BETAS": (0.1,)}
    for name, value in sizes.items():
        monkeypatch.setattr(recipe, name, value)
    begun = []

    def run(command, check):
        assert check
        begun.append(command[3])
        assert main(command[3:]) == 0

    monkeypatch.setattr(recipe, "subprocess", SimpleNamespace(run=run))
    recipe.begun = begun
    return recipe


@pytest.mark.proof  # text/offline/test_trainer.py hands over from stage to stage
def test_each_stage_hands_over_to_the_next(path, tmp_path, capsys):
    path.main(["--seeds", "1", "--out", str(tmp_path)])
    seed = tmp_path / "seed-1"
    assert path.begun == [
        "sft", "pairs", "pairs", "reward-model", "pairs", "train", "dpo", "dpo", *["evaluate"] * 5
    ]  # fmt: skip
    prompts = {
        name: {row["prompt"] for row in read_jsonl(seed / f"{name}.jsonl")} for name in ("prompts", "true-pairs")
    }
    assert not prompts["prompts"] & prompts["true-pairs"], "other prompts test the reward model"
    table = (tmp_path / "outcome.md").read_text()
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:7]] == list(path.models({}))
    assert (tmp_path / "whole-path.svg").read_text().startswith("<?xml")
    sft = json.loads((seed / "sft.json").read_text())["metrics"]
    assert sft["eval/kl"] == pytest.approx(0, abs=1e-4)
    tested = json.loads((seed / "reward-model.json").read_text())
    assert sum(part["pairs"] for part in tested["calibration"]) == tested["pairs"] > 0
    # What is there is kept.
    path.begun.clear()
    (seed / "dpo-0.1.json").unlink()
    path.main(["--seeds", "1", "--out", str(tmp_path)])
    assert path.begun == ["evaluate"]
    # In a world the path begins after SFT.
    path.begun.clear()
    world = {
        "model.name": str(seed / "sft" / "policy"),
        "reward": [path.BUILT_IN],
        "prompts.text": ["This movie was", "I", "The"],
    }
    (tmp_path / "world.json").write_text(json.dumps(world))
    kept = tmp_path / "kept.json"
    path.main(["--seeds", "1", "--out", str(tmp_path / "there"), "--world", str(tmp_path), "--keep", str(kept)])
    assert path.begun == ["pairs", "pairs", "reward-model", "pairs", "train", "dpo", "dpo", *["evaluate"] * 4]
    there = json.loads(kept.read_text())[tmp_path.name]
    assert there["SFT"]["1"]["kl"] == [pytest.approx(0, abs=1e-4)]
    assert 0 <= there["reward model"]["1"]["accuracy"][0] <= 1


def test_an_interval_of_the_mean_by_students_t(path):
    # Mean 2, deviation 1, t of 2 degrees of freedom 4.303: 4.303 / √3
    assert path.interval([1.0, 2.0, 3.0]) == "2.000 ± 2.484"
    assert path.interval([0.5]) == "0.500"
