"""The local engine: samples with the very model that is trained, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokencredit.settings.training import SamplingConfig
from tokencredit.text.data.prompts import PromptBatch
from tokencredit.text.engines.engine import Rollout
from tokencredit.text.engines.sampling import CachedSteps, sample
from tokencredit.text.engines.static import StaticDecoding
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.precision import Precision
from tokencredit.text.scoring_passes import evaluate_rollout, rollout_logprobs


@dataclass(frozen=True)
class LocalEngine:
    """An `Engine` that reads the policy's weights where they are; bit for bit the same for the same uniforms."""

    policy: ActorCritic
    tokenizer: PreTrainedTokenizerBase
    end_ids: Sequence[int]
    """Tokens that end a completion."""
    precision: Precision
    budget: int | None = None
    """The most tokens of a pass over whole texts, padding included; None for no limit."""
    decoding: StaticDecoding | None = None
    """Samples with a static cache; None with one that grows."""

    def generate(
        self,
        prompts: PromptBatch,
        settings: SamplingConfig,
        uniforms: Tensor,
        per_prompt: int = 1,
        started: Sequence[Tensor] | None = None,
    ) -> Rollout:
        """Sample with a KV cache; in bfloat16, where that differs from a full pass, evaluate the texts once more."""
        with self.precision.no_grad():
            with nullcontext(self.policy) if self.decoding is None else self.decoding.weights() as model:
                rollout = sample(
                    model,
                    prompts.to(self.precision.device),
                    uniforms.to(self.precision.device),
                    settings,
                    self.tokenizer,
                    self.end_ids,
                    per_prompt,
                    None if started is None else [tokens.to(self.precision.device) for tokens in started],
                    steps=CachedSteps if self.decoding is None else self.decoding.steps,
                )
            if not self.precision.half:
                return rollout
            if rollout.values is None:
                logprobs = rollout_logprobs(self.policy, rollout, settings.temperature, self.budget)
                return replace(rollout, logprobs=logprobs)
            now = evaluate_rollout(self.policy, rollout, settings.temperature, self.budget)
            return replace(rollout, logprobs=now.logprobs, values=now.values)

    def weights_changed(self) -> None:
        """Nothing to do: each rollout reads the weights as they are."""
