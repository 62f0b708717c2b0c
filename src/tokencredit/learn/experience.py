"""Experience: the tensors of a rollout that an update reads, for text and Gymnasium alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tokencredit.core.masked import Reduce, explained_variance, moments

LEFT_PADDED = ("prompt_ids", "prompt_mask")
"""Inputs whose padding comes first; all other tensors are padded at their end."""


@dataclass(frozen=True)
class Experience:
    """Tensors with a common batch axis: a rollout with its credit, or the rows of a minibatch or micro-batch of it.

    `inputs` holds the policy's inputs (tokens, or observations and actions) by argument name; all other tensors are
    `[batch, time]`.
    """

    inputs: dict[str, Tensor]
    mask: Tensor
    """True at the tokens or steps in the loss; may be false in a whole row."""
    lengths: Tensor
    """`[batch]`, or `[batch, parts]` if parts are padded apart, int64: tokens or steps of each row in a pass."""
    logprobs: Tensor
    """Log-probs under the policy around which the update clips; with `age`, under the behavior policy."""
    values: Tensor | None
    """None without a critic."""
    advantages: Tensor
    returns: Tensor
    critic_outputs: Tensor | None = None
    """Outputs of a critic that adds to values fitted otherwise, or whose head has adapted; None for `values`."""
    critic_targets: Tensor | None = None
    """What such a critic learns; None for `returns`."""
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

    divisor: Tensor | float = 1.0
    """What whitening divided the advantages by, a scalar; a penalty in the loss is divided by it too."""

    # Set in minibatches and their micro-batches.
    rows: Tensor | None = None
    """`[batch]`, numbers of the rows in the batch of all processes, which begins with those of the first process."""
    tokens: float = 0.0
    """Tokens in the loss of the minibatch, over all processes."""
    counts: Sequence[float] | None = None
    """`Objective.count` of the minibatch over all processes: the divisors of its means; None for weights of 1."""
    real: bool = True
    """False for rows of another process, in a pass without an effect that only takes part in what is collective."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.mask)

    def of_critic(self) -> tuple[Tensor | None, Tensor]:
        """The critic's outputs at the rollout, and what it learns."""
        outputs = self.values if self.critic_outputs is None else self.critic_outputs
        return outputs, self.returns if self.critic_targets is None else self.critic_targets

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, for a file."""
        return self.inputs | self._own()

    def _own(self) -> dict[str, Tensor]:
        """The tensors with a batch axis other than the inputs."""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor) and x.dim()}

    def map(self, function: Callable[[str, Tensor], Tensor]) -> Experience:
        """The experience with each tensor replaced by `function(name, tensor)`, inputs first."""
        inputs = {name: function(name, x) for name, x in self.inputs.items()}
        own: dict[str, Any] = {name: function(name, x) for name, x in self._own().items()}
        return replace(self, inputs=inputs, **own)

    def widths(self) -> list[int]:
        """The length of each tensor's second axis, or 0, in the order of `map`."""
        return [x.shape[1] if x.dim() > 1 else 0 for x in (*self.inputs.values(), *self._own().values())]

    def padded(self, widths: Iterable[int]) -> Experience:
        """The experience with second axes as long as the result of `widths`, of this or another one."""
        width = iter(widths)

        def widened(name: str, x: Tensor) -> Tensor:
            missing = next(width) - (x.shape[1] if x.dim() > 1 else 0)
            sides = (missing, 0) if name in LEFT_PADDED else (0, missing)
            return pad(x, (0, 0) * (x.dim() - 2) + sides) if missing else x

        return self.map(widened)

    def select(self, rows: Tensor | slice) -> Experience:
        """Select rows, in the given order."""
        return self.map(lambda _, tensor: tensor[rows])


def critic_metrics(values: Tensor, returns: Tensor, mask: Tensor, reduce: Reduce | None = None) -> dict[str, float]:
    """Metrics of a critic's values, `[batch, time]`: mean and explained variance."""
    _, mean, _ = moments(values, mask, reduce)
    explained = explained_variance(values, returns, mask, reduce)
    return dict(zip(("value_mean", "explained_variance"), torch.stack([mean, explained]).tolist(), strict=True))
