"""The passes of a run's iteration over random rows: timed on real models, measured on fake ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tokencredit.core.vocab_projection import TokenStats
from tokencredit.learn.training_mode import training, training_modules
from tokencredit.text.engines.local.sampling import Decoding
from tokencredit.text.engines.local.static_kv_cache import StaticDecoding, static_obstacle
from tokencredit.text.models.actor_critic import ActorCritic, Inputs
from tokencredit.text.models.kv_cache import CachedSteps
from tokencredit.text.models.precision import Precision
from tokencredit.tools.plan.work import Batch, Work


class SumOfLogprobs:
    """A loss with the cost of the run's."""

    def __init__(self, additive: bool):
        """Store `PolicyLoss.additive` of the run's loss; if false, several chunks are projected twice."""
        self.additive = additive

    def __call__(self, now: TokenStats, at: slice) -> Tensor:  # noqa: ARG002  (the PolicyLoss protocol)
        """The sum of all statistics."""
        return torch.stack([x.sum() for x in now if x is not None]).sum()


@dataclass(frozen=True)
class Passes:
    """Passes of a run's models."""

    work: Work
    policy: ActorCritic
    reference: ActorCritic | None
    precision: Precision

    @property
    def static(self) -> bool:
        """True for decoding with a static KV cache."""
        return self.work.static_cache and static_obstacle(self.policy) is None

    def inputs(self, rows: int, batch: Batch) -> Inputs:
        """Rows of random tokens; the first begins with padding if prompts differ in length."""
        device, vocabulary = self.precision.device, self.work.lm_config.get_text_config().vocab_size
        prompt_mask = torch.ones(rows, batch.prompt, dtype=torch.bool, device=device)
        if self.work.padded and batch.prompt > 1:
            prompt_mask[0, 0] = False
        return {
            "prompt_ids": torch.randint(vocabulary, (rows, batch.prompt), device=device),
            "prompt_mask": prompt_mask,
            "response_ids": torch.randint(vocabulary, (rows, batch.new), device=device),
            "mask": torch.ones(rows, batch.new, dtype=torch.bool, device=device),
        }

    def score(self, model: ActorCritic, inputs: Inputs) -> None:
        """Log-probs of a model, without gradients."""
        with self.precision.no_grad():
            model.logprobs(inputs, self.work.config.rollout.temperature)

    def value(self, inputs: Inputs) -> None:
        """Values of the critic, without gradients."""
        with self.precision.no_grad():
            self.policy.critic_outputs(inputs)

    def train(self, inputs: Inputs) -> None:
        """Forward and backward pass of policy and critic."""
        config = self.work.config
        loss, kl = SumOfLogprobs(additive=config.ppo.loss != "gspo"), None
        if self.work.exact_kl:
            kl, hidden = self.reference or self.policy, self.work.lm_config.get_text_config().hidden_size
            inputs = inputs | {"ref_hidden": torch.zeros(*inputs["mask"].shape, hidden)}
        with training(training_modules(self.policy)), self.precision.updates():
            with self.precision.autocast():
                outputs = self.policy(inputs, config.rollout.temperature, loss, config.ppo.entropy_coef > 0, kl)
            (outputs.policy_loss + (0 if outputs.values is None else outputs.values.sum())).backward()

    def train_critic(self, inputs: Inputs) -> None:
        """Forward and backward pass of the critic alone."""
        with training(training_modules(self.policy)), self.precision.updates():
            with self.precision.autocast():
                values = self.policy.critic_outputs(inputs).values
            values.sum().backward()

    @contextmanager
    def sampling(self, batch: Batch) -> Iterator[Sampling]:
        """A rollout of this batch, with its copy of the weights for static decoding."""
        decoding = StaticDecoding(self.policy) if self.static else None
        with self.precision.no_grad():
            if decoding is None:
                yield Sampling(self, batch, self.policy, CachedSteps)
                return
            with decoding.weights() as model:
                yield Sampling(self, batch, model, decoding.steps)


class Sampling:
    """A rollout in the course of sampling."""

    def __init__(self, passes: Passes, batch: Batch, model: ActorCritic, steps: Any):
        """Prepare random prompts for a model."""
        inputs, rollout = passes.inputs(batch.rows, batch), passes.work.config.rollout
        self.ids, self.model, self.per_prompt = inputs["prompt_ids"], model, rollout.per_prompt
        self.steps: Any = steps(model, inputs["prompt_mask"], batch.new)
        settings = replace(rollout, max_new_tokens=batch.new, min_new_tokens=0, stop=[], stop_at_eos=False)
        uniforms, nothing = torch.rand(batch.rows, batch.new, device=self.ids.device), self.ids.new_zeros(0)
        self.state = Decoding(uniforms, [nothing] * batch.rows, settings, self.ids.new_zeros(1), {})

    def prefill(self) -> None:
        """Read the prompts, and draw the first tokens."""
        self._draw(self.steps.prompts(self.ids, self.per_prompt), self.ids)

    def step(self) -> None:
        """Run the last tokens, and draw the next."""
        self.steps.repeat(self._step, 1)

    def _step(self) -> None:
        tokens = self.state.last().unsqueeze(-1)
        self._draw(self.steps.next(tokens), tokens)

    def _draw(self, hidden: Tensor, tokens: Tensor) -> None:
        critic = self.model.critic
        values = critic(hidden) if critic is not None and getattr(critic, "reads_last", False) else None
        self.state.draw(self.model.logits(hidden), tokens, values)
