"""The critic learns alone before the first iteration, on batches of the starting policy."""

import errno
import json
import math
import os
import re
import signal
from dataclasses import replace

import pytest
import torch

from helpers.configs import quiet, text_config
from helpers.files import read_events, read_jsonl, read_metrics
from helpers.models import changed_weights, copy_weights
from helpers.proofs import proofs
from helpers.runs import assert_same
from tokencredit.core.masked import explained_variance
from tokencredit.errors import RunStopped
from tokencredit.report.page import write_report
from tokencredit.settings.data import ScoreConfig
from tokencredit.settings.model import CriticConfig, LoraConfig, ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.training import AdvantageConfig, KLConfig, OptimConfig, UpdateConfig
from tokencredit.text import pretraining
from tokencredit.text.callbacks import Callback
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.text.pretraining import RISE

PATIENCE = 2
NORMALIZED = {"score": ScoreConfig(normalize="running")}


def small(folder, pretrain=3, iterations=2, **groups):
    critic = groups.pop("critic", CriticConfig(kind="separate", layers=1))
    groups = {"run": quiet(folder, iterations, save_every=10)} | groups
    return text_config(folder, critic=replace(critic, pretrain=pretrain, prefix_every=0), **groups)


CRITICS = {
    "a head on the policy's trunk": ({}, {"critic.head.0.weight", "critic.head.2.bias"}, set()),
    "a head that reads a detached trunk": ({"critic": CriticConfig(detach=True)}, {"critic.head.2.weight"}, set()),
    "a trunk of its own": ({"critic": CriticConfig(kind="separate")}, {"critic.trunk.", "critic.head.0.bias"}, set()),
    "a frozen trunk of its own": (
        {"critic": CriticConfig(kind="separate", detach=True)},
        {"critic.head.0.bias"},
        {"critic.trunk."},
    ),
    "beside an adapter": (
        {
            "model": ModelConfig(dtype="float32", lora=LoraConfig(rank=2, dropout=0.1)),
            "critic": CriticConfig(),
            "rollout": RolloutConfig(batch_size=8, max_new_tokens=8, per_prompt=4),
        },
        {"critic.head.2.weight"},
        set(),
    ),
    "with Muon": (
        {"critic": CriticConfig(kind="separate", layers=1), "optim": OptimConfig(name="muon")},
        {"critic.trunk.", "critic.head.2.weight"},
        set(),
    ),
}


def pretrain(args, **options):
    """A trainer whose critic has learned alone, and that has done no iteration."""
    trainer = PPOTrainer(args=args, **options)
    trainer.record.begin(args, 0, 0)
    for _ in trainer.pretrain():
        pass
    return trainer


@pytest.mark.parametrize("what", [*list(CRITICS)[2:5], *proofs(*list(CRITICS)[:2], "with Muon")])
def test_only_the_critics_own_parameters_learn(what, tmp_path):
    groups, learning, still = CRITICS[what]
    groups = {"ppo": UpdateConfig(epochs=1, minibatches=2)} | groups
    before = copy_weights(PPOTrainer(args=small(tmp_path / "untrained", **groups)).policy)
    now = changed_weights(pretrain(small(tmp_path / "run", pretrain=1, **groups)).policy, before)
    assert all(name.startswith("critic.") for name in now)
    assert all(any(name.startswith(part) for name in now) for part in learning)
    assert not any(name.startswith(part) for name in now for part in still)


def test_the_first_iteration_samples_as_it_would_have(tmp_path):
    without = PPOTrainer(args=small(tmp_path / "without")).collect().rollout
    with_ = pretrain(small(tmp_path / "with", 1)).collect().rollout
    assert torch.equal(with_.response_ids, without.response_ids)
    assert torch.equal(with_.logprobs, without.logprobs)
    assert not torch.equal(with_.values, without.values)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose critic learns until it no longer gets better, on batches that are large enough to tell."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    rollout, update = RolloutConfig(batch_size=32, max_new_tokens=16), UpdateConfig(epochs=2, minibatches=2)
    critic = CriticConfig(kind="separate", layers=1, lr=6e-3, trunk_lr=1e-3)  # which is there in half the batches
    args = small(folder, pretrain=60, critic=critic, rollout=rollout, ppo=update)
    trainer = PPOTrainer(args=replace(args, run=replace(args.run, iterations=1, save_every=5)))
    with pytest.MonkeyPatch.context() as patient:
        patient.setattr(pretraining, "PATIENCE", PATIENCE)
        trainer.train()
    return folder, trainer


def test_it_ends_where_held_out_batches_are_explained_no_better(run):
    folder, _ = run
    rows, (first,) = read_jsonl(folder / "pretrain.jsonl"), read_metrics(folder)
    assert PATIENCE < len(rows) < 60
    assert [row["batch"] for row in rows] == list(range(1, len(rows) + 1))
    explained = [row["explained_variance"] for row in rows]
    assert explained[0] == pytest.approx(0, abs=1e-6)  # of a head that predicts 0
    assert max(explained[-PATIENCE:]) <= max(explained[:-PATIENCE]) + RISE
    assert first["pretrain/batches"] == len(rows)
    assert first["pretrain/tokens"] == sum(row["tokens"] for row in rows)
    assert first["pretrain/explained_variance"] == pytest.approx(sum(explained[-PATIENCE:]) / PATIENCE)
    assert first["pretrain/explained_variance"] > 0.4
    assert first["explained_variance"] > 0.4
    assert all(row["critic_steps"] == 4 and row["seconds"] > 0 for row in rows)
    (event,) = [text for text in read_events(folder) if text.startswith("pretraining: ")]
    assert f"the critic learned from {len(rows)} batches (" in event
    assert event.endswith(", which no longer rose")


def test_it_does_not_end_before_anything_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(pretraining, "PATIENCE", PATIENCE)
    critic = CriticConfig(lr=1e-9)
    args = small(tmp_path / "slow", 5, critic=critic, ppo=UpdateConfig(epochs=1, minibatches=1), kl=KLConfig(coef=0))
    pretrain(args, reward_funcs=scores_with(1, lambda scores: [0.0 for _ in scores]))
    rows = read_jsonl(tmp_path / "slow" / "pretrain.jsonl")
    first, *others = [row["explained_variance"] for row in rows]
    assert first is None, "equal returns have no variance to explain"
    assert max(others) <= RISE
    assert len(rows) == 5
    (event,) = [text for text in read_events(tmp_path / "slow") if text.startswith("pretraining: ")]
    assert not event.endswith(", which no longer rose")


def test_its_time_and_tokens_are_those_of_the_run(run):
    folder, _ = run
    summary, rows = json.loads((folder / "summary.json").read_text()), read_jsonl(folder / "pretrain.jsonl")
    (iteration,) = read_metrics(folder)
    assert summary["iterations"] == 1
    assert summary["seconds"] > sum(row["seconds"] for row in rows) + iteration["seconds"]
    tokens = sum(row["tokens"] for row in [*rows, iteration])
    assert summary["tokens_per_second"] == pytest.approx(tokens / summary["seconds"])


def test_the_report_and_the_trackers_take_its_numbers(run):
    folder, _ = run
    assert "pretrain/explained_variance" in write_report(folder).read_text()


def test_another_run_goes_on_with_the_pretrained_critic(run, tmp_path):
    """Trunk and head of `critic.name` are exactly those that were saved, and so are its first values."""
    folder, trainer = run
    critic = CriticConfig(kind="separate", layers=1, name=str(folder))
    other = PPOTrainer(args=small(tmp_path / "other", pretrain=0, critic=critic))
    assert not changed_weights(other.policy.critic, copy_weights(trainer.policy.critic))
    scored = other.collect()
    returns = other.credit.monte_carlo(scored)[1].returns
    assert explained_variance(scored.rollout.values, returns, scored.rollout.mask) > 0.2


def test_it_learns_sampled_returns_whatever_the_estimator(tmp_path):
    """With γ = 0.5 and a score of 1 at the last token, the return n tokens before it is 0.5ⁿ."""
    args = small(tmp_path / "run", advantage=AdvantageConfig(estimator="td", gamma=0.5))
    trainer = PPOTrainer(args=args, reward_funcs=lambda completions, **columns: [1.0] * len(completions))
    scored = trainer.collect()
    _, experience = trainer.credit.monte_carlo(scored)
    mask = scored.rollout.mask
    after = mask.sum(1, keepdim=True) - 1 - torch.arange(mask.shape[1])
    torch.testing.assert_close(experience.returns[mask], (0.5**after)[mask])
    assert not torch.equal(experience.returns, trainer.credit.give(scored)[1].returns)


def test_completions_that_are_left_out_of_the_loss_are_left_out_here(tmp_path):
    args = small(tmp_path / "run", ppo=UpdateConfig(epochs=2, minibatches=2, mask_truncated=True))
    trainer = PPOTrainer(args=args)
    scored = trainer.collect()
    cut = scored.rollout.truncated
    assert cut.any()
    assert not trainer.credit.monte_carlo(scored)[1].mask[cut].any()


def scores_with(batch, spoil):
    """A reward of its own texts that does something else in one batch."""
    calls, due = [], {batch: spoil}  # its state, which makes it no other part

    def score(completions, **columns):
        calls.append(len(completions))
        spoil, scores = due.pop(len(calls), None), [len(text) / 50 for text in completions]
        return scores if spoil is None else spoil(scores)

    return score


def test_a_batch_that_is_not_finite_is_left_out_and_kept(tmp_path):
    score = scores_with(2, lambda scores: [math.nan, *scores[1:]])
    trainer = pretrain(small(tmp_path / "run"), reward_funcs=score)
    rows = read_jsonl(tmp_path / "run" / "pretrain.jsonl")
    assert [row["bad_steps"] for row in rows] == [0, 1, 0]
    assert [row["critic_steps"] for row in rows] == [4, 0, 4]
    assert "explained_variance" not in rows[1]
    bad, _ = read_events(tmp_path / "run")
    assert re.fullmatch(r"pretraining: .* nan .*; the step was skipped, its batch is in .*/000000-1", bad)
    assert len(list((tmp_path / "run" / "bad_steps").iterdir())) == 1
    assert trainer.record.bad_in_a_row == 0


def test_too_many_of_them_stop_the_run_and_say_where(tmp_path):
    def score(completions, **columns):
        return [math.nan] * len(completions)

    with pytest.raises(RunStopped, match=r"^stopped in the critic's pretraining: .* 3 steps in a row"):
        PPOTrainer(args=small(tmp_path / "run", pretrain=9), reward_funcs=score).train()


class Killed(BaseException):
    """Ends a run as SIGKILL would: nobody handles it."""


def kill(scores):
    raise Killed


def interrupt(scores):
    os.kill(os.getpid(), signal.SIGINT)
    return scores


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a run that nothing cuts short."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    PPOTrainer(args=small(folder, **NORMALIZED), reward_funcs=scores_with(0, kill)).train()
    return folder


@pytest.mark.parametrize(
    ("batch", "end"),
    [
        pytest.param(2, Killed, id="killed in it"),
        pytest.param(4, Killed, id="killed in iteration 1", marks=pytest.mark.proof),
        pytest.param(2, KeyboardInterrupt, id="Ctrl-C in it", marks=pytest.mark.proof),
        pytest.param(3, KeyboardInterrupt, id="Ctrl-C in its last batch", marks=pytest.mark.proof),
    ],
)
def test_a_run_that_is_cut_short_in_it_ends_as_one_that_was_not(batch, end, undisturbed, tmp_path):
    spoil = kill if end is Killed else interrupt
    with pytest.raises(end):
        PPOTrainer(args=small(tmp_path / "cut", **NORMALIZED), reward_funcs=scores_with(batch, spoil)).train()
    args = small(tmp_path / "cut", **NORMALIZED)
    PPOTrainer(args=args, reward_funcs=scores_with(0, kill)).train(resume_from_checkpoint=True)
    assert_same(undisturbed, tmp_path / "cut")
    finished = batch > 2
    assert sum(text.startswith("pretraining: ") for text in read_events(tmp_path / "cut")) == 1
    assert ("no checkpoint yet: the run begins anew" in read_events(tmp_path / "cut")) is not finished


def test_a_run_that_stops_in_its_first_iteration_does_not_pretrain_again(undisturbed, tmp_path):
    class Full(Callback):
        def before_reward(self, trainer):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "cache")

    args = small(tmp_path / "cut", **NORMALIZED)
    with pytest.raises(RunStopped, match="stopped in iteration 1: "):
        PPOTrainer(args=args, reward_funcs=scores_with(0, kill), callbacks=[Full()]).train()
    args = small(
        tmp_path / "cut", **NORMALIZED, run=quiet(tmp_path / "cut", 2, save_every=10, allow_changed=["callbacks[0]"])
    )
    PPOTrainer(args=args, reward_funcs=scores_with(0, kill)).train(resume_from_checkpoint=True)
    assert_same(undisturbed, tmp_path / "cut")
