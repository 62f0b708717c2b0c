"""Pairs of completions, ranked by a reward: `tokencredit pairs`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import combinations
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from tokencredit.errors import RunStopped
from tokencredit.processes import Processes
from tokencredit.runs.folder import write_file
from tokencredit.runs.untrusted import visible
from tokencredit.settings.options import PairsOptions
from tokencredit.settings.source import Source
from tokencredit.settings.training import SamplingConfig
from tokencredit.text.data.prompts import Prompts, load_prompts
from tokencredit.text.evaluation import describe, load_pipeline
from tokencredit.text.models.loading import max_prompt_length
from tokencredit.text.pipeline import Pipeline, Scored, UnusableBatch

COUNTS = (
    "groups",
    "completions",
    "truncated",
    "not_finite",
    "unscored",
    "duplicate_completions",
    "ties",
    "within_margin",
    "duplicate_pairs",
    "groups_without_pair",
    "pairs",
    "flipped",
)
"""Counts of `Pairs`, in the order of sampling."""
SAMPLING_SETTINGS = [item.name for item in fields(SamplingConfig)]


@dataclass
class Pairs:
    """Rows of preferences, and counts of everything that was sampled and left out."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTS, 0)))
    _seen: set[tuple[str, frozenset[str]]] = field(default_factory=set)

    def add(self, scored: Scored, options: PairsOptions, noise: torch.Generator) -> None:
        """Add the pairs of groups of `options.samples` consecutive completions of one prompt."""
        rewards, questions = scored.totals().tolist(), scored.prompts.questions()
        answers, applies = scored.prompts.answers(scored.completions), list(zip(*scored.terms.values(), strict=True))
        self.counts["completions"] += len(rewards)
        self.counts["truncated"] += int(scored.rollout.truncated.sum())
        for first in range(0, len(rewards), options.samples):
            group = range(first, first + options.samples)
            scored_rows = [row for row in group if any(value is not None for value in applies[row])]
            self.counts["unscored"] += len(group) - len(scored_rows)
            pairs, left_out = choose(scored.completions, rewards, scored_rows, options.pairs, options.margin)
            self.counts.update(left_out)
            before, text = len(self.rows), scored.prompts.texts[first]
            prompt = text if isinstance(scored.prompts.prompts[first], str) else questions[first]
            for pair in pairs:
                key = text, frozenset(scored.completions[row] for row in pair)
                if key in self._seen:
                    self.counts["duplicate_pairs"] += 1
                    continue
                self._seen.add(key)
                flip = bool(torch.rand((), generator=noise) < options.noise)
                chosen, rejected = reversed(pair) if flip else pair
                row = {
                    "prompt": prompt,
                    "chosen": answers[chosen],
                    "rejected": answers[rejected],
                    "reward_chosen": rewards[chosen],
                    "reward_rejected": rewards[rejected],
                }
                self.rows.append(row | ({"flipped": flip} if options.noise else {}))
                self.counts["flipped"] += flip
            self.counts["groups"] += 1
            self.counts["pairs"] += len(self.rows) - before
            self.counts["groups_without_pair"] += len(self.rows) == before


def choose(
    completions: Sequence[str], rewards: Sequence[float], rows: Iterable[int], kind: str, margin: float
) -> tuple[list[tuple[int, int]], Counter[str]]:
    """Pairs of the completions of one prompt: indices of the better and the worse one.

    Of equal texts only the first counts, and completions whose reward is not finite are left out.

    Args:
        completions: texts.
        rewards: one per completion.
        rows: indices of the completions to pair.
        kind: `best-worst` for one pair at most, or `all`.
        margin: least difference of the rewards of a pair; equal rewards never make one.

    Returns:
        The pairs, and counts of what was left out: `not_finite`, `duplicate_completions`, and of pairs `ties` and
        `within_margin`.
    """
    rows = list(rows)
    finite = [row for row in rows if isfinite(rewards[row])]
    distinct = {completions[row]: row for row in reversed(finite)}
    ranked = sorted(distinct.values(), key=lambda row: (-rewards[row], row))
    candidates = list(combinations(ranked, 2))
    if kind == "best-worst" and candidates:
        candidates = [(ranked[0], ranked[-1])]
    gaps = [rewards[better] - rewards[worse] for better, worse in candidates]
    counts = Counter(
        not_finite=len(rows) - len(finite),
        duplicate_completions=len(finite) - len(ranked),
        ties=sum(gap == 0 for gap in gaps),
        within_margin=sum(0 < gap < margin for gap in gaps),
    )
    return [pair for pair, gap in zip(candidates, gaps, strict=True) if gap > 0 and gap >= margin], counts


def collect_pairs(
    pipeline: Pipeline,
    prompts: Prompts,
    sampling: SamplingConfig,
    options: PairsOptions,
    seed: int,
    *,
    progress: Callable[[Iterable[int], int], Iterable[int]] = lambda starts, _: starts,
) -> Pairs:
    """Sample groups of completions, score and pair them.

    The random numbers of a group do not depend on `options.batch_size`.

    Args:
        pipeline: engine and reward terms.
        prompts: one per group, in their order.
        sampling: sampling settings.
        options: settings of groups and pairs.
        seed: seed of sampling and of label noise, which has random numbers of its own.
        progress: wraps the first group of each batch, with their number.

    Raises:
        RunStopped: a reward could not be computed, or a log-prob is not finite.
    """
    groups, per_batch = options.groups or len(prompts.kept), max(options.batch_size // options.samples, 1)
    uniforms, noise = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(2 * seed + 1)
    pairs = Pairs()
    for first in progress(range(0, groups, per_batch), -(-groups // per_batch)):
        count = min(per_batch, groups - first)
        batch = prompts.batch(first * options.samples, count * options.samples, options.samples)
        shape = (options.samples, sampling.max_new_tokens)
        numbers = torch.cat([torch.rand(shape, generator=uniforms) for _ in range(count)])
        try:
            scored = pipeline.collect(batch, sampling, numbers, options.samples)
        except UnusableBatch as error:
            raise RunStopped(str(error)) from error
        pairs.add(scored, options, noise)
    return pairs


def write_pairs(source: Source, which: str, reference: Source | None, options: PairsOptions, out: Path) -> Pairs:
    """Sample, score and pair completions; write the rows as JSON lines, and beside them settings and counts as JSON.

    Args:
        source: the model, with the configuration of prompts and rewards.
        which: of a run, `policy`, `best`, or `base` for the model it started from.
        reference: reference model for rewards that read its log-probs; None for the run's own, if it has one.
        options: settings of sampling and pairing.
        out: file of the rows; that of the settings ends in .json instead.

    Raises:
        ConfigError: a model, prompts or rewards cannot be loaded.
        RunStopped: a reward could not be computed, or no pair was found.
    """
    config, processes = source.config, Processes()
    models, pipeline = load_pipeline(source, which, reference, processes)
    sampling = options.sampling(config.rollout)
    limit = max_prompt_length(models.policy.lm, sampling.max_new_tokens, config.ppo.micro_batch_tokens)
    prompts = load_prompts(config.prompts, models.tokenizer, seed=config.seed, limit=limit)
    for line in filter(None, [*models.notes, prompts.dropped()]):
        print(visible(line))
    pipeline = replace(pipeline, finite=False)
    pairs = collect_pairs(pipeline, prompts, sampling, options, config.seed, progress=shown)
    counts = {name: pairs.counts[name] for name in COUNTS}
    if not pairs.rows:
        reasons = ", ".join(f"{name} {number}" for name, number in counts.items() if number)
        raise RunStopped(f"no pair was found ({reasons}); raise --samples or --temperature, or lower --margin")
    about = describe(source, which, reference, config.prompts) | {
        "sampling": {name: getattr(sampling, name) for name in SAMPLING_SETTINGS},
        "options": {name: getattr(options, name) for name in ("samples", "groups", "pairs", "margin", "noise")},
        "counts": counts,
    }
    write_file(out, "".join(json.dumps(row, allow_nan=False) + "\n" for row in pairs.rows))
    write_file(out.with_suffix(".json"), json.dumps(about, indent=2, allow_nan=False) + "\n")
    for name, number in counts.items():
        if number:
            print(f"{name:<24} {number}")
    return pairs


def shown(starts: Iterable[int], total: int) -> Iterable[int]:
    """The batches, with a progress bar on a terminal."""
    console = Console(stderr=True)
    return track(starts, "sampling", total, console=console, transient=True, disable=not console.is_terminal)
