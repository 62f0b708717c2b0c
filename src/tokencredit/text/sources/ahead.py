"""Sources of a run's batches: the current policy, or training while sampling, with weights a few updates old."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from torch import Tensor

from tokencredit.errors import EngineLost
from tokencredit.settings.text import PPOConfig
from tokencredit.text.batch import Batch
from tokencredit.text.data.prompts import PromptBatch
from tokencredit.text.data.stream import BatchStream
from tokencredit.text.data.tasks import TaskBatch
from tokencredit.text.engines.background import BackgroundEngine, start_background
from tokencredit.text.pipeline import Pipeline


class CurrentPolicy:
    """The source of a stream's batches, each sampled from the current policy when it is needed."""

    def __init__(self, pipeline: Pipeline, stream: BatchStream):
        self.pipeline, self.stream = pipeline, stream

    def sample(self, later: int) -> Batch:  # noqa: ARG002  (of `SamplesAhead`)
        """Sample the next batch; `later` is the number that is needed after it, beyond which none is begun."""
        prompts, uniforms = self.stream.next_batch()
        settings = self.stream.settings
        return self.pipeline.sample(prompts, settings, uniforms, settings.per_prompt)

    def weights_changed(self) -> None:
        """Do nothing: the engine has the weights."""

    def state_dict(self) -> dict[str, Any]:
        """State before the next batch, for a checkpoint."""
        return self.stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        self.stream.load_state_dict(state)

    def close(self) -> None:
        """Do nothing."""


class SamplesAhead(CurrentPolicy):
    """Batches of a stream, sampled up to `max_age` updates before they are learned from."""

    def __init__(self, pipeline: Pipeline, stream: BatchStream, args: PPOConfig, report: Callable[[str], None]):
        """Sample nothing yet; `report` is called with a line when a sampler has failed."""
        super().__init__(pipeline, stream)
        self.settings, self.report = args.rollout, report
        critic = pipeline.policy.critic
        self.scores = (
            args.off_policy.proximal == "recomputed"
            or pipeline.reference is not None
            or bool(args.rollout.filters())
            or (critic is not None and critic.reads_last)
        )
        """True if a full pass of the policy scores each batch; false if nothing reads what it computes."""
        self.engine: BackgroundEngine | None = None
        """Samples in the background; None before the first batch."""
        self.threads: ThreadPoolExecutor | None = None
        self.batches: deque[tuple[dict[str, Any], Future[Batch]]] = deque()
        """Batches on their way, each with the state of the stream before it was drawn."""
        self.proven = False
        """True once a batch has shown that the copy of the weights is the policy."""

    def sample(self, later: int) -> Batch:
        """The next batch, sampled to its end, with the age of each token, and scored by the policy if `scores`.

        After a failure of the sampler, batches that were not taken are sampled anew by another one.

        Raises:
            EngineLost: the sampler failed twice in a row.
            RunStopped: there is no room for a sampler, or its weights are not the policy's.
        """
        try:
            return self._next(later)
        except EngineLost as lost:
            self._drop(lost)
        try:
            return self._next(later)
        except EngineLost as lost:
            raise EngineLost(f"after a new start, {lost}") from lost

    def _next(self, later: int) -> Batch:
        # Begin as many batches as may wait, so that the sampler is never idle.
        while len(self.batches) <= min(self.settings.max_age, later):
            state = self.stream.state_dict()
            prompts, uniforms = self.stream.next_batch()
            self.engine = self.engine or self._start(prompts, uniforms)
            self.threads = self.threads or ThreadPoolExecutor(self.settings.max_age + 1, "sampling")
            self.batches.append((state, self.threads.submit(self._sample, self.engine, prompts, uniforms)))
        # Wait for the oldest one, which stays in the queue if its sampler fails.
        sampled = self.batches[0][1].result()
        self.batches.popleft()
        assert self.engine is not None
        rollout = replace(sampled.rollout, age=self.engine.ages(sampled.rollout))
        # The policy of now scores it; the first batch also proves that the copy has the policy's weights.
        if self.scores or not self.proven:
            scored = self.pipeline.engine.exact(rollout, self.settings)
            self.proven = self.proven or self.engine.proves(scored, self.settings)
            rollout = scored if self.scores else rollout
        return replace(sampled, rollout=rollout)

    def _sample(self, engine: BackgroundEngine, prompts: PromptBatch | TaskBatch, uniforms: Tensor) -> Batch:
        """Sample a batch, in a thread, and start the calls of slow reward terms."""
        player = None if self.pipeline.player is None else replace(self.pipeline.player, engine=engine)
        pipeline = replace(self.pipeline, engine=engine, player=player)
        return pipeline.start_rewards(pipeline.sample(prompts, self.settings, uniforms, self.settings.per_prompt))

    def weights_changed(self) -> None:
        """Give the policy's weights to the sampler; after a failure the next batch starts another one with them."""
        if self.engine is None:
            return
        try:
            self.engine.weights_changed()
        except EngineLost as lost:
            self._drop(lost)

    def state_dict(self) -> dict[str, Any]:
        """State of the stream before the first batch that was not taken, which is sampled again after a resume."""
        return self.batches[0][0] if self.batches else self.stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the stream back, and drop the batches that it gave since."""
        super().load_state_dict(state)
        self.batches.clear()

    def close(self) -> None:
        """End the background threads, and set the stream back to the first batch that was not taken."""
        if self.engine is not None:
            self.engine.close()
        if self.threads is not None:
            self.threads.shutdown(cancel_futures=True)
        self.stream.load_state_dict(self.state_dict())
        self.batches.clear()
        self.engine = self.threads = None

    def _drop(self, lost: EngineLost) -> None:
        """End a sampler that failed; the next one is proven again."""
        self.report(f"rollout.engine continuous failed, and samples the batches ahead anew: {lost.__cause__ or lost}")
        self.close()
        self.proven = False

    def _start(self, prompts: PromptBatch | TaskBatch, uniforms: Tensor) -> BackgroundEngine:
        """Start the sampler, with a cache for all rows on their way if prompts are as long as these."""
        settings = self.settings
        width = prompts.ids.shape[1] if isinstance(prompts, PromptBatch) else settings.max_new_tokens
        rows, longest = len(uniforms) * (settings.max_age + 1), width + settings.max_new_tokens
        return start_background(self.pipeline.engine, settings, rows, longest, float(uniforms[0, 0]))
