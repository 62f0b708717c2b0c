"""Evaluate a policy on held-out prompts, with its own sampling settings."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tokencredit.errors import ConfigError, RunStopped
from tokencredit.processes import Processes
from tokencredit.runs.resuming import given_in_python
from tokencredit.runs.untrusted import visible
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import EvalConfig
from tokencredit.text.batch import text_metrics
from tokencredit.text.data.prompts import Prompts
from tokencredit.text.models.run_models import load_run_models
from tokencredit.text.pipeline import Pipeline, Scored, UnusableBatch
from tokencredit.text.rewards.terms import build_terms, term_metrics
from tokencredit.text.setup import build_pipeline, evaluation_prompts

MEANINGS = {
    "best": "mean over prompts of the best completion's reward",
    "distinct": "share of distinct completions",
    "distinct_2": "share of distinct pairs of neighbouring tokens",
}
"""Meanings of metrics whose names do not tell, for the command."""
SEED_OFFSET = 1_000_003
"""Separates the seeds of evaluation from those of training; all evaluations of a run share their random numbers."""


def evaluate(pipeline: Pipeline, prompts: Prompts, settings: EvalConfig, *, seed: int) -> dict[str, float]:
    """Sample `best_of` completions for each of the first `samples` prompts and compute metrics.

    Returns:
        `eval/reward`, `eval/best` (mean over prompts of the best reward of their completions), each term, `eval/kl`
        (nats per sequence, if there is a reference model; `eval/log_ratio` if filters such as top_p bias the
        estimate), `eval/length`, `eval/distinct` (share of distinct completions) and `eval/distinct_2` (share of
        distinct token bigrams).

    Raises:
        UnusableBatch: a log-probability or reward is not finite, in any process.
    """
    processes = pipeline.processes
    share = -(-settings.samples // processes.count) * settings.best_of
    first = share * processes.rank
    generator = torch.Generator().manual_seed(seed + SEED_OFFSET)
    uniforms = torch.rand(share * processes.count, settings.max_new_tokens, generator=generator)
    batch = prompts.batch(first, share, settings.best_of)
    scored = pipeline.collect(batch, settings, uniforms[first : first + share], settings.best_of)
    return {f"eval/{name}": value for name, value in measure(scored, settings.best_of, processes).items()}


def measure(scored: Scored, best_of: int, processes: Processes) -> dict[str, float]:
    """Metrics of scored completions over all processes."""
    rollout, distance = scored.rollout, scored.kl()
    totals = scored.totals().cpu()
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
    return metrics


def evaluate_run(run: Path, config: PPOConfig, which: str) -> dict[str, float]:
    """Evaluate a run's policy like the run's own evaluations, print one line per metric, and return the metrics.

    Args:
        run: the run's folder.
        config: its configuration.
        which: `policy`, `best`, or `base` for the model it started from.

    Raises:
        ConfigError: the run has no such policy, or its rewards or prompts came from Python.
        RunStopped: a reward is not finite.
    """
    given = [name for name in given_in_python(run) if name in ("reward_funcs", "train_dataset", "eval_dataset")]
    if given:
        raise ConfigError(
            f"{str(run)!r} was begun in Python with {', '.join(given)}, which its folder does not hold; evaluate it "
            "there: PPOTrainer(…).evaluate(), or with eval.every during training"
        )
    processes = Processes()
    models = load_run_models(run, config, which, processes, reference=True)
    terms = build_terms(config.reward, processes.device)
    prompts = evaluation_prompts(config, models.policy.lm, models.tokenizer)
    for line in filter(None, [*models.notes, prompts.dropped()]):
        print(visible(line))
    try:
        metrics = evaluate(build_pipeline(config, models, terms, processes), prompts, config.eval, seed=config.seed)
    except UnusableBatch as error:
        raise RunStopped(str(error)) from error
    print(sizes(config.eval, len(prompts.kept)))
    for name, value in ((metric.removeprefix("eval/"), value) for metric, value in metrics.items()):
        print(f"{visible(name):<24} {value:<10.4g}{MEANINGS.get(name, '')}".rstrip())
    return metrics


def sizes(settings: EvalConfig, different: int) -> str:
    """Number of prompts and completions of an evaluation, as text; `different` prompts are repeated in turn."""
    repeated = f", {different} of them different" if different < settings.samples else ""
    return f"{settings.samples} prompts{repeated}; completions per prompt: {settings.best_of}"
