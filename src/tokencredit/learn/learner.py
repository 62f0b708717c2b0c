"""The learner: a model with its optimizer and objective. `Learner.update` is PPO's update, for text and Gymnasium."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tokencredit.core.masked import whiten_with_divisor
from tokencredit.core.off_policy import correction_stats
from tokencredit.distributed.processes import Processes
from tokencredit.distributed.sharding import sharded_in
from tokencredit.learn.experience import Experience
from tokencredit.learn.minibatches import micro_batches, minibatches
from tokencredit.learn.objective import MicroBatchLoss, Objective, Passes
from tokencredit.learn.optim import clip_gradients, set_rates
from tokencredit.learn.return_buffer import ReturnBuffer
from tokencredit.learn.rng import from_hex, to_hex
from tokencredit.learn.state import load_optimizer_state, load_trained_weights, optimizer_state, trained_weights
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
    ):
        """Store the parts and wrap the model for data parallelism.

        A parameter group's `metric` names its learning rate in the metrics, default `lr`. `schedule` is the
        learning-rate factor at an iteration, counted from 0; `generator` shuffles the rows.
        """
        self.model, self.optimizer, self.objective, self.settings = model, optimizer, objective, settings
        self.schedule, self.generator, self.processes = schedule, generator, processes
        self.wrapped = processes.wrap(model)
        self.lockstep = processes if sharded_in(model) else None
        """The processes, if all must make equal numbers of passes."""
        self.passes = passes
        self.value_heads = adaptive_heads(model)
        self.parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self.training_modules = training_modules(model)
        self.critic = CriticSteps(self)

    def set_rates(self, iteration: int) -> dict[str, float]:
        """Set the learning rates of an iteration, counted from 1; returns them by metric name."""
        set_rates(self.optimizer, self.schedule(iteration - 1))
        return {group.get("metric", "lr"): group["lr"] for group in self.optimizer.param_groups}

    def update(
        self, experience: Experience, *, frozen: Iterable[Tensor] = (), on_step: OnStep = raise_non_finite
    ) -> dict[str, float]:
        """Take `epochs` × `minibatches` optimizer steps on one rollout, then the critic-only steps.

        Schulman et al. 2017 (arXiv 1707.06347), algorithm 1.

        Args:
            experience: this process's share of one rollout with its credit.
            frozen: parameters that the joint steps of policy and critic do not change.
            on_step: called after each minibatch, and may raise. A step with a non-finite loss or gradient is skipped.

        Returns:
            `loss`, its parts and `grad_norm` as means over minibatches with acted tokens, the ratio metrics over all
            tokens, `first_ratio_error`, and the numbers of `steps` taken and `bad_steps` skipped. Critic-only steps
            add their number, `critic_steps`, and the value loss of their last pass, `critic_value_loss`.

        Raises:
            NonFiniteUpdate: a loss or gradient was not finite, and `on_step` re-raises it.
        """
        settings, frozen = self.settings, list(frozen)
        records: list[list[StepRecord]] = []
        grad_norms: list[float] = []
        bad_steps = 0
        # Scale or support of the value head must fit the returns before it learns from them.
        adapt_heads(self.value_heads, experience, self.processes)
        with training(self.training_modules):
            for minibatch in self._minibatches(experience):
                # The gradient of the whole minibatch, on all processes; during a warm-up the critic's alone.
                whitened = self._whitened(minibatch)
                drop_gradients(self.parameters)
                record = self.accumulate_gradients(whitened)
                drop_gradients(frozen)
                norm = clip_gradients(self.parameters, settings.max_grad_norm)
                # The only device synchronisation of a step. A step that is not finite anywhere is skipped everywhere.
                *losses, grad_norm = torch.stack([*(micro.loss for micro in record), norm]).tolist()
                if not self.processes.all(math.isfinite(sum(losses) + grad_norm)):
                    bad_steps += 1
                    on_step(whitened, self.locate(minibatch))
                    continue
                records.append(record)
                # The update ends before the step of a policy that is already too far away; NaN counts as too far.
                if settings.target_kl is not None:
                    kl = ratios(record, self.objective.clip, self.processes).metrics()["approx_kl_k3"]
                    if not kl <= settings.target_kl:
                        break
                self.optimizer.step()
                grad_norms.append(grad_norm)
                on_step(whitened, None)
            # Steps of the critic alone, also on buffered experiences.
            passes = self.critic.passes(experience, self.objective)
            critic, bad_critic_steps = self.critic.run(experience, passes, on_step)
        drop_gradients(self.parameters)  # sampling needs the memory
        steps: dict[str, float] = {"steps": len(grad_norms), "bad_steps": bad_steps + bad_critic_steps} | critic
        if not records:
            return steps
        metrics = update_metrics(records, self.objective.clip, self.processes)
        return metrics | {"grad_norm": sum(grad_norms) / max(len(grad_norms), 1)} | steps

    def pretrain_critic(self, experience: Experience, *, on_step: OnStep = raise_non_finite) -> dict[str, float]:
        """Fit the critic's own parameters to the returns of one rollout, with as many steps as it takes in an update.

        Ignores the learning-rate schedule and the value clip, which would slow down a critic that is still far off.
        Returns the critic's metrics of `update`, and `bad_steps`.
        """
        set_rates(self.optimizer, 1.0)
        adapt_heads(self.value_heads, experience, self.processes)
        with training(self.training_modules):
            joint, objective = self.settings.epochs if self.objective.value_coef > 0 else 0, unclipped(self.objective)
            passes = [(experience, objective)] * joint + self.critic.passes(experience, objective)
            metrics, bad_steps = self.critic.run(experience, passes, on_step)
        drop_gradients(self.parameters)
        return metrics | {"bad_steps": bad_steps}

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Training state that all processes share, and this process's part of the critic's buffer."""
        shared = {
            "weights": trained_weights(self.model),
            "optimizer": optimizer_state(self.optimizer, self.model),
            "shuffling": to_hex(self.generator.get_state()),
        }
        return shared, {"buffer": self.critic.buffer.state()} if self.settings.critic_buffer else {}

    def load(
        self, shared: Mapping[str, Any], own: Mapping[str, Any], everyone: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Restore the two parts of `state`; `ValueError` if the weights or moments do not fit this model.

        `everyone` has the parts of all processes if another number of them wrote the state.
        """
        load_trained_weights(self.model, shared["weights"])
        load_optimizer_state(self.optimizer, self.model, shared["optimizer"])
        self.generator.set_state(from_hex(shared["shuffling"]))
        if self.settings.critic_buffer:
            parts = [own["buffer"]] if everyone is None else [part["buffer"] for part in everyone]
            share = None if everyone is None else self.processes.share
            self.critic.buffer.load(parts, self.processes.device, share)

    def _minibatches(self, experience: Experience) -> Iterator[Experience]:
        """The minibatches of all joint steps."""
        settings = self.settings
        for _ in range(settings.epochs):
            yield from minibatches(experience, self.objective, settings.minibatches, self.generator, self.processes)

    def _whitened(self, minibatch: Experience) -> Experience:
        if not self.settings.whiten_minibatches:
            return minibatch
        mask = minibatch.mask & minibatch.real
        reduce = None if self.processes.count == 1 else self.processes.sum
        advantages, divisor = whiten_with_divisor(minibatch.advantages, mask, reduce=reduce, count=minibatch.tokens)
        return replace(minibatch, advantages=advantages, divisor=divisor)

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


class CriticSteps:
    """Steps that minimise the value loss alone: after the joint steps of an update, and before the first iteration.

    They change only the critic's own parameters.
    """

    def __init__(self, learner: Learner):
        """Take the steps of this learner."""
        self.learner, self.settings, self.processes = learner, learner.settings, learner.processes
        self.buffer = ReturnBuffer(self.settings.critic_buffer, learner.passes.critic_inputs)

    def passes(self, experience: Experience, objective: Objective) -> list[tuple[Experience, Objective]]:
        """Experience and objective of each pass; buffered experiences go unclipped, since their values are stale."""
        earlier = [(buffered, unclipped(objective)) for buffered in self.buffer.experiences]
        return [*earlier, (experience, objective)] * self.settings.critic_epochs

    def run(
        self, experience: Experience, passes: Iterable[tuple[Experience, Objective]], on_step: OnStep
    ) -> tuple[dict[str, float], int]:
        """Take the steps of `passes`; returns `critic_steps` and `critic_value_loss`, and the number of skipped steps.

        The buffer keeps `experience`. `on_step` is called after each minibatch, and may raise.
        """
        losses: list[float] = []
        bad_steps = 0
        for source, objective in passes:
            shuffled = self.settings.minibatches, self.learner.generator, self.processes
            for minibatch in minibatches(source, objective, *shuffled):
                loss, grad_norm = self.gradient(minibatch, objective)
                if not self.processes.all(math.isfinite(loss + grad_norm)):
                    bad_steps += 1
                    buffered_error = NonFiniteUpdate("value loss of an earlier batch", None)
                    on_step(minibatch, self.learner.locate(minibatch) if source is experience else buffered_error)
                    continue
                self.learner.optimizer.step()
                losses.append(loss)
                on_step(minibatch, None)
        if self.settings.critic_buffer and not bad_steps:
            self.buffer.add(experience)
        if not losses:
            return {}, bad_steps
        last = losses[-self.settings.minibatches :]
        return {"critic_steps": len(losses), "critic_value_loss": sum(last) / len(last)}, bad_steps

    def gradient(self, minibatch: Experience, objective: Objective) -> tuple[float, float]:
        """Compute the clipped value-loss gradient of the critic's own parameters; returns loss and gradient norm.

        Bypasses the model's data-parallel wrapper, which would wait for the gradient of every parameter.
        """
        parameters, losses = self.learner.parameters, []
        drop_gradients(parameters)
        for part in micro_batches(minibatch, self.settings.micro_batch_tokens, self.learner.lockstep):
            value_loss = MicroBatchLoss(objective, part).value_loss(self.learner.passes.critic(part.inputs))
            value_loss = value_loss if part.real else 0 * value_loss
            self.processes.backward(value_loss)
            losses.append(value_loss.detach())
        self.processes.average_gradients(parameters)
        norm = clip_gradients(parameters, self.settings.max_grad_norm)
        total = self.processes.sum(torch.stack(losses).sum())
        loss, grad_norm = torch.stack([total, norm]).tolist()
        return loss, grad_norm


def unclipped(objective: Objective) -> Objective:
    """The objective without value clipping."""
    return replace(objective, value_clip=None)
