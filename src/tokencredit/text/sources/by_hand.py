"""The loop by hand: a trainer's `sample`, `score` and `learn`, over the parts and the run loop that `train` uses."""

from __future__ import annotations

import atexit
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from inspect import GEN_CLOSED, getgeneratorstate
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError, RunStopped, quoted
from tokencredit.learn import rng
from tokencredit.runs.loop import State, Steps, Trainer, steps
from tokencredit.runs.summary import Summary
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.text.batch import EMPTY, Batch
from tokencredit.text.credit import Credit
from tokencredit.text.data.prompts import PromptBatch, Prompts
from tokencredit.text.data.rollout import Rollout, padded
from tokencredit.text.data.stream import BatchStream
from tokencredit.text.models.model_loading import max_prompt_length
from tokencredit.text.pipeline import Pipeline, Stages, no_stage
from tokencredit.text.rewards.calls import Term
from tokencredit.text.rewards.terms import score
from tokencredit.text.rollout_passes import ReferenceOutputs, evaluate_rollout

NO_REWARD = "reward_funcs is [], for a loop by hand whose learn(batch, scores) gets the scores"
ROUNDING = 1e-3
"""Largest log-prob that is taken for a rounded 0."""


class HandedScores:
    """The reward of a loop by hand: the scores that `learn` was given, for its batch alone."""

    scores: Any = None

    def __call__(self, prompts: Any, completions: Any, **columns: Any) -> Any:
        """The scores; `ConfigError` for completions of which there are none."""
        del prompts, completions, columns
        if self.scores is None:
            raise ConfigError(f"scores of these completions are not known: {NO_REWARD}")
        scores, self.scores = self.scores, None
        return scores


def _close(trainer: weakref.ref[LoopByHand]) -> None:
    """Close a run whose script has ended without closing it."""
    if (left := trainer()) is not None and not left.ended:
        left.close()


def flat_tensors(name: str, rows: Any) -> list[Tensor]:
    """The numbers of each completion as a flat tensor; `ConfigError` for anything else."""
    tensors: list[Tensor] = []
    try:
        tensors.extend(torch.as_tensor(row).flatten() for row in rows)  # keeps those before an error
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"completion {len(tensors)} has {name} that are no list of numbers: {error}") from error
    return tensors


def require_batch(batch: Any) -> None:
    """Raise `ConfigError` for anything but a batch."""
    if not isinstance(batch, Batch):
        raise ConfigError(f"batch is {quoted(batch)}; it must come from sample, adopt or score")


class LoopByHand(Trainer):
    """A trainer whose iterations may be done by hand.

    A run begins with the first call, or with `begin`. Its iterations are `learn`s, recorded as those of `train`; the
    last of `run.iterations`, a stopping rule or `close` ends it. As a context manager the trainer closes the run, or
    saves it after an error.

    Attributes:
        summary: the run's summary; None until it has ended.
    """

    args: PPOConfig
    loaded: PPOConfig
    processes: Processes
    pipeline: Pipeline
    credit: Credit
    stream: BatchStream
    stages: Stages
    tokenizer: Any
    rng: dict[str, Any]
    reported: set[str]
    rows: int
    """Completions of the batch, over all processes."""
    handed: Batch | None = None
    """The batch that `learn` was given."""
    last: Batch | None = None
    """The batch that was learned from last, with its credit."""
    remaining: Steps | None = None
    before: State | None = None
    """Resumable state other than weights when the iteration began, by hand its first `sample`; None once it changes
    weights."""

    def start(self, resume: bool) -> dict[str, Any]:
        """Arguments of `runs.loop.steps`."""
        raise NotImplementedError

    def _loop_state(self) -> State:
        """Resumable state other than the learner's."""
        raise NotImplementedError

    @property
    def ended(self) -> bool:
        """True once the run has ended, also by an error."""
        return self.remaining is not None and getgeneratorstate(self.remaining) == GEN_CLOSED

    @property
    def handed_scores(self) -> HandedScores | None:
        """The reward that `learn` is given; None if the run has one of its own."""
        own = [term.function for term in self.pipeline.terms if isinstance(term.function, HandedScores)]
        return own[0] if own else None

    def begin(self, resume_from_checkpoint: bool = False) -> int:
        """Begin the run, or resume it; returns the iterations done. Errors as in `train`."""
        if self.args.rollout.max_age:
            raise ConfigError("rollout.max_age samples ahead of train(); leave it out in a loop by hand")
        if self.remaining is not None:
            raise ConfigError("the run has begun already; make another trainer to resume it")
        self.remaining = steps(self, **self.start(resume_from_checkpoint), by_hand=True)
        try:
            done = self._advance()
        except ConfigError:  # it has not begun
            self.remaining = None
            raise
        atexit.register(_close, weakref.ref(self))
        return done

    def sample(self, prompts: Any = None, *, max_new_tokens: int | None = None) -> Batch:
        """Sample `rollout.per_prompt` completions of each prompt from the current policy.

        Args:
            prompts: texts, conversations, rows with columns for reward functions, or lists of token ids; this process's
                own, if there are several. None takes the next `rollout.batch_size` of the run's prompts.
            max_new_tokens: longest completion, at most `rollout.max_new_tokens`.

        Returns:
            A batch: its `completions` are texts, `rollout` has the tensors and `prompts` the prompts.
        """
        settings: RolloutConfig = self.loaded.rollout
        if max_new_tokens is not None:
            allowed = range(max(settings.min_new_tokens, 1), settings.max_new_tokens + 1)
            if type(max_new_tokens) is not int or max_new_tokens not in allowed:
                limits = f"{allowed[0]} to {allowed[-1]}, rollout.max_new_tokens"
                raise ConfigError(f"max_new_tokens is {quoted(max_new_tokens)}; it must be {limits}")
            settings = replace(settings, max_new_tokens=max_new_tokens)
        with self._running():
            self.before = self.before or self._loop_state()
            if prompts is None:
                rows, uniforms = self.stream.next_batch()
                uniforms = uniforms[:, : settings.max_new_tokens]
            else:
                rows = self._prompts(prompts, settings.max_new_tokens, settings.per_prompt)
                own, total = self._rows_of(len(rows.ids))
                uniforms = torch.rand(total, settings.max_new_tokens, generator=self.stream.generator)[own]
            draw = partial(self.pipeline.sample, rows, settings, uniforms, settings.per_prompt)
            batch = self.pipeline.drawn(draw, **self.drawing())
            return replace(batch, updates=len(self.record.history))

    def adopt(self, prompts: Any, completion_ids: Sequence[Any], logprobs: Sequence[Any] | None = None) -> Batch:
        """A batch of completions that were sampled elsewhere.

        Args:
            prompts: as in `sample`, one per completion.
            completion_ids: token ids of each completion, the end-of-sequence token included if it has one.
            logprobs: log-prob with which each token was drawn; None for those of the policy.
        """
        with self._running():
            rows = self._prompts(prompts, new=1)
            ids = flat_tensors("token ids", completion_ids)
            if wrong := [number for number, row in enumerate(ids) if row.is_floating_point() and len(row)]:
                raise ConfigError(f"completion {wrong[0]} has token ids that are no integers")
            ids = [row.long() for row in ids]
            drawn = None if logprobs is None else [row.float() for row in flat_tensors("logprobs", logprobs)]
            self._check_adopted(rows, ids, drawn)
            self.reported.add("completions")
            draw = partial(self._adopted, rows.to(self.pipeline.precision.device), ids, drawn)
            batch = self.pipeline.drawn(draw, **self.drawing())
            return replace(batch, updates=len(self.record.history))

    def score(self, batch: Batch) -> Batch:
        """The batch with reference log-probs and the scores of the run's reward, which `learn` then takes as it is.

        `total_scores()` of it are the scores, `[completions]`.
        """
        require_batch(batch)
        with self._running():
            return self.scored(self._by_current_policy(batch))

    def learn(self, batch: Batch, scores: Any = None) -> dict[str, float]:
        """Do an iteration on a batch: credit, update, records, and what else is due; returns its metrics.

        `reward` is NaN if the batch was skipped, since some of its numbers were not finite.

        Args:
            batch: from `sample`, `adopt` or `score`, of any size.
            scores: one number per completion, or a list of one per token; None for the run's own reward.

        Raises:
            ConfigError: the scores do not fit; nothing has changed.
            RunStopped: as in `train`.
        """
        given = self.handed_scores
        require_batch(batch)
        if scores is not None and given is None:
            names = ", ".join(term.name for term in self.pipeline.terms)
            raise ConfigError(
                f"learn got scores, and the run has a reward of its own, {names}: leave them out, or give PPOTrainer "
                "reward_funcs=[]"
            )
        if given is not None:
            if scores is None:
                raise ConfigError(f"learn got no scores, and {NO_REWARD}")
            self._check_scores(batch, scores)
            given.scores = scores
        self.last = None
        try:
            with self._running():
                self.handed = self._by_current_policy(batch)
                own, self.rows = self._rows_of(len(batch.completions))
                self.credit.first = own.start
            self._advance()
        finally:
            self.handed = None
            if given is not None:
                given.scores = None
        assert self.progress is not None
        return dict(self.progress[0])

    def close(self) -> Summary:
        """End the run, unless it has ended: checkpoint, policy, summary, page; returns the summary."""
        if self.summary is None:
            with self._running():
                pass
            self._advance("close()")
        assert self.summary is not None
        return self.summary

    def __enter__(self) -> LoopByHand:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self.remaining is not None and not self.ended:
            # Saves what was learned, and raises as `train` would; after Ctrl-C in a notebook it returns the summary.
            with self._own_rng(), suppress(StopIteration):
                self.remaining.throw(error)

    def drawing(self) -> dict[str, Any]:
        """Arguments of `Pipeline.drawn`."""
        return {"settings": self.loaded.rollout, "values": True, "stage": self.stages}

    def scored(self, batch: Batch) -> Batch:
        """The batch scored for training, unless it is."""
        if batch.scores is not EMPTY:
            return batch
        bootstrap = self.args.advantage.bootstrap
        return self.pipeline.scored(batch, **self.drawing(), bootstrap=bootstrap)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """A context in a run that has begun and not ended, with its own random numbers."""
        if self.remaining is None:
            self.begin()
        assert self.remaining is not None
        if self.ended:
            raise ConfigError(
                f"the run in {str(self.record.folder.path)!r} has ended, after {len(self.record.history)} of "
                f"{self.args.run.iterations} iterations (run.iterations); make another trainer, to resume it or anew"
            )
        with self._own_rng():
            yield

    @contextmanager
    def _own_rng(self) -> Iterator[None]:
        with rng.isolated():
            rng.set_random_state(self.rng)
            try:
                yield
            finally:
                self.rng = rng.random_state()

    def _advance(self, stopped_by: str | None = None) -> int:
        """Go on to the next iteration, or to the end; returns the iterations done."""
        assert self.remaining is not None
        with self._own_rng():
            try:
                return self.remaining.send(stopped_by)
            except StopIteration:
                return len(self.record.history)

    def _rows_of(self, count: int) -> tuple[slice, int]:
        """This process's rows among those of all processes, and their number."""
        counts = self.processes.gather(torch.tensor([count], device=self.processes.device)).tolist()
        first = sum(counts[: self.processes.rank])
        return slice(first, first + count), sum(counts)

    def _prompts(self, prompts: Any, new: int, repeat: int = 1) -> PromptBatch:
        """Prompts that leave room for `new` tokens as a batch, each `repeat` times."""
        config = self.loaded.prompts
        limit = max_prompt_length(self.pipeline.policy.lm, new, self.loaded.ppo.micro_batch_tokens)
        self._report_once("prompts", "prompts come from calls in Python, not from the configuration")
        if self.pipeline.player is not None:
            raise ConfigError("prompts are the environment's; call sample() without any, and adopt no completions")
        try:
            listed = [prompts] if isinstance(prompts, str) else [] if isinstance(prompts, Mapping) else list(prompts)
        except TypeError:  # as of a number, or a tensor without dimensions
            listed = []
        if not listed:
            raise ConfigError(
                f"prompts is {quoted(prompts)}; it must be a list of texts, conversations, rows or lists of token ids"
            )
        listed = [prompt if isinstance(prompt, Mapping) else {config.column: prompt} for prompt in listed]
        template = config.template if config.column not in listed[0] else None
        overlong = "error" if config.overlong == "drop" else config.overlong
        config = replace(config, template=template, overlong=overlong)
        batch = Prompts(listed, self.tokenizer, config, name="prompts", limit=limit).batch(0, len(listed))
        return batch.select([row for row in range(len(batch.ids)) for _ in range(repeat)]) if repeat > 1 else batch

    def _report_once(self, name: str, line: str) -> None:
        """Log a line, unless one of this name was logged."""
        if name not in self.reported:
            self.reported.add(name)
            self.record.event(line)

    def _check_adopted(self, rows: PromptBatch, ids: list[Tensor], logprobs: list[Tensor] | None) -> None:
        """Raise `ConfigError` unless prompts, completions and log-probs belong together."""
        room = max_prompt_length(self.pipeline.policy.lm, 0, self.loaded.ppo.micro_batch_tokens)
        group, lengths = self.loaded.rollout.per_prompt, rows.mask.sum(1).tolist()
        tokens = self.pipeline.policy.lm.config.get_text_config().vocab_size
        if self.loaded.off_policy.support == "truncated":
            raise ConfigError("off_policy.support truncated is for the engine's own draws; adopt needs support: full")
        for name, number in (("completions", len(ids)), ("lists of logprobs", len(logprobs or ids))):
            if number != len(rows.ids):
                raise ConfigError(f"there are {len(rows.ids)} prompts and {number} {name}; give one per prompt")
        for number, row in enumerate(ids):
            if not 0 < len(row) <= (room or math.inf) - lengths[number]:
                fit = f"with its prompt at most {room}, the model's context or ppo.micro_batch_tokens"
                raise ConfigError(f"completion {number} has {len(row)} tokens; it must have at least 1 and {fit}")
            if not 0 <= int(row.min()) <= int(row.max()) < tokens:
                raise ConfigError(f"completion {number} has a token id that is none of the {tokens} of the model")
            if logprobs is None:
                continue
            if len(logprobs[number]) != len(row):
                raise ConfigError(f"completion {number} has {len(row)} tokens and {len(logprobs[number])} logprobs")
            if bool((wrong := ~(logprobs[number].isfinite() & (logprobs[number] <= ROUNDING))).any()):
                shown = f"{float(logprobs[number][wrong][0]):g}"
                raise ConfigError(f"completion {number} has the logprob {shown}; log-probs are finite, and at most 0")
        texts = rows.contents()
        if len(texts) % group or any(texts[i] != texts[i - i % group] for i in range(len(texts))):
            raise ConfigError(
                f"rollout.per_prompt is {group}: give as many completions of each prompt, one after another"
            )

    def _adopted(self, rows: PromptBatch, ids: list[Tensor], logprobs: list[Tensor] | None) -> Batch:
        device, engine, settings = rows.ids.device, self.pipeline.engine, self.loaded.rollout
        mask = padded([torch.ones_like(row) for row in ids], torch.bool).to(device)
        tokens = padded(ids, torch.long, int(engine.end_ids[0])).to(device)
        ended = [settings.stop_at_eos and int(row[-1]) in engine.end_ids for row in ids]
        if settings.stop_at_eos and any(set(row[:-1].tolist()) & set(engine.end_ids) for row in ids):
            after = "completions go on after an end-of-sequence token, and all their tokens are learned from"
            self._report_once("ends", f"{after}: leave padding out")
        rollout = Rollout(
            prompt_ids=rows.ids,
            prompt_mask=rows.mask,
            response_ids=tokens,
            mask=mask,
            logprobs=torch.zeros(mask.shape, device=device),
            truncated=~torch.tensor(ended, device=device),
            behavior_logprobs=None if logprobs is None else padded(logprobs, torch.float32).to(device),
        )
        if settings.stop:
            rollout.truncated &= ~rollout.stopped(self.tokenizer, settings.stop)
        rollout = self._evaluated(rollout)
        return Batch(rows, rollout, rollout.texts(self.tokenizer), drawn_elsewhere=logprobs is not None)

    def _evaluated(self, rollout: Rollout) -> Rollout:
        """The rollout with log-probs of the current policy."""
        pipeline = self.pipeline
        with pipeline.precision.no_grad():
            given = pipeline.policy, rollout, self.loaded.rollout.temperature, pipeline.budget, pipeline.lockstep
            return evaluate_rollout(*given, entropy=rollout.age is not None)

    def _by_current_policy(self, batch: Batch) -> Batch:
        """The batch, with the age of its tokens and new log-probs, values and scores if it is older than the policy."""
        age = len(self.record.history) - batch.updates
        if self.pipeline.player is not None and (age or batch.scores is EMPTY):
            self.pipeline.player.environments.require(transcript.episode for transcript in batch.episodes or ())
        if age == 0:
            return batch
        rollout = batch.rollout
        if rollout.behavior_logprobs is None:
            rollout = replace(rollout, behavior_logprobs=rollout.logprobs)
        rollout = self._evaluated(replace(rollout, values=None, entropy=None, age=age * rollout.mask.long()))
        older = replace(batch, rollout=rollout, reference=ReferenceOutputs(), scores=EMPTY, prefixes=None, pending={})
        drawn = self.pipeline.drawn(lambda: older, **self.drawing() | {"stage": no_stage})
        return replace(drawn, updates=len(self.record.history))

    def _check_scores(self, batch: Batch, scores: Any) -> None:
        """Raise `ConfigError` unless there is a score for each completion, and not None for all in all processes."""
        reward, lengths = HandedScores(), batch.rollout.mask.sum(1).tolist()
        reward.scores = scores
        terms = [Term("scores", 1.0, reward, retries=0)]
        try:
            given = score(terms, batch.prompts.questions(), batch.answers(), {}, lengths, finite=False)
        except RunStopped as error:
            raise ConfigError(str(error)) from error
        if not self.processes.any(any(value is not None for value in given.terms["scores"])):
            raise ConfigError("scores are None for all completions; give a number for at least one")
