"""Pairs of completions, ranked by a reward: `tokencredit pairs`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from tokencredit.distributed.processes import Processes
from tokencredit.errors import RunStopped
from tokencredit.runs.folder import write_file
from tokencredit.runs.untrusted import visible
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.settings.run_kind import ModelSource
from tokencredit.text.data.prompts import PromptBatch, Prompts, load_prompts
from tokencredit.text.evaluation import describe, load_pipeline
from tokencredit.text.models.model_loading import max_prompt_length
from tokencredit.text.models.run_models import load_source
from tokencredit.text.pipeline import Pipeline
from tokencredit.text.ppo_setup import build_pipeline
from tokencredit.tools.scoring_options import SAMPLING, PairsOptions

COUNTS = (
    *("groups", "completions", "truncated", "not_finite", "unscored", "duplicate_completions", "ties"),
    *("within_margin", "duplicate_pairs", "groups_without_pair", "pairs", "flipped"),
)
"""Counts of `Pairs`, in the order of sampling."""


@dataclass
class Pairs:
    """Rows of preferences, and counts of everything that was sampled and left out."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTS, 0)))
    _seen: set[tuple[str, frozenset[str]]] = field(default_factory=set)

    def add(
        self,
        batch: PromptBatch,
        completions: Sequence[str],
        truncated: Sequence[bool],
        rewards: Sequence[float | None],
        options: PairsOptions,
        noise: torch.Generator,
    ) -> None:
        """Add the pairs of groups of `options.samples` consecutive completions of one prompt.

        Batch, completions, `truncated` and rewards have one row per completion: `truncated` is true for a text that
        reached the longest length, and has no end; the reward is None where no term applies.
        """
        answers, questions, ranked = batch.answers(completions), batch.questions(), options.pairs != "unranked"
        names = ("chosen", "rejected") if ranked else ("a", "b")
        for first in range(0, len(completions), options.samples):
            group = slice(first, first + options.samples)
            pairs, left_out = choose(completions[group], rewards[group], options.pairs, options.margin)
            self.counts.update(left_out)
            before, text = len(self.rows), batch.texts[first]
            prompt = text if isinstance(batch.prompts[first], str) else questions[first]
            for one, other in pairs:
                better, worse = first + one, first + other
                key = text, frozenset((completions[better], completions[worse]))
                if key in self._seen:
                    self.counts["duplicate_pairs"] += 1
                    continue
                self._seen.add(key)
                flip = ranked and bool(torch.rand((), generator=noise) < options.noise)
                sides = dict(zip(names, (worse, better) if flip else (better, worse), strict=True))
                row: dict[str, Any] = {"prompt": prompt} | {name: answers[side] for name, side in sides.items()}
                row |= {f"{name}_truncated": truncated[side] for name, side in sides.items()}
                if ranked:
                    row |= {f"reward_{name}": rewards[side] for name, side in sides.items()}
                    row |= {"flipped": flip} if options.noise else {}
                self.rows.append(row)
                self.counts["flipped"] += flip
            self.counts["groups"] += 1
            self.counts["pairs"] += len(self.rows) - before
            self.counts["groups_without_pair"] += len(self.rows) == before


def choose(
    completions: Sequence[str], rewards: Sequence[float | None], kind: str, margin: float
) -> tuple[list[tuple[int, int]], Counter[str]]:
    """Pairs of the completions of one prompt: indices of the better and the worse one.

    Of equal texts only the first counts. Completions without a reward, or with one that is not finite, are left out.

    Args:
        completions: texts.
        rewards: one per completion; None for no reward.
        kind: `best-worst` for one pair at most, `all`, or `unranked` for the first two completions, whatever their
            rewards.
        margin: least difference of the rewards of a pair; equal rewards never make one.

    Returns:
        The pairs, and counts of what was left out: `unscored`, `not_finite`, `duplicate_completions`, and of pairs
        `ties` and `within_margin`.
    """
    scored = {row: reward for row, reward in enumerate(rewards) if reward is not None}
    finite = {row: reward for row, reward in scored.items() if isfinite(reward)}
    distinct = {completions[row]: row for row in reversed(finite)}
    ranked = sorted(distinct.values(), key=lambda row: (-finite[row], row))
    counts = Counter(
        unscored=len(rewards) - len(scored),
        not_finite=len(scored) - len(finite),
        duplicate_completions=len(finite) - len(ranked),
    )
    candidates = list(combinations(ranked, 2))
    if kind == "unranked":
        return candidates[:1], counts
    if kind == "best-worst" and candidates:
        candidates = [(ranked[0], ranked[-1])]
    gaps = [finite[better] - finite[worse] for better, worse in candidates]
    counts.update(ties=sum(gap == 0 for gap in gaps), within_margin=sum(0 < gap < margin for gap in gaps))
    return [pair for pair, gap in zip(candidates, gaps, strict=True) if gap > 0 and gap >= margin], counts


def collect_pairs(
    pipeline: Pipeline, prompts: Prompts, sampling: SamplingConfig, options: PairsOptions, seed: int
) -> Pairs:
    """Sample groups of completions, one per prompt in their order, score and pair them.

    The random numbers of a group do not depend on `options.batch_size`, and label noise has its own, of the same seed.

    Raises:
        RunStopped: a reward could not be computed, or a log-prob is not finite.
    """
    groups, per_batch = options.groups or len(prompts.kept), max(options.batch_size // options.samples, 1)
    uniforms, noise = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(2 * seed + 1)
    pairs = Pairs()
    console = Console(stderr=True)
    starts, hidden = range(0, groups, per_batch), not console.is_terminal
    for first in track(starts, "sampling", console=console, transient=True, disable=hidden):
        count = min(per_batch, groups - first)
        batch = prompts.batch(first * options.samples, count * options.samples, options.samples)
        shape = (options.samples, sampling.max_new_tokens)
        numbers = torch.cat([torch.rand(shape, generator=uniforms) for _ in range(count)])
        if options.pairs == "unranked":
            sampled = pipeline.sample(batch, sampling, numbers, options.samples)
            rollout, completions = sampled.rollout, sampled.completions
            rewards: list[float | None] = [0.0] * len(completions)
        else:
            scored = pipeline.collect(batch, sampling, numbers, options.samples)
            rollout, completions = scored.rollout, scored.completions
            # No reward where no term applies.
            applies = [any(x is not None for x in values) for values in zip(*scored.terms.values(), strict=True)]
            rewards = [x if some else None for x, some in zip(scored.total_scores().tolist(), applies, strict=True)]
        pairs.counts["completions"] += len(completions)
        pairs.counts["truncated"] += int(rollout.truncated.sum())
        pairs.add(batch, completions, rollout.truncated.tolist(), rewards, options, noise)
    return pairs


def write_pairs(
    source: ModelSource, which: str, reference: ModelSource | None, options: PairsOptions, out: Path
) -> Pairs:
    """Sample, score and pair completions; write the rows as JSON lines, and beside them settings and counts as JSON.

    `source`, `which` and `reference` are as in `text.evaluation.evaluate_source`; `out` is the file of the rows.

    Raises:
        ConfigError: a model, prompts or rewards cannot be loaded.
        RunStopped: a reward could not be computed, or no pair was found.
    """
    config, processes = source.config, Processes()
    if options.pairs == "unranked":
        models = load_source(source, which, processes)
        pipeline = build_pipeline(config, models, [], processes)
    else:
        models, pipeline = load_pipeline(source, which, reference, processes)
        pipeline = replace(pipeline, finite=False)
    sampling = config.rollout
    limit = max_prompt_length(models.policy.lm, sampling.max_new_tokens, config.ppo.micro_batch_tokens)
    prompts = load_prompts(config.prompts, models.tokenizer, seed=config.seed, limit=limit)
    for line in filter(None, [*models.notes, prompts.dropped()]):
        print(visible(line))
    pairs = collect_pairs(pipeline, prompts, sampling, options, config.seed)
    counts = {name: pairs.counts[name] for name in COUNTS}
    if not pairs.rows:
        reasons = ", ".join(f"{name} {number}" for name, number in counts.items() if number)
        raise RunStopped(f"no pair was found ({reasons}); raise --samples or --temperature, or lower --margin")
    about = describe(source, which, reference, config.prompts) | {
        "sampling": {name: getattr(sampling, name) for name in SAMPLING},
        "options": {
            name: getattr(options, name) for name in ("samples", "groups", "pairs", "margin", "noise", "batch_size")
        },
        "counts": counts,
    }
    if options.pairs == "unranked":
        about["reward"] = []
    write_file(out, "".join(json.dumps(row, allow_nan=False) + "\n" for row in pairs.rows))
    write_file(out.with_suffix(".json"), json.dumps(about, indent=2, allow_nan=False) + "\n")
    for name, number in counts.items():
        if number:
            print(f"{name:<24} {number}")
    return pairs
