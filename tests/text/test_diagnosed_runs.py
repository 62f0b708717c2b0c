"""Runs of the built-in world that are made ill on purpose, each in its own way: the diagnosis names it."""

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch

from helpers.configs import quiet
from helpers.rewards import vowels
from tokencredit.errors import RunStopped
from tokencredit.report.reading import read_run
from tokencredit.runs.diagnosis import diagnose
from tokencredit.settings.data import ClassifierTerm, FunctionTerm
from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import KLConfig, OptimConfig, RunConfig, UpdateConfig
from tokencredit.text.ppo_trainer import PPOTrainer


def constant(completions, **columns):
    return [-1.0] * len(completions)


def undefined(completions, **columns):
    return [math.nan] * len(completions)


def short(completions, **columns):
    return [-len(text) / 20 for text in completions]


class Scaled:
    """Makes the policy's logits smaller or larger before a stage."""

    def __init__(self, stage, factor):
        def change(trainer):
            with torch.no_grad():
                trainer.policy.lm.get_input_embeddings().weight.mul_(factor)

        setattr(self, f"before_{stage}", change)


class Hotter:
    """An engine that draws at another temperature than it is asked for."""

    def __init__(self, engine):
        self.engine = engine

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def generate(self, prompts, settings, uniforms, per_prompt=1):
        return self.engine.generate(prompts, replace(settings, temperature=1.4), uniforms, per_prompt)


class DropoutInUpdates:
    """Switches the layers' dropout on for updates."""

    @staticmethod
    def switch(trainer, rate):
        for module in trainer.policy.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = rate
                module.train(rate > 0)

    def before_update(self, trainer):
        self.switch(trainer, 0.1)

    def after_update(self, trainer, metrics):
        self.switch(trainer, 0.0)


FAST = partial(OptimConfig, warmup=0, schedule="constant", max_grad_norm=None)
STILL = {"optim": FAST(lr=1e-12), "critic": CriticConfig(lr=1e-12)}
LOOSE = KLConfig(coef=1e-6)

DISEASES = {
    "mismatch": {"iterations": 2, "callbacks": [Scaled("update", 1.05)]},
    "not_moved": {"iterations": 20, **STILL},
    "degenerate": {
        "iterations": 16,
        "rollout": RolloutConfig(batch_size=16, max_new_tokens=16),
        "reward_funcs": short,
        "optim": FAST(lr=1e-3),
        "kl": LOOSE,
    },
    "clip_high": {"iterations": 5, "reward_funcs": vowels, "optim": FAST(lr=5e-3), "kl": LOOSE},
    "explained_variance": {
        "iterations": 20,
        "optim": FAST(lr=5e-5),
        "critic": CriticConfig(lr=1e-12, init="orthogonal", prefix_every=0),
    },
    "no_step": {"iterations": 2, "reward_funcs": undefined},
    "truncated": {"iterations": 1, "rollout": RolloutConfig(batch_size=8, max_new_tokens=4)},
    "constant_term": {"iterations": 2, "reward_funcs": constant},
    "dominant_term": {
        "iterations": 5,
        "reward": [
            ClassifierTerm(classifier="builtin:reviews"),
            FunctionTerm(function="length", kwargs={"unit": "characters"}, weight=-1.0),
        ],
    },
    "clip_low": {"iterations": 20, "optim": OptimConfig(warmup=0, max_grad_norm=1e-6)},
    "still_warming": {"iterations": 4, "optim": OptimConfig(warmup=10)},
}


LONG = [names for names, options in DISEASES.items() if options["iterations"] > 5]
"""tests/runs/test_diagnosis.py has the same findings from written metrics."""


@pytest.mark.parametrize(
    "names", [pytest.param(names, marks=pytest.mark.proof if names in LONG else ()) for names in DISEASES]
)
def test_a_run_with_a_known_fault_is_diagnosed(names, tmp_path, capsys):
    options = dict(DISEASES[names])
    run = RunConfig(
        dir=str(tmp_path / "run"), iterations=options.pop("iterations"), samples=1, trackers=[], show_every=0
    )
    given = {key: options.pop(key) for key in ("reward_funcs", "callbacks") if key in options}
    groups = {
        "model": ModelConfig(dtype="float32"),
        "rollout": RolloutConfig(batch_size=8, max_new_tokens=8),
        "ppo": UpdateConfig(epochs=2, minibatches=2),
        "run": run,
    }
    with pytest.raises(RunStopped) if names == "no_step" else nullcontext():
        PPOTrainer(args=PPOConfig(**(groups | options)), **given).train()
    found = read_run(tmp_path / "run")
    findings = {finding.name: finding for finding in diagnose(found.metrics, found.config)}
    shown = capsys.readouterr().out
    for name in names.split(", "):
        assert name in findings
        assert findings[name].title in shown


@pytest.mark.parametrize(
    ("dtype", "cause"),
    [
        ("float32", "temperature"),
        *(pytest.param("float32", cause, marks=pytest.mark.proof) for cause in (None, "dropout")),
        *(pytest.param("bfloat16", cause, marks=pytest.mark.proof) for cause in (None, "temperature", "dropout")),
    ],
)
def test_rounding_is_no_mismatch_in_either_number_format(dtype, cause, tmp_path):
    """Completions of unequal length, which sampling and updates pad and batch apart."""
    args = PPOConfig(
        model=ModelConfig(dtype=dtype),
        rollout=RolloutConfig(batch_size=64, max_new_tokens=48),
        ppo=UpdateConfig(epochs=1, micro_batch_tokens=400),
        run=quiet(tmp_path / "run", 1 if cause else 2),
    )
    trainer = PPOTrainer(args=args, callbacks=[DropoutInUpdates()] if cause == "dropout" else None)
    if cause == "temperature":
        trainer.pipeline.engine = Hotter(trainer.pipeline.engine)
    trainer.train()
    found = read_run(tmp_path / "run")
    named = {finding.name for finding in diagnose(found.metrics, found.config)}
    assert ("mismatch" in named) == (cause is not None)
