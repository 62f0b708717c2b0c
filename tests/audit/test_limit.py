"""The share of the attainable in runs of texts, and the command that samples the reference."""

from dataclasses import replace

import pytest
import torch

from helpers.configs import quiet, text_config
from helpers.files import read_jsonl, read_metrics
from helpers.rewards import vowels
from tokencredit.core.rewards import attainable
from tokencredit.errors import ConfigError
from tokencredit.report.reading import read_run
from tokencredit.report.story import story
from tokencredit.settings.data import FunctionTerm, PromptsConfig, ScoreConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.run_kind import read_config
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import KLConfig
from tokencredit.text.audit.limit import obstacle, prompt_numbers
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.tools.limit_run import limit, limit_of_settings, reached

COEF = 0.02


def config(folder, iterations=2, **groups):
    small = {"rollout": RolloutConfig(batch_size=32, max_new_tokens=6), "kl": KLConfig(coef=COEF)}
    run = quiet(folder, iterations, save_every=1, samples=32)
    return text_config(folder, **small | {"reward": [FunctionTerm(function="length")], "run": run} | groups)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("limit") / "run"
    args = config(folder)
    return folder, PPOTrainer(args=args, reward_funcs=vowels).train()


def share(row, first):
    return (row["objective"] - first["limit/start"]) / (first["limit/objective"] - first["limit/start"])


def test_the_first_iteration_estimates_the_limit_and_each_has_its_share(run):
    folder, summary = run
    rows = read_metrics(folder)
    first = rows[0]
    best = attainable(torch.tensor([s["reward"] for s in read_jsonl(folder / "samples.jsonl")][:32]), COEF)
    for name in ("objective", "reward", "kl", "start", "effective"):
        assert first[f"limit/{name}"] == pytest.approx(getattr(best, name), rel=1e-4), name
    assert first["limit/low"] < first["limit/objective"] < first["limit/high"]
    for row in rows:
        assert row["objective"] == pytest.approx(row["reward"] - COEF * row["kl"], abs=1e-6)
        assert row["attainable"] == pytest.approx(share(row, first))
    assert "limit/objective" not in rows[1]
    assert first["attainable"] == pytest.approx(0, abs=1e-3)
    assert summary["attainable_last"] == rows[1]["attainable"]
    words = f"{100 * rows[1]['attainable']:.0f} % of what this reward allows at this KL price"
    assert words in summary.attained
    assert [" ".join(fact[1:]) for fact in story(read_run(folder)) if fact.label == "reached"] == [summary.attained]


def test_a_resumed_run_keeps_the_limit_until_its_price_changes(run, tmp_path):
    folder, _ = run
    args = config(folder, iterations=3)
    summary = PPOTrainer(args=args, reward_funcs=vowels).train(resume_from_checkpoint=True)
    rows = read_metrics(folder)
    assert rows[2]["attainable"] == pytest.approx(share(rows[2], rows[0]))
    assert summary["attainable_last"] == rows[2]["attainable"]
    dearer = replace(config(folder, iterations=4), kl=KLConfig(coef=2 * COEF))
    summary = PPOTrainer(args=dearer, reward_funcs=vowels).train(resume_from_checkpoint=True)
    assert "attainable" not in read_metrics(folder)[3]
    assert (summary["attainable_last"], summary.attained) == (None, None)
    assert reached(folder) == pytest.approx(read_metrics(folder)[3]["objective"]), "at the price that holds now"
    assert "reached" not in [fact.label for fact in story(read_run(folder))]


def test_penalties_count_and_normalised_scores_have_no_limit(tmp_path):
    rows = {}
    for name, score in (("penalty", ScoreConfig(missing_eos_penalty=1.0)), ("scaled", ScoreConfig(normalize="batch"))):
        args = config(tmp_path / name, 1, score=score)
        rows[name], _ = PPOTrainer(args=args, reward_funcs=vowels).iteration(1)
    penalty = rows["penalty"]
    assert penalty["limit/start"] == pytest.approx(penalty["reward"] - penalty["truncated"], abs=1e-5)
    assert penalty["shaped_reward"] == pytest.approx(penalty["limit/start"])
    assert penalty["shaped_reward_std"] > penalty["reward_std"]
    assert "shaped_reward" not in rows["scaled"]
    assert not {"objective", "attainable", "limit/objective"} & set(rows["scaled"])


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ({}, None),
        ({"kl": KLConfig(coef=0)}, "kl.coef is 0"),
        ({"kl": KLConfig(target=3.0)}, "kl.target adapts"),
        ({"score": ScoreConfig(normalize="running")}, "score.normalize is running"),
        ({"rollout": RolloutConfig(top_p=0.9)}, "rollout.top_p filters"),
    ],
)
def test_settings_without_a_limit_are_named(groups, reason, tmp_path):
    args = config(tmp_path / "none", **groups)
    found = obstacle(args)
    assert found is None if reason is None else reason in found
    if reason is not None:
        with pytest.raises(ConfigError, match=f"no limit: {reason}"):
            limit_of_settings(args, 64)


def test_prompts_are_one_only_with_the_same_columns(tmp_path):
    rows = [{"prompt": "It was", "answer": "a"}, {"prompt": "It was", "answer": "b"}]
    args = config(tmp_path / "none", prompts=PromptsConfig())
    trainer = PPOTrainer(args=args, reward_funcs=vowels, train_dataset=rows)
    batch = trainer.collect()
    pairs = set(zip(prompt_numbers(batch).tolist(), batch.prompts.columns["answer"], strict=True))
    assert sorted(answer for _, answer in pairs) == ["a", "b"]
    assert len({number for number, _ in pairs}) == 2


def test_the_command_agrees_with_the_estimate_of_the_first_iteration(tmp_path, capsys):
    """Of a run by its folder, and of the configuration that it was made with."""
    args = config(tmp_path / "run", 1)
    PPOTrainer(args=args).train()
    first = read_metrics(tmp_path / "run")[0]
    capsys.readouterr()
    best = limit_of_settings(args, 100, tmp_path / "run")
    assert (best.samples, best.prompts, best.pooled) == (100, 1, False)
    assert best.start == pytest.approx(first["limit/start"], abs=3)
    assert best.low <= first["limit/high"]
    assert first["limit/low"] <= best.high
    out = capsys.readouterr().out
    assert out.startswith("J*")
    assert "the run has reached" in out
    assert limit_of_settings(replace(args, run=quiet(tmp_path / "other")), 100) == best
    assert "reached" not in capsys.readouterr().out


def test_a_run_begun_in_python_has_its_limit_by_the_command_or_there(run, tmp_path, capsys):
    """By the command if its reward is a term of a configuration; with a function of Python, of a trainer."""
    folder, _ = run
    with pytest.raises(ConfigError, match=r"in Python with reward_funcs, .*: tokencredit\.limit\(PPOTrainer\(…\)\)"):
        limit_of_settings(read_config(folder / "config.yaml", PPOConfig), 100, folder)
    trainer = PPOTrainer(args=config(tmp_path / "same"), reward_funcs=vowels)
    best = limit(trainer, 100)
    assert (best.samples, best.prompts) == (100, 1)
    assert capsys.readouterr().out.startswith("J*")
    trainer.record.history.append({})
    with pytest.raises(ConfigError, match="the trainer has trained, and its policy is not the reference"):
        limit(trainer, 100)
    with pytest.raises(ConfigError, match=r"it needs a reward: reward_funcs is \[\]"):
        limit(PPOTrainer(args=config(tmp_path / "hand"), reward_funcs=[]), 100)
    named = PPOTrainer(args=config(tmp_path / "named", 1), reward_funcs="length", processing_class=trainer.tokenizer)
    named.train()
    kept = read_config(tmp_path / "named" / "config.yaml", PPOConfig)
    assert (kept.reward[0].function, list(kept.python)) == ("length", ["processing_class"])
    assert limit_of_settings(kept, 100, tmp_path / "named").samples == 100
    assert "the run has reached" in capsys.readouterr().out
