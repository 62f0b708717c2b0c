"""Layer norms and RMS norms with their scale frozen, which makes them linear."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from tokencredit.errors import ConfigError

PROBE = 1e3
"""Size of the states that read a norm's gain; the norm's epsilon is negligible beside its square."""
TOLERANCE = 1e-3
"""Largest relative difference between a norm and its frozen form."""


class FrozenNorm(NamedTuple):
    """A norm as a linear function: gain · (x − mean x) · scale + bias, in float64; an RMS norm has no mean.

    The scale is 1 / deviation, or 1 / root mean square, of one state, and stays fixed for its summands.
    """

    gain: Tensor
    """`[width]`; for Gemma's norms 1 + weight."""
    bias: Tensor
    """`[width]`; 0 without a bias."""
    scale: Tensor
    """A number."""
    centred: bool
    """True for a layer norm, which subtracts the mean."""

    def pull_back(self, direction: Tensor) -> tuple[Tensor, Tensor]:
        """The vector `[width]` and the constant such that direction · norm(x) = vector · x + constant."""
        vector = self.gain * direction * self.scale
        return vector - vector.mean() if self.centred else vector, self.bias @ direction


def freeze(norm: nn.Module, state: Tensor) -> FrozenNorm:
    """A norm with its scale frozen at the value for `state`, `[width]`.

    Gain, bias and centring are read from the norm's outputs for three probes, so its class does not matter.

    Raises:
        ConfigError: it is neither a layer norm nor an RMS norm.
    """
    probe = state.new_full(state.shape, PROBE)
    signs = torch.ones_like(state)
    signs[1::2] = -1
    bias, constant, alternating = (norm(x).double() for x in (torch.zeros_like(state), probe, probe * signs))
    gain, centred = (alternating - bias) * signs, bool((constant - bias).abs().max() < TOLERANCE)
    linear = gain * (state.double() - (state.double().mean() if centred else 0))
    normed = norm(state).double()
    scale = ((normed - bias) @ linear) / (linear @ linear).clamp(min=torch.finfo(torch.float64).tiny)
    if not (linear * scale + bias - normed).abs().max() <= TOLERANCE * normed.abs().max():
        raise ConfigError(
            f"the model cannot be inspected: {type(norm).__name__} is neither a layer norm nor an RMS norm; take a "
            "model of another architecture"
        )
    return FrozenNorm(gain, bias, scale, centred)
