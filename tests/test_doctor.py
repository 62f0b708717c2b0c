"""Runs with a fault made on purpose are diagnosed, and healthy ones are not accused. `make doctor` runs these tests."""

import os
from copy import deepcopy
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.configs import quiet
from tokencredit.report.reading import read_run
from tokencredit.runs.diagnosis import diagnose
from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AuditConfig, OptimConfig, UpdateConfig
from tokencredit.text.audit.completion_auditor import CompletionAuditor
from tokencredit.text.callbacks import Callback
from tokencredit.text.credit import Credit
from tokencredit.text.engines.local.local_engine import LocalEngine
from tokencredit.text.models.run_models import load_start
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.text.rollout_passes import evaluate_rollout

pytestmark = pytest.mark.proof

WHOLE = "DOCTOR" in os.environ
"""Test every case, as `make doctor` does for an hour; else a part."""


# Critics and λ: a true value belongs to the policy alone, so one truth serves all critics and λ that are put beside it.

OF_AUDITS = {"critic_worse", "critic_flat", "lam_low", "lam_high"}
AUDIT = AuditConfig(every=1, completions=64, continuations=32, states=None)


def vowels(completions, **columns):
    """A reward at the end to which each token adds its part; values are learnt, since they hold what was written."""
    return [0.1 * sum(text.count(vowel) for vowel in "aeiou") for text in completions]


def odd(completions, completion_ids, **columns):
    """A reward for each token with an odd number: its own reward is its credit, all that follows is luck."""
    return [[0.2 * (i % 2) for i in ids] for ids in completion_ids]


def scale(factor, bias=0.0):
    """Scale a critic's values, around `bias`."""

    def change(head):
        head.weight.mul_(factor)
        head.bias.mul_(factor).add_(bias)

    return change


def redirect(head):
    """Read another direction of hidden states, three times as loud."""
    other = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(1))
    head.weight.copy_(other * (3 * head.weight.norm() / other.norm()))


@dataclass(frozen=True)
class Kept(CompletionAuditor):
    """An auditor that samples the truth of its completions once, for all critics and λ."""

    kept: list = None

    def _sample(self, returns, *rest, **more):
        if not self.kept:
            super()._sample(returns, *rest, **more)
            self.kept.append(returns)
        vars(returns).update(vars(self.kept[0]))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trainers by name: the defaults, and two whose critic alone learns, the values of a policy held still."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp("doctor") / name
            groups = {"model": ModelConfig(dtype="float32"), "run": quiet(folder, 20, save_every=0)}
            if name == "plain":
                rollout = RolloutConfig(batch_size=64, max_new_tokens=12)
            else:
                # The more tokens follow a token, the more luck there is in what λ = 1 credits to it.
                length = {"vowels": 8, "odd": 16}[name]
                rollout = RolloutConfig(batch_size=64, max_new_tokens=length, stop_at_eos=False)
                groups["critic"] = CriticConfig(kind="separate", trunk_lr=1e-3, epochs=8)
                groups["ppo"], groups["optim"] = UpdateConfig(epochs=1), OptimConfig(lr=1e-9)
            rewards = {"vowels": vowels, "odd": odd}
            trainer = PPOTrainer(args=PPOConfig(rollout=rollout, **groups), reward_funcs=rewards.get(name))
            trainer.train()
            made[name] = trainer, read_run(folder), {}
        return made[name]

    return get


def findings(trained, name, number, change, lam):
    """Findings about critic and λ, by an audit of completions that `number` chooses, with a changed critic and λ."""
    trainer, run, truths = trained(name)
    args = replace(trainer.args, advantage=replace(trainer.args.advantage, lam=lam))
    credit = Credit(args, trainer.processes.sum)
    credit.load_state_dict(trainer.credit.state_dict())
    head = trainer.policy.critic.head[-1]
    before = {name: x.clone() for name, x in head.state_dict().items()}
    with torch.no_grad():
        if change is not None:
            change(head)
    auditor = Kept(trainer.pipeline, credit, trainer.prompts, AUDIT, kept=truths.setdefault(number, []))
    audit = auditor.audit(number)
    head.load_state_dict(before)
    *rows, last = run.metrics
    config = run.config | {"advantage": run.config["advantage"] | {"lam": lam}}
    metrics = audit.judge(trainer.processes)["metrics"]
    return {finding.name for finding in diagnose([*rows, last | metrics], config)} & OF_AUDITS


ILL = [
    ("critic_worse", "vowels", 0, scale(-1), 0.95),
    ("critic_worse", "vowels", 1, scale(3), 0.95),
    ("critic_worse", "vowels", 2, scale(-0.5), 0.5),
    ("critic_worse", "odd", 3, scale(-1), 0.0),
    ("critic_worse", "vowels", 4, scale(5), 1.0),
    ("critic_flat", "vowels", 0, scale(0), 0.95),
    ("critic_flat", "odd", 1, scale(0, 0.5), 0.0),
    ("critic_flat", "vowels", 2, scale(0.05), 0.95),
    ("critic_flat", "vowels", 3, scale(0.1), 0.5),
    ("critic_flat", "vowels", 4, scale(0.15), 1.0),
    ("lam_low", "vowels", 0, scale(-1), 0.3),
    ("lam_low", "vowels", 1, scale(-0.5), 0.0),
    ("lam_low", "vowels", 2, redirect, 0.3),
    ("lam_low", "vowels", 3, scale(-1), 0.0),
    ("lam_low", "vowels", 4, scale(-0.5), 0.2),
    *(("lam_high", "odd", number, None, lam) for number, lam in enumerate((1.0, 0.99, 1.0, 0.99, 0.98))),
]


@pytest.mark.parametrize(("check", "name", "number", "change", "lam"), ILL if WHOLE else ILL[:12:5])
def test_a_wrong_critic_or_lambda_is_named(check, name, number, change, lam, trained):
    assert check in findings(trained, name, number, change, lam)


@pytest.mark.parametrize("number", range(5 if WHOLE else 1))
@pytest.mark.parametrize(("name", "lam"), [("vowels", 0.5), ("vowels", 0.0), ("odd", 0.0), ("plain", 0.95)])
def test_a_right_critic_and_lambda_are_not_accused(name, lam, number, trained):
    assert findings(trained, name, number, None, lam) == set()


# Engines, filters and old samples.


class HalfEngine(LocalEngine):
    """A local engine that samples in bfloat16, beside training in float32."""

    def generate(self, prompts, settings, uniforms, per_prompt=1, started=None):
        rollout = self.half().generate(prompts, settings, uniforms, per_prompt, started)
        if rollout.behavior_logprobs is None:
            rollout = replace(rollout, behavior_logprobs=rollout.logprobs)
        with torch.no_grad():
            return evaluate_rollout(self.policy, rollout, settings.temperature, None)

    def half(self):
        return LocalEngine(self.policy, self.tokenizer, self.end_ids, replace(self.precision, dtype="bfloat16"))


class HalfWeights(HalfEngine):
    """A local engine whose weights are rounded to bfloat16."""

    def half(self):
        rounded = deepcopy(self.policy)
        for parameter in rounded.lm.parameters():
            parameter.data = parameter.data.bfloat16().float()
        return LocalEngine(rounded, self.tokenizer, self.end_ids, self.precision)


class WaitForBatches(Callback):
    """Begins an update only when all batches ahead are sampled, so that ages do not depend on timing."""

    def before_update(self, trainer):
        for _, sampled in getattr(trainer.source, "batches", ()):
            sampled.result()


def ahead(age, iterations, **settings):
    """A run that samples `age` batches ahead."""
    sampling = {"rollout.engine": "continuous", "rollout.max_age": age, "kl.coef": 0.0, "run.iterations": iterations}
    return sampling | {key.replace("__", "."): value for key, value in settings.items()}


HALF, CUT, OLD = "engine_mismatch", "truncated_support", "stale_samples"
SMALL, MIDDLE, DEEP = (2, 64), (4, 128), (8, 128)
"""Layers and width of random models."""
CASES = [  # the finding, settings, the size of a random model in place of the built-in one, the engine
    (HALF, {}, None, HalfEngine),
    (HALF, {"rollout.per_prompt": 4}, None, HalfEngine),
    (HALF, {"rollout.temperature": 0.7}, None, HalfWeights),
    (HALF, {"rollout.max_new_tokens": 24}, None, HalfWeights),
    (HALF, {}, SMALL, HalfEngine),
    (HALF, {}, MIDDLE, HalfWeights),
    (HALF, {}, DEEP, HalfEngine),
    (CUT, {"rollout.top_p": 0.9}, None, None),
    (CUT, {"rollout.top_p": 0.7}, None, None),
    (CUT, {"rollout.top_k": 5}, None, None),
    (CUT, {"rollout.top_k": 20, "rollout.temperature": 1.3}, None, None),
    (CUT, {"rollout.min_p": 0.1}, None, None),
    (CUT, {"rollout.min_p": 0.2}, MIDDLE, None),
    (CUT, {"rollout.top_p": 0.8, "rollout.top_k": 20, "rollout.temperature": 0.7}, None, None),
    (OLD, ahead(4, 10, optim__lr=1e-3), None, None),
    (OLD, ahead(8, 14, optim__lr=1e-3), None, None),
    (OLD, ahead(4, 10, optim__lr=3e-3), None, None),
    (OLD, ahead(6, 12, optim__lr=1e-3, ppo__epochs=8), None, None),
    (OLD, ahead(4, 10, optim__lr=3e-3), SMALL, None),
    (OLD, ahead(6, 12, optim__lr=2e-3, off_policy__proximal="interpolated"), None, None),
    (None, {"model.dtype": "bfloat16"}, None, None),
    (None, {"model.dtype": "bfloat16", "rollout.temperature": 0.7}, None, None),
    (None, {"model.dtype": "bfloat16"}, MIDDLE, None),
    (None, {"model.dtype": "bfloat16"}, DEEP, None),
    (None, {"rollout.engine": "continuous"}, None, None),
    (None, {"rollout.engine": "continuous", "rollout.per_prompt": 4}, None, None),
    (None, {"rollout.engine": "continuous"}, MIDDLE, None),
    (None, {"rollout.engine": "continuous", "model.dtype": "bfloat16"}, SMALL, None),
    (None, {"rollout.top_p": 0.995}, None, None),
    (None, {"rollout.top_k": 1000}, None, None),
    (None, {"rollout.min_p": 0.0005}, None, None),
    (None, {"rollout.top_p": 0.99, "rollout.temperature": 0.7}, None, None),
    (None, {"rollout.top_p": 0.8, "off_policy.correct": "clip"}, None, None),
    (None, {"rollout.top_k": 5, "off_policy.correct": "mask"}, None, None),
    (None, {"rollout.min_p": 0.2, "off_policy.proximal": "behavior"}, None, None),
    (None, {"rollout.top_p": 0.7, "off_policy.correct": "clip", "off_policy.level": "geometric"}, MIDDLE, None),
    (None, ahead(1, 8), None, None),
    (None, ahead(2, 8), None, None),
    (None, ahead(4, 10), None, None),
    (None, ahead(4, 10, off_policy__proximal="interpolated", off_policy__correct="clip"), None, None),
]


def random_model(layers, width, vocabulary):
    """A random model whose distributions are far from uniform."""
    torch.manual_seed(layers)
    shape = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    shape |= {"num_attention_heads": 4, "max_position_embeddings": 256, "vocab_size": vocabulary}
    return LlamaForCausalLM(LlamaConfig(**shape, initializer_range=0.3))


@pytest.mark.parametrize("number", range(0, len(CASES), 1 if WHOLE else 7))
def test_an_engine_filters_and_old_samples_are_named_where_they_matter(number, tmp_path):
    fault, settings, size, engine = CASES[number]
    small = {"seed": number + 1, "model.dtype": "float32", "rollout.batch_size": 32, "rollout.max_new_tokens": 12}
    small |= {"optim.warmup": 0, "run.dir": str(tmp_path / "run"), "run.iterations": 5}
    small |= {"run.trackers": [], "run.show_every": 0, "run.save_every": 0}
    model, tokenizer = None, None
    if size is not None:
        _, tokenizer = load_start(ModelConfig())
        model = random_model(*size, len(tokenizer))
    args = PPOConfig.from_dict(small | settings)
    trainer = PPOTrainer(model=model, processing_class=tokenizer, args=args, callbacks=[WaitForBatches()])
    if engine is not None:
        trainer.pipeline.engine = engine(**vars(trainer.pipeline.engine))
    trainer.train()
    run = read_run(tmp_path / "run")
    named = {finding.name for finding in diagnose(run.metrics, run.config)} & {HALF, CUT, OLD}
    assert named == (set() if fault is None else {fault})
