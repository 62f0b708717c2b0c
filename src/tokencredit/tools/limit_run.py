"""`tokencredit limit`, also from Python: the best that a policy can reach at a KL price, by samples of a reference."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch

from tokencredit.core.rewards import Attainable, attainable
from tokencredit.errors import ConfigError
from tokencredit.learn.rng import preserved
from tokencredit.report.reading import NoIteration, read_run
from tokencredit.runs.jsonl import PRICED, scored_anew
from tokencredit.runs.resuming import started_from
from tokencredit.runs.summary import count, figure, final_mean, of_attainable
from tokencredit.settings.run_kind import with_engine
from tokencredit.settings.text import PPOConfig
from tokencredit.text.audit.limit import obstacle, prompt_numbers
from tokencredit.text.data.prompts import Prompts
from tokencredit.text.evaluation import SEED_OFFSET
from tokencredit.text.models.model_loading import check_origin
from tokencredit.text.ppo_trainer import PPOTrainer
from tokencredit.text.sources.by_hand import NO_REWARD

PER_PROMPT = 64
"""Least completions per prompt: of a data set so many fewer prompts are taken, for each has an optimum of its own."""
IGNORED = ("callbacks", "eval_dataset", "processing_class", "peft_config")
"""Arguments from Python that do not change the reference, or whose change `check_origin` finds."""


def limit(trainer: PPOTrainer, samples: int = 1024) -> Attainable:
    """Sample the reference of a trainer that has not trained, print its optimum, and return it.

    Args:
        trainer: a trainer with the run's arguments, also one of `tokencredit.trl`.
        samples: least completions; at least 64 per prompt are taken.

    Raises:
        ConfigError: the attainable means nothing with these settings, or the policy has been trained.
        RunStopped: a reward is not finite.
    """
    trainer = getattr(trainer, "trainer", trainer)  # of TRL's
    args = trainer.args
    reason = obstacle(args)
    if trainer.handed_scores is not None:
        reason = f"it needs a reward: {NO_REWARD}"
    if reason:
        raise ConfigError(f"no limit: {reason}")
    if trainer.record.history:
        raise ConfigError("no limit: the trainer has trained, and its policy is not the reference; make another")
    with preserved():
        best = sample(trainer, samples)
    show(best, args.kl.coef)
    return best


def limit_of_settings(config: PPOConfig, samples: int, run: Path | None = None) -> Attainable:
    """Sample the reference of a run, or of the run that a configuration would train, and print its optimum.

    Raises:
        ConfigError: the attainable means nothing with these settings, or the model that the run began with is not
            there.
        RunStopped: a reward is not finite.
    """
    config = with_engine(config)
    if reason := obstacle(config):
        raise ConfigError(f"no limit: {reason}")
    if arguments := [name for name in config.python if name not in IGNORED]:
        name = "the run of this configuration" if run is None else repr(str(run))
        raise ConfigError(
            f"{name} was begun in Python with {', '.join(arguments)}, which its folder does not hold; sample "
            "in Python: tokencredit.limit(PPOTrainer(…)), with the same arguments; the first iteration's metrics hold "
            "an estimate"
        )
    with preserved():
        trainer = PPOTrainer(args=replace(config, python={}))
        if run is not None and (origin := started_from(run)) is not None:
            check_origin(origin, trainer.origin, config.model.name)
    best = limit(trainer, samples)
    if run is not None and (objective := reached(run)) is not None:
        share = best.share(objective)
        print(f"the run has reached {of_attainable(share, few=best.few, pooled=best.pooled)}")
    return best


def sample(trainer: PPOTrainer, samples: int) -> Attainable:
    """The attainable from at least so many completions of a trainer's untrained policy, the reference."""
    args, prompts = trainer.args, trainer.prompts
    assert isinstance(prompts, Prompts)  # no episodes
    # As many completions of each prompt, in batches of the size that the run samples.
    repeat = max(PER_PROMPT, math.ceil(samples / len(prompts.kept)))
    total, size = repeat * math.ceil(samples / repeat), args.rollout.batch_size
    generator = torch.Generator().manual_seed(args.seed + SEED_OFFSET)
    rewards, numbers = [], []
    for first in range(0, total, size):
        rows = min(size, total - first)
        uniforms = torch.rand(rows, args.rollout.max_new_tokens, generator=generator)
        batch = trainer.pipeline.collect(prompts.batch(first, rows, repeat), args.rollout, uniforms)
        rewards.append(trainer.credit.totals(batch).cpu())
        numbers.append(prompt_numbers(batch))
    return attainable(torch.cat(rewards), args.kl.coef, torch.cat(numbers), generator)


def reached(run: Path) -> float | None:
    """The objective of a run's last iterations; None where it is not known."""
    try:
        read = read_run(run, samples=False)
    except NoIteration:
        return None
    return final_mean(read.metrics[scored_anew(read.changes, PRICED) :], "objective")


def show(best: Attainable, coef: float) -> None:
    """Print the optimum."""
    prompts = f"{best.prompts} prompt{'s' * (best.prompts > 1)}"
    rows = {
        "J*": f"{figure(best.objective)}, 95 % interval {figure(best.low)} to {figure(best.high)}: "
        f"the largest reward − {coef:g} · KL",
        "at the optimum": f"reward {figure(best.reward)}, KL {figure(best.kl)} nats per sequence",
        "reference": f"reward {figure(best.start)}",
        "samples": f"{count(best.samples)} of {prompts}, {figure(best.effective)} effective per prompt",
    }
    for label, text in rows.items():
        print(f"{label:<16}{text}")
    if best.few:
        print("too few effective samples: J* is a lower bound; raise --samples")
