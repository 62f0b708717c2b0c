"""FLOPs and moved bytes of the stages of a PPO iteration, from a model's shape; `tokencredit plan` measures memory.

`python benchmarks/costs.py` prints the tables of RESULTS.md, `--docs` those of docs/gpu.md, `--write` fills both pages;
cost_tables.py makes them. Units: FLOPs (a multiply-add is two), bytes, seconds; GB are 10⁹ bytes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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


@dataclass(frozen=True)
class Batch:
    """The work of one iteration of one process; all completions have full length."""

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


class Setup(NamedTuple):
    """The settings that determine computation."""

    critic: Literal["shared", "separate", "none"] = "shared"
    lora_rank: int = 0
    reference: bool = True


def trained_parameters(shape: Shape, setup: Setup) -> int:
    """Number of trained parameters: model or adapter, value head, trunk of a separate critic."""
    model = lora_parameters(shape, setup.lora_rank) if setup.lora_rank else parameters(shape)
    head = 0 if setup.critic == "none" else head_parameters(shape)
    return model + head + (trunk_parameters(shape) if setup.critic == "separate" else 0)


def cache_bytes(shape: Shape) -> int:
    """KV cache per token in bfloat16: 2 · layers · key-value heads · head width numbers."""
    return 2 * HALF * shape.layers * shape.keys


def config_of(shape: Shape) -> Any:
    """Transformers' configuration of a shape; GPT-2's has no dropout and a GELU of one operation, as in runs."""
    from transformers import GPT2Config, LlamaConfig, Qwen3Config

    sizes = {"vocab_size": shape.vocabulary, "max_position_embeddings": shape.positions, "hidden_size": shape.width}
    sizes |= {"num_hidden_layers": shape.layers, "num_attention_heads": shape.heads}
    if shape.family == "gpt2":
        ends = {"bos_token_id": shape.vocabulary - 1, "eos_token_id": shape.vocabulary - 1}
        others = {"activation_function": "gelu_pytorch_tanh", "tie_word_embeddings": shape.tied}
        others |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        return GPT2Config(n_inner=shape.mlp, **sizes, **ends, **others)
    sizes |= {"num_key_value_heads": shape.kv_heads, "head_dim": shape.head_width, "intermediate_size": shape.mlp}
    kind = {"llama": LlamaConfig, "qwen3": Qwen3Config}[shape.family]
    return kind(tie_word_embeddings=shape.tied, **sizes)


GPT2 = Shape("GPT-2 124M", "gpt2", 50257, 768, 12, 12, 12, 64, 3072, 1024)
QWEN3_06B = Shape("Qwen3-0.6B", "qwen3", 151936, 1024, 28, 16, 8, 128, 3072, 40960)
QWEN3_17B = Shape("Qwen3-1.7B", "qwen3", 151936, 2048, 28, 16, 8, 128, 6144, 40960)
QWEN3_4B = Shape("Qwen3-4B", "qwen3", 151936, 2560, 36, 32, 8, 128, 9728, 40960)
QWEN3_8B = Shape("Qwen3-8B", "qwen3", 151936, 4096, 36, 32, 8, 128, 12288, 40960, tied=False)
QWEN3_14B = Shape("Qwen3-14B", "qwen3", 151936, 5120, 40, 40, 8, 128, 17408, 40960, tied=False)
MEASURED = (GPT2, QWEN3_06B, QWEN3_17B)
"""The models of RESULTS.md."""
SHAPES = (*MEASURED, QWEN3_4B, QWEN3_8B)
LARGER = (QWEN3_17B, QWEN3_4B, QWEN3_8B, QWEN3_14B)
"""The models of the table of little memory."""


class Device(NamedTuple):
    """A GPU's memory in bytes, its memory bandwidth in bytes per second, its dense bfloat16 FLOPs per second."""

    memory: float
    bandwidth: float
    flops: float


H200 = Device(141e9, 4.8e12, 989e12)
"""By the datasheet."""
COPY = H200._replace(bandwidth=4.3e12)
"""With the bandwidth that copies reach."""


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


if __name__ == "__main__":
    from cost_tables import main  # which imports this module

    sys.exit(main(sys.argv[1:]))
