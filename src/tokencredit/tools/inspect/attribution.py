"""Direct logit attribution: log-odds as a sum over the parts that write to the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tokencredit.errors import ConfigError
from tokencredit.tools.inspect.parts import Layer, Part, Parts
from tokencredit.tools.inspect.recording import Record

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


@torch.no_grad()
def log_odds(parts: Parts, states: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Log-odds `[...]` of two sets of tokens from last states `[..., width]`, before the final norm, in nats.

    The mean logit of `up` minus the mean logit of `down`, before a soft cap: with one token each, log p(up)/p(down).
    """
    direction, constant = parts.direction(up, down)
    odds: Tensor = parts.norm(states).double() @ direction + constant
    return odds


@torch.no_grad()
def attribute(parts: Parts, seen: Record, position: int, up: Tensor, down: Tensor) -> dict[Part, float]:
    """Direct contribution of each part of a model to the log-odds of two sets of tokens at a position, in nats.

    The last state is a sum x = embedding + Σ (attention + MLP), the final norm with its scale frozen is linear, and so
    are logits: a part c contributes d · gain · scale · (c − mean c), where d is the `direction` of the log-odds. The
    attention's contribution is that of its heads, through its output projection, and of its bias. Layer norms centre;
    RMS norms do not. The norm's bias and the projection's are the part `bias`.

    Returns:
        By part: embedding, attentions, MLPs and `bias` add up to `log_odds`; the heads and the bias of a layer add up
        to its attention.
    """
    direction, constant = parts.direction(up, down)
    vector, offset = freeze(parts.norm, seen.states[-1][position]).pull_back(direction)
    result = {Part("embedding"): seen.embedding[position].double() @ vector}
    for number, layer in enumerate(parts.layers, start=1):
        attention, mlp = seen.attention[number - 1][position], seen.mlp[number - 1][position]
        result[Part("attention", number)] = attention.double() @ vector
        projected = seen.projected[number - 1][position]
        heads, rest = _heads(layer, seen.heads[number - 1][position], projected, parts.heads, vector)
        result |= {Part("head", number, head): x for head, x in enumerate(heads, start=1)}
        result |= {Part("bias", number): rest, Part("mlp", number): mlp.double() @ vector}
    result[Part("bias")] = constant + offset
    return dict(zip(result, torch.stack(list(result.values())).tolist(), strict=True))


def _heads(layer: Layer, inputs: Tensor, projected: Tensor, heads: int, vector: Tensor) -> tuple[Tensor, Tensor]:
    """Contributions `[heads]` of an attention's heads from their outputs, and that of its biases."""
    constant = vector.new_zeros(())
    if layer.attention_norm is not None:
        vector, constant = freeze(layer.attention_norm, projected).pull_back(vector)
    alone = torch.block_diag(*inputs.view(heads, 1, -1))
    bias, *outputs = layer.projection(torch.cat([torch.zeros_like(inputs)[None], alone])).double()
    return (torch.stack(outputs) - bias) @ vector, bias @ vector + constant


def total(contributions: Mapping[Part, float]) -> float:
    """The sum of the parts of a whole model, in which heads and their biases are parts of attentions."""
    return sum(
        x for part, x in contributions.items() if part.kind != "head" and (part.kind != "bias" or part.layer is None)
    )
