"""Audit a policy's credit: fresh completions or episodes, their true values, and the advantages of every estimator."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from tokencredit.audit.agreement import judge, true_numbers
from tokencredit.audit.estimates import Variant, label, variants
from tokencredit.audit.fresh_randomness import NotReplayed
from tokencredit.audit.truth import STREAM, Returns, Truth, generator, rounds, spread
from tokencredit.audit.verdict import remedy
from tokencredit.core.estimator_table import EstimatorFunction
from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError, EngineLost, RunStopped
from tokencredit.learn.rng import isolated
from tokencredit.report.notebook import AuditRecord
from tokencredit.runs.folder import AUDIT
from tokencredit.runs.loop import AT_END, audit_at_end
from tokencredit.runs.recorder import RunRecord
from tokencredit.runs.summary import History, Summary
from tokencredit.settings.training import AdvantageConfig, AuditConfig
from tokencredit.text.audit.continuations import Continuations, States, episode_start, run_in_all, states_of
from tokencredit.text.audit.cost import PLANNED, Cost, Meter, Pace, expected
from tokencredit.text.batch import Batch
from tokencredit.text.credit import Credit, ScoreScale
from tokencredit.text.data.prefixes import scoring
from tokencredit.text.data.prompts import Prompts
from tokencredit.text.data.tasks import Tasks
from tokencredit.text.pipeline import Pipeline, Stages, UnusableBatch
from tokencredit.user_code.parts import inputs_of, load_estimator

GROUP = 8
"""Group size of group estimators in an audit on request of a run with one completion per prompt."""


class AuditTooSmall(RunStopped):
    """A limit of an audit leaves no continuation."""


@dataclass(frozen=True)
class Audit:
    """Audited completions with true values and the advantages of every estimator, `[completions, time]` each."""

    batch: Batch
    """Whole groups of completions; `rows` are audited."""
    rows: list[int]
    truth: Truth
    values: Tensor | None
    """The critic's values; None without a critic."""
    advantages: Mapping[str, Tensor]
    """Advantages by the estimator's label; the first is the run's own."""
    continuations: float
    """Mean number of continuations per state."""
    limits: Mapping[str, float]
    """Limits that ended this process's audit, by their settings."""
    cost: Cost
    """Of this process."""
    scaled: bool
    """The shown advantages are in deviations of their group."""

    def judge(self, processes: Processes) -> dict[str, Any]:
        """The findings of `audit.agreement` on the completions of all processes, `critic`, `credit` and `metrics`, and
        their reward `calls` and `tokens`."""
        truth, labels = vars(self.truth), list(self.advantages)
        own = [*truth.values(), *self.advantages.values(), *([] if self.values is None else [self.values])]
        parts = iter(gather(processes, own))
        gathered = Truth(**{name: next(parts) for name in truth})
        advantages = {label: next(parts) for label in labels}
        counts = torch.tensor([self.cost.calls, self.cost.tokens], dtype=torch.float64, device=processes.device)
        calls, tokens = map(int, processes.sum(counts).tolist())
        return judge(gathered, next(parts, None), advantages, self.scaled) | {"calls": calls, "tokens": tokens}

    def samples(self, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
        """This process's completions as records for samples.jsonl, with the true values of each token."""
        samples = self.batch.samples(tokenizer, self.rows)
        return [sample | true_numbers(self.truth, row, len(sample["tokens"])) for row, sample in enumerate(samples)]

    def record(self, number: int, settings: AuditConfig, pipeline: Pipeline) -> dict[str, Any]:
        """The contents of audit.json: the findings, and this process's samples."""
        return {
            "iteration": number,
            "settings": {name: getattr(settings, name) for name in ("completions", "continuations", "states")},
            "continuations": self.continuations,
            "limits": dict(self.limits),
            "seconds": self.cost.seconds,
            "samples": [{"iteration": number, **sample} for sample in self.samples(pipeline.tokenizer)],
        } | self.judge(pipeline.processes)


@dataclass(frozen=True)
class CompletionAuditor:
    """Measures the true credit of completions, sampled and scored as in the run."""

    pipeline: Pipeline
    credit: Credit
    """The run's credit, which audits do not modify."""
    prompts: Prompts | Tasks
    settings: AuditConfig
    """Size of the audit; `every` is not read."""
    group: int = 1
    """Minimum group size of group estimators; the first completion of each group is audited."""
    other: str | EstimatorFunction | None = None
    """An estimator that is compared besides the run's own and ours."""

    def beside(self, estimator: Any) -> CompletionAuditor:
        """An auditor that compares a function or `FILE.py:NAME` too, if given; `ConfigError` if it cannot work."""
        if estimator is None:
            return self
        pipeline = self.pipeline
        # An estimator reads scores of the text alone, which those with the usual end are not.
        bare = pipeline.prefix_every and scoring(pipeline.terms) and not self.credit.prefixes.end
        inputs = [name for name in inputs_of(self.credit.args) if name != "prefix_scores" or bare]
        # It gets the run's settings, and need not read those that the run's own estimator reads.
        loaded = load_estimator(replace(self.credit.args.advantage, estimator=estimator, kwargs={}), inputs)
        other = AdvantageConfig(estimator=loaded.estimator)
        other.check_critic(self.credit.args.critic)
        entropy = pipeline.entropy or "entropy" in other.reads().inputs
        return replace(self, pipeline=replace(pipeline, entropy=entropy), other=other.estimator)

    def __post_init__(self) -> None:
        """Raise `ConfigError` for limits that exclude the audits of training."""
        if self.settings.every:
            self._meter()

    def _meter(self) -> Meter:
        rollout = self.credit.args.rollout
        return Meter(self.settings, self.pipeline, max(self.group, rollout.per_prompt), rollout.max_new_tokens)

    @isolated()  # a reward may draw from the global generators
    def audit(self, number: int) -> Audit:
        """Audit fresh completions; each iteration `number` has its own.

        The run's score scale and running means are left unchanged.

        Raises:
            UnusableBatch: a log-probability, KL, value or reward is not finite, in any process.
            RewardError: a reward could not be computed.
            NotReplayed: an environment answers otherwise when an episode is replayed.
        """
        # Fresh completions in whole groups, seeded by the iteration and the process.
        args, processes, meter = self.credit.args, self.pipeline.processes, self._meter()
        group = max(self.group, args.rollout.per_prompt)
        place = number * processes.count + processes.rank
        random = generator(STREAM, args.seed, place)
        scored = self._collect(place, group, random)
        meter.tokens = int(scored.rollout.mask.sum())
        # Their credit, by a copy of the run's: its running means stay as they are. The configuration's check requires
        # a batch size divisible by the group size.
        groups = replace(args.rollout, per_prompt=group, batch_size=group * args.rollout.batch_size)
        credit = Credit(replace(args, rollout=groups), self.credit.reduce)
        credit.load_state_dict(self.credit.state_dict())
        credit.prefixes.weight = min(args.rollout.batch_size / (len(scored.scores) * processes.count), 1.0)
        batch, _ = credit.give(scored, fit=False)
        credit.baseline.load_state_dict(self.credit.baseline.state_dict())  # as before this batch
        # Their truth, from continuations of the first completion of each group.
        scale, rows = credit.score_scale(scored.scores), torch.arange(0, len(scored.scores), group)
        returns, lengths = Returns(scored.rollout.mask[rows]), scored.rollout.response_lengths().cpu()[rows]
        last = credit.returns(scored, scale).cpu()[rows, lengths - 1]
        most = args.rollout.batch_size // processes.count
        sampler = Continuations.of(self.pipeline, credit, scored, random, most)
        with self.pipeline.held():
            run_in_all(processes, scored, lambda: self._sample(returns, last, sampler, scored, rows, meter))
        continued = returns.counts[returns.counts > 0]
        if processes.any(not len(continued)):
            ended: dict[str, float] = {}
            for own in processes.texts(json.dumps(meter.ended_by)):
                ended |= json.loads(own)
            limits = " and ".join(f"audit.{name} is {limit:g}" for name, limit in ended.items())
            raise AuditTooSmall(f"{limits}, which leaves no continuation; raise it, or lower audit.completions")
        values = batch.rollout.values
        return Audit(
            batch,
            rows.tolist(),
            returns.truth(last, lengths),
            None if values is None else values.where(batch.valued, torch.nan).cpu()[rows],
            {label: x.cpu()[rows] for label, x in self._estimates(credit, batch, scale, group)},
            float(continued.mean()),
            meter.ended_by,
            Cost(meter.calls, meter.tokens, time.perf_counter() - meter.started),
            args.advantage.estimator == "group_relative" and args.advantage.scale,
        )

    def record(
        self, number: int, settings: AuditConfig, rows: Sequence[Mapping[str, Any]], say: Callable[[str], None]
    ) -> dict[str, Any]:
        """An audit of this size as audit.json holds it; `say` is called with its cost, by the run's rows of metrics.

        Raises as `audit`.
        """
        group = GROUP if self.credit.args.rollout.per_prompt == 1 else self.group
        auditor = replace(self, settings=settings, group=group)
        say(f"this audit: about {auditor.expected(rows)}")
        return auditor.audit(number).record(number, settings, self.pipeline)

    def write(self, record: RunRecord, settings: AuditConfig | None) -> AuditRecord:
        """Audit the policy as it is now, of all states by default: writes, shows and returns the audit."""
        if not record.history:
            raise ConfigError("there is nothing to audit: no iteration is done")
        size = settings or replace(self.settings, states=None)
        audit = self.record(len(record.history), size, record.history, record.screen.say)
        if record.main:
            record.folder.write_json(AUDIT, audit)
            record.screen.audit(audit, remedy(audit, "trainer.audit", record.history))
        return AuditRecord(audit)

    def cost(self, history: History) -> float:
        """Seconds per completion of an audit at the end; raises `ConfigError` if this run cannot be audited."""
        if self.credit.args.sharding.sampling == "layers":
            raise ConfigError("each process samples continuations of its own; set sharding.sampling: gathered")
        return self._each(history).seconds or 0.0

    def _each(self, history: History) -> Cost:
        """The planned cost per completion of an audit at the end."""
        return replace(self, settings=PLANNED).expected(history, completions=1)

    def expected(self, rows: Sequence[Mapping[str, Any]], completions: int | None = None) -> Cost:
        """The work of an audit, or of one of so many `completions`, by the last of a run's rows of metrics."""
        rollout, pipeline = self.credit.args.rollout, self.pipeline
        pace = Pace.of(rows, rollout.batch_size, rollout.max_new_tokens)
        if isinstance(self.prompts, Tasks):  # episodes are replayed to the state
            pace = pace._replace(continued=1.0)
        every = pipeline.prefix_every if scoring(pipeline.terms) else 0
        return expected(self.settings, max(self.group, rollout.per_prompt), pace, every, completions)

    def at_end(self, summary: Summary, stages: Stages, record: RunRecord) -> None:
        """Audit the final policy, as `runs.loop.audit_at_end` allows."""

        def audit(completions: int, seconds: float) -> dict[str, Any]:
            each = self._each(record.history)
            limits = {name: getattr(self.settings, name) for name in ("calls", "tokens")}
            for name, limit in limits.items():
                if limit is not None and (completions := min(completions, int(limit / getattr(each, name)))) < 2:
                    raise ConfigError(f"audit.{name} is {limit}, and each completion needs {getattr(each, name):.0f}")
            size = AuditConfig(0, AT_END.continuations, AT_END.states, seconds, completions=completions, **limits)
            auditor = replace(self, settings=size)
            record.screen.say(f"audit at the end: about {auditor.expected(record.history)}")
            return auditor._staged(summary.iterations, stages)

        audit_at_end(record, summary, self.settings, lambda: self.cost(record.history), audit)

    def measure(self, number: int, stages: Stages, record: RunRecord) -> dict[str, float]:
        """Audit while training: writes audit.json, returns metrics; none if a number is not finite."""
        if number == self.settings.every:
            record.screen.say(f"each audit: about {self.expected(record.history)}")
        try:
            audit = self._staged(number, stages)
        except (UnusableBatch, EngineLost, NotReplayed, AuditTooSmall) as error:
            record.event(f"an audit is skipped: {error}")
            return {}
        if self.pipeline.processes.main:
            record.folder.write_json(AUDIT, audit)
        metrics: dict[str, float] = audit["metrics"]
        return metrics

    def _staged(self, number: int, stages: Stages) -> dict[str, Any]:
        """An audit as audit.json holds it, as a stage of the run, whose callbacks may add metrics."""
        with stages("audit") as results:
            audit = self.audit(number).record(number, self.settings, self.pipeline)
            results["metrics"] = audit["metrics"]
        return audit

    def _collect(self, place: int, group: int, random: torch.Generator) -> Batch:
        args = self.credit.args
        count = -(-self.settings.completions // self.pipeline.processes.count) * group
        uniforms = torch.rand(count, args.rollout.max_new_tokens, generator=random)
        prompts, bootstrap = self.prompts.batch(place * count, count, group), args.advantage.bootstrap
        return self.pipeline.collect(prompts, args.rollout, uniforms, group, values=True, bootstrap=bootstrap)

    def _sample(
        self, returns: Returns, last: Tensor, sampler: Continuations, scored: Batch, rows: Tensor, meter: Meter
    ) -> None:
        """Sample continuations into `returns` up to the configured number or limit.

        Returns `last` from the last token on become NaN where they depend on an environment's chance.
        """
        random, positions = sampler.generator, []
        chance = self._replayed(scored, rows.tolist())
        last[torch.tensor(chance)] = torch.nan
        # Independent positions for each row; shared ones would correlate rows, which the confidence intervals exclude.
        for acted, by_chance in zip(scored.rollout.mask.cpu()[rows], chance, strict=True):
            tokens = acted.nonzero()[:, 0].tolist()
            chosen = [tokens[i] for i in spread(len(tokens), self.settings.states, random)]
            positions.append(around(chosen, tokens[-1] + 1 + by_chance))
        states = states_of(positions)
        for count in rounds(self.settings.continuations, limited=meter.limited):
            for part in sampler.returns(scored, States(rows[states.rows], states.at), count, meter.allows):
                returns.add(torch.searchsorted(rows, part.states.rows), part.states.at, part.values, part.actions)
                meter.tokens += part.tokens

    def _replayed(self, scored: Batch, rows: Sequence[int]) -> list[bool]:
        """Check that episodes can be replayed; true for those whose environment holds random number generators."""
        player = self.pipeline.player
        if scored.episodes is None or player is None:
            return [False] * len(rows)
        after = scored.rollout.mask.shape[1] + 1  # whole episodes, with their last answers
        transcripts, _, replayed = player.replay([episode_start(scored, row, after) for row in rows])
        player.environments.release(transcript.episode for transcript in transcripts)
        return [answers.random for answers in replayed]

    def _estimates(self, credit: Credit, scored: Batch, scale: ScoreScale, group: int) -> Iterator[tuple[str, Tensor]]:
        """Label and unwhitened advantages of each estimator."""
        args, values = credit.advantage_now(), scored.rollout.values
        options, texts = args.options(), scored.dense is None and scored.bootstrap is None
        groups = texts and group > 1
        estimators = variants(args.estimator, options, values=values is not None, texts=texts, groups=groups)
        if self.other is not None:
            estimators.setdefault(label(self.other, options), Variant(self.other, options))
        for name, variant in estimators.items():
            rollout = replace(scored.rollout, values=values if variant.critic else None)
            estimator = replace(args, **{**variant.options, "estimator": variant.name})
            yield name, credit.advantages(replace(scored, rollout=rollout), scale, estimator)


def around(tokens: list[int], length: int) -> list[int]:
    """Positions of the states before and after these tokens of a completion that are below `length`."""
    return sorted({at for token in tokens for at in (token, token + 1) if at < length})


def gather(processes: Processes, tensors: list[Tensor]) -> list[Tensor]:
    """Concatenate tensors `[completions, time]` over all processes, padded with NaN."""
    if processes.count == 1:
        return tensors
    longest = int(processes.max(torch.tensor(tensors[0].shape[1], device=processes.device)))
    padded = [pad(x.double(), (0, longest - x.shape[1]), value=torch.nan) for x in tensors]
    return list(processes.gather(torch.stack(padded, dim=1).to(processes.device)).cpu().unbind(1))
