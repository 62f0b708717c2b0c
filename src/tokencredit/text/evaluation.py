"""Evaluation: what a policy writes on held-out prompts, measured with settings of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokencredit.core.kl import k1
from tokencredit.errors import ConfigError
from tokencredit.runs.console import visible
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import EvalConfig
from tokencredit.text.batch import distinct_over_processes, token_pairs
from tokencredit.text.data.prompts import Prompts, load_prompts
from tokencredit.text.engines.sampling import Rollout, sample
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.loading import end_ids, load_language_model, room_for_prompts
from tokencredit.text.rewards.terms import Term, build_terms, score, term_metrics

SEED_OFFSET = 1_000_003
"""Keeps evaluation's random numbers apart from training's; they are the same in every evaluation of a run."""


def evaluate(
    policy: ActorCritic,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int],
    terms: Sequence[Term],
    prompts: Prompts,
    settings: EvalConfig,
    *,
    seed: int,
    ref_logprobs: Callable[[Rollout], Tensor | None],
    accelerator: Accelerator,
) -> dict[str, float]:
    """Sample `best_of` completions of each of the first `samples` prompts and measure them.

    Returns:
        `eval/reward`, `eval/best` (mean over prompts of the best reward of their completions), each term, `eval/kl`
        (nats a sequence, if there is a reference), `eval/length`, `eval/distinct` (share of different completions) and
        `eval/distinct_2` (share of different pairs of neighbouring tokens).
    """
    share = -(-settings.samples // accelerator.num_processes) * settings.best_of
    first = share * accelerator.process_index
    generator = torch.Generator().manual_seed(seed + SEED_OFFSET)
    uniforms = torch.rand(share * accelerator.num_processes, settings.max_new_tokens, generator=generator)
    batch = prompts.batch(first, share, settings.best_of)
    device = accelerator.device
    rollout = sample(
        policy,
        batch.ids.to(device),
        batch.mask.to(device),
        uniforms[first : first + share].to(device),
        settings,
        tokenizer,
        end_ids,
        settings.best_of,
    )
    reference = ref_logprobs(rollout)
    completions = rollout.texts(tokenizer)
    columns = batch.columns | rollout.columns(reference)
    rated = score(terms, batch.prompts, batch.answers(completions), columns, rollout.mask.sum(1).tolist())
    totals = torch.tensor(rated.totals)
    if rated.dense is not None:
        totals += torch.tensor([sum(row) for row in rated.dense])

    def reduce(tensor: Tensor) -> Tensor:
        return accelerator.reduce(tensor, "sum")

    all_pairs, pairs, _ = token_pairs(rollout.response_ids, rollout.mask)
    sums = [len(totals), totals.sum(), totals.view(-1, settings.best_of).amax(1).sum(), rollout.mask.sum()]
    sums += [len(set(zip(batch.texts, completions, strict=True))), all_pairs]
    sums += [0 if reference is None else k1(rollout.logprobs, reference, rollout.mask).sum()]
    rows, reward, best, tokens, distinct, all_pairs, kl = reduce(
        torch.tensor([float(x) for x in sums], device=device)
    ).tolist()
    metrics = {
        "reward": reward / rows,
        "best": best / (rows / settings.best_of),
        **term_metrics(rated.terms, reduce, device),
        "length": tokens / rows,
        "distinct": distinct / rows,
        "distinct_2": distinct_over_processes(pairs, accelerator) / max(all_pairs, 1),
    }
    if reference is not None:
        metrics["kl"] = kl / rows
    return {f"eval/{name}": value for name, value in metrics.items()}


@torch.no_grad()
def evaluate_run(run: Path, config: PPOConfig, which: str) -> dict[str, float]:
    """Measure a run's policy as the run's own evaluations did, print a line a metric, and return them.

    Args:
        run: the run's folder.
        config: its configuration.
        which: `policy`, `best`, or `base` for the model it started from.

    Raises:
        ConfigError: the run has no such policy.
    """
    if which != "base" and not (run / which).is_dir():
        raise ConfigError(f"{str(run)!r} has no {which}/; a run writes policy/ at its end, and best/ with eval.every")
    name = config.model.name if which == "base" else str(run / which)
    lm, tokenizer = load_language_model(replace(config.model, name=name))
    base = ActorCritic(load_language_model(config.model)[0]) if config.kl.coef > 0 else None

    def ref_logprobs(rollout: Rollout) -> Tensor | None:
        return None if base is None else base(**rollout.inputs(), temperature=config.eval.temperature).logprobs

    prompts = load_prompts(
        config.eval.prompts or config.prompts,
        tokenizer,
        seed=config.seed,
        room=room_for_prompts(lm, config.eval.max_new_tokens),
        group="prompts" if config.eval.prompts is None else "eval.prompts",
    )
    if left_out := prompts.left_out():
        print(visible(left_out))
    metrics = evaluate(
        ActorCritic(lm),
        tokenizer,
        end_ids(lm, tokenizer),
        build_terms(config.reward, "cpu"),
        prompts,
        config.eval,
        seed=config.seed,
        ref_logprobs=ref_logprobs,
        accelerator=Accelerator(cpu=True),
    )
    for metric, value in metrics.items():
        print(f"{visible(metric.removeprefix('eval/')):<24} {value:.4g}")
    return metrics
