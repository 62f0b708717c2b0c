"""Runs that fail as the field reports it, and healthy ones: the diagnosis names each fault with a cure that works, and
accuses no healthy run.

The thresholds of the checks were chosen with the runs of `TUNED` in view; those of `HELD_OUT` were judged once, after.
`MISSED` are those among them that were judged otherwise than expected.
"""

import hashlib
from dataclasses import dataclass, field

import pytest

from tokencredit.control.control_trainer import ControlTrainer
from tokencredit.report.reading import read_run
from tokencredit.runs.diagnosis import diagnose
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.text.ppo_trainer import PPOTrainer

pytestmark = [pytest.mark.slow, pytest.mark.proof]


def length(completions, **columns):
    return [len(text) / 50 for text in completions]


def characters(completions, **columns):
    return [float(len(text)) for text in completions]


def goods(completions, **columns):
    return [0.2 * text.count("good") for text in completions]


def phrase(completions, **columns):
    return [float("the movie was great" in text.lower()) + 0.1 * text.count("great") for text in completions]


def chance(completions, **columns):
    digests = (hashlib.blake2b(text.encode(), digest_size=4).digest() for text in completions)
    return [int.from_bytes(digest, "big") / 2**32 for digest in digests]


def far(completions, **columns):
    return [3 + sum(text.count(v) for v in "aeiou") / max(len(text), 1) for text in completions]


def rare(completions, **columns):
    return [float("zombie" in text) for text in completions]


def easy(completions, **columns):
    return [float(len(text) > 12) for text in completions]


def medium(completions, **columns):
    return [-abs(len(text) - 30) / 30 for text in completions]


def dense(completions, completion_ids, **columns):
    return [[0.2 * (i % 2) for i in ids] for ids in completion_ids]


def first_prompt(completions, prompts, **columns):
    """Likes in answers to one prompt what it dislikes in those to others."""
    sign = [1 if "movie" in prompt else -1 for prompt in prompts]
    return [s * min(text.count(" a") + text.count(" the"), 4) / 4 for s, text in zip(sign, completions, strict=True)]


def shouting(completions, **columns):
    return [float("!" in text) for text in completions]


FAST = {"optim.lr": 1e-3, "kl.coef": 1e-6}
LORA = {"model.lora.rank": 8}
LEARNING = {"ppo.epochs": 4, "ppo.minibatches": 4, "rollout.batch_size": 32, "optim.lr": 3e-4}
CARTPOLE = {"env.id": "CartPole-v1"}


@dataclass
class Run:
    """A run, its fault if it has one, and the cure."""

    settings: dict
    reward: object = None
    iterations: int = 24
    fault: str = ""
    """Name of the check that is first in the diagnosis; empty for a healthy run."""
    cure: dict = field(default_factory=dict)
    """Settings of the first cure of the advice."""
    better: tuple = ()
    """A metric, and the sign of its change by the cure."""


TUNED = {
    "hacked by length": Run(FAST, length, fault="degenerate", cure={"kl.coef": 0.1}, better=("truncated", -1)),
    "hacked by repetition": Run(FAST, goods, fault="degenerate", cure={"kl.coef": 0.1}, better=("distinct_2", 1)),
    "KL without reward": Run(FAST, chance, fault="kl_runaway", cure={"kl.coef": 0.1}, better=("kl", -1)),
    "entropy explodes": Run(
        {"ppo.entropy_coef": 0.3, "optim.lr": 1e-3},
        fault="entropy_explodes",
        cure={"ppo.entropy_coef": 0.0},
        better=("entropy", -1),
    ),
    "critic lags": Run(
        {"critic.lr": 1e-6, "critic.kind": "separate", "critic.trunk_lr": 1e-7},
        far,
        fault="critic_lags",
        cure={"critic.lr": 1e-3, "critic.trunk_lr": 1e-4},
        better=("value_mean", 1),
    ),
    "agent with a low rate": Run(
        CARTPOLE | {"optim.lr": 2.5e-5},
        iterations=40,
        fault="clip_low",
        cure={"optim.lr": 1e-3},
        better=("train/average_return", 1),
    ),
    "large rewards": Run(
        {}, characters, fault="large_rewards", cure={"score.normalize": "running"}, better=("reward", 1)
    ),
    "as it comes": Run(LEARNING),
    "another prompt": Run(LEARNING | {"prompts.text": "The plot was"}),
    "agent for 20 iterations": Run(CARTPOLE, iterations=20),
    "agent for 120 iterations": Run(CARTPOLE, iterations=120),
    "groups": Run(
        {"rollout.per_prompt": 4, "advantage.estimator": "group_relative", "critic.kind": "none", "optim.lr": 3e-4}
    ),
    "agent with a shared critic": Run(CARTPOLE | {"critic.kind": "shared"}, iterations=40),
}
HELD_OUT = {
    "hacked by a phrase": Run(
        FAST, phrase, iterations=40, fault="degenerate", cure={"kl.coef": 0.1}, better=("distinct_2", 1)
    ),
    "entropy collapses": Run(
        {"optim.lr": 3e-3, "kl.coef": 1e-6}, fault="entropy_collapse", cure={"optim.lr": 3e-4}, better=("entropy", 1)
    ),
    "rare reward": Run({}, rare, fault="rare_reward", cure={"rollout.batch_size": 128}, better=("reward_std", 1)),
    "equal groups": Run(
        {"rollout.per_prompt": 2, "advantage.estimator": "group_relative", "critic.kind": "none"},
        easy,
        fault="equal_groups",
        cure={"rollout.per_prompt": 8},
        better=("advantage_std", 1),
    ),
    "high rate": Run({"optim.lr": 1e-2}, fault="clip_high", cure={"optim.lr": 1e-3}, better=("reward", 1)),
    "LoRA does not move": Run(
        LORA | {"optim.lr": 1e-6}, fault="clip_low", cure={"optim.lr": 3e-3}, better=("reward", 1)
    ),
    "evaluation disagrees": Run(
        {
            "prompts.text": "This movie was really",
            "eval.text": ["The food was", "My dog is"],
            "eval.every": 2,
            "optim.lr": 5e-4,
            "kl.coef": 0.01,
        },
        first_prompt,
        fault="evaluation_disagrees",
        cure={"prompts.text": ["This movie was really", "The food was", "My dog is"]},
        better=("eval/reward", 1),
    ),
    "LoRA": Run(LORA | {"optim.lr": 3e-3}),
    "reward per token": Run(LEARNING | {"rollout.stop_at_eos": False}, dense),
    "stop string": Run(LEARNING | {"rollout.stop": ["."]}),
    "medium length": Run(LEARNING, medium),
    "no critic": Run(LEARNING | {"critic.kind": "none", "advantage.estimator": "uniform"}, shouting),
    "agent of the policy gradient": Run(
        CARTPOLE | {"algorithm": "policy_gradient", "optim.lr": 5e-3, "steps": 256}, iterations=60
    ),
    "agent of continuous actions": Run(
        {
            "env.id": "Pendulum-v1",
            "env.normalize_rewards": True,
            "env.normalize_observations": True,
            "advantage.gamma": 0.9,
            "optim.lr": 1e-3,
            "critic.lr": 1e-3,
            "steps": 512,
            "ppo.epochs": 10,
        },
        iterations=60,
    ),
}
RUNS = TUNED | HELD_OUT
MISSED = {
    "entropy collapses": "degenerate, since the reward rose as well",
    "rare reward": "constant_term: no completion had the reward at all",
    "equal groups": "constant_term: all completions had the reward",
    "high rate": "degenerate",
    "LoRA does not move": "explained_variance, before clip_low",
    "evaluation disagrees": "grows_long, before evaluation_disagrees",
    "medium length": "degenerate, though healthy: the reward asks for a third of the length",
    "no critic": "constant_term, though healthy: no completion had the reward at all",
}
"""Names of runs, with the finding that came first."""


def train(folder, run, settings):
    """Train a run; its findings and metrics."""
    own = run.settings | settings
    own |= {"run.dir": str(folder), "run.iterations": run.iterations, "run.trackers": [], "run.save_every": 0}
    if "env.id" in own:
        ControlTrainer(ControlConfig.from_dict(own)).train()
    else:
        small = {"model.dtype": "float32", "rollout.batch_size": 16, "run.show_every": 0}
        small |= {"ppo.epochs": 2, "ppo.minibatches": 2}
        PPOTrainer(args=PPOConfig.from_dict(small | own), reward_funcs=run.reward).train()
    found = read_run(folder)
    return diagnose(found.metrics, found.config), found.metrics


def mean_at_end(metrics, name):
    values = [row[name] for row in metrics[-5:] if row.get(name) is not None]
    return sum(values) / len(values)


def expected(name):
    """The name of a run, as a parameter that may fail if the diagnosis misjudged it."""
    return pytest.param(name, marks=[pytest.mark.xfail(reason=MISSED[name])] if name in MISSED else [])


@pytest.mark.parametrize("name", [expected(name) for name, run in RUNS.items() if run.fault])
def test_a_fault_of_the_field_is_named_with_a_cure_that_helps(name, tmp_path):
    run = RUNS[name]
    (first, *_), metrics = train(tmp_path / "sick", run, {})
    assert first.name == run.fault
    assert any(key in first.cures[0] for key in run.cure)
    _, cured = train(tmp_path / "cured", run, run.cure)
    metric, sign = run.better
    assert sign * (mean_at_end(cured, metric) - mean_at_end(metrics, metric)) > 0


@pytest.mark.parametrize("name", [expected(name) for name, run in RUNS.items() if not run.fault])
def test_a_healthy_run_is_not_accused(name, tmp_path):
    found, _ = train(tmp_path / "run", RUNS[name], {})
    assert found == []
