"""`ppo.loss`: from settings to objectives, and short runs that train and resume with each loss."""

from types import SimpleNamespace

import pytest

from helpers.files import read_metrics
from helpers.proofs import proofs
from tokencredit.cli import main
from tokencredit.errors import ConfigError
from tokencredit.learn.objective import Objective, SequenceObjective, WeightedObjective
from tokencredit.settings.text import PPOConfig
from tokencredit.text.ppo_learner import build_objective
from tokencredit.text.ppo_setup import remarks

SMALL = ["--model.dtype", "float32", "--rollout.batch_size", "8", "--rollout.max_new_tokens", "8"]
SMALL += ["--ppo.epochs", "2", "--ppo.minibatches", "2", "--run.show_every", "0"]
SMALL += ["--optim.schedule", "constant", "--optim.warmup", "0", "--optim.lr", "0.001"]
ROWS = SimpleNamespace(name="'rows.jsonl'", other_columns=["answer", "completion"])
GSPO = {"ppo.loss": "gspo", "ppo.clip": 3e-4, "ppo.clip_high": 4e-4}


def objective(settings):
    return build_objective(PPOConfig.from_dict(settings))


def test_settings_choose_the_objective():
    assert type(objective({})) is Objective
    assert (gspo := objective(GSPO)) == SequenceObjective(**vars(gspo))
    assert gspo.clip == (3e-4, 4e-4)
    assert not gspo.additive
    assert objective({"ppo.loss": "cispo"}).clip == (0.2, 0.2)
    assert objective({"ppo.loss": "cispo"}).outside == "clip"
    sao = objective({"ppo.loss": "sao", "ppo.clip": 0.3, "ppo.clip_high": 4.0})
    assert (sao.outside, sao.divergence, sao.clip) == ("mask", None, (0.3, 4.0))
    for loss, divergence, limit in [("cispo", None, 0.2), ("dppo_tv", "tv", 0.15), ("dppo_kl", "kl", 0.05)]:
        made = objective({"ppo.loss": loss})
        assert isinstance(made, WeightedObjective)
        assert made.divergence == divergence
        assert divergence is None or made.divergence_limit == limit
    assert objective({"ppo.loss": "dppo_kl", "ppo.divergence_limit": 0.01}).divergence_limit == 0.01


def test_gspo_needs_a_clip_range_of_its_own():
    with pytest.raises(ConfigError, match=r"ppo\.clip is 0\.2, and ppo\.loss is gspo; .* must be below 0\.2, as 3e-4"):
        PPOConfig.from_dict({"ppo.loss": "gspo"})


def test_gspo_without_its_papers_reduction_is_said():
    (line,) = remarks(PPOConfig.from_dict(GSPO), ROWS, sharded=False)
    assert line.startswith("ppo.loss gspo with ppo.reduction token: longer completions weigh more than in GSPO's paper")
    assert not [*remarks(PPOConfig.from_dict(GSPO | {"ppo.reduction": "sequence"}), ROWS, sharded=False)]
    assert not [*remarks(PPOConfig(), ROWS, sharded=False)]


def test_a_column_that_no_reward_can_see_is_named():
    rows = SimpleNamespace(name="'rows.jsonl'", other_columns=["answer", "completions"])
    (line,) = remarks(PPOConfig(), rows, sharded=False)
    assert line.startswith("the column 'completions' of 'rows.jsonl' does not reach rewards, which get the run's own")


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["gspo", "cispo", "sao", "dppo_tv", *proofs("clip", "dppo_kl")])
def test_a_run_trains_with_each_loss(loss, tmp_path):
    options = [f"--{key}={value}" for key, value in GSPO.items()] if loss == "gspo" else ["--ppo.loss", loss]
    assert main(["train", *SMALL, *options, "--run.iterations", "1", "--run.dir", str(tmp_path / "run")]) == 0
    (row,) = read_metrics(tmp_path / "run")
    assert row["grad_norm"] > 0
    assert row["ratio_max"] > 1
    if loss == "gspo":
        assert 0 < row["clip_fraction"] <= 1
