"""A value head that predicts a histogram of returns, with a support that adapts to the returns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tokencredit.core.losses import SMOOTHING, histogram_values
from tokencredit.distributed.processes import Processes
from tokencredit.learn.experience import Experience

MARGIN = 3
"""Bins between the returns and either end of the support: 4 deviations of the Gaussian around a return."""
RESERVE = 0.25
"""Headroom for later returns at an end that moves, relative to the range of the returns."""
MIN_RANGE = 1e-3
"""Smallest range of returns that the support covers, relative to the largest magnitude, or to 1."""
MAX_DROP = 5.0
"""Largest drop of the logits of bins outside the old support below the outermost old bin, in nats."""


class Histogram(NamedTuple):
    """A critic's distributions over the bins."""

    logits: Tensor
    """`[tokens, bins]` of the acted tokens, flattened, with the critic's gradient."""
    edges: Tensor
    """`[bins + 1]`, in units of value."""


class HistogramHead(nn.Module):
    """A value head with one output per bin; a value is the mean of the bin centres.

    Farebrother et al. 2024 (HL-Gauss, arXiv 2403.03950), with a fixed support. Here the support is a buffer: `follow`
    sets it from the first returns and widens it for later ones. Before that, all bins and values are 0.
    """

    support: Tensor

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

    @torch.no_grad()
    def follow(self, low: float, high: float) -> None:
        """Widen the support, if needed, to cover returns from `low` to `high` with a margin.

        Resamples the last layer onto the new bins, so that each state's density stays in place: a logit is the
        log-density at its bin's centre, interpolated linearly between the old ones, and outside the old support it
        falls off like the Gaussian around a return. Values are preserved to within one new bin width. Adam's moments
        are left as they are.
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


def histogram_heads(model: nn.Module) -> list[HistogramHead]:
    """The histogram value heads of a model."""
    return [module for module in model.modules() if isinstance(module, HistogramHead)]


def follow_returns(heads: Iterable[HistogramHead], experience: Experience, processes: Processes) -> None:
    """Widen the supports of heads to cover an experience's finite returns, over all processes."""
    for head in heads:
        returns = experience.returns
        excluded = ~(experience.mask & returns.isfinite())
        ends = torch.stack([x.masked_fill(excluded, -torch.inf).max() for x in (-returns, returns)])
        low, high = processes.max(ends).tolist()
        if high > -torch.inf:
            head.follow(-low, high)
