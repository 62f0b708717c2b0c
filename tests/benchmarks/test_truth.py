"""benchmarks/truth.py keeps figures of runs and of each world's limit, in a file that it goes on with."""

import json
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import truth  # noqa: E402

from tokencredit import PPOConfig  # noqa: E402
from tokencredit.text.models.model_loading import resolve  # noqa: E402


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
    [("write-up: prefix", "sets a policy or prompts"), ("hacking: none", "has no variant none")],
)
def test_a_recipes_variant_that_is_of_its_own_world_is_refused(variant, message):
    with pytest.raises(SystemExit, match=message):
        truth.settings_of(variant)


def test_a_size_is_the_worlds_policy_of_that_name_beside_its_judge(tmp_path):
    with pytest.raises(SystemExit, match=r"tiny is missing: .*--size tiny"):
        truth.of_size(tmp_path, "tiny", [])
    for name in ("policy", "tiny", "judge"):
        (tmp_path / name).mkdir()
    assert truth.of_size(tmp_path, "medium", [])["model.name"] == str(tmp_path / "policy")
    assert "model.name" not in truth.settings_of("scaling: tiny")
    settings = truth.of_size(tmp_path, "tiny", [{"classifier": "questions", "label": "NUM"}])
    assert settings["model.name"] == str(tmp_path / "tiny")
    assert settings["reward"][1]["weight"] == 0


@torch.no_grad()
def test_fluency_is_the_judges_mean_log_probability_of_the_completions_tokens():
    judge = resolve("builtin:reviews", "policy")
    prompts, completions = [[5, 6, 7], [8, 9]], [[10, 11], [12, 13, 14, 15]]
    found = truth.fluency(["", ""], ["", ""], prompts, completions, str(judge))
    for prompt, completion, value in zip(prompts, completions, found, strict=True):
        logits = truth.loaded(str(judge))(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1)[range(len(completion)), completion]
        assert value == pytest.approx(float(logprobs.mean()), abs=1e-5)


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
