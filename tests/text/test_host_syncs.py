"""Host syncs, which empty a GPU's queue: how many an update and the passes of a batch make, and where."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from helpers.proofs import proofs
from tokencredit.learn.minibatches import length_batches
from tokencredit.learn.objective import SequenceObjective, WeightedObjective
from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AdvantageConfig, KLConfig, RunConfig, UpdateConfig
from tokencredit.text import rollout_passes
from tokencredit.text.ppo_trainer import PPOTrainer

MINIBATCHES, EPOCHS = 2, 2
PASS, STEP = "text/models/actor_critic.py", "tokencredit/learn/learner.py"
BATCHES = "tokencredit/learn/minibatches.py"
UPDATE, RATIOS, GRADIENT = (
    "tokencredit/learn/update.py",
    "tokencredit/core/losses.py",
    "tokencredit/core/vocab_projection.py",
)


def by_file(counted):
    """Syncs by source file, but for Transformers' look at the padding of a pass."""
    files = Counter()
    for name, number in counted.syncs.items():
        files[name.split(" at ")[1].split(":")[0]] += number
    return {file: number for file, number in files.items() if "/transformers/" not in file}


@pytest.fixture(params=["shared", "separate", "none"])
def batch(request, tmp_path):
    args = PPOConfig(
        model=ModelConfig(dtype="float32"),
        critic=CriticConfig(kind=request.param, **({"prefix_every": 0} if request.param != "none" else {})),
        rollout=RolloutConfig(batch_size=8, max_new_tokens=8),
        ppo=UpdateConfig(epochs=EPOCHS, minibatches=MINIBATCHES),
        run=RunConfig(dir=str(tmp_path / "run")),
        **({} if request.param != "none" else {"advantage": AdvantageConfig(estimator="reward_to_go")}),
    )
    trainer = PPOTrainer(args=args)
    scored = trainer.collect()
    return trainer, scored, trainer.credit.give(scored)[1]


@pytest.mark.parametrize(("whiten", "micro_batches"), [*proofs((False, 1)), (True, 3)])
def test_an_update_waits_twice_per_minibatch_and_once_per_micro_batch(
    whiten, micro_batches, batch, counts, monkeypatch
):
    trainer, _, experience = batch

    def cut(lengths, budget):
        return list(torch.cat(length_batches(lengths, budget)).tensor_split(micro_batches))

    monkeypatch.setattr("tokencredit.learn.minibatches.length_batches", cut)
    learner = trainer.learner
    learner.settings = replace(learner.settings, whiten_minibatches=whiten)
    with counts() as counted:
        learner.update(experience)
    steps = EPOCHS * MINIBATCHES
    assert by_file(counted) == {
        BATCHES: EPOCHS + steps,  # counts of a pass's minibatches, and lengths of each one
        UPDATE: 2,  # metrics of the update
        RATIOS: 1,
        STEP: steps,  # is the loss finite?
        PASS: steps * micro_batches,
        GRADIENT: steps * micro_batches,  # on a CPU alone
    }


@pytest.mark.parametrize("batch", ["shared"], indirect=True)
@pytest.mark.parametrize(
    "kind",
    [SequenceObjective, *proofs(WeightedObjective, partial(WeightedObjective, divergence="tv"))],
)
def test_another_loss_waits_no_more(kind, batch, counts):
    trainer, _, experience = batch
    learner = trainer.learner
    learner.objective = kind(**vars(learner.objective))
    with counts() as counted:
        learner.update(experience)
    steps = EPOCHS * MINIBATCHES
    every = {STEP: steps, PASS: steps, GRADIENT: steps}
    assert by_file(counted) == {BATCHES: EPOCHS + steps, UPDATE: 2, RATIOS: 1} | every


def test_a_step_of_the_critic_alone_waits_as_often(batch, counts):
    trainer, _, experience = batch
    if trainer.policy.critic is None:
        return
    with counts() as counted:
        trainer.learner.pretrain_critic(experience)
    steps = EPOCHS * MINIBATCHES
    expected = {BATCHES: EPOCHS + steps, STEP: steps, PASS: steps}
    assert by_file(counted) == expected


def test_passes_over_a_rollout_wait_once_per_micro_batch(batch, counts):
    trainer, scored, _ = batch
    policy, rollout = trainer.policy, scored.rollout
    passes = {
        "policy": lambda: rollout_passes.evaluate_rollout(policy, rollout, 1.0, None),
        "log-probs": lambda: rollout_passes.rollout_logprobs(policy, rollout, 1.0, None),
        "reference": lambda: rollout_passes.reference_outputs(
            policy, trainer.reference, rollout, KLConfig(), 1.0, None
        ),
    }
    for run in passes.values():
        with torch.no_grad(), counts() as counted:
            run()
        assert by_file(counted) == {BATCHES: 1, PASS: 1}


def test_credit_waits_once_per_function_of_the_core(batch, counts):
    trainer, scored, _ = batch
    with counts() as counted:
        trainer.credit.give(scored)
    assert by_file(counted) == {
        "tokencredit/core/argument_checks.py": 2,  # token_rewards, of scores and of KL
        "tokencredit/core/episodes.py": 1,
        "tokencredit/core/masked.py": 1,
        "tokencredit/learn/controllers.py": 1,
        "tokencredit/text/credit.py": 1,
    }
