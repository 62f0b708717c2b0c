"""The learner: a model with its optimizer and objective. `Learner.update` is PPO's update, for text and Gymnasium."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tokencredit.core.masked import whiten_with_divisor
from tokencredit.core.off_policy import correction_stats
from tokencredit.distributed.processes import Processes
from tokencredit.distributed.sharding import sharded_in
from tokencredit.learn.experience import Experience
from tokencredit.learn.minibatches import micro_batches, minibatches
from tokencredit.learn.objective import MicroBatchLoss, Objective, Passes
from tokencredit.learn.optim import clip_gradients, set_rates
from tokencredit.learn.rng import from_hex, to_hex
from tokencredit.learn.state import load_training_state, training_state
from tokencredit.learn.training_mode import training, training_modules
from tokencredit.learn.update import (
    NonFiniteUpdate,
    OnStep,
    StepRecord,
    UpdateSettings,
    drop_gradients,
    raise_non_finite,
    ratios,
    update_metrics,
)
from tokencredit.learn.value_heads import adapt_heads, adaptive_heads


class Learner:
    """A model, its optimizer and learning-rate schedule, the objective, and the generator that shuffles rows."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        passes: Passes,
        objective: Objective,
        settings: UpdateSettings,
        schedule: Callable[[int], float],
        generator: torch.Generator,
        processes: Processes,
        frozen: Iterable[Tensor] = (),
    ):
        """Store the parts and wrap the model for data parallelism.

        A parameter group's `metric` names its learning rate in the metrics, default `lr`. `schedule` is the
        learning-rate factor at an iteration, counted from 0; `generator` shuffles the rows. The joint steps of policy
        and critic leave `frozen` parameters alone: those of a critic whose loss has no weight there, which its momentum
        from other steps would move.
        """
        self.model, self.optimizer, self.objective, self.settings = model, optimizer, objective, settings
        self.schedule, self.generator, self.processes = schedule, generator, processes
        self.wrapped = processes.wrap(model)
        self.lockstep = processes if sharded_in(model) else None
        """The processes, if all must make equal numbers of passes."""
        self.passes, self.frozen = passes, list(frozen)
        self.value_heads = adaptive_heads(model)
        self.parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self.training_modules = training_modules(model)
        self.whitened: list[tuple[Tensor, Tensor]] = []
        """Rows and advantages of the last update's minibatches, if each is whitened, with a last column of ones."""

    def set_rates(self, iteration: int) -> dict[str, float]:
        """Set the learning rates of an iteration, counted from 1; returns them by metric name."""
        return set_rates(self.optimizer, self.schedule(iteration - 1))

    def update(
        self,
        experience: Experience,
        *,
        on_step: OnStep = raise_non_finite,
        each: Callable[[dict[str, float]], None] | None = None,
    ) -> dict[str, float]:
        """Take `epochs` × `minibatches` optimizer steps on one rollout, then the critic-only steps.

        Schulman et al. 2017 (arXiv 1707.06347), algorithm 1.

        Args:
            experience: this process's share of one rollout with its credit.
            on_step: called after each minibatch, and may raise. A step with a non-finite loss or gradient is skipped.
            each: called after each joint step with the metrics of its minibatch, numbered from 1 by `minibatch`.

        Returns:
            `loss`, its parts and `grad_norm` as means over minibatches with acted tokens, the ratio metrics over all
            tokens, those of the first minibatch (`update_metrics`), and the numbers of `steps` taken and `bad_steps`
            skipped. Critic-only steps add their number, `critic_steps`, and the value loss of their last pass,
            `critic_value_loss`.

        Raises:
            NonFiniteUpdate: a loss or gradient was not finite, and `on_step` re-raises it.
        """
        settings = self.settings
        records: list[list[StepRecord]] = []
        grad_norms: list[float] = []
        taken = bad_steps = 0
        self.whitened.clear()
        # Scale or support of the value head must fit the returns before it learns from them.
        experience = adapt_heads(self.value_heads, experience, self.processes)
        drawn = partial(minibatches, experience, self.objective, settings.minibatches, self.generator, self.processes)
        with training(self.training_modules):
            for minibatch in chain.from_iterable(drawn() for _ in range(settings.epochs)):
                # The gradient of the whole minibatch, on all processes.
                whitened = self._whitened(minibatch)
                drop_gradients(self.parameters)
                record = self.accumulate_gradients(whitened)
                drop_gradients(self.frozen)
                norm = clip_gradients(self.parameters, settings.max_grad_norm, settings.grad_norm)
                # The only device synchronisation of a step. A step that is not finite anywhere is skipped everywhere.
                *losses, grad_norm = torch.stack([*(micro.loss for micro in record), norm]).tolist()
                if not self.processes.all(math.isfinite(sum(losses) + grad_norm)):
                    bad_steps += 1
                    on_step(whitened, self.locate(minibatch))
                    continue
                records.append(record)
                grad_norms.append(grad_norm)
                # The update ends before the step of a policy that is already too far away; NaN counts as too far.
                if settings.target_kl is not None:
                    kl = ratios(record, self.objective.metric_clip, self.processes).metrics()["approx_kl_k3"]
                    if not kl <= settings.target_kl:
                        break
                self.optimizer.step()
                taken += 1
                on_step(whitened, None)
                if each is not None:
                    own = update_metrics([record], self.objective.metric_clip, self.processes)
                    each({"minibatch": taken} | own | {"grad_norm": grad_norm})
            critic, bad_critic_steps = self.critic_steps(experience, self.objective, settings.critic_epochs, on_step)
        drop_gradients(self.parameters)  # sampling needs the memory
        steps: dict[str, float] = {"steps": taken, "bad_steps": bad_steps + bad_critic_steps} | critic
        if not records:
            return steps
        metrics = update_metrics(records, self.objective.metric_clip, self.processes)
        return metrics | {"grad_norm": sum(grad_norms) / len(grad_norms)} | steps

    def pretrain_critic(self, experience: Experience, *, on_step: OnStep = raise_non_finite) -> dict[str, float]:
        """Fit the critic's own parameters to the returns of one rollout, with as many steps as it takes in an update.

        Ignores the learning-rate schedule and the value clip, which would slow down a critic that is still far off.
        Returns the critic's metrics of `update`, and `bad_steps`.
        """
        set_rates(self.optimizer, 1.0)
        experience = adapt_heads(self.value_heads, experience, self.processes)
        with training(self.training_modules):
            joint = self.settings.epochs if self.objective.value_coef > 0 else 0
            objective, passes = self.objective.changed(value_clip=None), joint + self.settings.critic_epochs
            metrics, bad_steps = self.critic_steps(experience, objective, passes, on_step)
        drop_gradients(self.parameters)
        return metrics | {"bad_steps": bad_steps}

    def critic_steps(
        self, experience: Experience, objective: Objective, passes: int, on_step: OnStep
    ) -> tuple[dict[str, float], int]:
        """Minimise the value loss over the critic's own parameters, in passes over an experience.

        Returns `critic_steps` and `critic_value_loss`, and the number of skipped steps. `on_step` is called after each
        minibatch, and may raise.
        """
        last: list[float] = []
        steps, bad_steps, count = 0, 0, self.settings.minibatches
        for _ in range(passes):
            losses: list[float] = []
            for minibatch in minibatches(experience, objective, count, self.generator, self.processes):
                loss, grad_norm = self.critic_gradient(minibatch, objective)
                if not self.processes.all(math.isfinite(loss + grad_norm)):
                    bad_steps += 1
                    on_step(minibatch, self.locate(minibatch))
                    continue
                self.optimizer.step()
                losses.append(loss)
                on_step(minibatch, None)
            steps, last = steps + len(losses), losses or last
        if not steps:
            return {}, bad_steps
        return {"critic_steps": steps, "critic_value_loss": sum(last) / len(last)}, bad_steps

    def critic_gradient(self, minibatch: Experience, objective: Objective) -> tuple[float, float]:
        """Compute the clipped value-loss gradient of the critic's own parameters; returns loss and gradient norm.

        Bypasses the model's data-parallel wrapper, which would wait for the gradient of every parameter.
        """
        drop_gradients(self.parameters)
        losses = []
        for part in micro_batches(minibatch, self.settings.micro_batch_tokens, self.lockstep):
            value_loss = MicroBatchLoss(objective, part).value_loss(self.passes.critic(part.inputs))
            value_loss = value_loss if part.real else 0 * value_loss
            self.processes.backward(value_loss)
            losses.append(value_loss.detach())
        self.processes.average_gradients(self.parameters)
        norm = clip_gradients(self.parameters, self.settings.max_grad_norm, self.settings.grad_norm)
        total = self.processes.sum(torch.stack(losses).sum())
        loss, grad_norm = torch.stack([total, norm]).tolist()
        return loss, grad_norm

    def state(self) -> dict[str, Any]:
        """Training state, the same in all processes."""
        return training_state(self.model, self.optimizer) | {"shuffling": to_hex(self.generator.get_state())}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`; `ConfigError` if the weights or moments do not fit this model."""
        load_training_state(self.model, self.optimizer, state)
        self.generator.set_state(from_hex(state["shuffling"]))

    def _whitened(self, minibatch: Experience) -> Experience:
        if not self.settings.whiten_minibatches:
            return minibatch
        mask = minibatch.mask & minibatch.real
        reduce = None if self.processes.count == 1 else self.processes.sum
        advantages, divisor = whiten_with_divisor(minibatch.advantages, mask, reduce=reduce, count=minibatch.tokens)
        if minibatch.rows is not None:
            self.whitened.append((minibatch.rows, minibatch.real * pad(advantages, (0, 1), value=1.0)))
        return replace(minibatch, advantages=advantages, divisor=divisor)

    def used_advantages(self, experience: Experience, first: int, rows: int) -> Tensor:
        """Advantages as the last update's loss used them, `[batch, time]`; NaN at tokens that are not in the loss.

        If each minibatch is whitened, the mean over the passes. `first` is the number of the experience's first row in
        the batch of all processes, which has so many `rows`.
        """
        advantages = experience.advantages
        if self.whitened:
            sums = advantages.new_zeros(rows, self.whitened[0][1].shape[1])
            for numbers, part in self.whitened:
                sums[numbers] += part
            own = self.processes.sum(sums)[first : first + len(advantages)]
            advantages = own[:, : advantages.shape[1]] / own[:, -1:]
        return advantages.masked_fill(~experience.mask, math.nan)

    def accumulate_gradients(self, minibatch: Experience) -> list[StepRecord]:
        """Accumulate a minibatch's gradient over micro-batches of similar lengths.

        Every mean over tokens divides by the token count of the whole minibatch on all processes, so that micro-batches
        and processes add up to the same gradient, however they are split. Processes synchronise gradients once, with
        the last micro-batch, so that their numbers of micro-batches may differ; those of a model with sharded modules,
        whose passes are collective, are made equal.
        """
        if minibatch.counts is None:  # an experience as a minibatch of its own
            counts = self.processes.sum(self.objective.count(minibatch.mask, minibatch.value_mask)).tolist()
            minibatch = replace(minibatch, counts=counts)
        records = []
        parts = micro_batches(minibatch, self.settings.micro_batch_tokens, self.lockstep)
        for number, part in enumerate(parts, start=1):
            with self.processes.no_sync(self.wrapped) if number < len(parts) else nullcontext():
                records.append(self._pass(part))
        if self.lockstep is not None:
            self.processes.average_gradients(self.parameters)
        return records

    def _pass(self, part: Experience) -> StepRecord:
        """Run a forward and a backward pass; without an effect if the rows are not real."""
        # Forward: the policy's loss goes into the model, whose projection to the vocabulary calls it chunk by chunk and
        # takes its gradient there (`core.vocab_projection.differentiate`); the critic's part comes on top.
        loss = MicroBatchLoss(self.objective, part)
        outputs = self.passes.evaluate(self.wrapped, part.inputs, loss)
        losses = loss.complete(outputs)
        # Backward. Sharded policy and critic one after the other, so that gathered weights of both never meet.
        factor, terms = 1 if part.real else 0, [losses.total]
        if self.passes.separate_critic and self.lockstep is not None and losses.critic is not None:
            terms = [losses.policy, losses.critic]
        for term in terms:
            self.processes.backward(factor * term)
        # What the metrics need, measured from the log-probs around which the loss was clipped.
        parts = {name: factor * x for name, x in losses.parts.items()}
        part, mask = self.objective.around_proximal(outputs.logprobs, part), part.mask & part.real
        clipped = self.objective.clipped(outputs.logprobs, part)
        behavior, stats = part.behavior_logprobs, None
        if behavior is not None:
            stats = correction_stats(part.weights, outputs.logprobs, behavior, mask)
        total = factor * losses.total.detach()
        return StepRecord(total, parts, outputs.logprobs, part.logprobs, mask, clipped, stats)

    @torch.no_grad()
    def locate(self, minibatch: Experience) -> NonFiniteUpdate:
        """Find the first row and loss term of a failed minibatch that are not finite, one row at a time."""
        assert minibatch.rows is not None
        first, names = (-1, -1), []
        rows = len(minibatch)
        for number in range(rows if self.lockstep is None else self.processes.most(rows)):
            place = min(number, rows - 1)
            row = replace(minibatch.select(slice(place, place + 1)), counts=None)
            loss = MicroBatchLoss(self.objective, row)
            parts = loss.complete(self.passes.evaluate(self.model, row.inputs, loss)).parts
            names, finite = list(parts), [bool(x.isfinite()) for x in parts.values()]
            if not all(finite) and first == (-1, -1):
                first = int(minibatch.rows[place]), finite.index(False)
                if self.lockstep is None:
                    break
        everywhere = self.processes.gather(torch.tensor([first], device=self.processes.device)).tolist()
        for place, term in everywhere:
            if term >= 0:
                return NonFiniteUpdate(names[term].removesuffix("_in_update").replace("_", " "), place)
        return NonFiniteUpdate("gradient", None)
