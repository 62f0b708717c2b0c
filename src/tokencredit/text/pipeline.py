"""From prompts to scored completions, in stages, for training, evaluation, generation and benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokencredit.distributed.processes import Processes, lack_of_memory, restored
from tokencredit.distributed.sharding import gathered, is_sharded
from tokencredit.errors import ConfigError, EngineLost, RunStopped
from tokencredit.learn.experience import Experience
from tokencredit.learn.update import NonFiniteUpdate
from tokencredit.runs.recorder import RunRecord
from tokencredit.runs.untrusted import visible
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.settings.training import KLConfig
from tokencredit.text.batch import Batch
from tokencredit.text.callbacks import Callback, contents, refuse_changes
from tokencredit.text.data.prefixes import Ended, PrefixFit, prefix_scores, scoring, usual_end
from tokencredit.text.data.prompts import PromptBatch
from tokencredit.text.data.rollout import Rollout
from tokencredit.text.data.tasks import TaskBatch
from tokencredit.text.engines.engine import Engine
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.precision import Precision
from tokencredit.text.rewards.calls import NonFiniteScore, RewardError, Term
from tokencredit.text.rewards.terms import Scores, score, start_calls
from tokencredit.text.rollout_passes import (
    ReferenceOutputs,
    evaluate_rollout,
    reference_outputs,
    rollout_values,
    values_after,
)
from tokencredit.text.turns.episode_record import columns, refuse_failed
from tokencredit.text.turns.play import EpisodePlayer
from tokencredit.user_code.user_objects import user_code

T = TypeVar("T")
Draw = Callable[[], Batch]
"""Gives the next batch of completions: samples it, or waits for one that was begun ahead of time."""
Stage = Callable[[str], AbstractContextManager[dict[str, Any]]]
"""Makes a context for a named stage; the stage puts its results into the context's dict."""
MEMORY_ADVICE = {
    "rollout": "lower rollout.batch_size or rollout.max_new_tokens",
    "reward": "lower the batch_size of the reward's terms",
    "prefixes": "lower the batch_size of the reward's terms, or raise critic.prefix_every",
    "audit": "lower rollout.batch_size, the number of texts sampled at once, or audit.continuations",
    "evaluation": "lower eval.samples or eval.max_new_tokens",
}
"""Advice shown when a stage runs out of memory."""


class UnusableBatch(RunStopped):
    """A batch with a non-finite log-prob, value, KL or reward."""

    def __init__(self, reason: str, rollout: Rollout, texts: list[str], *, diverged: bool = False):
        """`diverged` is true if the model's own numbers are not finite, false for a reward."""
        super().__init__(reason)
        self.rollout, self.texts, self.diverged = rollout, texts, diverged


@contextmanager
def no_stage(_name: str) -> Iterator[dict[str, Any]]:
    """A stage without timing or callbacks."""
    yield {}


@dataclass
class Pipeline:
    """Engine, reference model and reward terms, in the dtype and on the device of one policy."""

    policy: ActorCritic
    reference: ActorCritic | None
    """A model of its own, the policy itself if only an adapter is trained, or None."""
    tokenizer: PreTrainedTokenizerBase
    precision: Precision
    engine: Engine
    terms: Sequence[Term]
    kl: KLConfig
    processes: Processes
    budget: int | None = None
    """Tokens per micro-batch of a full forward pass, padding included; None for no limit."""
    player: EpisodePlayer | None = None
    """Plays episodes of several turns with the engine; None if a completion is one turn."""
    prefix_every: int = 0
    """Tokens between the prefixes that are scored for a critic; 0 for none."""
    entropy: bool = False
    """Compute the entropies of completions to be learned from, for an estimator that reads them: one more pass."""
    finite: bool = True
    """Raise for scores that are not finite, instead of returning them."""
    fit: PrefixFit | None = None
    """The fit of values to scores of prefixes, which chooses their end; None if there is none."""

    @property
    def lockstep(self) -> Processes | None:
        """The processes that must make the same number of passes, since models are sharded over them; None if not."""
        return self.processes if self.processes.count > 1 and is_sharded(self.policy.lm) else None

    def held(self) -> AbstractContextManager[None]:
        """A context in which this process holds all weights of sharded models, so that its passes are its own."""
        return gathered(self.policy, self.reference)

    def weights_changed(self, report: Callable[[str], None]) -> None:
        """Sync the engine with weights that have changed.

        If it is lost, which `report` is called with a line for, `complete` tries again, and fails then.
        """
        try:
            self.engine.weights_changed()
        except EngineLost as error:
            report(f"{error}; it is tried again before the next rollout")

    def sample(
        self, prompts: PromptBatch | TaskBatch, settings: SamplingConfig, uniforms: Tensor, per_prompt: int = 1
    ) -> Batch:
        """Sample a completion, or play an episode, for each row of prompts. Arguments as in `collect`."""
        with self.engine.held():
            if isinstance(prompts, TaskBatch):
                assert self.player is not None
                with restored():
                    played = self.player.play(prompts, settings, uniforms)
                return Batch(played.prompts, played.rollout, played.rollout.texts(self.tokenizer), played.transcripts)
            rollout = self.engine.generate(prompts, settings, uniforms, per_prompt)
            return Batch(prompts, rollout, rollout.texts(self.tokenizer))

    def collect(
        self,
        prompts: PromptBatch | TaskBatch,
        settings: SamplingConfig,
        uniforms: Tensor,
        per_prompt: int = 1,
        *,
        values: bool = False,
        bootstrap: bool = False,
    ) -> Batch:
        """Sample a completion for each row of prompts and score it.

        Args:
            prompts: this process's rows, of prompts or of episodes.
            settings: sampling settings and stop conditions.
            uniforms: `[batch, settings.max_new_tokens]`, random numbers in [0, 1).
            per_prompt: number of consecutive rows with the same prompt.
            values: compute the critic's values if the engine has not.
            bootstrap: also compute the values of the states after truncated completions.

        Raises:
            UnusableBatch: a log-probability, value or reward is not finite, in any process.
            RewardError: a reward could not be computed.
        """
        draw = partial(self.sample, prompts, settings, uniforms, per_prompt)
        batch = self.drawn(draw, settings, values=values)
        return self.scored(batch, settings, values=values, bootstrap=bootstrap)

    def drawn(self, draw: Draw, settings: SamplingConfig, *, values: bool = False, stage: Stage = no_stage) -> Batch:
        """The next batch, with values and entropies if they are read, in a stage; all else is as in `collect`."""
        with stage("rollout") as results:
            # An engine that was lost is started again before anything is asked of it.
            self.engine.recover()
            # Sample. If one process fails, all do, as far as the engine allows.
            with self.engine.agreed():
                batch = draw()
            if batch.episodes is not None:
                refuse_failed(batch.episodes, self.processes)
            # The critic's values of the states before tokens, unless the engine has computed them on its way.
            if values and batch.rollout.values is None and self.policy.critic is not None:
                with self.precision.no_grad():
                    estimates = rollout_values(self.policy, batch.rollout, self.budget, self.lockstep)
                batch = replace(batch, rollout=replace(batch.rollout, values=estimates))
            if values and self.entropy and batch.rollout.entropy is None:
                of_policy = self.policy, batch.rollout, settings.temperature, self.budget, self.lockstep
                with self.precision.no_grad():
                    entropies = evaluate_rollout(*of_policy, entropy=True).entropy
                batch = replace(batch, rollout=replace(batch.rollout, entropy=entropies))
            results["rollout"] = batch.rollout
        return batch

    def scored(
        self,
        batch: Batch,
        settings: SamplingConfig,
        *,
        values: bool = False,
        bootstrap: bool = False,
        stage: Stage = no_stage,
    ) -> Batch:
        """The batch with reference log-probs, KL, scores and, for values, scores of the prefixes of its completions.

        Arguments and errors are those of `collect`. Later episodes may then use the environments of these.
        """
        over = not batch.pending  # after an error nobody waits for these calls, which may use the environments
        try:
            scored = self._scored(batch, settings, bootstrap, stage)
            over = True
        finally:
            if over and batch.episodes is not None and self.player is not None:
                self.player.environments.release(transcript.episode for transcript in batch.episodes)
        if not (values and self.prefix_every and scoring(self.terms)):
            return scored
        rollout, given = batch.rollout, (self.terms, scored.prompts, batch.rollout, self.tokenizer, self.prefix_every)

        def scores(end: Sequence[int]) -> Tensor:
            return self._agreed(scored, lambda: prefix_scores(*given, end), "of a prefix ")

        with stage("prefixes"):
            ended, fit = None, self.fit
            if fit is not None and fit.end is None and (end := usual_end(rollout, self.tokenizer, self.processes.sum)):
                ended = Ended(end, scores(end))
            prefixes = scores([] if fit is None else fit.end or [])
        return replace(scored, prefixes=prefixes, ended=ended)

    def _scored(self, batch: Batch, settings: SamplingConfig, bootstrap: bool, stage: Stage) -> Batch:
        rollout, episodes, after = batch.rollout, batch.episodes, None
        # Passes over the completions: values after truncated ones, log-probs and KL of the reference model.
        with stage("reference") as results, self.precision.no_grad():
            if bootstrap:
                following = None if episodes is None else [episode.following for episode in episodes]
                after = values_after(self.policy, rollout, self.budget, following, self.lockstep)
            reference = results["reference"] = reference_outputs(
                self.policy, self.reference, rollout, self.kl, settings.temperature, self.budget, self.lockstep
            )
        # Nothing that is not finite may reach rewards and the update, whichever process it appears in.
        possible = (rollout.logprobs, rollout.behavior_logprobs, rollout.values, reference.kl, after)
        numbers = [x for x in possible if x is not None]
        if not self.processes.all(bool(torch.stack([x.isfinite().all() for x in numbers]).all())):
            reason = "a log-probability, value or KL of a completion is not finite"
            raise UnusableBatch(reason, rollout, batch.texts(), diverged=True)
        # The user's reward comes last: it may read the reference log-probs.
        with stage("reward") as results:
            scores = results["scores"] = self._scores(batch, reference)
        return replace(
            batch,
            reference=reference,
            bootstrap=after,
            scores=torch.tensor(scores.totals, device=self.precision.device),
            dense=scores.dense,
            terms=scores.terms,
            of_texts=scores.of_texts,
            drawn_elsewhere=batch.drawn_elsewhere or bool(settings.filters()),
            stopped=rollout.stopped(self.tokenizer, settings.stop) if settings.stop and episodes is None else None,
        )

    def start_rewards(self, batch: Batch) -> Batch:
        """Start the calls of reward terms that run in threads of their own and need no reference model."""
        awaited, finite = self.reference is not None, self.finite
        return replace(batch, pending=start_calls(*self._asked(batch, None), finite=finite, reference=awaited))

    def _asked(self, batch: Batch, ref_logprobs: Tensor | None) -> tuple[Any, ...]:
        """What the reward is asked: terms, prompts, completions, columns, and numbers of sampled tokens."""
        known = batch.prompts.columns | batch.rollout.columns(ref_logprobs)
        known |= {} if batch.episodes is None else columns(batch.episodes)
        return self.terms, batch.prompts.questions(), batch.answers(), known, batch.rollout.mask.sum(1).tolist()

    def _scores(self, batch: Batch, reference: ReferenceOutputs) -> Scores:
        asked = self._asked(batch, reference.logprobs)
        given = self._agreed(batch, partial(score, *asked, finite=self.finite, started=batch.pending))
        if not self.processes.any(any(x is not None for column in given.terms.values() for x in column)):
            names = ", ".join(given.terms)
            raise RewardError(f"no reward term scored any completion: {names} returned None for all of them")
        return given

    def _agreed(self, batch: Batch, compute: Callable[[], T], what: str = "") -> T:
        """What the reward terms give; if a process fails, all stop, and save, together."""
        scores, reason = None, f"a reward term {what}is not finite or too large in another process"
        with self.processes.agreed(RewardError, ConfigError):
            try:
                scores = compute()
            except NonFiniteScore as error:
                reason = f"{error} ({what.strip()})" if what else str(error)
        if not self.processes.all(scores is not None) or scores is None:
            raise UnusableBatch(reason, batch.rollout, batch.texts())
        return scores


class Stages:
    """Runs and times a trainer's stages, and calls its callbacks.

    Attributes:
        seconds: duration of each stage of the iteration.
    """

    def __init__(self, trainer: Any, callbacks: Sequence[Any]):
        """Store the callbacks, whose `before_STAGE(trainer)` and `after_STAGE(trainer, **results)` are called."""
        self.trainer, self.callbacks = trainer, list(callbacks)
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[dict[str, Any]]:
        """A context around a stage, with a dict for the stage's results.

        Raises:
            OutOfMemory: the stage ran out of memory.
            RunStopped: a callback raised, or set a metric to something other than a number.
        """
        if "iteration" in self.seconds:  # of the last one
            self.seconds = {}
        before = sum(self.seconds.values()) if name == "iteration" else self.seconds.get(name, 0.0)
        self._call(f"before_{name}")
        results: dict[str, Any] = {}
        started = time.perf_counter()
        advice = MEMORY_ADVICE.get(name, "lower ppo.micro_batch_tokens, or set model.gradient_checkpointing")
        with lack_of_memory(f"out of memory in its {name} stage; {advice}"):
            yield results
        self.trainer.pipeline.processes.settle()
        self.seconds[name] = before + time.perf_counter() - started  # with samples taken by hand before
        self._call(f"after_{name}", **results)
        for metric, value in results.get("metrics", {}).items():
            if not isinstance(value, Real):
                raise RunStopped(f"a callback set metrics[{metric!r}] to {visible(repr(value))}; it must be a number")

    def times(self, tokens: float) -> dict[str, float]:
        """Metrics of the time of an iteration, or of its stages so far, in which so many tokens were sampled."""
        stages = dict(self.seconds)
        seconds = stages.pop("iteration", sum(stages.values()))
        named = {f"seconds/{stage}": spent for stage, spent in stages.items()}
        return {"seconds": seconds} | named | {"tokens_per_second": tokens / seconds}

    def caller(self, event: str) -> Callable[[dict[str, float]], None] | None:
        """Calls the callbacks that have this method with metrics; None if none has."""
        methods = [getattr(x, event, None) for x in self.callbacks]  # which may belong to the object alone
        called = any(getattr(x, "__func__", x) not in (None, getattr(Callback, event)) for x in methods)
        return (lambda metrics: self._call(event, metrics=metrics)) if called else None

    def _call(self, event: str, **results: Any) -> None:
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            if method is None:
                continue
            before = contents(results)
            with user_code(f"{event} of the callback {type(callback).__name__}"):
                method(self.trainer, **results)
            refuse_changes(before, contents(results), event, type(callback).__name__)


def count_step(
    record: RunRecord, number: int, scored: Batch, minibatch: Experience, error: NonFiniteUpdate | None
) -> None:
    """Count skipped optimizer steps in a row, and save their minibatches; `error` is None if the step was taken."""
    if error is None:
        record.bad_in_a_row = 0
        return
    text = None if error.row is None else scored.text_of_row(error.row, record.processes)
    reason = str(error) if text is None else f"{error.term} of the text {text!r} is not finite"
    record.bad_step(number, reason, minibatch.tensors(), diverged=True, text=text)
