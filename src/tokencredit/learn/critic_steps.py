"""Steps of the critic alone: after the joint steps of an update, and before the first iteration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tokencredit.learn.experience import Experience, ReturnBuffer, like_lengths
from tokencredit.learn.objective import MicroBatchLoss, Objective, Passes
from tokencredit.learn.optim import clip_gradients
from tokencredit.learn.update import NonFiniteUpdate, OnStep, UpdateSettings, drop_gradients, minibatches
from tokencredit.processes import Processes


class CriticSteps:
    """Optimizer steps that minimise the value loss alone and move the critic's own parameters alone."""

    def __init__(
        self,
        passes: Passes,
        optimizer: torch.optim.Optimizer,
        settings: UpdateSettings,
        generator: torch.Generator,
        processes: Processes,
        locate: Callable[[Experience, Tensor], NonFiniteUpdate],
    ):
        """Put the parts together.

        Args:
            passes: the critic's pass, and what it reads.
            optimizer: of all parameters; it leaves those without a gradient as they are, moments and decay included.
            settings: how an update goes through an experience.
            generator: shuffles the rows.
            processes: the job.
            locate: finds the row of a minibatch whose loss is not finite.
        """
        self._critic, self.optimizer, self.settings = passes.critic, optimizer, settings
        self.generator, self.processes, self._locate = generator, processes, locate
        self.parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self.buffer = ReturnBuffer(settings.critic_buffer, passes.critic_inputs)

    def passes(self, experience: Experience, objective: Objective) -> list[tuple[Experience, Objective]]:
        """What each pass goes through: earlier experiences, without a clip, for which their values are too old."""
        earlier = [(each, unclipped(objective)) for each in self.buffer.experiences]
        return [*earlier, (experience, objective)] * self.settings.critic_epochs

    def take(
        self, experience: Experience, passes: Iterable[tuple[Experience, Objective]], on_step: OnStep
    ) -> tuple[dict[str, float], int]:
        """Take the steps; returns `critic_steps` and `critic_value_loss`, if there are any, and how many were skipped.

        Args:
            experience: the new one, which the buffer keeps.
            passes: what each pass goes through, and the objective whose value loss it minimises.
            on_step: called after each minibatch, and may raise.
        """
        losses: list[float] = []
        bad_steps = 0
        for source, objective in passes:
            for part in minibatches(source, objective, self.settings.minibatches, self.generator, self.processes):
                minibatch, new = source.select(part.rows), source is experience
                loss, grad_norm = self.gradient(minibatch, objective, part.counts)
                if not self.processes.all(math.isfinite(loss + grad_norm)):
                    bad_steps += 1
                    earlier = NonFiniteUpdate("value loss of an earlier batch", None)
                    on_step(minibatch, self._locate(experience, part.rows) if new else earlier)
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
        self, minibatch: Experience, objective: Objective, counts: Sequence[float] | None = None
    ) -> tuple[float, float]:
        """Put the gradient of the value loss, clipped, into the critic's own parameters; returns the loss and its norm.

        The model's wrapper, which waits for the gradient of every parameter, has no part in it. Arguments as in
        `Learner.backward`.
        """
        assert self._critic is not None
        if counts is None:
            counts = self.processes.sum(objective.count(minibatch.mask)).tolist()
        drop_gradients(self.parameters)
        losses = []
        for rows in like_lengths(minibatch.lengths, self.settings.micro_batch_tokens):
            part = minibatch.select(rows)
            value_loss = MicroBatchLoss(objective, part, counts).value_loss(self._critic(part.inputs))
            value_loss.backward()
            losses.append(value_loss.detach())
        self.processes.sum_gradients(self.parameters)
        norm = clip_gradients(self.parameters, self.settings.max_grad_norm, self.settings.grad_norm_type)
        total = self.processes.sum(torch.stack(losses).sum())
        loss, grad_norm = torch.stack([total, norm]).tolist()
        return loss, grad_norm


def unclipped(objective: Objective) -> Objective:
    """The objective without a clip of the value loss."""
    return replace(objective, value_clip=None)
