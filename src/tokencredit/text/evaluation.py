"""Evaluate a model on prompts, with sampling settings of their own: in training, and as a command."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError
from tokencredit.report.meanings import meaning
from tokencredit.runs.folder import write_file
from tokencredit.runs.untrusted import visible
from tokencredit.settings.data import PromptsConfig
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.settings.run_kind import ModelSource
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import EvalConfig, KLConfig
from tokencredit.text import ppo_setup as setup
from tokencredit.text.batch import Batch, text_metrics
from tokencredit.text.data.prompts import Prompts
from tokencredit.text.data.stream import share_of_rows
from tokencredit.text.data.tasks import Tasks
from tokencredit.text.engines.requests import LONGER
from tokencredit.text.models.run_models import Models, load_source, with_reference
from tokencredit.text.pipeline import Pipeline
from tokencredit.text.rewards.terms import term_metrics
from tokencredit.text.turns.environments import COLUMN
from tokencredit.text.turns.episode_record import episode_metrics

SEED_OFFSET = 1_000_003
"""Separates the seeds of evaluation from those of training; all evaluations of a run share their random numbers."""


def check_evaluation_lengths(args: PPOConfig, pipeline: Pipeline, prompts: Prompts | Tasks) -> None:
    """Raise `ConfigError` if vLLM takes no sequences as long as those of the run's evaluations."""
    longest = pipeline.engine.longest
    if longest is None or not (args.eval.every and isinstance(prompts, Prompts)):
        return
    width, new = prompts.batch(0, args.eval.samples).ids.shape[1], args.evaluation_sampling().max_new_tokens
    if width + new > longest:
        raise ConfigError(
            f"eval.max_new_tokens is {new}, and prompts of evaluations have up to {width} tokens; rollout.engine takes "
            f"{longest} together: lower eval.max_new_tokens, or {LONGER.format(width + new)}"
        )


def evaluate(pipeline: Pipeline, prompts: Prompts | Tasks, args: PPOConfig) -> dict[str, float]:
    """Sample `eval.best_of` completions for each of the first `eval.samples` prompts and measure them.

    Returns:
        The metrics of `measure`, each after `eval/`; `UnusableBatch` if one is not finite in any process.
    """
    processes, best_of, sampling = pipeline.processes, args.eval.best_of, args.evaluation_sampling()
    total = args.eval.samples * best_of
    rows = share_of_rows(processes, total, best_of)
    generator = torch.Generator().manual_seed(args.seed + SEED_OFFSET)
    uniforms = torch.rand(total, sampling.max_new_tokens, generator=generator)
    batch = prompts.batch(rows.start, rows.stop - rows.start, best_of)
    scored = pipeline.collect(batch, sampling, uniforms[rows], best_of)
    return {f"eval/{name}": value for name, value in measure(scored, best_of, processes).items()}


def measure(scored: Batch, best_of: int, processes: Processes) -> dict[str, float]:
    """Metrics of scored completions over all processes.

    The mean reward, `best` (mean over prompts of the best reward of their completions), each term, length, `kl` (nats
    per sequence; `log_ratio` if filters such as top_p bias it), the shares of distinct completions and token bigrams.
    """
    rollout, distance = scored.rollout, scored.kl()
    totals = scored.total_scores().cpu()
    sums: list[Tensor | float] = [len(totals), totals.sum(), totals.view(-1, best_of).amax(1).sum(), rollout.mask.sum()]
    sums += [0 if distance is None else distance[1].sum()]
    device = rollout.mask.device
    rows, reward, best, tokens, kl = processes.sum(torch.tensor([float(x) for x in sums], device=device)).tolist()
    texts = text_metrics(scored, processes)
    metrics = {
        "reward": reward / rows,
        "best": best / (rows / best_of),
        **term_metrics(scored.terms, processes.sum, device),
        "length": tokens / rows,
        "distinct": texts["distinct"],
        "distinct_2": texts["distinct_2"],
    }
    if distance is not None:
        metrics[distance[0]] = kl / rows
    if scored.episodes is not None:
        metrics |= episode_metrics(scored.episodes, processes, device)
    return metrics


def evaluate_source(
    source: ModelSource, which: str = "policy", reference: ModelSource | None = None
) -> dict[str, float]:
    """Evaluate a model like a run's own evaluations, print one line per metric, and return the metrics.

    Args:
        source: a run, or a model by name, with the configuration of prompts, rewards and evaluation.
        which: of a run, `policy`, `best`, or `base` for the model it started from.
        reference: reference model of the KL; None for the run's own, if it has one.
    """
    config, processes = source.config, Processes()
    setup.check_evaluation_size(config, processes.count)
    models, pipeline = load_pipeline(source, which, reference, processes)
    prompts: Prompts | Tasks
    if pipeline.player is None:
        prompts = setup.evaluation_prompts(config, models.policy.lm, models.tokenizer)
    else:
        prompts = setup.evaluation_tasks(config)
        pipeline.player.environments.check_columns(prompts.columns, prompts.values(COLUMN))
    for line in filter(None, [*models.notes, *pipeline.engine.notes, prompts.dropped()]):
        print(visible(line))
    metrics = evaluate(pipeline, prompts, config)
    print(sizes(config.eval, prompts))
    for name, value in ((metric.removeprefix("eval/"), value) for metric, value in metrics.items()):
        print(f"{visible(name):<24} {value:<10.4g}{meaning(name)}".rstrip())
    return metrics


def load_pipeline(
    source: ModelSource, which: str, reference: ModelSource | None, processes: Processes
) -> tuple[Models, Pipeline]:
    """A source's models and pipeline with its reward terms; arguments and errors as in `evaluate_source`."""
    config, kl = source.config, source.config.kl
    models = load_source(source, which, processes, reference=reference is None)
    if reference is not None:
        models, kl = with_reference(models, reference, processes), KLConfig()
    environments = setup.environments_of(config)
    terms = setup.load_terms(config, None, processes.device, environments)
    return models, replace(setup.build_pipeline(config, models, terms, processes, environments), kl=kl)


def describe(source: ModelSource, which: str, reference: ModelSource | None, prompts: PromptsConfig) -> dict[str, Any]:
    """A source, its rewards and seed, and prompts, in plain dicts for a file of results."""
    config = source.config
    return {
        "model": source.name,
        "which": which if source.run is not None else None,
        "reference": None if reference is None else reference.name,
        "seed": config.seed,
        "prompts": asdict(prompts),
        "reward": [asdict(term) for term in config.reward],
        **({"env": asdict(config.env), "tools": config.tools} if config.several_turns() else {}),
    }


def write_metrics(
    file: Path, source: ModelSource, which: str, reference: ModelSource | None, metrics: Mapping[str, float]
) -> None:
    """Write an evaluation's metrics with its settings as JSON; null replaces a metric that is not finite."""
    config = source.config
    about = describe(source, which, reference, config.held_out_prompts() or config.prompts)
    own = asdict(config.evaluation_sampling())
    sampling = {item.name: own[item.name] for item in fields(SamplingConfig)}
    sampling |= {"samples": config.eval.samples, "best_of": config.eval.best_of}
    numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    result = about | {"sampling": sampling, "metrics": numbers}
    write_file(file, json.dumps(result, indent=2, allow_nan=False) + "\n")


def sizes(settings: EvalConfig, prompts: Prompts | Tasks) -> str:
    """Number of prompts and completions of an evaluation, as text; prompts are repeated in turn."""
    if isinstance(prompts, Tasks):
        return f"{settings.samples} seeds of episodes; episodes per seed: {settings.best_of}"
    different = len(prompts.kept)
    repeated = f", {different} of them different" if different < settings.samples else ""
    return f"{settings.samples} prompts{repeated}; completions per prompt: {settings.best_of}"
