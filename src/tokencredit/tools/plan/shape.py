"""Sizes of a decoder model, and the numbers of parameters that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FLOAT, HALF = 4, 2
"""Bytes per number in float32 and bfloat16."""

Family = Literal["gpt2", "llama", "qwen3"]
"""GPT-2 has biases and learned positions; Llama a gated MLP and rotary positions; Qwen3 also norms on queries and
keys."""


@dataclass(frozen=True)
class Shape:
    """A decoder model's sizes."""

    name: str
    family: Family
    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    mlp: int
    positions: int
    tied: bool = True
    """The input embedding is tied to the output projection."""
    others: int = 0
    """Parameters that the family's formula does not count, such as biases of queries and keys."""

    @property
    def queries(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_width

    @property
    def keys(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.kv_heads * self.head_width


def attention_matrices(shape: Shape) -> list[tuple[int, int]]:
    """Inputs and outputs of each linear layer of a decoder layer's attention."""
    if shape.family == "gpt2":
        return [(shape.width, 3 * shape.width), (shape.width, shape.width)]
    return [(shape.width, shape.queries), *[(shape.width, shape.keys)] * 2, (shape.queries, shape.width)]


def layer_matrices(shape: Shape) -> list[tuple[int, int]]:
    """Inputs and outputs of each linear layer of a decoder layer."""
    gates = 1 if shape.family == "gpt2" else 2
    up, down = (shape.width, shape.mlp), (shape.mlp, shape.width)
    return [*attention_matrices(shape), *[up] * gates, down]


def layer_parameters(shape: Shape) -> int:
    """Parameters of a decoder layer: matrices, biases and norms."""
    matrices = layer_matrices(shape)
    products = sum(i * o for i, o in matrices)
    if shape.family == "gpt2":
        return products + sum(outputs for _, outputs in matrices) + 4 * shape.width
    return products + 2 * shape.width + (2 * shape.head_width if shape.family == "qwen3" else 0)


def trunk_matrices(shape: Shape) -> int:
    """Parameters that multiply in the trunk: all linear layers, no embedding."""
    return shape.layers * sum(i * o for i, o in layer_matrices(shape))


def projection(shape: Shape) -> int:
    """Parameters of the vocabulary projection, and of the input embedding: vocabulary × width."""
    return shape.vocabulary * shape.width


def parameters(shape: Shape) -> int:
    """All parameters; a tied embedding counts once."""
    ends = (2 + shape.positions) * shape.width if shape.family == "gpt2" else shape.width
    layers = shape.layers * layer_parameters(shape)
    return layers + ends + projection(shape) * (1 if shape.tied else 2) + shape.others


def trunk_parameters(shape: Shape) -> int:
    """Parameters of the trunk of a separate critic: all but an untied projection."""
    return parameters(shape) - (0 if shape.tied else projection(shape))


def head_parameters(shape: Shape, kind: Literal["mlp", "linear"] = "mlp", outputs: int = 1) -> int:
    """Parameters of the value head, with biases: width → outputs, or width → 4 width → outputs (`mlp`)."""
    if kind == "linear":
        return (shape.width + 1) * outputs
    return 4 * shape.width**2 + 4 * shape.width + (4 * shape.width + 1) * outputs


def lora_parameters(shape: Shape, rank: int) -> int:
    """Parameters of an adapter on each linear layer: rank × (inputs + outputs)."""
    return shape.layers * rank * sum(i + o for i, o in layer_matrices(shape))
