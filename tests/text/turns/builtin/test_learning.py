"""The recipes of the built-in environments learn."""

import json
from pathlib import Path

import pytest

from tokencredit.cli import main

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[4] / "recipes" / "turns"


def rewards(tmp_path, recipe, *settings):
    """The reward of each iteration of a recipe's run."""
    given = ["--run.dir", str(tmp_path / "run"), "--run.samples", "0", "--run.trackers", "[]", *settings]
    assert main(["train", "--config", str(RECIPES / recipe), *given]) == 0
    return [json.loads(line)["reward"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.proof
def test_the_policy_of_the_grid_learns_to_reach_the_goal(tmp_path):
    solved = rewards(tmp_path, "grid.yaml", "--run.iterations", "5")
    assert 0.2 < solved[0] <= 0.4
    assert solved[-1] > 0.7


@pytest.mark.proof
def test_the_policy_of_the_calculator_learns_to_calculate(tmp_path):
    solved = rewards(tmp_path, "calculator.yaml", "--run.iterations", "8", "--rollout.batch_size", "64")
    assert 0.05 < solved[0] <= 0.35
    assert sum(solved[-2:]) / 2 > 0.4
