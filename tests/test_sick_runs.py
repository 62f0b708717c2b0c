"""Runs that fail as the field reports it, and healthy ones: the diagnosis names each fault with a cure that works, and
accuses no healthy run.

The conditions of the checks were chosen with the runs of `TUNED` in view. Those of `HELD_OUT` were judged once, after;
`MISSED` are those among them that were judged otherwise than expected. The last 16 of `TUNED` were held out before: of
8 sick and 8 healthy ones 4 and 6 were judged as expected. Two of the others showed faults of the checks, which were
mended: a low rate was named after completions that were cut off, and γ was named for an agent with a reward on every
step. Six were no such runs as intended: three sick agents and texts that learned or were not empty, and healthy runs
whose reward did not rise or rose with the length; they are here with what they are.
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

pytestmark = pytest.mark.proof


def length(completions, **columns):
    return [len(text) / 50 for text in completions]


def large(completions, **columns):
    return [1000.0 * text.count("e") / max(len(text), 1) for text in completions]


def goods(completions, **columns):
    return [0.2 * text.count("good") for text in completions]


def phrase(completions, **columns):
    return [float("the movie was great" in text.lower()) + 0.1 * text.count("great") for text in completions]


def phrase_once(completions, **columns):
    """The same, without its flaw: words that are written again cost."""
    words = [text.split() for text in completions]
    repeated = [1 - len(set(found)) / max(len(found), 1) for found in words]
    return [x - 2 * share for x, share in zip(phrase(completions), repeated, strict=True)]


def chance(completions, **columns):
    digests = (hashlib.blake2b(text.encode(), digest_size=4).digest() for text in completions)
    return [int.from_bytes(digest, "big") / 2**32 for digest in digests]


def far(completions, **columns):
    return [3 + min(text.count(" the"), 4) / 4 for text in completions]


def says(word):
    """A reward of two values: 1 for texts with the word."""

    def term(completions, **columns):
        return [float(word in text.lower()) for text in completions]

    return term


def medium(completions, **columns):
    return [-abs(len(text) - 70) / 70 for text in completions]


def dense(completions, completion_ids, **columns):
    return [[0.2 * (i % 2) for i in ids] for ids in completion_ids]


def articles(completions, **columns):
    return [min(text.count(" the") + text.count(" a "), 5) / 5 for text in completions]


def commas(completions, **columns):
    return [0.2 * text.count(",") for text in completions]


def no_commas(completions, **columns):
    return [-0.5 * text.count(",") for text in completions]


def brief(completions, **columns):
    return [1 - len(text) / 120 for text in completions]


def letter(completions, **columns):
    return [0.2 * text.count("o") for text in completions]


def share(completions, **columns):
    return [10 * text.count("a") / max(len(text), 1) for text in completions]


def first_prompt(completions, prompts, **columns):
    """Likes in answers to one prompt what it dislikes in those to others."""
    sign = [1 if "movie" in prompt else -1 for prompt in prompts]
    return [s * min(text.count(" a") + text.count(" the"), 4) / 4 for s, text in zip(sign, completions, strict=True)]


FAST = {"optim.lr": 1e-3, "kl.coef": 1e-6}
LORA = {"model.lora.rank": 8}
LEARNING = {"optim.lr": 5e-4}
GROUPS = {"rollout.per_prompt": 4, "advantage.estimator": "group_relative", "critic.kind": "none"}
PENDULUM = {
    "env.id": "Pendulum-v1",
    "env.normalize_rewards": True,
    "env.normalize_observations": True,
    "advantage.gamma": 0.9,
    "optim.lr": 1e-3,
    "critic.lr": 1e-3,
    "steps": 512,
    "ppo.epochs": 10,
}
LAKE = {"env.id": "FrozenLake-v1", "env.kwargs": {"is_slippery": False}, "optim.lr": 3e-3}
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
    """Settings of the first cure of the advice, or another reward."""
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
        LEARNING | {"critic.lr": 1e-6, "critic.kind": "separate", "critic.trunk_lr": 1e-7},
        far,
        fault="explained_variance",
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
    "agent with a high rate": Run(
        CARTPOLE | {"optim.lr": 0.1},
        iterations=30,
        fault="clip_high",
        cure={"optim.lr": 1e-3},
        better=("train/average_return", 1),
    ),
    "hacked by large rewards": Run(
        LEARNING, large, fault="phrase_spreads", cure={"kl.coef": 20.0}, better=("distinct_2", 1)
    ),
    "as it comes": Run(LEARNING),
    "another prompt": Run(LEARNING | {"prompts.text": "The plot was", "rollout.max_new_tokens": 32}),
    "agent for 20 iterations": Run(CARTPOLE, iterations=20),
    "agent for 120 iterations": Run(CARTPOLE, iterations=120),
    "groups": Run(GROUPS | {"optim.lr": 3e-4}),
    "agent with a shared critic": Run(CARTPOLE | {"critic.kind": "shared"}, iterations=40),
    "hacked by a phrase": Run(
        FAST, phrase, iterations=40, fault="hollow_score", cure={"reward": phrase_once}, better=("repetition", -1)
    ),
    "entropy collapses": Run(
        {"optim.lr": 1e-2, "ppo.epochs": 1, "ppo.minibatches": 1},
        fault="entropy_collapse",
        cure={"optim.lr": 1e-3},
        better=("reward", 1),
    ),
    "rare reward": Run({}, says("slow"), fault="equal_scores", cure={"rollout.batch_size": 64}, better=("reward", 1)),
    "equal groups": Run(
        {"rollout.per_prompt": 2, "advantage.estimator": "group_relative", "critic.kind": "none"},
        says("ending"),
        fault="equal_scores",
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
    "no critic": Run(
        LEARNING | {"critic.kind": "none", "advantage.estimator": "uniform", "rollout.max_new_tokens": 32},
        says("story"),
    ),
    "agent of the policy gradient": Run(
        CARTPOLE | {"algorithm": "policy_gradient", "optim.lr": 5e-3, "steps": 256},
        iterations=60,
        fault="critic_lags",
        cure={"critic.lr": 5e-3, "critic.epochs": 10, "critic.clip": None},
        better=("train/average_return", 1),
    ),
    "agent of continuous actions": Run(PENDULUM, iterations=60),
    "hacked by commas": Run(
        FAST | {"prompts.text": "I watched this film", "seed": 3},
        commas,
        fault="degenerate",
        cure={"kl.coef": 0.1},
        better=("ref_logprob", 1),
    ),
    "hacked by short texts": Run(
        FAST | {"seed": 4}, brief, fault="degenerate", cure={"kl.coef": 0.3}, better=("ref_logprob", 1)
    ),
    "noise in groups": Run(
        FAST | GROUPS | {"prompts.text": "The acting was"},
        chance,
        fault="kl_runaway",
        cure={"kl.coef": 0.5},
        better=("kl", -1),
    ),
    "low rate": Run(
        {"optim.lr": 1e-6, "prompts.text": "The plot was", "seed": 5},
        fault="clip_low",
        cure={"optim.lr": 1e-3},
        better=("reward", 1),
    ),
    "high rate of LoRA": Run(
        LORA | {"optim.lr": 0.3, "seed": 6}, fault="clip_high", cure={"optim.lr": 3e-3}, better=("reward", 1)
    ),
    "evaluation of short texts": Run(
        LEARNING | {"eval.max_new_tokens": 3, "eval.every": 2},
        articles,
        fault="evaluation_disagrees",
        cure={"eval.max_new_tokens": None},
        better=("eval/reward", 1),
    ),
    "agent with an entropy bonus": Run(PENDULUM | {"ppo.entropy_coef": 0.5}, iterations=40),
    "agent with few steps": Run(LAKE | {"env.number": 4, "steps": 32}, iterations=40),
    "defaults": Run({}, iterations=48),
    "rewards below zero": Run(LEARNING | {"prompts.text": "The acting was", "seed": 7}, no_commas),
    "LoRA in groups": Run(GROUPS | LORA | {"optim.lr": 3e-3, "seed": 8}),
    "separate critic": Run(LEARNING | {"critic.kind": "separate", "seed": 9}),
    "several prompts": Run(
        LEARNING | {"prompts.text": ["The plot was", "The music", "I thought"], "eval.every": 4, "seed": 10}
    ),
    "agent at a higher rate": Run(CARTPOLE | {"optim.lr": 1e-3, "seed": 11}, iterations=30),
    "agent on a frozen lake": Run(LAKE | {"env.number": 16, "seed": 12}, iterations=30),
    "agent of Monte Carlo returns": Run(
        CARTPOLE | {"advantage.estimator": "monte_carlo", "optim.lr": 1e-3, "env.number": 8, "seed": 13}, iterations=30
    ),
}

HELD_OUT = {
    "hacked by a letter": Run(
        FAST | {"prompts.text": "The music", "seed": 21},
        letter,
        fault="degenerate",
        cure={"kl.coef": 0.3},
        better=("ref_logprob", 1),
    ),
    "noise with a separate critic": Run(
        FAST | {"prompts.text": "I thought", "critic.kind": "separate", "seed": 22},
        chance,
        fault="kl_runaway",
        cure={"kl.coef": 0.5},
        better=("kl", -1),
    ),
    "entropy of LoRA explodes": Run(
        LORA | {"optim.lr": 1e-2, "ppo.entropy_coef": 0.5, "seed": 23},
        fault="entropy_explodes",
        cure={"ppo.entropy_coef": 0.0},
        better=("reward", 1),
    ),
    "small groups": Run(
        GROUPS, says("humor"), fault="equal_scores", cure={"rollout.per_prompt": 16}, better=("advantage_std", 1)
    ),
    "evaluation at another temperature": Run(
        LEARNING | {"eval.temperature": 3.0, "eval.every": 2, "seed": 24},
        share,
        fault="evaluation_disagrees",
        cure={"eval.temperature": None},
        better=("eval/reward", 1),
    ),
    "agent with a shared critic and a low rate": Run(
        CARTPOLE | {"critic.kind": "shared", "optim.lr": 1e-6, "seed": 25},
        iterations=30,
        fault="clip_low",
        cure={"optim.lr": 1e-3},
        better=("train/average_return", 1),
    ),
    "agent with far too high a rate": Run(
        CARTPOLE | {"env.number": 8, "optim.lr": 0.3, "seed": 26},
        iterations=30,
        fault="clip_high",
        cure={"optim.lr": 1e-3},
        better=("train/average_return", 1),
    ),
    "share of a letter": Run(LEARNING | {"prompts.text": "The music", "rollout.max_new_tokens": 32, "seed": 27}, share),
    "larger groups": Run(GROUPS | {"rollout.per_prompt": 8, "optim.lr": 5e-4, "seed": 28}),
    "without λ": Run(LEARNING | {"advantage.lam": 1.0, "seed": 29}),
    "cooler": Run(LEARNING | {"rollout.temperature": 0.8, "seed": 30}),
    "agent of a shared critic": Run(CARTPOLE | {"critic.kind": "shared", "optim.lr": 1e-3, "seed": 31}, iterations=30),
    "small agent on a frozen lake": Run(LAKE | {"env.number": 8, "agent.hidden": [32], "seed": 32}, iterations=30),
    "curious agent": Run(CARTPOLE | {"ppo.entropy_coef": 0.05, "optim.lr": 1e-3, "seed": 33}, iterations=30),
}
RUNS = TUNED | HELD_OUT
MISSED = {
    "small groups": "none: it learned after all, and was named in iteration 10 alone",
    "small agent on a frozen lake": "equal_scores: it was meant to be healthy, and never reached its goal",
}
"""Names of runs, with the finding that came first."""


def train(folder, run, settings):
    """Train a run; its findings, and what it left."""
    own = run.settings | settings
    reward = own.pop("reward", run.reward)
    own |= {"run.dir": str(folder), "run.iterations": run.iterations, "run.trackers": [], "run.save_every": 0}
    if "env.id" in own:
        ControlTrainer(ControlConfig.from_dict(own)).train()
    else:
        small = {"model.dtype": "float32", "rollout.batch_size": 16, "run.show_every": 0}
        small |= {"ppo.epochs": 2, "ppo.minibatches": 2}
        PPOTrainer(args=PPOConfig.from_dict(small | own), reward_funcs=reward).train()
    found = read_run(folder)
    return diagnose(found.metrics, found.config, samples=found.samples), found


def mean_at_end(metrics, name):
    values = [row[name] for row in metrics[-5:] if row.get(name) is not None]
    return sum(values) / len(values)


def expected(name):
    """The name of a run, as a parameter that may fail if the diagnosis misjudged it."""
    return pytest.param(name, marks=[pytest.mark.xfail(reason=MISSED[name])] if name in MISSED else [])


@pytest.mark.parametrize("name", [expected(name) for name, run in RUNS.items() if run.fault])
def test_a_fault_of_the_field_is_named_with_a_cure_that_helps(name, tmp_path):
    run = RUNS[name]
    (first, *_), sick = train(tmp_path / "sick", run, {})
    assert first.name == run.fault
    assert any(key in first.cures[0] for key in run.cure)
    found, cured = train(tmp_path / "cured", run, run.cure)
    assert run.fault not in [finding.name for finding in found]
    metric, sign = run.better
    assert sign * (mean_at_end(cured.metrics, metric) - mean_at_end(sick.metrics, metric)) > 0


@pytest.mark.parametrize("name", [expected(name) for name, run in RUNS.items() if not run.fault])
def test_a_healthy_run_is_not_accused(name, tmp_path):
    """Neither at its end nor before."""
    found, run = train(tmp_path / "run", RUNS[name], {})
    assert found == []
    for iterations in range(1, len(run.metrics)):
        assert diagnose(run.metrics[:iterations], run.config, ended=False) == []
