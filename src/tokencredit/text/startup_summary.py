"""What a run trains, from which prompts, for which reward and where: the lines before its first iteration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from tokencredit.learn.state import trainable
from tokencredit.runs.summary import count, shortened
from tokencredit.settings.data import ClassifierTerm, RewardTerm
from tokencredit.settings.text import PPOConfig
from tokencredit.text.data.prompts import Prompts
from tokencredit.text.data.tasks import Tasks
from tokencredit.text.pipeline import Pipeline
from tokencredit.text.rewards.texts import last_message

OUTPUTS = {"probability": "P({})", "logit": "logit of {}", "log_odds": "log-odds of {}"}
"""Classifier outputs, with a place for the label."""


def overview(
    args: PPOConfig, pipeline: Pipeline, prompts: Prompts | Tasks, configured: bool, folder: Path
) -> Iterator[tuple[str, str]]:
    """Pairs of a label and a text.

    Args:
        args: the configuration.
        pipeline: the run's pipeline.
        prompts: the training prompts.
        configured: the reward terms are those of the configuration; terms from Python are shown by their names.
        folder: the run's folder.
    """
    lm, precision, processes = pipeline.policy.lm, pipeline.precision, pipeline.processes
    size, trained = sum(p.numel() for p in lm.parameters()), sum(p.numel() for p in trainable(lm))
    name = args.model.name or "from Python"
    yield "model", f"{name}, {count(size)} parameters" + (f", {count(trained)} trained" if trained < size else "")
    number = len(prompts.kept)
    if isinstance(prompts, Tasks):
        assert pipeline.player is not None
        rows = "" if prompts.rows is None else f", {number:,} rows of {prompts.name}"
        yield "environment", f"{pipeline.player.environments.name}, at most {args.env.max_turns} turns{rows}"
    else:
        first = shortened(last_message(prompts.batch(0, 1).prompts[0]), 60)
        yield "prompts", f"1: {first}" if number == 1 else f"{number:,} of {prompts.name}; the first: {first}"
    by_source = configured and not isinstance(prompts, Tasks)
    terms = [(x.weight, source(x)) for x in args.reward] if by_source else [(x.weight, x.name) for x in pipeline.terms]
    for weight, term in terms:
        yield "reward", term if weight == 1 else f"{weight:g} × {term}"
    gpu = f" ({torch.cuda.get_device_name(precision.device)})" if precision.device.type == "cuda" else ""
    jobs = f", {processes.count} processes" if processes.count > 1 else ""
    yield "device", f"{precision.device}{gpu}, {precision.dtype}{jobs}"
    yield "run", f"{folder}, {args.run.iterations:,} iterations of {args.rollout.batch_size:,} completions"


def source(settings: RewardTerm) -> str:
    """A reward term's source, such as `P(NEGATIVE) of builtin:reviews`."""
    if isinstance(settings, ClassifierTerm):
        return f"{OUTPUTS[settings.output].format(settings.label)} of {settings.classifier}"
    kind, value = settings.source()
    return value if kind == "function" else f"reward model {value}"
