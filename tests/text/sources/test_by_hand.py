import json
import math
import sys

import pytest
import torch

from helpers.configs import text_config
from helpers.files import read_events, read_jsonl, read_metrics
from helpers.runs import assert_same
from tokencredit.cli import main
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.settings.rollout import OffPolicyConfig, RolloutConfig
from tokencredit.settings.training import EvalConfig, KLConfig, RunConfig
from tokencredit.text.ppo_trainer import PPOTrainer

PROMPTS = ["This movie was", "The actors", "Honestly"]


def short(completions, **columns):
    return [-len(text) / 100 for text in completions]


FAILURES = []


def flaky(completions, **columns):
    if FAILURES and FAILURES.pop():
        raise RuntimeError("the service is down")
    return short(completions)


def by_hand(folder, iterations=2, **groups):
    return PPOTrainer(reward_funcs=[], args=text_config(folder, iterations, **groups))


def learn(trainer, prompts=PROMPTS):
    batch = trainer.sample(prompts)
    return trainer.learn(batch, short(batch.completions))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A loop of two iterations: its folder, trainer, and metrics of each."""
    folder = tmp_path_factory.mktemp("hand") / "run"
    with by_hand(folder) as trainer:
        metrics = [learn(trainer), learn(trainer, PROMPTS[:2])]
    return folder, trainer, metrics


def test_a_loop_by_hand_over_the_runs_prompts_and_reward_is_train(tmp_path):
    PPOTrainer(reward_funcs=short, args=text_config(tmp_path / "train", 2)).train()
    trainer = PPOTrainer(reward_funcs=short, args=text_config(tmp_path / "hand", 2))
    state = torch.get_rng_state()
    while trainer.summary is None:
        scored = trainer.score(trainer.sample())
        assert scored.total_scores().tolist() == pytest.approx(short(scored.completions))
        trainer.learn(scored)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(tmp_path / "train", tmp_path / "hand")


def test_a_loop_leaves_the_files_of_a_run_and_batches_may_differ_in_size(whole, capsys):
    folder, trainer, metrics = whole
    assert [row["iteration"] for row in read_metrics(folder)] == [1, 2]
    assert [row["tokens"] for row in metrics] == [row["tokens"] for row in read_metrics(folder)]
    assert metrics[1]["tokens"] <= 2 * 8 < metrics[0]["tokens"]
    assert metrics[0]["seconds/rollout"] > 0
    assert trainer.close() is trainer.summary
    assert trainer.summary["stopped_by"] == "iterations"
    assert (folder / "policy" / "model.safetensors").is_file()
    assert {row["prompt"] for row in read_jsonl(folder / "samples.jsonl")} <= set(PROMPTS)
    assert "prompts come from calls in Python, not from the configuration" in read_events(folder)
    with pytest.raises(ConfigError, match="has ended, after 2 of 2 iterations"):
        trainer.sample(PROMPTS)
    assert main(["audit", str(folder)]) == 2
    assert "cannot be audited: its scores came from calls of learn(batch, scores)" in capsys.readouterr().err


def test_a_loop_that_was_closed_is_resumed_where_it_was(whole, tmp_path):
    with by_hand(tmp_path / "run") as trainer:
        learn(trainer)
    assert trainer.summary["stopped_by"] == "close()"
    assert "call trainer.begin(resume_from_checkpoint=True)" in trainer.record.how_to_resume()
    trainer = by_hand(tmp_path / "run")
    with pytest.raises(ConfigError, match="holds a run or other files already"):
        trainer.begin()
    assert trainer.begin(resume_from_checkpoint=True) == 1
    learn(trainer, PROMPTS[:2])
    assert_same(whole[0], tmp_path / "run")


def test_an_error_in_the_loop_saves_what_was_learned(tmp_path):
    def loop():
        with by_hand(tmp_path / "run") as trainer:
            learn(trainer)
            trainer.learn(trainer.sample(PROMPTS), [1 / 0] * 3)

    with pytest.raises(ZeroDivisionError):
        loop()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["iterations"] == 1
    assert (tmp_path / "run" / "policy").is_dir()


@pytest.mark.parametrize("interactive", [False, True])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_between_two_iterations_is_resumed_with_the_same_batch(
    whole, error, interactive, tmp_path, monkeypatch
):
    if interactive:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)

    def loop():
        with by_hand(tmp_path / "run") as trainer:
            learn(trainer)
            trainer.sample(PROMPTS[:2])
            raise error

    with pytest.raises(error) as caught:
        loop()
    notes = getattr(caught.value, "__notes__", [])
    assert ["stopped before iteration 2" in note for note in notes] == [True] * (error is ValueError)
    trainer = by_hand(tmp_path / "run")
    assert trainer.begin(resume_from_checkpoint=True) == 1
    learn(trainer, PROMPTS[:2])
    assert_same(whole[0], tmp_path / "run")


def test_a_reward_that_fails_in_learn_is_resumed_with_the_same_prompts(tmp_path):
    PPOTrainer(reward_funcs=flaky, args=text_config(tmp_path / "train", 2)).train()
    trainer = PPOTrainer(reward_funcs=flaky, args=text_config(tmp_path / "hand", 2))
    trainer.learn(trainer.sample())
    FAILURES.extend([True] * 3)  # it is tried three times
    with pytest.raises(RunStopped, match=r"call trainer\.begin\(resume_from_checkpoint=True\)"):
        trainer.learn(trainer.sample())
    trainer = PPOTrainer(reward_funcs=flaky, args=text_config(tmp_path / "hand", 2))
    trainer.begin(resume_from_checkpoint=True)
    trainer.learn(trainer.sample())
    assert_same(tmp_path / "train", tmp_path / "hand")


def test_completions_of_elsewhere_are_those_of_the_policy(tmp_path):
    trainer = by_hand(tmp_path / "run")
    batch = trainer.sample(PROMPTS)
    rollout = batch.rollout
    ids = [row[: int(mask.sum())] for row, mask in zip(rollout.response_ids, rollout.mask, strict=True)]
    prompts = [row[mask] for row, mask in zip(rollout.prompt_ids, rollout.prompt_mask, strict=True)]
    drawn = [[-1.0] * len(row) for row in ids]
    for given in (PROMPTS, [row.tolist() for row in prompts]):
        adopted = trainer.adopt(given, ids, drawn)
        assert adopted.completions == batch.completions
        assert adopted.prompts.texts == batch.prompts.texts
        torch.testing.assert_close(adopted.rollout.logprobs, rollout.logprobs)
        torch.testing.assert_close(adopted.rollout.values, rollout.values)
        assert torch.equal(adopted.rollout.truncated, rollout.truncated)
    # A score per token, and draws with another log-prob than the policy's.
    metrics = trainer.learn(adopted, [[-0.1] * len(row) for row in ids])
    assert metrics["reward"] == pytest.approx(-0.1 * sum(map(len, ids)) / 3)
    assert "behavior_logprobs" in read_jsonl(tmp_path / "run" / "samples.jsonl")[0]
    assert "log_ratio" in metrics, "of another policy's draws it is no KL"
    assert "kl" not in metrics
    # A batch from before that update is older than the policy.
    with torch.no_grad():
        entropies = trainer.policy(rollout.inputs(), temperature=1.0, entropy=True).stats.entropy
    old = trainer.learn(batch, [0.0] * 3)
    assert old["age_mean"] == 1
    assert old["entropy"] == pytest.approx(float(entropies[rollout.mask].mean()), rel=1e-4)
    assert trainer.summary is not None


MISTAKES = {
    "got no scores": lambda trainer, batch: trainer.learn(batch),
    "returned 2 numbers for 3 completions": lambda trainer, batch: trainer.learn(batch, [0.0, 1.0]),
    "scores are None for all completions": lambda trainer, batch: trainer.learn(batch, [None] * 3),
    "must be a number": lambda trainer, batch: trainer.learn(batch, ["good"] * 3),
    "it must come from sample": lambda trainer, batch: trainer.learn(batch.completions, [0.0] * 3),
    "batch is None; it must come from": lambda trainer, batch: trainer.score(None),
    "max_new_tokens is 9; it must be 1 to 8": lambda trainer, batch: trainer.sample(PROMPTS, max_new_tokens=9),
    "max_new_tokens is 'x'; it must be": lambda trainer, batch: trainer.sample(PROMPTS, max_new_tokens="x"),
    "max_new_tokens is True; it must be": lambda trainer, batch: trainer.sample(PROMPTS, max_new_tokens=True),
    "prompts is 5; it must be a list": lambda trainer, batch: trainer.sample(5),
    "it must be a list": lambda trainer, batch: trainer.sample(torch.tensor(3)),
    "prompts is {'prompt'": lambda trainer, batch: trainer.sample({"prompt": PROMPTS}),
    "row 1 of prompts has 600 tokens": lambda trainer, batch: trainer.sample([[5] * 600]),
    "3 prompts and 1 completions": lambda trainer, batch: trainer.adopt(PROMPTS, [[5, 6]]),
    "completion 0 has 600 tokens; it must have": lambda trainer, batch: trainer.adopt(PROMPTS[:1], [[5] * 600]),
    "completion 0 has a token id that is none of the": lambda trainer, batch: trainer.adopt(PROMPTS[:1], [[5, 10**6]]),
    "completion 0 has the logprob 1.5; log-probs are": lambda trainer, batch: trainer.adopt(
        PROMPTS[:1], [[5, 6]], [[-1.0, 1.5]]
    ),
    "completion 0 has the logprob -inf; log-probs are finite": lambda trainer, batch: trainer.adopt(
        PROMPTS[:1], [[5, 6]], [[-1.0, -math.inf]]
    ),
    "completion 0 has token ids that are no integers": lambda trainer, batch: trainer.adopt(PROMPTS[:1], [[5.7, 6]]),
    "completion 0 has token ids that are no list of numbers: new": lambda trainer, batch: trainer.adopt(
        PROMPTS[:1], ["good"]
    ),
    "completion 1 has token ids that are no list of numbers: expected": lambda trainer, batch: trainer.adopt(
        PROMPTS[:2], [[5], [[5], [6, 7]]]
    ),
    "token ids that are no list of numbers: 'NoneType": lambda trainer, batch: trainer.adopt(PROMPTS[:1], None),
    "logprobs that are no list of numbers": lambda trainer, batch: trainer.adopt(PROMPTS[:1], [[5, 6]], [None]),
    "2 tokens and 1 logprobs": lambda trainer, batch: trainer.adopt(PROMPTS[:1], [[5, 6]], [[-1.0]]),
    "has begun already": lambda trainer, batch: trainer.begin(),
    "train.. needs a reward": lambda trainer, batch: trainer.train(),
    "no audit: it needs a reward": lambda trainer, batch: trainer.audit(),
}


def test_a_mistake_is_said_and_the_loop_goes_on(tmp_path):
    trainer = by_hand(tmp_path / "run", rollout=RolloutConfig(batch_size=3, max_new_tokens=8, min_new_tokens=1))
    batch = trainer.sample(PROMPTS, max_new_tokens=4)
    assert batch.rollout.mask.sum(1).max() <= 4
    for mixed in ((x for x in PROMPTS), [PROMPTS[0], *({"prompt": x} for x in PROMPTS[1:])]):
        assert trainer.sample(mixed).prompts.texts == PROMPTS
    assert trainer.sample(max_new_tokens=4).rollout.mask.shape[1] <= 4, "of the run's prompts too"
    for message, call in MISTAKES.items():
        with pytest.raises(ConfigError, match=message):
            call(trainer, batch)
    assert math.isnan(trainer.learn(batch, [math.nan] * 3)["reward"]), "of a batch that was skipped"
    trainer.learn(batch, torch.zeros(3))
    assert trainer.close()["iterations"] == 2
    with pytest.raises(ConfigError, match="has ended"):
        trainer.learn(batch, [0.0] * 3)
    assert trainer.handed_scores.scores is None


def test_adopted_completions_without_log_probs_are_the_policys_and_need_no_correction(tmp_path):
    groups = {"rollout": RolloutConfig(batch_size=3, max_new_tokens=8, top_p=0.9), "kl": KLConfig(coef=0)}
    trainer = by_hand(tmp_path / "run", **groups, off_policy=OffPolicyConfig(correct="clip"))
    trainer.learn(trainer.adopt(PROMPTS, [[5, 6]] * 3), [0.0, 1.0, 0.5])
    assert trainer.close()["iterations"] == 1


def test_completions_of_elsewhere_have_no_truncated_support(tmp_path):
    rollout = RolloutConfig(batch_size=3, max_new_tokens=8, top_k=5)
    off_policy = OffPolicyConfig(support="truncated", proximal="behavior")
    trainer = by_hand(tmp_path / "run", rollout=rollout, off_policy=off_policy)
    with pytest.raises(ConfigError, match=r"off_policy.support .* adopt needs support: full"):
        trainer.adopt(PROMPTS, [[5, 6]] * 3)


def test_padding_after_the_end_of_an_adopted_completion_is_reported(tmp_path):
    padded = (
        "completions go on after an end-of-sequence token, and all their tokens are learned from: leave padding out"
    )
    for stop_at_eos in (True, False):
        folder = tmp_path / str(stop_at_eos)
        trainer = by_hand(folder, rollout=RolloutConfig(batch_size=3, max_new_tokens=8, stop_at_eos=stop_at_eos))
        end = trainer.tokenizer.eos_token_id
        trainer.adopt(PROMPTS[:1], [[5, end]])
        assert padded not in read_events(folder)
        trainer.adopt(PROMPTS[:1], [[5, end, end]])
        assert (padded in read_events(folder)) == stop_at_eos
        trainer.close()


def test_a_kl_to_aim_at_is_said_to_pass_over_draws_of_elsewhere(tmp_path):
    trainer = by_hand(tmp_path / "run", kl=KLConfig(target=6.0))
    before = trainer.credit.kl.coef
    metrics = trainer.learn(trainer.adopt(PROMPTS, [[5, 6]] * 3, [[-1.0, -1.0]] * 3), [0.0, 1.0, 0.5])
    assert trainer.credit.kl.coef == before
    assert "log_ratio" in metrics
    assert "entropy" not in metrics, "the log-probs of others' draws are none of the policy's entropy"
    trainer.close()
    said = "kl.target and stop.kl pass over batches that the current policy did not draw: their KL is not known"
    assert said in read_events(tmp_path / "run")


def test_draws_of_elsewhere_have_no_share_of_the_attainable(tmp_path):
    trainer = by_hand(tmp_path / "run", kl=KLConfig(place="both", estimator="full"))
    metrics = trainer.learn(trainer.adopt(PROMPTS, [[5, 6]] * 3, [[-1.0, -1.0]] * 3), [0.0, 1.0, 0.5])
    assert metrics["kl"] == pytest.approx(0, abs=1e-4)
    assert not [name for name in metrics if name == "objective" or name.startswith("limit/")]
    assert "objective" in learn(trainer)
    trainer.close()


def test_scores_need_a_trainer_without_a_reward(tmp_path):
    trainer = PPOTrainer(reward_funcs=short, args=text_config(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"a reward of its own, short: leave them out, or give PPOTrainer reward_fun"):
        trainer.learn(trainer.sample(), [0.0] * 8)
    with pytest.raises(ConfigError, match=r"this run was begun by hand: go on with learn\(batch\), or close"):
        trainer.train()
    trainer.close()
    trainer = by_hand(None, run=RunConfig())
    with pytest.raises(ConfigError, match=r"is True, and run.dir is not set; set run.dir to the folder of a run"):
        trainer.begin(resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match=r"eval.every needs a reward, and reward_funcs is \[\]"):
        by_hand(tmp_path / "other", eval=EvalConfig(every=1))
