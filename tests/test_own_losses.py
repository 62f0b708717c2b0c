"""Policy losses of users: trained, measured and written down under their own names, for texts and agents."""

from functools import partial
from itertools import cycle

import pytest
import torch
import yaml

from helpers.configs import control_config, text_config
from helpers.files import read_metrics, without_times
from tokencredit import AgentUpdateConfig, Callback, UpdateConfig
from tokencredit.control.control_trainer import ControlTrainer
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.learn.objective import Objective
from tokencredit.text.ppo_trainer import PPOTrainer

FILE = """
import torch

def clipped(ratio, advantages, clip):
    low, high = clip
    bounded = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return -bounded, {"outside": ((ratio - 1).abs() > 0.1).float(), "ratio_of_mine": ratio}
"""
PASSES = {"epochs": 2, "minibatches": 2}


def rows_clipped(logprobs, old_logprobs, advantages, mask, width=0.2):
    """PPO's loss again, by whole rows."""
    ratio = torch.where(mask, logprobs - old_logprobs, 0.0).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - width, 1 + width) * advantages)


class Weighted(Objective):
    """PPO's loss times a weight, with a metric."""

    def __init__(self, weight=0.0, **options):
        super().__init__(**options)
        object.__setattr__(self, "weight", weight)  # the class is frozen

    def surrogate(self, logprobs, rows, at):
        losses = super().surrogate(logprobs, rows, at)
        return self.weight * losses, dict.fromkeys(("squares", "reward"), losses.detach().square())


def in_turns(*metrics):
    """PPO's loss without a clip, and in each call the next of these metrics, each of one number."""
    turns = cycle(metrics)
    return lambda ratio, advantages: (
        -ratio * advantages,
        {k: torch.full_like(ratio, x) for k, x in next(turns).items()},
    )


class Minibatches(Callback):
    def __init__(self):
        self.rows = []

    def after_minibatch(self, trainer, metrics):
        self.rows.append(metrics)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs with PPO's loss: of ours, from a file, by rows from Python, and as a class."""
    folder = tmp_path_factory.mktemp("losses")
    (folder / "mine.py").write_text(FILE)
    losses = {"ours": "clip", "file": f"{folder}/mine.py:clipped", "rows": rows_clipped, "class": Weighted}
    watcher = Minibatches()
    for name, loss in losses.items():
        callbacks = [watcher] if name == "file" else None
        kwargs = {"weight": 1.0} if name == "class" else {}
        args = text_config(folder / name, 2, ppo=UpdateConfig(loss=loss, kwargs=kwargs, **PASSES))
        PPOTrainer(args=args, callbacks=callbacks).train()
    return folder, watcher.rows


@pytest.mark.parametrize("name", ["file", "rows", "class"])
def test_ppos_loss_written_again_trains_as_ours(name, runs):
    folder, _ = runs
    ours, own = (without_times(read_metrics(folder / x)) for x in ("ours", name))
    for key in ("reward", "policy_loss", "loss", "grad_norm", "approx_kl_k3"):
        assert [row[key] for row in own] == pytest.approx([row[key] for row in ours], rel=1e-3, abs=1e-6), key


def test_extra_results_are_metrics(runs):
    folder, _ = runs
    rows = read_metrics(folder / "file")
    assert [row["loss/ratio_of_mine"] for row in rows] == pytest.approx([row["ratio_mean"] for row in rows], rel=1e-4)
    assert all(0 <= row["loss/outside"] <= 1 for row in rows)
    assert all(row["loss/squares"] > 0 for row in read_metrics(folder / "class"))


def test_metrics_go_by_their_names_whatever_their_order(tmp_path):
    loss = in_turns({"one": 1, "two": 2}, {"two": 2, "one": 1})
    trainer = PPOTrainer(args=text_config(tmp_path / "run", ppo=UpdateConfig(loss=loss, **PASSES)))
    metrics = trainer.update(1, *trainer.credit.give(trainer.collect()))
    assert (metrics["loss/one"], metrics["loss/two"]) == pytest.approx((1, 2))


def test_the_clip_fraction_is_there_only_where_the_loss_reads_clip(runs):
    folder, _ = runs
    assert all("clip_fraction" in row for row in read_metrics(folder / "file"))
    assert all("clip_fraction" not in row for row in read_metrics(folder / "rows"))


def test_a_callback_gets_the_metrics_of_each_minibatch(runs):
    folder, minibatches = runs
    assert [row["minibatch"] for row in minibatches] == [1, 2, 3, 4] * 2
    for number, row in enumerate(read_metrics(folder / "file")):
        own = minibatches[4 * number : 4 * number + 4]
        assert row["loss/outside"] == pytest.approx(sum(x["loss/outside"] for x in own) / 4)
        assert row["grad_norm"] == pytest.approx(sum(x["grad_norm"] for x in own) / 4)


def test_a_fixed_argument_is_not_replaced_by_the_setting_of_its_name(tmp_path):
    seen = set()

    def loss(ratio, advantages, clip):
        seen.add(clip)
        return -ratio * advantages

    trainer = PPOTrainer(args=text_config(tmp_path / "run", ppo=UpdateConfig(loss=partial(loss, clip=0.7), **PASSES)))
    trainer.update(1, *trainer.credit.give(trainer.collect()))
    assert seen == {0.7}


def test_config_yaml_names_the_loss(runs):
    folder, _ = runs
    named = {
        name: yaml.safe_load((folder / name / "config.yaml").read_text())["ppo"]["loss"] for name in ("file", "rows")
    }
    assert named["file"] == f"{folder}/mine.py:clipped"
    assert named["rows"].startswith("python:rows_clipped(width=0.2) (test_own_losses.py, ")


def test_an_agent_has_its_own_loss(tmp_path):
    for name, loss in {"own": rows_clipped, "ours": "clip"}.items():
        ControlTrainer(control_config(tmp_path / name, ppo=AgentUpdateConfig(loss=loss))).train()
    own, ours = (read_metrics(tmp_path / name) for name in ("own", "ours"))
    assert [row["policy_loss"] for row in own] == pytest.approx(
        [row["policy_loss"] for row in ours], rel=1e-3, abs=1e-6
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"loss": lambda ratio, temperature: ratio},
            "needs temperature, which this run does not have; it",
        ),
        ({"loss": rows_clipped, "clip": 0.1}, r"ppo.clip is 0.1, which ppo.loss rows_clipped.* does not read"),
        (
            {"loss": lambda ratio, clip: ratio, "clip": 0.1, "kwargs": {"clip": 0.3}},
            "ppo.clip is 0.1, which ppo.loss .* not",
        ),
        ({"loss": rows_clipped, "kwargs": {"height": 1}}, "ppo.kwargs has 'height', which rows_clipped"),
        ({"loss": int}, "is neither a function nor a subclass of Objective"),
        ({"loss": "none.py:f"}, "there is no loss file 'none.py'"),
    ],
)
def test_what_cannot_work_is_refused_before_training(settings, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        PPOTrainer(args=text_config(tmp_path / "run", ppo=UpdateConfig(**settings, **PASSES)))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda ratio: ratio.mean(), r"ppo.loss returned a loss of shape \(\); it must return a tensor"),
        (lambda ratio: ratio.detach(), "returned losses without a gradient; compute them from ratio or logprobs"),
        (lambda ratio: (ratio, None), r"returned a loss of \(tensor"),
        (lambda ratio: (ratio, ratio), r"returned a loss of \(tensor"),
        (lambda ratio: (ratio, {"a": ratio}, 1), r"returned a loss of \(tensor"),
        (in_turns({"one": 1}, {"two": 2}), "returned loss/one, loss/two in some calls only; it must return the same"),
        (lambda ratio: ratio / None, r"raised TypeError: .* at .*test_own_losses.py:\d+"),
    ],
)
def test_what_fails_in_the_run_is_named(loss, message, tmp_path):
    trainer = PPOTrainer(args=text_config(tmp_path / "run", ppo=UpdateConfig(loss=loss, **PASSES)))
    with pytest.raises(RunStopped, match=message):
        trainer.train()
