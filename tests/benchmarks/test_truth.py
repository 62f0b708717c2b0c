"""benchmarks/truth.py keeps figures of runs and of each world's limit, in a file that it goes on with."""

import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import truth  # noqa: E402

from tokencredit import PPOConfig  # noqa: E402


def test_a_new_file_gets_the_worlds_limit_and_its_missing_runs_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(truth, "SAMPLES", 64)
    out = tmp_path / "worlds.json"
    change = "run.iterations=1,rollout.batch_size=8,rollout.max_new_tokens=4"
    monkeypatch.setattr(sys, "argv", ["truth.py", "--variants", change, "--seeds", "1", "--out", str(out)])
    assert truth.main() == 0
    kept = json.loads(out.read_text())["builtin"]
    assert kept["limit"]["reference"] < kept["limit"]["best"] < 1
    figures = kept[change]["1"]
    assert [len(figures[name]) for name in ("reward", "kl", "distinct_2", "clock")] == [1, 1, 1, 1]
    before = out.stat().st_mtime_ns
    capsys.readouterr()
    assert truth.main() == 0
    assert out.stat().st_mtime_ns == before
    assert change not in capsys.readouterr().out


def test_a_recipes_variant_has_the_worlds_reward_in_place_of_its_own():
    settings = truth.settings_of("spread: every-token")
    assert settings["critic.prefix_every"] == 0
    assert "model.name" not in settings
    world = {"classifier": "questions", "label": "NUM"}
    (term,) = truth.in_world(settings["reward"], world)
    assert term["kwargs"] == world
    assert term["function"].endswith("spread.py:every_token")
    PPOConfig.from_dict(truth.BASE | settings)


@pytest.mark.parametrize(
    ("variant", "message"),
    [("write-up: prefix", "sets prompts"), ("hacking: none", "has no variant none")],
)
def test_a_recipes_variant_that_is_of_its_own_world_is_refused(variant, message):
    with pytest.raises(SystemExit, match=message):
        truth.settings_of(variant)


def test_settings_with_a_colon_are_audited():
    assert truth.audits_of("ppo.kwargs={beta: 0.3}") == truth.AUDITS
    assert truth.audits_of("hacking: no-kl") == {}


def test_a_reward_without_a_counterpart_is_refused():
    with pytest.raises(SystemExit, match="no counterpart"):
        truth.in_world(truth.settings_of("claims: positive")["reward"], {"classifier": "questions", "label": "NUM"})


def test_a_run_that_measured_no_kl_has_a_line_without_one():
    figures = {"audits": {}, "reward": [0.5] * 20, "clock": [9.6]}
    assert truth.line("hacking: no-kl", 1, figures) == "hacking: no-kl 1  10 s"
    assert truth.line("default", 1, figures | {"kl": [2.0] * 20}).endswith("objective 0.400  KL 2.00  10 s")
