"""The local engine: samples from the trained model itself, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokencredit.distributed.processes import Processes
from tokencredit.distributed.sharding import gathered
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.text.data.prompts import PromptBatch
from tokencredit.text.engines.engine import FAILURES, Rollout
from tokencredit.text.engines.local.conversation import LocalConversation
from tokencredit.text.engines.local.sampling import sample
from tokencredit.text.engines.local.static_kv_cache import StaticDecoding
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.kv_cache import CachedSteps
from tokencredit.text.models.precision import Precision
from tokencredit.text.scoring_passes import evaluate_rollout, rollout_logprobs


@dataclass
class LocalEngine:
    """An `Engine` that shares the policy's weights; the same uniforms give bitwise the same rollout."""

    policy: ActorCritic
    tokenizer: PreTrainedTokenizerBase
    end_ids: Sequence[int]
    precision: Precision
    budget: int | None = None
    decoding: StaticDecoding | None = None
    """Decoding with a static KV cache; None uses a growing one."""
    in_step: Processes | None = None
    """Processes that sample in step, since the policy is sharded over them and gathered layer by layer."""
    keeps_support: bool = False
    """Keep the tokens that filters leave (`Rollout.support`) where `top_k` bounds their number."""
    processes: Processes = field(default_factory=Processes)
    notes: Sequence[str] = ()

    longest = None

    def generate(
        self,
        prompts: PromptBatch,
        settings: SamplingConfig,
        uniforms: Tensor,
        per_prompt: int = 1,
        started: Sequence[Tensor] | None = None,
    ) -> Rollout:
        """Sample with a KV cache; in bfloat16, recompute log-probs and values by a full forward pass."""
        # The policy itself samples, or its copy for a static cache, with the same weights.
        model = nullcontext(self.policy) if self.decoding is None else self.decoding.weights()
        with self.precision.no_grad(), model as policy:
            rollout = sample(
                policy,
                prompts.to(self.precision.device),
                uniforms.to(self.precision.device),
                settings,
                self.tokenizer,
                self.end_ids,
                per_prompt,
                None if started is None else [tokens.to(self.precision.device) for tokens in started],
                steps=CachedSteps if self.decoding is None else self.decoding.steps,
                in_step=self.in_step,
                keeps_support=self.keeps_support,
            )
        # In bfloat16 a pass of one token at a time is rounded in other ways than the update's pass of the whole text.
        return self.exact(rollout, settings)

    def converse(self, prompts: PromptBatch, settings: SamplingConfig, uniforms: Tensor) -> LocalConversation:
        """Begin episodes of several turns, with a growing KV cache."""
        device = self.precision.device
        return LocalConversation(
            self.policy,
            prompts.to(device),
            uniforms.to(device),
            settings,
            self.tokenizer,
            self.end_ids,
            self.precision,
            partial(self.exact, settings=settings),
            keeps_support=self.keeps_support,
        )

    def exact(self, rollout: Rollout, settings: SamplingConfig) -> Rollout:
        """The rollout with log-probs and values of a full forward pass in bfloat16; in float32 they equal it.

        The tokens were drawn with the log-probs of the sampling pass, which become `behavior_logprobs`.
        """
        if not self.precision.bfloat16:
            return rollout
        if rollout.behavior_logprobs is None:
            rollout = replace(rollout, behavior_logprobs=rollout.logprobs)
        with self.precision.no_grad():
            if rollout.values is None:
                logprobs = rollout_logprobs(self.policy, rollout, settings.temperature, self.budget, self.in_step)
                return replace(rollout, logprobs=logprobs)
            return evaluate_rollout(self.policy, rollout, settings.temperature, self.budget, self.in_step)

    def weights_changed(self) -> None:
        """Do nothing: the weights are shared."""

    def recover(self) -> None:
        """Do nothing: it cannot be lost."""

    def agreed(self) -> AbstractContextManager[None]:
        """A context for sampling a rollout, in which a failure of one process is raised in all."""
        # A process that fails between steps in step leaves the others in one, where they cannot hear of it.
        return self.processes.agreed(*FAILURES, MemoryError) if self.in_step is None else nullcontext()

    def held(self) -> AbstractContextManager[None]:
        """A context in which this process holds a sharded policy whole, unless processes sample in step."""
        return gathered(self.policy.lm) if self.in_step is None else nullcontext()
