"""Critic-only optimizer steps: after the joint steps of an update, and before the first iteration."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tokencredit.distributed.processes import Processes
from tokencredit.learn.experience import Experience, joined
from tokencredit.learn.minibatches import micro_batches, minibatches
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
        locate: Callable[[Experience], NonFiniteUpdate],
    ):
        """Arguments as in `Learner`; `lockstep` as in `micro_batches`; `locate` finds a row that is not finite."""
        self._passes, self.optimizer, self.settings = passes, optimizer, settings
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
        """Take the steps of `passes`; returns `critic_steps` and `critic_value_loss`, and the number of skipped steps.

        The buffer keeps `experience`. `on_step` is called after each minibatch, and may raise.
        """
        losses: list[float] = []
        bad_steps = 0
        for source, objective in passes:
            for minibatch in minibatches(source, objective, self.settings.minibatches, self.generator, self.processes):
                loss, grad_norm = self.gradient(minibatch, objective)
                if not self.processes.all(math.isfinite(loss + grad_norm)):
                    bad_steps += 1
                    buffered_error = NonFiniteUpdate("value loss of an earlier batch", None)
                    on_step(minibatch, self._locate(minibatch) if source is experience else buffered_error)
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

    def gradient(self, minibatch: Experience, objective: Objective) -> tuple[float, float]:
        """Compute the clipped value-loss gradient of the critic's own parameters; returns loss and gradient norm.

        Bypasses the model's data-parallel wrapper, which would wait for the gradient of every parameter.
        """
        drop_gradients(self.parameters)
        losses = []
        for part in micro_batches(minibatch, self.settings.micro_batch_tokens, self.lockstep):
            value_loss = MicroBatchLoss(objective, part).value_loss(self._passes.critic(part.inputs))
            value_loss = value_loss if part.real else 0 * value_loss
            self.processes.backward(value_loss)
            losses.append(value_loss.detach())
        self.processes.average_gradients(self.parameters)
        norm = clip_gradients(self.parameters, self.settings.max_grad_norm)
        total = self.processes.sum(torch.stack(losses).sum())
        loss, grad_norm = torch.stack([total, norm]).tolist()
        return loss, grad_norm


class ReturnBuffer:
    """Buffer of the last experiences, reduced to the critic's inputs, values and returns."""

    def __init__(self, size: int, inputs: Iterable[str]):
        """Start empty, with room for `size` experiences; `inputs` are the names of the critic's inputs."""
        self.inputs = tuple(inputs)
        self.experiences: deque[Experience] = deque(maxlen=size)

    def add(self, experience: Experience) -> None:
        """Add an experience; evicts the oldest one from a full buffer."""
        inputs = {name: experience.inputs[name] for name in self.inputs}
        empty = experience.returns[:, :0]  # placeholders for tensors that the critic does not read
        without = replace(experience, ref_logprobs=None, weights=None, behavior_logprobs=None, age=None)
        self.experiences.append(replace(without, inputs=inputs, logprobs=empty, advantages=empty))

    def state(self) -> list[dict[str, Any]]:
        """The experiences, oldest first, as copies: a checkpoint cannot hold tensors that share memory."""
        names = ("mask", "lengths", "values", "returns", "value_mask")
        return [
            {"inputs": {name: x.clone() for name, x in experience.inputs.items()}}
            | {name: x.clone() for name in names if (x := getattr(experience, name)) is not None}
            for experience in self.experiences
        ]

    def load(
        self, states: Sequence[Sequence[dict[str, Any]]], device: torch.device, share: Callable[[int], slice] | None
    ) -> None:
        """Restore the results of `state`, of this process or of all that wrote the checkpoint, on a device.

        `share` selects this process's rows of all; None keeps them.
        """

        def buffered(tensors: dict[str, Any]) -> Experience:
            inputs = {name: x.to(device) for name, x in tensors["inputs"].items()}
            own = {name: x.to(device) for name, x in tensors.items() if name != "inputs"}
            empty = own["returns"][:, :0]
            return Experience(inputs, logprobs=empty, advantages=empty, **own)

        self.experiences.clear()
        for parts in zip(*states, strict=True):
            experience = joined([buffered(tensors) for tensors in parts])
            self.experiences.append(experience if share is None else experience.select(share(len(experience))))


def unclipped(objective: Objective) -> Objective:
    """The objective without value clipping."""
    return replace(objective, value_clip=None)
