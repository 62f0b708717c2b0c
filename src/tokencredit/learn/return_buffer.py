"""The experiences that a critic learns from again, in its own optimizer steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tokencredit.learn.experience import Experience, joined


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
