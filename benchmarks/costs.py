"""FLOPs, bytes and memory of the stages of a PPO iteration, computed from a model's shape.

`python benchmarks/costs.py` prints the tables of RESULTS.md, `--docs` those of docs/gpu.md, `--write` fills both pages;
cost_tables.py makes them. Units: FLOPs (a multiply-add is two), bytes, seconds; GB are 10⁹ bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from tokencredit.core.logprobs import CHUNK_LOGITS_ON_ACCELERATORS

FLOAT, HALF = 4, 2
"""Bytes per number in float32 and bfloat16."""


@dataclass(frozen=True)
class Shape:
    """A decoder model's sizes.

    GPT-2 has biases and learned positions; Qwen3 a gated MLP, rotary positions, and norms on queries and keys.
    """

    name: str
    family: Literal["gpt2", "qwen3"]
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

    @property
    def queries(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_width

    @property
    def keys(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.kv_heads * self.head_width

    def config(self) -> Any:
        """Transformers' configuration; GPT-2's without dropout and with a GELU of one operation, as runs have it."""
        from transformers import GPT2Config, Qwen3Config

        sizes = {"vocab_size": self.vocabulary, "max_position_embeddings": self.positions, "hidden_size": self.width}
        sizes |= {"num_hidden_layers": self.layers, "num_attention_heads": self.heads}
        if self.family == "gpt2":
            ends = {"bos_token_id": self.vocabulary - 1, "eos_token_id": self.vocabulary - 1}
            others = {"activation_function": "gelu_pytorch_tanh", "tie_word_embeddings": self.tied}
            others |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
            return GPT2Config(n_inner=self.mlp, **sizes, **ends, **others)
        sizes |= {"num_key_value_heads": self.kv_heads, "head_dim": self.head_width, "intermediate_size": self.mlp}
        return Qwen3Config(tie_word_embeddings=self.tied, **sizes)


GPT2 = Shape("GPT-2 124M", "gpt2", 50257, 768, 12, 12, 12, 64, 3072, 1024)
QWEN3_06B = Shape("Qwen3-0.6B", "qwen3", 151936, 1024, 28, 16, 8, 128, 3072, 40960)
QWEN3_17B = Shape("Qwen3-1.7B", "qwen3", 151936, 2048, 28, 16, 8, 128, 6144, 40960)
QWEN3_4B = Shape("Qwen3-4B", "qwen3", 151936, 2560, 36, 32, 8, 128, 9728, 40960)
QWEN3_8B = Shape("Qwen3-8B", "qwen3", 151936, 4096, 36, 32, 8, 128, 12288, 40960, tied=False)
MEASURED = (GPT2, QWEN3_06B, QWEN3_17B)
"""The models of RESULTS.md."""
SHAPES = (*MEASURED, QWEN3_4B, QWEN3_8B)


class Device(NamedTuple):
    """A GPU's memory in bytes, its memory bandwidth in bytes per second, its dense bfloat16 FLOPs per second."""

    memory: float
    bandwidth: float
    flops: float


H200 = Device(141e9, 4.8e12, 989e12)
"""By the datasheet."""
COPY = H200._replace(bandwidth=4.3e12)
"""With the bandwidth that copies reach."""


@dataclass(frozen=True)
class Batch:
    """The work of one iteration; all completions have full length."""

    rows: int = 64
    prompt: int = 64
    new: int = 448
    epochs: int = 4
    minibatches: int = 4

    @property
    def length(self) -> int:
        """Tokens per row in a forward pass: the last one is never an input."""
        return self.prompt + self.new - 1

    @property
    def responses(self) -> int:
        """Sampled tokens of all rows: the positions that are projected to the vocabulary."""
        return self.rows * self.new


@dataclass(frozen=True)
class Setup:
    """The settings that determine computation and memory."""

    critic: Literal["shared", "separate", "none"] = "shared"
    lora_rank: int = 0
    gradient_checkpointing: bool = False
    micro_batch_tokens: int | None = None
    reference: bool = True


def layer_matrices(shape: Shape) -> list[tuple[int, int]]:
    """Inputs and outputs of each linear layer of a decoder layer."""
    width, mlp = shape.width, shape.mlp
    if shape.family == "gpt2":
        return [(width, 3 * width), (width, width), (width, mlp), (mlp, width)]
    keys = [(width, shape.keys)] * 2
    return [(width, shape.queries), *keys, (shape.queries, width), (width, mlp), (width, mlp), (mlp, width)]


def trunk_matrices(shape: Shape) -> int:
    """Parameters that multiply in the trunk: all linear layers, no embedding."""
    return shape.layers * sum(i * o for i, o in layer_matrices(shape))


def projection(shape: Shape) -> int:
    """Parameters of the vocabulary projection, and of the input embedding: vocabulary × width."""
    return shape.vocabulary * shape.width


def parameters(shape: Shape) -> int:
    """All parameters; a tied embedding counts once."""
    if shape.family == "gpt2":
        biases = sum(outputs for _, outputs in layer_matrices(shape))
        small = shape.layers * (biases + 4 * shape.width) + 2 * shape.width + shape.positions * shape.width
    else:
        small = shape.layers * 2 * (shape.width + shape.head_width) + shape.width
    return trunk_matrices(shape) + small + projection(shape) * (1 if shape.tied else 2)


def trunk_parameters(shape: Shape) -> int:
    """Parameters of the trunk of a separate critic: all but an untied projection."""
    return parameters(shape) - (0 if shape.tied else projection(shape))


def head_parameters(shape: Shape) -> int:
    """Parameters of the value head (`critic.head: mlp`): width → 4 width → 1, with biases."""
    return 4 * shape.width**2 + 8 * shape.width + 1


def lora_parameters(shape: Shape, rank: int) -> int:
    """Parameters of an adapter on each linear layer: rank × (inputs + outputs)."""
    return shape.layers * rank * sum(i + o for i, o in layer_matrices(shape))


class Products(NamedTuple):
    """Multiples of a forward pass's FLOPs: of the linear layers, of the attention, of the adapters."""

    matrices: float = 1
    attention: float = 1
    adapters: float = 1


FORWARD = Products()
TRAINED = Products(3, 3)
"""Forward and backward: a backward pass is two products for each one. Fused attention computes its scores a second time
in the backward pass and executes 3.5; model FLOPs, of which MFU is a share, leave that out."""
ADAPTED = Products(2, 3, 3)
"""Forward and backward with LoRA: frozen matrices need no gradient, so one product less."""


def attention_flops(shape: Shape, pairs: float) -> float:
    """4 · layers · heads · head width · pairs of query and key: the scores, and the sums over values."""
    return 4.0 * shape.layers * shape.queries * pairs


def trunk_flops(shape: Shape, rows: int, length: int, products: Products = FORWARD, rank: int = 0) -> float:
    """FLOPs of a trunk on rows of a length: 2 · (matrices + adapters) per token, and attention.

    Attention counts the full square, length² pairs per row, which is what kernels with a padding mask compute. Causal
    kernels without a mask compute half of it.
    """
    linear = 2.0 * rows * length * trunk_matrices(shape) * products.matrices
    adapters = 2.0 * rows * length * lora_parameters(shape, rank) * products.adapters
    return linear + adapters + attention_flops(shape, rows * length**2) * products.attention


def projection_flops(shape: Shape, tokens: int, products: float = 1) -> float:
    """FLOPs of the vocabulary projection: 2 · vocabulary · width per token and product.

    `token_loss` takes three products per token, of logits, hidden states' gradient and weight's gradient; two with a
    frozen weight; passes without gradients take one.
    """
    return 2.0 * projection(shape) * tokens * products


def head_flops(shape: Shape, tokens: int) -> float:
    """FLOPs of the value head, 2 · (4 width² + 4 width) per token, which are in float32."""
    return 2.0 * (4 * shape.width**2 + 4 * shape.width) * tokens


def iteration_flops(shape: Shape, batch: Batch, setup: Setup) -> dict[str, float]:
    """Model FLOPs of each stage of an iteration.

    Left out are the reward, the few samples that are evaluated after the update, and what gradient checkpointing
    computes again.
    """
    rows, length, tokens, rank = batch.rows, batch.length, batch.responses, setup.lora_rank
    forward = trunk_flops(shape, rows, length, rank=rank) + projection_flops(shape, tokens)
    head = 0.0 if setup.critic == "none" else head_flops(shape, tokens)
    own = trunk_flops(shape, rows, length) if setup.critic == "separate" else 0.0
    # Sampling: the prompt's square, then each token against all before it.
    pairs = batch.prompt**2 + sum(range(batch.prompt + 1, batch.prompt + batch.new))
    sampling = forward + attention_flops(shape, rows * (pairs - length**2))
    trained = ADAPTED if rank else TRAINED
    update = trunk_flops(shape, rows, length, trained, rank) + projection_flops(shape, tokens, trained.matrices)
    update += (3 * own) + (3 * head)
    return {
        "rollout": sampling + (head if setup.critic == "shared" else 0),
        "re-evaluation": forward + own + head,
        "reference": forward - 2.0 * rows * length * lora_parameters(shape, rank) if setup.reference else 0.0,
        "update": batch.epochs * update,
    }


def decode_weight_bytes(shape: Shape) -> int:
    """Bytes of weights read per decoding step, in bfloat16, each once: trunk matrices and vocabulary projection."""
    return HALF * (trunk_matrices(shape) + projection(shape))


def cache_bytes(shape: Shape) -> int:
    """KV cache per token: 2 · layers · key-value heads · head width · 2 bytes."""
    return 2 * shape.layers * shape.keys * HALF


def step_bytes(shape: Shape, rows: int, length: int) -> float:
    """Bytes of a decoding step: weights, the cache of `length` tokens per row, logits in float32 written and read."""
    logits = 2 * FLOAT * rows * shape.vocabulary
    return decode_weight_bytes(shape) + rows * length * cache_bytes(shape) + logits


def step_seconds(shape: Shape, rows: int, length: int, device: Device = H200) -> float:
    """Least time of a decoding step: its bytes at full bandwidth, or its FLOPs at full speed if that is longer."""
    flops = 2.0 * rows * (trunk_matrices(shape) + projection(shape)) + attention_flops(shape, rows * length)
    return max(step_bytes(shape, rows, length) / device.bandwidth, flops / device.flops)


def rollout_seconds(shape: Shape, batch: Batch, device: Device = H200) -> float:
    """Least time of a rollout: the prompts at full speed, then a decoding step per token after the first."""
    flops = trunk_flops(shape, batch.rows, batch.prompt) + projection_flops(shape, batch.rows)
    prompts = max(decode_weight_bytes(shape) / device.bandwidth, flops / device.flops)
    lengths = range(batch.prompt + 1, batch.prompt + batch.new)
    return prompts + sum(step_seconds(shape, batch.rows, length, device) for length in lengths)


def update_rate(shape: Shape, batch: Batch, setup: Setup, mfu: float = 1.0, device: Device = H200) -> float:
    """Tokens read per second in the update, prompts included, at a share of the device's FLOPs."""
    flops = iteration_flops(shape, batch, setup)["update"] / (batch.epochs * batch.rows * batch.length)
    return mfu * device.flops / flops


def optimizer_bytes(trained: int, clipping: bool = True) -> int:
    """Bytes of an optimizer step: AdamW in one kernel, 28 per parameter in float32.

    It reads parameter, gradient and two moments and writes all but the gradient. Clipping takes 12 more: the gradient
    is read for its norm, then read and written to be scaled.
    """
    return trained * (7 * FLOAT + (3 * FLOAT if clipping else 0))


def layer_activation_bytes(shape: Shape, length: int, rank: int = 0) -> int:
    """Bytes that a layer keeps per token for its backward pass, under bfloat16 autocast and eager PyTorch.

    Counted tensor by tensor: the residual stream and Qwen3's norms in float32, a bfloat16 copy of its input for each
    linear layer, queries, keys and values at the width of the query heads, and the padding mask, which each layer makes
    in bfloat16 anew, of `length` numbers per token. An adapter keeps its input and its narrow states; frozen norms keep
    one tensor less.
    """
    width, queries, keys, mlp, heads = shape.width, shape.queries, shape.keys, shape.mlp, shape.heads
    mask = HALF * length
    if shape.family == "gpt2":
        plain = 20 * width + 4 * mlp + 4 * heads + 16 + mask
        return plain + (2 * width + 8 * rank if rank else 0)
    adapted = 18 * width + 14 * queries + 4 * keys + 8 * mlp + 4 * (2 * heads + shape.kv_heads) + 8 + mask
    return adapted + (14 * rank if rank else 8 * width + 2 * keys)


def activation_bytes(shape: Shape, length: int, setup: Setup) -> int:
    """Bytes that a trunk keeps per token for its backward pass; with checkpointing, each layer's input in float32.

    The backward pass then has the activations of one layer besides.
    """
    layer = layer_activation_bytes(shape, length, setup.lora_rank)
    ends = 4 * shape.width + 24 if shape.family == "gpt2" else 8 * shape.width + 8 * shape.head_width + 12
    if setup.gradient_checkpointing:
        return shape.layers * FLOAT * shape.width + layer + ends
    return shape.layers * layer + ends


def head_activation_bytes(shape: Shape) -> int:
    """Bytes that the value head keeps per sampled token: its input and two tensors of four times its width, float32."""
    return FLOAT * (shape.width + 2 * 4 * shape.width)


def frozen_bytes(shape: Shape) -> int:
    """Bytes of a frozen model: trunk matrices in bfloat16; embeddings, projection, biases and norms in float32."""
    half = trunk_matrices(shape)
    return HALF * half + FLOAT * (parameters(shape) - half)


def trained_parameters(shape: Shape, setup: Setup) -> int:
    """Number of trained parameters: model or adapter, value head, trunk of a separate critic."""
    model = lora_parameters(shape, setup.lora_rank) if setup.lora_rank else parameters(shape)
    head = 0 if setup.critic == "none" else head_parameters(shape)
    return model + head + (trunk_parameters(shape) if setup.critic == "separate" else 0)


def memory(shape: Shape, batch: Batch, setup: Setup) -> dict[str, dict[str, float]]:
    """Bytes by part: `kept` throughout, and in addition those of `update`, `sampling` or `scoring`.

    Left out are reward models, the CUDA context (about half a GB) and memory that is fragmented.
    """
    lora, own, vocabulary = bool(setup.lora_rank), setup.critic == "separate", projection(shape)
    trained, model = trained_parameters(shape, setup), trunk_matrices(shape)
    head = 0 if setup.critic == "none" else head_activation_bytes(shape)
    copies = HALF * (vocabulary + (lora_parameters(shape, setup.lora_rank) if lora else model) + (model if own else 0))
    read = batch.rows * batch.length
    tokens, scored = (min(x, setup.micro_batch_tokens or x) for x in (read / batch.minibatches, read))
    share = batch.new / batch.length
    chunk, scored_chunk = (min(CHUNK_LOGITS_ON_ACCELERATORS, x * share * shape.vocabulary) for x in (tokens, scored))
    trunks = activation_bytes(shape, batch.length, setup)
    trunks += activation_bytes(shape, batch.length, replace(setup, lora_rank=0)) if own else 0
    # Gradients of the projection, and of a tied embedding, before they are added to those of earlier micro-batches.
    forming = 0 if lora else FLOAT * vocabulary * (2 if shape.tied else 1)
    return {
        "kept": {
            "weights": FLOAT * trained + (frozen_bytes(shape) if lora else 0),
            "moments": 2 * FLOAT * trained,
            "reference": frozen_bytes(shape) if setup.reference and not lora else 0,
        },
        "update": {
            "gradients": FLOAT * trained + forming,
            "autocast copies": copies,
            "activations": tokens * (trunks + share * head),
            "logits": (FLOAT + HALF) * chunk,
        },
        "sampling": {
            "decode copy": HALF * (vocabulary + (lora_parameters(shape, setup.lora_rank) if lora else model)),
            "KV cache": batch.rows * (batch.prompt + batch.new) * cache_bytes(shape),
            "logits": 5 * FLOAT * batch.rows * shape.vocabulary,
        },
        "scoring": {
            "autocast copies": copies,
            "activations": scored * layer_activation_bytes(shape, batch.length),
            "logits": FLOAT * scored_chunk,
        },
    }


def peak(parts: Mapping[str, Mapping[str, float]]) -> float:
    """Peak memory: the kept part plus the largest stage."""
    kept, *stages = (sum(part.values()) for part in parts.values())
    return kept + max(stages)


if __name__ == "__main__":
    from cost_tables import main  # which imports this module

    sys.exit(main(sys.argv[1:]))
