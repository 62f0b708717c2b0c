"""benchmarks/control.py trains the same recipe with both libraries and prints its table."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("stable_baselines3")
pytest.importorskip("gymnasium")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import control

RECIPE = """
env: {id: CartPole-v1, number: 2, normalize_observations: true, normalize_rewards: true}
steps: 64
ppo: {epochs: 1, minibatches: 2}
eval: {episodes: 2}
run: {iterations: 2}
"""


@pytest.mark.slow
def test_both_libraries_run_a_recipe_and_the_table_judges_them(monkeypatch, tmp_path, capsys):
    (tmp_path / "cartpole.yaml").write_text(RECIPE)
    monkeypatch.setattr(control, "RECIPES", tmp_path)
    for library in ("ours", "theirs"):
        for seed in (1, 2):
            control.one("cartpole", library, seed, tmp_path)
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["", "--keep", str(tmp_path), "--recipes", "cartpole", "--seeds", "1", "2"])
    control.main()  # finds them finished
    header, line, row, _, code = capsys.readouterr().out.splitlines()[-5:]
    assert header.count("|") == line.count("|") == row.count("|") == 10
    assert code.startswith("Code: ")
    assert row.startswith("| cartpole | 256 | ")
    assert "490.04 ± 6.12 (CartPole-v1, 500,000) | 500 ± 0 (CartPole-v1, 100,000)" in row
    assert "≥ 475 on each seed: no" in row


def runs(own, other):
    return {library: [{"return": x, "greedy": 500} for x in xs] for library, xs in (("ours", own), ("theirs", other))}


@pytest.mark.parametrize(
    ("own", "verdict"),
    [
        ([5.0, 6.0, 7.0], "worse"),
        ([98.0, 104.0, 101.0], "within chance"),
        ([60.0, 150.0, 100.0], "cannot tell"),
        ([190.0, 220.0, 200.0], "better"),
    ],
)
def test_a_verdict_follows_from_the_interval(own, verdict):
    assert f"Stable-Baselines3: {verdict};" in control.verdict("cartpole", runs(own, [99.0, 101.0, 103.0]), "")


def test_one_seed_gives_no_verdict():
    assert control.verdict("hopper", runs([5.0], [6.0]), "") == "Stable-Baselines3: cannot tell"


def test_a_collapsed_seed_counts_beside_the_published_mean_of_the_same_budget():
    five = runs([500.0, 500.0, 500.0, 500.0, 420.0], [500.0] * 5)
    assert "≥ CleanRL's mean: no" in control.verdict("cartpole", five, "CartPole-v1, 500,000")
    assert "CleanRL" not in control.verdict("cartpole", five, "CartPole-v1, 100,000")


def test_a_setting_that_the_other_library_is_not_given_is_refused(monkeypatch, tmp_path):
    (tmp_path / "cartpole.yaml").write_text(RECIPE + "critic: {clip: 0.2}\n")
    monkeypatch.setattr(control, "RECIPES", tmp_path)
    with pytest.raises(SystemExit, match=r"sets critic\.clip, which Stable-Baselines3 is not given"):
        control.one("cartpole", "theirs", 1, tmp_path)


def test_the_middle_of_five_is_the_mean_of_three():
    assert control.middle([100.0, 2.0, 1.0, 3.0, -50.0]) == 2.0
