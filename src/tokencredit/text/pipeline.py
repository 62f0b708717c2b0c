"""From prompts to scored completions, for training, evaluation, generation and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokencredit.core.rewards import k1
from tokencredit.distributed.processes import Processes
from tokencredit.distributed.sharding import gathered, is_sharded
from tokencredit.errors import ConfigError, EngineLost
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.settings.training import KLConfig
from tokencredit.text.data.prompts import Prompt, PromptBatch
from tokencredit.text.data.tasks import TaskBatch
from tokencredit.text.engines.engine import Engine, Rollout
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.precision import Precision
from tokencredit.text.rewards.calls import NonFiniteReward, RewardError, Term
from tokencredit.text.rewards.terms import PendingCall, Scores, score, start_calls
from tokencredit.text.scoring_passes import ReferenceOutputs, reference_outputs, rollout_values, values_after
from tokencredit.text.turns.play import Player, Transcript, columns

Stage = Callable[[str], AbstractContextManager[dict[str, Any]]]
"""Makes a context for a named stage; the stage puts its results into the context's dict."""


class UnusableBatch(Exception):
    """A batch with a non-finite log-prob, value, KL or reward."""

    def __init__(self, reason: str, rollout: Rollout, texts: list[str]):
        super().__init__(reason)
        self.rollout, self.texts = rollout, texts


class Sampled(NamedTuple):
    """Completions of a batch."""

    prompts: PromptBatch
    rollout: Rollout
    completions: list[str]
    episodes: list[Transcript] | None = None
    """Transcripts of episodes of several turns; None if a completion is one turn."""
    pending: Mapping[str, PendingCall] = MappingProxyType({})
    """Calls of reward terms that `Pipeline.start_rewards` has started."""

    def answers(self) -> list[Prompt]:
        """Completions as reward terms receive them: texts, or messages, of all turns if there are several."""
        if self.episodes is None:
            return self.prompts.answers(self.completions)
        rows = zip(self.episodes, self.prompts.prompts, self.completions, strict=True)
        return [episode.completion(prompt, text) for episode, prompt, text in rows]


@dataclass(frozen=True)
class Scored:
    """Completions with reference log-probs, KL and scores, before credit assignment."""

    prompts: PromptBatch
    rollout: Rollout
    completions: list[str]
    reference: ReferenceOutputs
    scores: Tensor
    """`[batch]`, weighted sum of terms with one number per completion, the reward of its last token."""
    dense: list[list[float]] | None
    """Weighted sum of terms with one number per token; None if there is none."""
    terms: dict[str, list[float | None]]
    """Unweighted values of each term; None where it does not apply."""
    of_texts: bool = True
    """True if some term gave one number for a whole completion."""
    filtered: bool = False
    """True if filters such as top_p truncated the sampling distribution."""
    bootstrap: Tensor | None = None
    """`[batch]`, the critic's value of the state after truncated completions, 0 elsewhere; None without a bootstrap."""
    episodes: list[Transcript] | None = None
    """Transcripts of episodes of several turns."""

    def totals(self) -> Tensor:
        """Total reward of each completion, `[batch]`."""
        if self.dense is None:
            return self.scores
        return self.scores + torch.tensor([sum(row) for row in self.dense], device=self.scores.device)

    def kl(self) -> tuple[str, Tensor] | None:
        """Metric name and KL to the reference model at each token, in nats; None without a reference model.

        The exact KL if known, otherwise log π/π_ref of the sampled token, whose mean estimates the KL. With filters
        such as top_p, and for tokens of earlier updates, it is a biased estimate and called `log_ratio`.
        """
        reference = self.reference
        if reference.exact and reference.kl is not None:
            return "kl", reference.kl
        if reference.logprobs is None:
            return None
        log_ratio = k1(self.rollout.logprobs, reference.logprobs, self.rollout.mask)
        return "log_ratio" if self.filtered or self.rollout.age is not None else "kl", log_ratio

    def texts(self) -> list[str]:
        """Each prompt's text followed by its completion."""
        return self.prompts.continued(self.completions)


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
    player: Player | None = None
    """Plays episodes of several turns with the engine; None if a completion is one turn."""
    finite: bool = True
    """Raise for scores that are not finite, instead of returning them."""

    @property
    def lockstep(self) -> Processes | None:
        """The processes that must make the same number of passes, since models are sharded over them; None if not."""
        return self.processes if self.processes.count > 1 and is_sharded(self.policy.lm) else None

    def held(self) -> AbstractContextManager[None]:
        """A context in which this process holds all weights of sharded models, so that its passes are its own."""
        return gathered(self.policy, self.reference)

    def weights_changed(self, report: Callable[[str], None]) -> None:
        """Sync the engine with weights that have changed; if it is lost, `complete` tries again, and fails then.

        Args:
            report: called with a line for the failure, with which what was learned is not lost.

        Raises:
            RunStopped: the engine's log-probs are not the policy's.
        """
        try:
            self.engine.weights_changed()
        except EngineLost as error:
            report(f"{error}; it is tried again before the next rollout")

    def sample(
        self, prompts: PromptBatch | TaskBatch, settings: SamplingConfig, uniforms: Tensor, per_prompt: int = 1
    ) -> Sampled:
        """Sample a completion, or play an episode, for each row of prompts. Arguments as in `collect`."""
        with self.engine.held():
            if isinstance(prompts, TaskBatch):
                assert self.player is not None
                played = self.player.play(prompts, settings, uniforms)
                return Sampled(played.prompts, played.rollout, played.rollout.texts(self.tokenizer), played.transcripts)
            rollout = self.engine.generate(prompts, settings, uniforms, per_prompt)
            return Sampled(prompts, rollout, rollout.texts(self.tokenizer))

    def collect(
        self,
        prompts: PromptBatch | TaskBatch,
        settings: SamplingConfig,
        uniforms: Tensor,
        per_prompt: int = 1,
        *,
        values: bool = False,
        bootstrap: bool = False,
        stage: Stage = no_stage,
    ) -> Scored:
        """Sample a completion for each row of prompts and score it.

        Args:
            prompts: this process's rows, of prompts or of episodes.
            settings: sampling settings and stop conditions.
            uniforms: `[batch, settings.max_new_tokens]`, random numbers in [0, 1).
            per_prompt: number of consecutive rows with the same prompt.
            values: compute the critic's values if the engine has not.
            bootstrap: also compute the values of the states after truncated completions.
            stage: wraps the stages `rollout`, `reference` and `reward`.

        Raises:
            UnusableBatch: a log-probability, value or reward is not finite, in any process.
            RewardError: a reward could not be computed.
        """
        sample = partial(self.sample, prompts, settings, uniforms, per_prompt)
        return self.complete(sample, settings, values=values, bootstrap=bootstrap, stage=stage)

    def complete(
        self,
        sample: Callable[[], Sampled],
        settings: SamplingConfig,
        *,
        values: bool = False,
        bootstrap: bool = False,
        stage: Stage = no_stage,
    ) -> Scored:
        """Score the completions that `sample` returns; other arguments and errors as in `collect`."""
        with stage("rollout") as results:
            self.engine.recover()
            with self.engine.agreed():
                sampled = sample()
            rollout = sampled.rollout
            if values and rollout.values is None and self.policy.critic is not None:
                with self.precision.no_grad():
                    rollout = replace(rollout, values=rollout_values(self.policy, rollout, self.budget, self.lockstep))
            results["rollout"] = rollout
        return self.score(sampled._replace(rollout=rollout), settings, bootstrap=bootstrap, stage=stage)

    def score(
        self,
        sampled: Sampled,
        settings: SamplingConfig,
        *,
        bootstrap: bool = False,
        stage: Stage = no_stage,
    ) -> Scored:
        """Compute reference log-probs, KL and scores of completions; arguments and errors as in `collect`.

        Later episodes may then use the environments of these.
        """
        over = not sampled.pending  # after an error nobody waits for these calls, which may use the environments
        try:
            scored = self._scored(sampled, settings, bootstrap, stage)
            over = True
            return scored
        finally:
            if over and sampled.episodes is not None and self.player is not None:
                self.player.environments.release(transcript.episode for transcript in sampled.episodes)

    def _scored(self, sampled: Sampled, settings: SamplingConfig, bootstrap: bool, stage: Stage) -> Scored:
        """As `score`."""
        prompts, rollout, completions, episodes, *_ = sampled
        after = None
        with stage("reference") as results, self.precision.no_grad():
            if bootstrap:
                following = None if episodes is None else [episode.following for episode in episodes]
                after = values_after(self.policy, rollout, self.budget, following, self.lockstep)
            reference = results["reference"] = reference_outputs(
                self.policy, self.reference, rollout, self.kl, settings.temperature, self.budget, self.lockstep
            )
        texts = prompts.continued(completions)
        possible = (rollout.logprobs, rollout.behavior_logprobs, rollout.values, reference.kl, after)
        numbers = [x for x in possible if x is not None]
        if not self.processes.all(bool(torch.stack([x.isfinite().all() for x in numbers]).all())):
            raise UnusableBatch("a log-probability, value or KL of a completion is not finite", rollout, texts)
        with stage("reward") as results:
            scores = results["scores"] = self._score(sampled, reference, texts)
        totals = torch.tensor(scores.totals, device=self.precision.device)
        return Scored(
            prompts,
            rollout,
            completions,
            reference,
            totals,
            scores.dense,
            scores.terms,
            of_texts=scores.of_texts,
            filtered=bool(settings.filters()),
            bootstrap=after,
            episodes=episodes,
        )

    def start_rewards(self, sampled: Sampled) -> Sampled:
        """Start the calls of reward terms that run in threads of their own and need no reference model.

        Raises:
            ConfigError: a function requires a column that does not exist.
        """
        known, lengths = self._columns(sampled, None), sampled.rollout.mask.sum(1).tolist()
        questions, answers = sampled.prompts.questions(), sampled.answers()
        awaited, finite = self.reference is not None, self.finite
        pending = start_calls(self.terms, questions, answers, known, lengths, finite=finite, reference=awaited)
        return sampled._replace(pending=pending)

    def _columns(self, sampled: Sampled, ref_logprobs: Tensor | None) -> dict[str, list[Any]]:
        """Columns for reward functions."""
        known = sampled.prompts.columns | sampled.rollout.columns(ref_logprobs)
        return known if sampled.episodes is None else known | columns(sampled.episodes)

    def _score(self, sampled: Sampled, reference: ReferenceOutputs, texts: list[str]) -> Scores:
        """The reward terms' scores of this process's completions."""
        prompts, rollout = sampled.prompts, sampled.rollout
        known = self._columns(sampled, reference.logprobs)
        lengths = rollout.mask.sum(1).tolist()
        scores, reason = None, "a reward term is not finite in another process"
        with self.processes.agreed(RewardError, ConfigError):  # all stop, and save, together
            try:
                answers = sampled.answers()
                questions, pending = prompts.questions(), sampled.pending
                scores = score(self.terms, questions, answers, known, lengths, finite=self.finite, started=pending)
            except NonFiniteReward as error:
                reason = str(error)
        if not self.processes.all(scores is not None) or scores is None:
            raise UnusableBatch(reason, rollout, texts)
        return scores
