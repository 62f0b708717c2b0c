"""The loss of an update, computed from the policy's and critic's outputs for a micro-batch.

All terms of the loss are combined here. The policy's part is passed into the model's forward pass as a function of the
token statistics, so that the projection to a large vocabulary can form its gradient a chunk at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from tokencredit.core.losses import (
    Clip,
    clip_range,
    clipped_surrogate,
    histogram_loss,
    reduction_count,
    token_weights,
    value_loss,
    weighted_sum,
)
from tokencredit.core.off_policy import (
    correction,
    divergence_mask,
    importance_ratios,
    interpolated_logprobs,
    sequence_surrogate,
    weighted_policy_gradient,
)
from tokencredit.core.rewards import KL_ROUNDING, kl_estimate
from tokencredit.core.vocab_projection import TokenStats
from tokencredit.errors import RunStopped
from tokencredit.learn.experience import Experience
from tokencredit.learn.value_heads import Histogram


class CriticOutputs(NamedTuple):
    """Outputs of a critic for an experience, with its gradient."""

    values: Tensor
    """`[batch, time]`."""
    histogram: Histogram | None = None
    """Histograms whose means are the values, if the critic predicts them."""
    scale: Tensor | float = 1.0
    """The value loss is that of values and returns divided by this."""


class PolicyOutputs(NamedTuple):
    """Outputs of policy and critic for an experience."""

    policy_loss: Tensor
    """A scalar, with the policy's gradient."""
    stats: TokenStats
    """`[batch, time]` each, without a gradient; None where not computed."""
    critic: CriticOutputs | None = None
    """None without a critic."""

    @property
    def logprobs(self) -> Tensor:
        """Log-probs of the tokens."""
        assert self.stats.logprobs is not None
        return self.stats.logprobs

    @property
    def values(self) -> Tensor | None:
        """The critic's values; None without a critic."""
        return None if self.critic is None else self.critic.values


class PolicyLoss(Protocol):
    """The policy's part of a loss on some rows."""

    additive: bool
    """True for a sum over tokens. If false, the statistics of all tokens arrive in one call, and the loss may combine
    those of a row in any way; several chunks are then projected twice."""

    def __call__(self, now: TokenStats, at: slice) -> Tensor:
        """The loss, a scalar, of a slice of the flattened acted tokens."""


class Passes(Protocol):
    """The forward passes of an update; a subclass per kind of model."""

    separate_critic: bool = False
    """True if policy and critic have no trained parameter in common."""

    def evaluate(self, model: nn.Module, inputs: dict[str, Tensor], loss: PolicyLoss) -> PolicyOutputs:
        """Outputs of the model, possibly in its data-parallel wrapper, for an experience's inputs.

        A model without a vocabulary projection calls `loss(TokenStats(logprobs[mask], …), slice(None))`.
        """

    def critic(self, inputs: dict[str, Tensor]) -> CriticOutputs:
        """The critic's outputs, with a gradient only for the critic's own parameters."""


class Loss(NamedTuple):
    """The loss of a micro-batch as a sum of the policy's and the critic's part, with their gradients, and its terms
    before their coefficients, by metric name."""

    policy: Tensor
    critic: Tensor | None
    parts: dict[str, Tensor]

    @property
    def total(self) -> Tensor:
        """The loss."""
        return self.policy if self.critic is None else self.policy + self.critic


@dataclass(frozen=True)
class Interpolation:
    """A proximal policy between behavior and present policy, by age, with its weights: A-3PO (arXiv 2512.06547).

    Each pass computes it anew from the present log-probs, so that no pass of its own is needed.
    """

    correct: str = "none"
    """`outside` of `core.off_policy.correction` for the weights π_prox / μ of tokens; none for weights of 1."""
    low: float = 0.0
    high: float = 2.0

    def around_proximal(self, logprobs: Tensor, rows: Experience) -> Experience:
        """The rows with log-probs and weights of the proximal policy, for present log-probs `[batch, time]`."""
        behavior, age = rows.behavior_logprobs, rows.age
        assert behavior is not None, "`Credit` sets it"
        assert age is not None, "`Credit` sets it"
        proximal, weights = interpolated_logprobs(behavior, logprobs, age), None
        if self.correct != "none":
            weights = correction(proximal, behavior, rows.mask, outside=self.correct, low=self.low, high=self.high)
        return replace(rows, logprobs=proximal, weights=weights)


@dataclass(frozen=True)
class Objective:
    """PPO's objective: Σ weight · (L_policy + c_vf · L_vf − c_ent · H + β / σ · KL); see `core.losses` for each term.

    σ is what whitening divided the advantages by, so that β is a price in units of the reward.

    A different policy loss overrides `surrogate` and `clipped`; with `additive` false it receives all tokens of the
    rows in one call. `surrogate` may return metrics besides the losses, one number per token and name, which become
    `loss/NAME`, so that none takes the name of another metric.
    """

    clip: Clip = 0.2
    dual_clip: float | None = None
    value_clip: float | None = None
    value_coef: float = 0.5
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    """β of the KL in the loss."""
    kl_estimator: str | None = None
    """Estimator of that KL from `Experience.ref_logprobs`; None where it is exact or not in the loss."""
    reduction: str = "token"
    horizon: int | None = None
    """Tokens that the reduction `constant` counts per row; None for the longest row of the batch."""
    value_horizon: int | None = None
    """The same for the value loss of one value per turn; None for `horizon`."""
    interpolation: Interpolation | None = None
    """The proximal policy as a function of the present one; None for that of `Experience.logprobs`."""

    additive = True

    def changed(self, **fields: Any) -> Self:
        """A copy with other fields, and with whatever else a subclass has set: `replace` would call its constructor."""
        other = copy(self)
        vars(other).update(fields)
        return other

    @property
    def metric_clip(self) -> Clip | None:
        """The range outside which a token counts in the metric `clip_fraction`; None for no such metric."""
        return self.clip

    def count(self, mask: Tensor, value_mask: Tensor | None = None) -> Tensor:
        """This process's contribution to the divisors of the token weights; sum it over processes.

        Two numbers: for the policy's terms, and for the value loss. Arguments as in `Experience`.
        """
        count = reduction_count(mask, self.reduction, self.horizon)
        if value_mask is None:
            return count.repeat(2)
        return torch.stack([count, reduction_count(value_mask, self.reduction, self.value_horizon or self.horizon)])

    def token_losses(self, now: TokenStats, rows: Experience, at: Tensor) -> dict[str, Tensor]:
        """Each term of the policy loss at acted tokens `[tokens]`, before its coefficient.

        `at` has the tokens' indices in the flattened tensors of `rows`. Importance weights (`Experience.weights`)
        multiply the surrogate alone; entropy and KL are unweighted.
        """
        assert now.logprobs is not None
        if self.interpolation is not None:
            present = now.logprobs.detach().new_zeros(rows.mask.numel()).index_copy(0, at, now.logprobs.detach())
            rows = self.interpolation.around_proximal(present.view(rows.mask.shape), rows)  # right at these tokens only
        kl, distance = now.kl, now.kl
        if self.kl_estimator is not None and rows.ref_logprobs is not None:
            reference = rows.ref_logprobs.flatten()[at]
            kl, distance = kl_estimate(self.kl_estimator, now.logprobs, reference), (now.logprobs - reference).abs()
        if kl is not None and distance is not None:
            kl = kl.masked_fill(distance < KL_ROUNDING, 0.0)
        result = self.surrogate(now.logprobs, rows, at)
        surrogate, metrics = result if isinstance(result, tuple) else (result, {})
        if rows.weights is not None:
            surrogate = surrogate * rows.weights.flatten()[at]
        parts = {"policy_loss": surrogate, "entropy_in_update": now.entropy, "kl_in_update": kl}
        own = {f"loss/{name}": numbers for name, numbers in metrics.items()}
        return own | {name: losses for name, losses in parts.items() if losses is not None}

    def around_proximal(self, logprobs: Tensor, rows: Experience) -> Experience:
        """The rows with log-probs and weights of the proximal policy of a pass with these log-probs."""
        return rows if self.interpolation is None else self.interpolation.around_proximal(logprobs, rows)

    def surrogate(self, logprobs: Tensor, rows: Experience, at: Tensor) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """The policy loss at acted tokens, from their log-probs; `rows` and `at` as in `token_losses`."""
        old_logprobs, advantages = rows.logprobs.flatten()[at], rows.advantages.flatten()[at]
        return clipped_surrogate(logprobs, old_logprobs, advantages, clip=self.clip, dual_clip=self.dual_clip)

    def clipped(self, logprobs: Tensor, rows: Experience) -> Tensor | None:  # noqa: ARG002  (others read them)
        """Tokens in the metric `clip_fraction`, bool `[batch, time]`; None for those whose ratio is outside `clip`."""
        return None

    def total(self, parts: dict[str, Tensor], divisor: Tensor | float = 1.0) -> Tensor:
        """The policy's part of the loss, from the weighted sums of `token_losses`; σ is `Experience.divisor`."""
        loss = parts["policy_loss"]
        if "entropy_in_update" in parts and self.entropy_coef != 0:
            loss = loss - self.entropy_coef * parts["entropy_in_update"]
        return loss + self.kl_coef / divisor * parts["kl_in_update"] if "kl_in_update" in parts else loss


@dataclass(frozen=True)
class SequenceObjective(Objective):
    """GSPO: the surrogate of a row's mean ratio, `core.off_policy.sequence_surrogate`."""

    additive = False

    def surrogate(self, logprobs: Tensor, rows: Experience, at: Tensor) -> Tensor:
        """The policy loss of all acted tokens of the rows."""
        flat = logprobs.new_zeros(rows.mask.numel()).index_copy(0, at, logprobs)
        now = flat.view(rows.mask.shape)
        return sequence_surrogate(now, rows.logprobs, rows.advantages, rows.mask, clip=self.clip).flatten()[at]

    def clipped(self, logprobs: Tensor, rows: Experience) -> Tensor:
        """All tokens of the rows whose mean ratio is outside `clip`."""
        low, high = clip_range(self.clip)
        ratios = importance_ratios(logprobs, rows.logprobs, rows.mask, level="geometric")
        return (ratios < low) | (ratios > high)


@dataclass(frozen=True)
class WeightedObjective(Objective):
    """CISPO, SAO and DPPO: the policy gradient with weights, `core.off_policy.weighted_policy_gradient`."""

    outside: str = "clip"
    """Weights whose ratio is outside `clip`: CISPO bounds them from above (clip), SAO sets them to 0 (mask)."""
    divergence: str | None = None
    """Divergence that masks a token in DPPO, of `core.off_policy.DIVERGENCES`; None masks by the ratio."""
    divergence_limit: float = 0.2

    def surrogate(self, logprobs: Tensor, rows: Experience, at: Tensor) -> Tensor:
        """The policy loss at acted tokens."""
        tokens = (logprobs, rows.logprobs.flatten()[at], rows.advantages.flatten()[at])
        now, old, advantages = (x.unsqueeze(0) for x in tokens)
        mask = torch.ones_like(now, dtype=torch.bool)
        weights = self._weights(now, old, advantages, mask)
        return weighted_policy_gradient(now, advantages, weights, mask).squeeze(0)

    def clipped(self, logprobs: Tensor, rows: Experience) -> Tensor:
        """Tokens whose weight is bounded (CISPO) or masked (SAO, DPPO)."""
        if self.divergence is None and self.outside == "clip":
            return importance_ratios(logprobs, rows.logprobs, rows.mask) > clip_range(self.clip)[1]
        return self._weights(logprobs, rows.logprobs, rows.advantages, rows.mask) == 0

    def _weights(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        if self.divergence is None:
            low, high = clip_range(self.clip)
            low = 0.0 if self.outside == "clip" else low  # CISPO's paper has no lower bound
            return correction(logprobs, old_logprobs, mask, outside=self.outside, low=low, high=high)
        return divergence_mask(
            logprobs, old_logprobs, advantages, mask, divergence=self.divergence, limit=self.divergence_limit
        )


def sum_parts(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Sums of the terms of losses, by name."""
    if some := {name for x in parts for name in x.keys() ^ parts[0].keys()}:
        names = ", ".join(sorted(some))
        raise RunStopped(f"ppo.loss returned {names} in some calls only; it must return the same metrics in each")
    stacked = torch.stack([torch.stack([x[name] for name in parts[0]]) for x in parts])
    return dict(zip(parts[0], stacked.sum(0), strict=True))


class MicroBatchLoss:
    """The loss of one micro-batch: the model calls it for the policy's part, `complete` adds the critic's."""

    def __init__(self, objective: Objective, rows: Experience):
        """Compute the token weights from the minibatch's `counts`; None gives weights of 1, to examine single rows."""
        self.objective, self.rows = objective, rows
        self.additive = objective.additive
        self.weights = self._weights(rows.mask, 0)
        self.acted_count = rows.mask.flatten().cumsum(0)
        self.parts: dict[str, Tensor] = {}

    def __call__(self, now: TokenStats, at: slice) -> Tensor:
        """The policy's part, for a slice of the acted tokens."""
        assert now.logprobs is not None
        indices = self._indices(at.start or 0, len(now.logprobs))
        weights = self.weights.flatten()[indices]
        losses = self.objective.token_losses(now, self.rows, indices)
        sums = {name: weighted_sum(x, weights) for name, x in losses.items()}
        parts = {name: x.detach() for name, x in sums.items()}
        self.parts = sum_parts([self.parts, parts]) if self.parts else parts
        return self.objective.total(sums, self.rows.divisor)

    def _indices(self, first: int, count: int) -> Tensor:
        """Indices of `count` acted tokens in the flattened mask, without a GPU synchronisation."""
        ordinals = torch.arange(first + 1, first + count + 1, device=self.acted_count.device)
        return torch.searchsorted(self.acted_count, ordinals)

    def _weights(self, mask: Tensor, part: int) -> Tensor:
        if self.rows.counts is None:
            return mask.float()
        return token_weights(mask, by=self.objective.reduction, count=self.rows.counts[part])

    def complete(self, now: PolicyOutputs) -> Loss:
        """The whole loss, with its gradient; the terms carry none."""
        critic, parts = None, dict(self.parts)
        if now.critic is not None and self.rows.values is not None:
            value = self.value_loss(now.critic)
            critic = self.objective.value_coef * value
            parts["value_loss"] = value.detach()
        return Loss(now.policy_loss, critic, parts)

    def value_loss(self, now: CriticOutputs) -> Tensor:
        """The critic's part, before its coefficient, with its gradient."""
        rows, (outputs, targets) = self.rows, self.rows.of_critic()
        weights = self.weights if rows.value_mask is None else self._weights(rows.value_mask, 1)
        if now.histogram is not None:
            acted = self._indices(0, len(now.histogram.logits))
            losses = histogram_loss(now.histogram.logits, targets.flatten()[acted], now.histogram.edges)
            return weighted_sum(losses, weights.flatten()[acted])
        assert outputs is not None
        values, outputs, targets = (x / now.scale for x in (now.values, outputs, targets))
        losses = value_loss(values, outputs, targets, rows.mask, clip=self.objective.value_clip)
        return weighted_sum(losses, weights)
