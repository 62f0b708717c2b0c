"""What a rollout leaves behind for the update, in either world."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Experience:
    """Tensors that share their first axis, the one that minibatches are taken from.

    `inputs` holds what the policy needs to be evaluated again (tokens, or observations and actions), by the name of
    its argument; the rest is `[batch, time]`.
    """

    inputs: dict[str, Tensor]
    mask: Tensor
    logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor

    def __len__(self) -> int:
        """Rows on the first axis."""
        return len(self.mask)

    def select(self, rows: Tensor | slice) -> Experience:
        """These rows, in this order."""
        return Experience(
            inputs={name: tensor[rows] for name, tensor in self.inputs.items()},
            mask=self.mask[rows],
            logprobs=self.logprobs[rows],
            values=self.values[rows],
            advantages=self.advantages[rows],
            returns=self.returns[rows],
        )

    def minibatches(self, count: int, generator: torch.Generator) -> Iterator[Tensor]:
        """Row numbers, shuffled and cut into `count` minibatches whose sizes differ by one at most."""
        order = torch.randperm(len(self), generator=generator)
        yield from order.to(self.mask.device).tensor_split(count)
