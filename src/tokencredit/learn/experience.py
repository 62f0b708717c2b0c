"""What a rollout leaves behind for the update, in either world."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokencredit.core.masked import Reduce, explained_variance, moments

PASS_OVERHEAD = 256
"""Fixed cost of an extra forward pass on a CPU, in tokens: split a batch only if that saves more padding."""

PASS_OVERHEAD_ON_ACCELERATORS = 4096
"""The same on other devices, which need large products to be busy."""


@dataclass(frozen=True)
class Experience:
    """Tensors that share their first axis, the one that minibatches are taken from.

    `inputs` holds what the policy needs to be evaluated again (tokens, or observations and actions), by the name of
    its argument; the rest is `[batch, time]`.
    """

    inputs: dict[str, Tensor]
    mask: Tensor
    """Bool, true at the tokens or steps that take part in the loss; a row may have none."""
    lengths: Tensor
    """`[batch]`, int64: tokens or steps that a pass through the model reads of each row."""
    logprobs: Tensor
    values: Tensor | None
    """None without a critic."""
    advantages: Tensor
    returns: Tensor
    ref_logprobs: Tensor | None = None
    """Log-probabilities of the tokens under the reference model, where the loss estimates the KL from them."""

    def __len__(self) -> int:
        """Rows on the first axis."""
        return len(self.mask)

    def tensors(self) -> dict[str, Tensor]:
        """All of them by name, in one dict."""
        own = {name: tensor for name, tensor in vars(self).items() if name != "inputs" and tensor is not None}
        return self.inputs | own

    def select(self, rows: Tensor | slice) -> Experience:
        """These rows, in this order."""
        inputs = {name: tensor[rows] for name, tensor in self.inputs.items()}
        own: dict[str, Any] = {name: x if x is None else x[rows] for name, x in vars(self).items() if name != "inputs"}
        return Experience(inputs, **own)

    def minibatches(self, count: int, generator: torch.Generator) -> Iterator[Tensor]:
        """Row numbers, shuffled and cut into `count` minibatches whose sizes differ by one at most."""
        order = torch.randperm(len(self), generator=generator)
        yield from order.to(self.mask.device).tensor_split(count)


class ReturnBuffer:
    """The last experiences, as far as a critic learns from them: its inputs, and returns."""

    def __init__(self, size: int, inputs: Iterable[str]):
        """Start empty; `size` is the number of experiences, `inputs` are the names of those that the critic reads."""
        self.inputs = tuple(inputs)
        self.experiences: deque[Experience] = deque(maxlen=size)

    def add(self, experience: Experience) -> None:
        """Keep an experience, in the place of the oldest one if there are enough."""
        inputs = {name: experience.inputs[name] for name in self.inputs}
        nothing = _nothing(experience.returns)
        self.experiences.append(
            replace(experience, inputs=inputs, logprobs=nothing, advantages=nothing, ref_logprobs=None)
        )

    def state(self) -> list[dict[str, Any]]:
        """The experiences, oldest first; no two tensors share memory, which a checkpoint could not hold."""
        return [
            {"inputs": {name: x.clone() for name, x in experience.inputs.items()}}
            | {name: getattr(experience, name).clone() for name in ("mask", "lengths", "values", "returns")}
            for experience in self.experiences
        ]

    def load(self, state: Iterable[dict[str, Any]], device: torch.device) -> None:
        """Hold what `state` gave, on a device."""
        self.experiences.clear()
        for tensors in state:
            inputs = {name: x.to(device) for name, x in tensors["inputs"].items()}
            own = {name: x.to(device) for name, x in tensors.items() if name != "inputs"}
            nothing = _nothing(own["returns"])
            self.experiences.append(Experience(inputs, logprobs=nothing, advantages=nothing, **own))


def _nothing(returns: Tensor) -> Tensor:
    """A tensor with as many rows and no columns, in the place of what a critic does not learn from."""
    return returns[:, :0]


def critic_metrics(values: Tensor, returns: Tensor, mask: Tensor, reduce: Reduce | None = None) -> dict[str, float]:
    """Metrics of a critic's values, `[batch, time]`: their mean, and how much of the returns' variance they explain."""
    _, mean, _ = moments(values, mask, reduce)
    explained = explained_variance(values, returns, mask, reduce)
    return dict(zip(("value_mean", "explained_variance"), torch.stack([mean, explained]).tolist(), strict=True))


def like_lengths(lengths: Tensor, budget: int | None = None) -> list[Tensor]:
    """Cut rows into batches of like length, so that little of what a model reads is padding.

    Among all ways to cut the rows in the order of their lengths, the one with the least Σ (rows · longest + overhead),
    found by dynamic programming; the overhead is that of one more pass through a model, in tokens.

    Args:
        lengths: `[batch]`, int64.
        budget: the most tokens of a batch, padding included; None for no limit.

    Returns:
        Row numbers, a tensor a batch, the longest rows first.

    Raises:
        ValueError: a row alone is longer than the budget.
    """
    overhead = PASS_OVERHEAD if lengths.device.type == "cpu" else PASS_OVERHEAD_ON_ACCELERATORS
    longest = np.sort(np.array(lengths.tolist(), dtype=np.int64))[::-1]
    if budget is None and longest[0] == longest[-1]:
        return [torch.arange(len(lengths), device=lengths.device)]
    order = lengths.argsort(descending=True, stable=True)
    if budget is not None and longest[0] > budget:
        raise ValueError(f"budget is {budget}; it must be at least {longest[0]}, the tokens of the longest row")
    least, start_of = np.zeros(len(longest) + 1, dtype=np.int64), np.zeros(len(longest) + 1, dtype=np.int64)
    for end in range(1, len(longest) + 1):
        tokens = longest[:end] * np.arange(end, 0, -1)  # of a batch from each row to this one
        costs = least[:end] + tokens + overhead
        if budget is not None:
            costs[tokens > budget] = np.iinfo(np.int64).max
        start_of[end] = costs.argmin()
        least[end] = costs[start_of[end]]
    batches, end = [], len(longest)
    while end:
        batches.append(order[start_of[end] : end])
        end = int(start_of[end])
    return batches[::-1]
