"""Critic-only optimizer steps: after the joint steps of an update, and before the first iteration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tokencredit.distributed.processes import Processes
from tokencredit.learn.experience import Experience, ReturnBuffer
from tokencredit.learn.minibatches import Minibatch, micro_batches, minibatches
from tokencredit.learn.objective import MicroBatchLoss, Objective, Passes
from tokencredit.learn.optim import clip_gradients
from tokencredit.learn.update import NonFiniteUpdate, OnStep, UpdateSettings, drop_gradients


class CriticSteps:
    """Optimizer steps that minimise only the value loss and change only the critic's own parameters."""

    def __init__(
        self,
        passes: Passes,
        optimizer: torch.optim.Optimizer,
        settings: UpdateSettings,
        generator: torch.Generator,
        processes: Processes,
        lockstep: Processes | None,
        locate: Callable[[Minibatch], NonFiniteUpdate],
    ):
        """Store the parts.

        Args:
            passes: the critic's forward pass and the names of its inputs.
            optimizer: over all parameters; skips those without a gradient, weight decay and moments included.
            settings: the update's settings.
            generator: shuffles the rows.
            processes: the processes of the job.
            lockstep: as in `micro_batches`.
            locate: finds the row of a minibatch whose loss is not finite.
        """
        self._critic, self.optimizer, self.settings = passes.critic, optimizer, settings
        self.generator, self.processes, self.lockstep, self._locate = generator, processes, lockstep, locate
        self.parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self.buffer = ReturnBuffer(settings.critic_buffer, passes.critic_inputs)

    def passes(self, experience: Experience, objective: Objective) -> list[tuple[Experience, Objective]]:
        """Experience and objective of each pass; buffered experiences go unclipped, since their values are stale."""
        earlier = [(buffered, unclipped(objective)) for buffered in self.buffer.experiences]
        return [*earlier, (experience, objective)] * self.settings.critic_epochs

    def run(
        self, experience: Experience, passes: Iterable[tuple[Experience, Objective]], on_step: OnStep
    ) -> tuple[dict[str, float], int]:
        """Take the steps; returns the metrics `critic_steps` and `critic_value_loss`, and the number of skipped steps.

        Args:
            experience: the new experience, which the buffer keeps.
            passes: experience of each pass, and the objective whose value loss it minimises.
            on_step: called after each minibatch, and may raise.
        """
        losses: list[float] = []
        bad_steps = 0
        for source, objective in passes:
            for part in minibatches(source, objective, self.settings.minibatches, self.generator, self.processes):
                minibatch, is_new = part.experience, source is experience
                loss, grad_norm = self.gradient(minibatch, objective, part.counts, real=part.real)
                if not self.processes.all(math.isfinite(loss + grad_norm)):
                    bad_steps += 1
                    buffered_error = NonFiniteUpdate("value loss of an earlier batch", None)
                    on_step(minibatch, self._locate(part) if is_new else buffered_error)
                    continue
                self.optimizer.step()
                losses.append(loss)
                on_step(minibatch, None)
        if self.settings.critic_buffer and not bad_steps:
            self.buffer.add(experience)
        if not losses:
            return {}, bad_steps
        last = losses[-self.settings.minibatches :]
        return {"critic_steps": len(losses), "critic_value_loss": sum(last) / len(last)}, bad_steps

    def gradient(
        self,
        minibatch: Experience,
        objective: Objective,
        counts: Sequence[float] | None = None,
        *,
        real: bool = True,
    ) -> tuple[float, float]:
        """Compute the clipped value-loss gradient of the critic's own parameters; returns loss and gradient norm.

        Bypasses the model's data-parallel wrapper, which would wait for the gradient of every parameter. Arguments as
        in `Learner.backward`.
        """
        assert self._critic is not None
        if counts is None:
            counts = self.processes.sum(objective.count(minibatch.mask, minibatch.value_mask)).tolist()
        drop_gradients(self.parameters)
        losses = []
        for part, in_loss in micro_batches(minibatch, self.settings.micro_batch_tokens, self.lockstep, real=real):
            value_loss = MicroBatchLoss(objective, part, counts).value_loss(self._critic(part.inputs))
            value_loss = value_loss if in_loss else 0 * value_loss
            self.processes.backward(value_loss)
            losses.append(value_loss.detach())
        self.processes.average_gradients(self.parameters)
        norm = clip_gradients(self.parameters, self.settings.max_grad_norm)
        total = self.processes.sum(torch.stack(losses).sum())
        loss, grad_norm = torch.stack([total, norm]).tolist()
        return loss, grad_norm


def unclipped(objective: Objective) -> Objective:
    """The objective without value clipping."""
    return replace(objective, value_clip=None)
