"""Training while sampling: batches are sampled ahead in the background, with weights a few updates old."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from tokencredit.errors import EngineLost, RunStopped
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.text.data.prompts import PromptBatch
from tokencredit.text.data.stream import BatchStream
from tokencredit.text.data.tasks import TaskBatch
from tokencredit.text.engines.background import BackgroundSampler
from tokencredit.text.engines.engine import Rollout
from tokencredit.text.engines.probe import TOLERANCE, TOLERANCE_BFLOAT16
from tokencredit.text.engines.requests import SEEDS, EngineFailure, RequestEngine
from tokencredit.text.pipeline import Pipeline, Sampled


class _Batch(NamedTuple):
    state: dict[str, Any]
    """State of the stream before the batch was drawn."""
    sampled: Future[Sampled]


class SamplesAhead:
    """Batches of a stream, sampled up to `max_age` updates before they are learned from."""

    def __init__(self, pipeline: Pipeline, stream: BatchStream, settings: RolloutConfig, *, recompute: bool = True):
        """Sample nothing yet.

        Args:
            pipeline: the run's; its engine computes log-probs and values when a batch is taken.
            stream: prompts and uniforms.
            settings: sampling settings, `max_age` and `stale_cache`.
            recompute: the update needs log-probs of the policy at its start.
        """
        self.run, self.stream, self.settings = pipeline, stream, settings
        engine = pipeline.engine
        assert isinstance(engine, RequestEngine)
        unread = not recompute and pipeline.reference is None and not settings.filters()
        self.scores = engine.shared_critic or not unread
        """True if a full pass of the policy scores each batch; false if nothing reads what it computes."""
        self.background: Pipeline | None = None
        """The pipeline that samples in the background; None before the first batch."""
        self.threads: ThreadPoolExecutor | None = None
        self.batches: deque[_Batch] = deque()
        self.proven = False
        """True once a batch has shown that the copy of the weights is the policy."""

    def next(self, later: int) -> Sampled:
        """The next batch, sampled to its end, with the age of each token, and scored by the policy if `scores`.

        After a failure of the sampler, batches that were not taken are sampled anew by another one.

        Args:
            later: number of batches that the run needs after this one; no more are begun.

        Raises:
            EngineLost: the sampler failed twice in a row.
            RunStopped: there is no room for a sampler, or its weights are not the policy's.
        """
        try:
            return self._next(later)
        except EngineLost as lost:
            self._drop(lost.__cause__ or lost)
        try:
            return self._next(later)
        except EngineLost as lost:
            raise EngineLost(f"after a new start, {lost}") from lost

    def _next(self, later: int) -> Sampled:
        """As `next`, without a second try."""
        while len(self.batches) <= min(self.settings.max_age, later):
            state = self.stream.state_dict()
            prompts, uniforms = self.stream.next_batch()
            self.background = self.background or self._start(prompts, uniforms)
            self.threads = self.threads or ThreadPoolExecutor(self.settings.max_age + 1, "sampling")
            self.batches.append(_Batch(state, self.threads.submit(self._sample, prompts, uniforms)))
        sampled = self.batches[0].sampled.result()
        self.batches.popleft()
        rollout, engine = sampled.rollout, self.run.engine
        assert rollout.versions is not None
        assert isinstance(engine, RequestEngine)
        age = (self._sampler().version - rollout.versions).masked_fill(~rollout.mask, 0)
        rollout = replace(rollout, age=age)
        if self.scores or not self.proven:
            scored = engine.exact(rollout, self.settings)
            if not self.proven:
                self._prove(scored, engine.precision.bfloat16)
            rollout = scored if self.scores else rollout
        return sampled._replace(rollout=rollout)

    def _sample(self, prompts: PromptBatch | TaskBatch, uniforms: Tensor) -> Sampled:
        """Sample a batch, in a thread, and start the calls of slow reward terms."""
        assert self.background is not None
        sampled = self.background.sample(prompts, self.settings, uniforms, self.settings.per_prompt)
        return self.background.start_rewards(sampled)

    def weights_changed(self) -> None:
        """Give the policy's weights to the sampler; after a failure the next batch starts another one with them."""
        if self.background is None:
            return
        try:
            self._sampler().sync(self.run.policy)
        except EngineFailure as failure:
            self._drop(failure)

    def state_dict(self) -> dict[str, Any]:
        """State of the stream before the first batch that was not taken, which is sampled again after a resume."""
        return self.batches[0].state if self.batches else self.stream.state_dict()

    def clear(self) -> None:
        """Drop all batches, since the stream was set back."""
        self.batches.clear()

    def close(self) -> None:
        """End the background threads, and set the stream back to the first batch that was not taken."""
        if self.background is not None:
            self._sampler().close()
        if self.threads is not None:
            self.threads.shutdown(cancel_futures=True)
        self.stream.load_state_dict(self.state_dict())
        self.batches.clear()
        self.background = self.threads = None

    def _drop(self, failure: BaseException) -> None:
        """End a sampler that failed; the next one is proven again."""
        assert isinstance(self.run.engine, RequestEngine)
        self.run.engine.report(f"rollout.engine continuous failed, and samples the batches ahead anew: {failure}")
        self.close()
        self.proven = False

    def _prove(self, rollout: Rollout, bfloat16: bool) -> None:
        """Raise `RunStopped` unless tokens of the present weights have the policy's log-probs, up to rounding."""
        assert rollout.behavior_logprobs is not None
        assert rollout.age is not None
        now = rollout.mask & (rollout.age == 0)
        if self.settings.filters() or not now.any():
            return
        apart = float((rollout.behavior_logprobs - rollout.logprobs)[now].abs().mean())
        tolerance = TOLERANCE_BFLOAT16 if bfloat16 else TOLERANCE
        if not apart <= tolerance:
            raise RunStopped(
                f"the copy of the policy that samples ahead does not have its log-probs: they differ by {apart:.2g} "
                f"nats per token on average (expected at most {tolerance:g}), so this model cannot be copied as it is; "
                "set rollout.max_age: 0. Nothing was learned from its samples"
            )
        self.proven = True

    def _start(self, prompts: PromptBatch | TaskBatch, uniforms: Tensor) -> Pipeline:
        """Start the sampler, with a cache for all rows on their way if prompts are as long as these."""
        engine, settings = self.run.engine, self.settings
        assert isinstance(engine, RequestEngine)
        width = prompts.ids.shape[1] if isinstance(prompts, PromptBatch) else settings.max_new_tokens
        rows = len(uniforms) * (settings.max_age + 1)
        try:
            sampler = BackgroundSampler(
                engine.policy,
                engine.tokenizer,
                engine.end_ids,
                settings,
                rows,
                width + settings.max_new_tokens,
                keeps_cache=settings.stale_cache == "keep",
                seed=int(uniforms[0, 0] * SEEDS),
            )
        except EngineFailure as failure:
            raise RunStopped(f"rollout.engine {engine.sampler.name} cannot sample ahead: {failure}") from failure
        background = replace(engine, sampler=sampler, deferred=True)
        player = None if self.run.player is None else replace(self.run.player, engine=background)
        return replace(self.run, engine=background, player=player)

    def _sampler(self) -> BackgroundSampler:
        assert self.background is not None
        engine = self.background.engine
        assert isinstance(engine, RequestEngine)
        assert isinstance(engine.sampler, BackgroundSampler)
        return engine.sampler
