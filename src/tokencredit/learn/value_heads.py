"""Value heads that adapt to the returns they are to predict: a scale, or a histogram with a support."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tokencredit.core.losses import SMOOTHING, histogram_values
from tokencredit.core.masked import moments
from tokencredit.distributed.processes import Processes
from tokencredit.learn.experience import Experience

DECAY = 0.9
"""Factor on the weight of earlier returns in the scale of a `ScaledHead`, per update."""
MARGIN = 3
"""Bins between the returns and either end of the support: 4 deviations of the Gaussian around a return."""
RESERVE = 0.25
"""Headroom for later returns at an end that moves, relative to the range of the returns."""
MIN_RANGE = 1e-3
"""Smallest range of returns that the support covers, relative to the largest magnitude, or to 1."""
MAX_DROP = 10.0
"""Largest drop of the logits of bins outside the old support below the outermost old bin, in nats."""


class AdaptiveHead(ABC):
    """A value head, a module, that adapts to the returns it is to predict."""

    support: Tensor
    """What it keeps of the returns: a buffer, saved with the weights."""

    @abstractmethod
    def adapt(self, returns: Tensor, mask: Tensor, processes: Processes) -> None:
        """Adapt to returns, of all processes, where the mask is true."""


class ScaledHead(AdaptiveHead, nn.Sequential):
    """A value head in units of the returns' running deviation σ around their mean μ: V = c + s · (its layers' output).

    s = max(σ, 1), and c is how far μ lies outside [−1, 1]. In the value loss, values and returns are divided by s, so
    that large returns neither drown the policy's gradient in a shared trunk nor take the head many steps to reach. As
    in PopArt (van Hasselt et al. 2016, arXiv 1602.07714) the last layer is rescaled when c and s move, and all values
    stay as they are; unlike there, nothing changes while returns are around 1 or smaller. At the first returns, values
    move with c, since an untrained critic's mean nothing yet.
    """

    support: Tensor
    """Number, mean and variance of the returns; the number decays with each update."""

    def __init__(self, *layers: nn.Module):
        """Start with c = 0 and s = 1; `layers` map states `[..., width]` to `[..., 1]`, the last linearly."""
        super().__init__(*layers)
        self.register_buffer("support", torch.zeros(3))

    def scale(self) -> Tensor:
        """s, a scalar."""
        return self.support[2].sqrt().clamp(min=1)

    def center(self) -> Tensor:
        """c, a scalar."""
        mean = self.support[1]
        return mean - mean.clamp(-1, 1)

    def keep_values(self) -> None:
        """Make the first returns keep the values, too, of layers that have learned elsewhere."""
        self.support[0] = 1e-6

    def forward(self, hidden: Tensor) -> Tensor:
        """Values `[..., 1]` of states."""
        values: Tensor = super().forward(hidden) * self.scale() + self.center()  # type: ignore[no-untyped-call]
        return values

    @torch.no_grad()
    def adapt(self, returns: Tensor, mask: Tensor, processes: Processes) -> None:
        """Move c and s with the moments of these returns, and rescale the last layer."""
        scale, center, (number, mean, variance) = self.scale(), self.center(), self.support.clone()
        # Merge the moments by their numbers. Without a finite return the share is 0, and nothing moves.
        count = processes.sum(mask.sum())
        _, new_mean, new_variance = moments(returns, mask, processes.sum, count=count.clamp(min=1))
        total = DECAY * number + count
        share, change = count / total.clamp(min=1e-9), new_mean - mean
        variance = (1 - share) * variance + share * new_variance + share * (1 - share) * change.square()
        self.support.copy_(torch.stack([total, mean + share * change, variance]))
        # Keep the values, except at the first returns.
        last = self[-1]
        assert isinstance(last, nn.Linear)
        weight, bias = last.weight, last.bias
        bias.copy_(torch.where(number > 0, (scale * bias + center - self.center()) / self.scale(), bias))
        weight.mul_(torch.where(number > 0, scale / self.scale(), 1.0))


class Histogram(NamedTuple):
    """A critic's distributions over the bins."""

    logits: Tensor
    """`[tokens, bins]` of the acted tokens, flattened, with the critic's gradient."""
    edges: Tensor
    """`[bins + 1]`, in units of value."""


class HistogramHead(AdaptiveHead, nn.Module):
    """A value head with one output per bin; a value is the mean of the bin centres.

    Farebrother et al. 2024 (HL-Gauss, arXiv 2403.03950), with a fixed support. Here the support is a buffer: `follow`
    sets it from the first returns and widens it for later ones. Before that, all bins and values are 0.
    """

    def __init__(self, layers: nn.Linear | nn.Sequential):
        """Start without a support; `layers` map hidden states `[..., width]` to logits `[..., bins]`."""
        super().__init__()
        self.layers = layers
        self.register_buffer("support", torch.zeros(2))

    @property
    def last(self) -> nn.Linear:
        """The last layer, with one row per bin."""
        last = self.layers if isinstance(self.layers, nn.Linear) else self.layers[-1]
        assert isinstance(last, nn.Linear)
        return last

    @property
    def bins(self) -> int:
        """Number of bins."""
        return self.last.out_features

    def edges(self) -> Tensor:
        """Edges of the bins `[bins + 1]`."""
        low, high = self.support
        edges: Tensor = low + (high - low) * torch.linspace(0, 1, self.bins + 1, device=low.device)
        return edges

    def forward(self, hidden: Tensor) -> Tensor:
        """Values `[..., 1]` of states."""
        return histogram_values(self.layers(hidden), self.edges()).unsqueeze(-1)

    def histogram(self, hidden: Tensor) -> Histogram:
        """Distributions of states `[tokens, width]`."""
        return Histogram(self.layers(hidden), self.edges())

    def adapt(self, returns: Tensor, mask: Tensor, processes: Processes) -> None:
        """Widen the support to cover these returns."""
        ends = torch.stack([x.masked_fill(~mask, -torch.inf).max() for x in (-returns, returns)])
        low, high = processes.max(ends).tolist()
        if high > -torch.inf:
            self.follow(-low, high)

    @torch.no_grad()
    def follow(self, low: float, high: float) -> None:
        """Widen the support, if needed, to cover returns from `low` to `high` with a margin.

        Resamples the last layer onto the new bins, so that each state's density stays in place: a logit is the
        log-density at its bin's centre, interpolated linearly between the old ones, and outside the old support it
        falls off like the Gaussian around a return. Learned values are preserved to about one new bin width. Adam's
        moments are left as they are.
        """
        old_low, old_high = self.support.tolist()
        first = old_low == old_high == 0
        margin = MARGIN * (old_high - old_low) / self.bins
        if not first and old_low + margin <= low and high <= old_high - margin:
            return
        if first:
            missing = MIN_RANGE * max(1.0, abs(low), abs(high)) - (high - low)
            inner = [low - max(missing, 0) / 2, high + max(missing, 0) / 2]
        else:
            inner = [min(low, old_low + margin), max(high, old_high - margin)]
        reserve = RESERVE * (inner[1] - inner[0])
        low = inner[0] - reserve if first or low < old_low + margin else inner[0]
        high = inner[1] + reserve if first or high > old_high - margin else inner[1]
        width = (high - low) / (self.bins - 2 * MARGIN)
        old_edges = self.edges()
        self.support.copy_(torch.tensor([low - MARGIN * width, high + MARGIN * width]))
        if not first:
            self._resample(old_edges, self.edges())

    def _resample(self, old_edges: Tensor, new_edges: Tensor) -> None:
        """Interpolate the rows of the last layer from the old bins to the new ones."""
        old, new = ((edges[1:] + edges[:-1]) / 2 for edges in (old_edges, new_edges))
        position = ((new - old[0]) / (old[1] - old[0])).clamp(0, self.bins - 1)
        lower = position.floor().long().clamp(max=self.bins - 2)
        fraction = position - lower
        weight, bias = self.last.weight, self.last.bias
        weight.copy_(weight[lower].lerp(weight[lower + 1], fraction.unsqueeze(1)))
        bias.copy_(bias[lower].lerp(bias[lower + 1], fraction))
        outside = (old[0] - new).clamp(min=0) + (new - old[-1]).clamp(min=0)
        drop = 0.5 * (outside / (SMOOTHING * (new_edges[1] - new_edges[0]))).square()
        bias.sub_(drop.clamp(max=MAX_DROP))


def adaptive_heads(model: nn.Module) -> list[AdaptiveHead]:
    """The adaptive value heads of a model."""
    return [module for module in model.modules() if isinstance(module, AdaptiveHead)]


def adapt_heads(heads: Iterable[AdaptiveHead], experience: Experience, processes: Processes) -> Experience:
    """Adapt heads to the finite targets of all processes; returns the experience with the outputs that they now give.

    Those of a `ScaledHead` move at the first returns. The value clip would keep the critic near the old ones.
    """
    given, targets = experience.of_critic()
    outputs = given
    for head in heads:
        untrained = head.support[0] == 0
        head.adapt(targets, experience.mask & targets.isfinite(), processes)
        if isinstance(head, ScaledHead) and outputs is not None:
            outputs = torch.where(untrained, outputs * head.scale() + head.center(), outputs)
    return experience if outputs is given else replace(experience, critic_outputs=outputs)
