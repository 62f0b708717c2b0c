"""The pipeline around another engine than the local one, and the same for training and evaluation."""

from dataclasses import replace

import pytest
import torch

from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import RolloutConfig, RunConfig, UpdateConfig
from tokencredit.text.pipeline import UnusableBatch
from tokencredit.text.rewards.calls import Term
from tokencredit.text.scoring_passes import evaluate_rollout
from tokencredit.text.trainer import PPOTrainer


class Elsewhere:
    """An engine that gives tokens and log-probabilities alone, and hears of new weights."""

    def __init__(self, engine):
        self.engine, self.changes = engine, 0

    def generate(self, prompts, settings, uniforms, per_prompt=1):
        return replace(self.engine.generate(prompts, settings, uniforms, per_prompt), values=None)

    def weights_changed(self):
        self.changes += 1


def trainer_of(folder, dtype="float32", **changes):
    args = PPOConfig(
        model=ModelConfig(dtype=dtype),
        rollout=RolloutConfig(batch_size=4, max_new_tokens=6),
        ppo=UpdateConfig(epochs=1, minibatches=1),
        run=RunConfig(dir=str(folder), iterations=2, trackers=[], show_every=0),
    )
    return PPOTrainer(args=replace(args, **changes))


@pytest.mark.parametrize("kind", ["shared", "separate"])
@pytest.mark.slow
def test_another_engine_trains_the_same(kind, tmp_path):
    """The critic's values come from a pass of their own, and the engine is told of each change of the weights."""
    own = trainer_of(tmp_path / "own", critic=CriticConfig(kind=kind))
    other = trainer_of(tmp_path / "other", critic=CriticConfig(kind=kind))
    engine = other.pipeline.engine = Elsewhere(other.pipeline.engine)
    scored = own.collect(), other.collect()
    assert scored[1].rollout.values is not None
    torch.testing.assert_close(scored[0].rollout.values, scored[1].rollout.values)
    assert scored[0].completions == scored[1].completions
    other.train()
    assert engine.changes == 2
    longer = replace(other.args.run, iterations=3)
    again = trainer_of(tmp_path / "other", critic=CriticConfig(kind=kind), run=longer)
    engine = again.pipeline.engine = Elsewhere(again.pipeline.engine)
    again.train(resume_from_checkpoint=True)
    assert engine.changes == 2, "once for the checkpoint's weights, once for the third iteration's"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_local_engine_gives_what_a_full_pass_gives(dtype, tmp_path):
    trainer = trainer_of(tmp_path, dtype)
    rollout = trainer.collect().rollout
    with trainer.pipeline.precision.no_grad():
        now = evaluate_rollout(trainer.policy, rollout, 1.0, None)
    close = {"rtol": 0, "atol": 0} if dtype == "bfloat16" else {}
    torch.testing.assert_close(rollout.logprobs, now.logprobs, **close)
    torch.testing.assert_close(rollout.values, now.values, **close)


def test_values_are_computed_only_where_they_are_wanted(tmp_path):
    trainer = trainer_of(tmp_path, critic=CriticConfig(kind="separate"))
    settings = trainer.args.rollout
    prompts, uniforms = trainer.prompts.batch(0, 4), torch.rand(4, settings.max_new_tokens)
    assert trainer.pipeline.collect(prompts, settings, uniforms).rollout.values is None
    assert trainer.pipeline.collect(prompts, settings, uniforms, values=True).rollout.values is not None


def test_the_whole_reward_is_the_score_and_what_tokens_earned(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.pipeline.terms = [
        Term("whole", 2.0, lambda completions, **_: [1.0] * len(completions)),
        Term("each", 0.5, lambda completion_ids, **_: [[1.0] * len(ids) for ids in completion_ids]),
    ]
    scored = trainer.collect()
    assert scored.scores.tolist() == [2.0] * 4
    assert scored.totals().tolist() == pytest.approx((2.0 + 0.5 * scored.rollout.mask.sum(1)).tolist())


def test_what_is_not_finite_is_no_batch(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.pipeline.terms = [Term("odd", 1.0, lambda completions, **_: [float("nan")] * len(completions))]
    with pytest.raises(UnusableBatch, match="reward term 'odd' is nan") as caught:
        trainer.collect()
    assert len(caught.value.texts) == len(caught.value.rollout.mask) == 4
