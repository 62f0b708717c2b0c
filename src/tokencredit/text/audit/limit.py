"""The share of the attainable: a run's objective beside the best that its reward allows at its KL price."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokencredit.core.rewards import attainable
from tokencredit.distributed.processes import Processes
from tokencredit.runs.summary import History
from tokencredit.settings.text import PPOConfig
from tokencredit.text.batch import Batch, text_hashes
from tokencredit.text.credit import Credit

NEAR = 0.1
"""Largest mean KL, in nats per sequence, of samples that are the reference's; in bfloat16 it is not 0."""


def obstacle(args: PPOConfig) -> str | None:
    """The setting for which the attainable means nothing, and why; None if there is none."""
    if args.several_turns():
        return "episodes of several turns depend on an environment, whose answers are not the policy's to choose"
    if not args.kl.coef:
        return "kl.coef is 0, and without a price the limit is the largest reward; set kl.coef"
    if args.kl.target is not None:
        return "kl.target adapts the KL price, and the limit is of one price; set kl.target: null"
    if args.score.normalize != "none":
        return f"score.normalize is {args.score.normalize}, which moves the scale of the reward; set it to none"
    if filters := args.rollout.filters():
        return f"rollout.{filters[0]} filters the samples, which then estimate no KL; leave it out"
    return None


def prompt_numbers(batch: Batch) -> Tensor:
    """A number of at least 0 per row, the same for rows of one prompt with the same columns, in every process."""
    return text_hashes(batch.prompts.texts, batch.prompts.contents())


def limit_metrics(
    batch: Batch, kl: float | None, credit: Credit, processes: Processes, history: History
) -> dict[str, float]:
    """The objective of a batch of this KL, reward − β · KL, and its share of the attainable, where they mean something.

    The first iteration's samples are the reference's. The estimate from them is in its metrics, after `limit/`, where
    later iterations and resumed runs find it.
    """
    args = credit.args
    if kl is None or obstacle(args) or args.rollout.max_age or batch.drawn_elsewhere or batch.episodes is not None:
        return {}
    totals = credit.totals(batch)
    reward, rows = processes.sum(torch.stack([totals.sum(), totals.new_tensor(len(totals))])).tolist()
    metrics = {"objective": reward / rows - args.kl.coef * kl}
    if not history and abs(kl) <= NEAR:
        metrics |= _estimate(totals, prompt_numbers(batch), args, processes)
    known = history[0] if history and not history.priced else metrics
    room = known.get("limit/objective", math.nan) - known.get("limit/start", math.nan)
    if room > 0:
        metrics["attainable"] = (metrics["objective"] - known["limit/start"]) / room
    return metrics


def _estimate(totals: Tensor, prompts: Tensor, args: PPOConfig, processes: Processes) -> dict[str, float]:
    """The attainable as metrics, from the reference's samples in all processes."""
    prompts = processes.gather(prompts.to(totals.device))
    totals = processes.gather(totals)[prompts >= 0]
    generator = torch.Generator().manual_seed(args.seed)
    best = attainable(totals, args.kl.coef, prompts[prompts >= 0], generator)
    if not math.isfinite(best.share(best.objective)):
        return {}
    names = ("objective", "low", "high", "reward", "kl", "start", "effective", "few", "pooled")
    return {f"limit/{name}": float(getattr(best, name)) for name in names}
