"""Experience: the tensors of a rollout that an update reads, for text and Gymnasium alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from tokencredit.core.masked import Reduce, explained_variance, moments

PASS_OVERHEAD = 256
"""Fixed cost of an extra forward pass on a CPU, in tokens: split a batch only if that saves more padding."""

PASS_OVERHEAD_ON_ACCELERATORS = 4096
"""Fixed cost of an extra forward pass on other devices, in tokens; only large products keep them busy."""


LEFT_PADDED = ("prompt_ids", "prompt_mask")
"""Inputs whose padding comes first; all other tensors are padded at their end."""


@dataclass(frozen=True)
class Experience:
    """Tensors with a common batch axis, from which minibatches are drawn.

    `inputs` holds the policy's inputs (tokens, or observations and actions) by argument name; all other tensors are
    `[batch, time]`.
    """

    inputs: dict[str, Tensor]
    mask: Tensor
    """Bool, true at the tokens or steps in the loss; may be false in a whole row."""
    lengths: Tensor
    """`[batch]`, int64: tokens or steps of each row in a forward pass."""
    logprobs: Tensor
    """Log-probs under the policy around which the update clips; with `age`, under the behavior policy."""
    values: Tensor | None
    """None without a critic."""
    advantages: Tensor
    returns: Tensor
    ref_logprobs: Tensor | None = None
    """Log-probabilities under the reference model, if the loss estimates the KL from them."""
    value_mask: Tensor | None = None
    """Bool, true at the tokens in the value loss; None for `mask`."""
    weights: Tensor | None = None
    """Importance weights on the policy loss, from `core.off_policy.correction`; None for 1."""
    behavior_logprobs: Tensor | None = None
    """Log-probs under the policy that drew the tokens, if the update measures how far they are from its own."""
    age: Tensor | None = None
    """Int64, updates since each token was drawn, if `Objective.interpolation` depends on it."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.mask)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, inputs included."""
        own = {name: tensor for name, tensor in vars(self).items() if name != "inputs" and tensor is not None}
        return self.inputs | own

    def map(self, function: Callable[[str, Tensor], Tensor]) -> Experience:
        """The experience with each tensor replaced by `function(name, tensor)`, inputs first."""
        inputs = {name: function(name, x) for name, x in self.inputs.items()}
        own = {name: x for name, x in vars(self).items() if name != "inputs"}
        changed: dict[str, Any] = {name: x if x is None else function(name, x) for name, x in own.items()}
        return Experience(inputs, **changed)

    def columns(self) -> list[Tensor]:
        """All tensors, in the order of `map`."""
        return [*self.inputs.values(), *(x for name, x in vars(self).items() if name != "inputs" and x is not None)]

    def widths(self) -> list[int]:
        """The length of each tensor's second axis, or 0, in the order of `map`."""
        return [x.shape[1] if x.dim() > 1 else 0 for x in self.columns()]

    def padded(self, widths: Iterable[int]) -> Experience:
        """The experience with second axes as long as the result of `widths`, of this or another one."""
        width = iter(widths)
        return self.map(lambda name, x: _widened(name, x, next(width)))

    def select(self, rows: Tensor | slice) -> Experience:
        """Select rows, in the given order."""
        return self.map(lambda _, tensor: tensor[rows])


BUFFERED = ("mask", "lengths", "values", "returns", "value_mask")
"""Tensors of an experience, besides its inputs, that the critic reads."""


class ReturnBuffer:
    """Buffer of the last experiences, reduced to the critic's inputs, values and returns."""

    def __init__(self, size: int, inputs: Iterable[str]):
        """Start empty; `size` is the capacity in experiences, `inputs` the names of the critic's inputs."""
        self.inputs = tuple(inputs)
        self.experiences: deque[Experience] = deque(maxlen=size)

    def add(self, experience: Experience) -> None:
        """Add an experience; evicts the oldest one from a full buffer."""
        inputs = {name: experience.inputs[name] for name in self.inputs}
        empty = _empty(experience.returns)
        without = replace(experience, ref_logprobs=None, weights=None, behavior_logprobs=None, age=None)
        self.experiences.append(replace(without, inputs=inputs, logprobs=empty, advantages=empty))

    def state(self) -> list[dict[str, Any]]:
        """The experiences, oldest first, as copies: a checkpoint cannot hold tensors that share memory."""
        return [
            {"inputs": {name: x.clone() for name, x in experience.inputs.items()}}
            | {name: x.clone() for name in BUFFERED if (x := getattr(experience, name)) is not None}
            for experience in self.experiences
        ]

    def load(
        self,
        states: Sequence[Sequence[dict[str, Any]]],
        device: torch.device,
        share: Callable[[int], slice] | None = None,
    ) -> None:
        """Restore the results of `state`, on a device.

        Args:
            states: of this process, or of all processes that wrote the checkpoint.
            device: where to.
            share: selects this process's rows of all; None keeps them.
        """
        self.experiences.clear()
        for parts in zip(*states, strict=True):
            experience = joined([_buffered(tensors, device) for tensors in parts])
            self.experiences.append(experience if share is None else experience.select(share(len(experience))))


def _buffered(tensors: Mapping[str, Any], device: torch.device) -> Experience:
    """An experience from its part of `ReturnBuffer.state`."""
    inputs = {name: x.to(device) for name, x in tensors["inputs"].items()}
    own = {name: x.to(device) for name, x in tensors.items() if name != "inputs"}
    empty = _empty(own["returns"])
    return Experience(inputs, logprobs=empty, advantages=empty, **own)


def joined(parts: Sequence[Experience]) -> Experience:
    """The rows of several experiences, padded to the longest prompt and response."""
    widths = [max(column) for column in zip(*(part.widths() for part in parts), strict=True)]
    columns = zip(*(part.padded(widths).columns() for part in parts), strict=True)
    whole = iter([torch.cat(column) for column in columns])
    return parts[0].map(lambda _name, _part: next(whole))


def _widened(name: str, x: Tensor, width: int) -> Tensor:
    """A tensor padded along its second axis, if it has one."""
    missing = width - (x.shape[1] if x.dim() > 1 else 0)
    if missing == 0:
        return x
    return pad(x, (0, 0) * (x.dim() - 2) + ((missing, 0) if name in LEFT_PADDED else (0, missing)))


def _empty(returns: Tensor) -> Tensor:
    """Placeholder `[batch, 0]` for tensors that the critic does not read."""
    return returns[:, :0]


def critic_metrics(values: Tensor, returns: Tensor, mask: Tensor, reduce: Reduce | None = None) -> dict[str, float]:
    """Metrics of a critic's values, `[batch, time]`: mean and explained variance."""
    _, mean, _ = moments(values, mask, reduce)
    explained = explained_variance(values, returns, mask, reduce)
    return dict(zip(("value_mean", "explained_variance"), torch.stack([mean, explained]).tolist(), strict=True))


def length_batches(lengths: Tensor, budget: int | None = None) -> list[Tensor]:
    """Group rows of similar length into batches, to reduce padding.

    Sorts the rows by length and splits them where Σ (rows · longest + overhead) is least, by dynamic programming. The
    overhead is the fixed cost of another forward pass, in tokens.

    Args:
        lengths: `[batch]`, int64.
        budget: most tokens per batch, padding included; None for no limit.

    Returns:
        Row indices, one tensor per batch, the longest rows first.

    Raises:
        ValueError: a single row is longer than the budget.
    """
    overhead = PASS_OVERHEAD if lengths.device.type == "cpu" else PASS_OVERHEAD_ON_ACCELERATORS
    longest = np.sort(np.array(lengths.tolist(), dtype=np.int64))[::-1]
    if budget is None and longest[0] == longest[-1]:
        return [torch.arange(len(lengths), device=lengths.device)]
    order = lengths.argsort(descending=True, stable=True)
    if budget is not None and longest[0] > budget:
        raise ValueError(f"budget is {budget}; it must be at least {longest[0]}, the tokens of the longest row")
    min_cost, best_start = np.zeros(len(longest) + 1, dtype=np.int64), np.zeros(len(longest) + 1, dtype=np.int64)
    for end in range(1, len(longest) + 1):
        tokens = longest[:end] * np.arange(end, 0, -1)  # of a batch from each row to this one
        costs = min_cost[:end] + tokens + overhead
        if budget is not None:
            costs[tokens > budget] = np.iinfo(np.int64).max
        best_start[end] = costs.argmin()
        min_cost[end] = costs[best_start[end]]
    batches, end = [], len(longest)
    while end:
        batches.append(order[best_start[end] : end])
        end = int(best_start[end])
    return batches[::-1]
