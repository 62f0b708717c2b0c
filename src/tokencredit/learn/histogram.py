"""A value head that predicts a histogram of returns, and the support of its bins, which follows the returns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tokencredit.core.losses import SMOOTHING, histogram_values
from tokencredit.learn.experience import Experience
from tokencredit.processes import Processes

MARGIN = 3
"""Bins between the returns and either end of the support: 4 deviations of the Gaussian around a return."""
RESERVE = 0.25
"""Room for later returns at an end that moves, in ranges of the returns."""
LEAST_RANGE = 1e-3
"""Least range of returns that the support is made for, relative to the largest of them, or to 1."""
LARGEST_DROP = 5.0
"""Nats by which bins outside the old support may begin below the outermost old one."""


class Histogram(NamedTuple):
    """A critic's distributions over the bins."""

    logits: Tensor
    """`[tokens, bins]` of the acted tokens, one after another, with the critic's gradient."""
    edges: Tensor
    """`[bins + 1]`, in units of value."""


class HistogramHead(nn.Module):
    """A value head with an output per bin; a value is the mean of the bins' centres.

    Farebrother et al. 2024 (HL-Gauss, arXiv 2403.03950), whose support is fixed. Here it is a buffer: `follow` sets it
    by the first returns and widens it for later ones. Until then all bins are at 0, and so is every value.
    """

    support: Tensor

    def __init__(self, layers: nn.Linear | nn.Sequential):
        """Begin without a support; `layers` lead from hidden states `[..., width]` to logits `[..., bins]`."""
        super().__init__()
        self.layers = layers
        self.register_buffer("support", torch.zeros(2))

    @property
    def last(self) -> nn.Linear:
        """The last layer, with a row per bin."""
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
        """Widen the support, if it must be, to hold returns from `low` to `high` with a margin.

        The outputs are laid out anew, so that each state's density stays where it was: a logit is the log-density at
        its bin's centre, read off the old ones in straight lines, and falling off as the Gaussian around a return does
        outside the old support. Values stay what they were to within a new bin's width. Adam's moments are left alone.
        """
        old_low, old_high = self.support.tolist()
        first = old_low == old_high == 0
        edge = MARGIN * (old_high - old_low) / self.bins
        if not first and old_low + edge <= low and high <= old_high - edge:
            return
        if first:
            lack = LEAST_RANGE * max(1.0, abs(low), abs(high)) - (high - low)
            inner = [low - max(lack, 0) / 2, high + max(lack, 0) / 2]
        else:
            inner = [min(low, old_low + edge), max(high, old_high - edge)]
        reserve = RESERVE * (inner[1] - inner[0])
        low = inner[0] - reserve if first or low < old_low + edge else inner[0]
        high = inner[1] + reserve if first or high > old_high - edge else inner[1]
        width = (high - low) / (self.bins - 2 * MARGIN)
        before = self.edges()
        self.support.copy_(torch.tensor([low - MARGIN * width, high + MARGIN * width]))
        if not first:
            self._lay_out(before, self.edges())

    def _lay_out(self, before: Tensor, now: Tensor) -> None:
        """Move the rows of the last layer from the bins between some edges to those between others."""
        old, new = ((edges[1:] + edges[:-1]) / 2 for edges in (before, now))
        place = ((new - old[0]) / (old[1] - old[0])).clamp(0, self.bins - 1)
        lower = place.floor().long().clamp(max=self.bins - 2)
        share = place - lower
        weight, bias = self.last.weight, self.last.bias
        weight.copy_(weight[lower].lerp(weight[lower + 1], share.unsqueeze(1)))
        bias.copy_(bias[lower].lerp(bias[lower + 1], share))
        outside = (old[0] - new).clamp(min=0) + (new - old[-1]).clamp(min=0)
        drop = 0.5 * (outside / (SMOOTHING * (now[1] - now[0]))).square()
        bias.sub_(drop.clamp(max=LARGEST_DROP))


def histogram_heads(model: nn.Module) -> list[HistogramHead]:
    """The value heads of a model that predict histograms."""
    return [module for module in model.modules() if isinstance(module, HistogramHead)]


def follow_returns(heads: Iterable[HistogramHead], experience: Experience, processes: Processes) -> None:
    """Let heads follow the returns of an experience, over all processes; those that are not finite are left out."""
    for head in heads:
        returns = experience.returns
        others = ~(experience.mask & returns.isfinite())
        ends = torch.stack([x.masked_fill(others, -torch.inf).max() for x in (-returns, returns)])
        low, high = processes.max(ends).tolist()
        if high > -torch.inf:
            head.follow(-low, high)
