"""Memory of a run's parts in bytes, by formula: from the sizes of the model, the batch and the settings.

Formulas are per process. Activations are counted tensor by tensor for eager PyTorch, and tested on real models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from tokencredit.tools.plan.shape import (
    FLOAT,
    HALF,
    Shape,
    attention_matrices,
    head_parameters,
    layer_parameters,
    lora_parameters,
    parameters,
    projection,
    trunk_matrices,
    trunk_parameters,
)

CHUNK_LOGITS = {"cpu": 2**22, "cuda": 2**27}
"""Logits per chunk of the vocabulary projection; `core.logprobs` has the numbers, and a test holds them equal."""
MIN_CHUNK = 128
"""Fewest tokens per chunk of the vocabulary projection."""
SHORT = 64
"""Longest sequence that trains with PyTorch's math attention in bfloat16 on a CPU; see `text.models.actor_critic`."""
SPARE_TOKENS = 64
"""Least spare capacity of a growing KV cache; see `text.engines.local.dynamic_kv_cache`."""
LARGE = 2**25
"""Bytes from which the C library (glibc) takes a tensor's memory from the kernel, and returns it when it is freed. It
keeps the memory of smaller ones for tensors to come, so their highest sum stays resident."""
FILES, SMALLEST_FILE, LARGEST_FILE = 64, 2**26, 2**30
"""Number and bytes of a checkpoint's files; `runs.tensor_files` has them too, and a test holds them equal."""
SERIALIZED = 2
"""Copies of a checkpoint's file in RAM while it is written: 472 MB were measured for a file of 240 MB."""
ID = 4
"""Bytes of a kept token id."""
EXPERIENCE = (9, 47)
"""Bytes kept per prompt token and per sampled token, padding included: ids and mask; and for sampled tokens uniform
number, log-probs of policy and reference, values, KL, rewards, advantages, returns and their masks."""

Parts = dict[str, dict[str, float]]
"""Bytes by moment and part: `kept` throughout, and the additional ones of each moment."""


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


@dataclass(frozen=True)
class Setup:
    """The settings that determine computation and memory."""

    critic: Literal["shared", "separate", "none"] = "shared"
    lora_rank: int = 0
    gradient_checkpointing: bool = False
    micro_batch_tokens: int | None = None
    reference: bool = True
    head: Literal["mlp", "linear"] = "mlp"
    outputs: int = 1
    """Outputs of the value head: bins of a histogram."""
    trunk: Shape | None = None
    """A separate critic's trunk; None for the policy's."""
    members: int = 1
    critic_trains: Literal["all", "all but attention", "head"] = "all"
    adapter: int | None = None
    """Parameters of the adapter; None for one on each linear layer."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    device: Literal["cpu", "cuda"] = "cuda"
    static_cache: bool = True
    padded: bool = True
    """Prompts differ in length, so that attention has a mask."""
    logit_tensors: int = 0
    """Further tensors of logits per chunk: 1 for the entropy, 3 for an exact KL."""
    processes: int = 1
    shard: Literal["none", "full"] = "none"
    gathered: bool = True
    """While sampling, a sharded policy is whole in each process."""
    support: int = 0
    """Token ids that are kept for each sampled token (`off_policy.support`)."""

    @property
    def half(self) -> bool:
        """Compute is in bfloat16."""
        return self.dtype == "bfloat16"

    @property
    def size(self) -> int:
        """Bytes per number of the compute dtype."""
        return HALF if self.half else FLOAT


def attention_kind(length: int, setup: Setup) -> Literal["fused", "math"]:
    """The attention kernel of an update, which decides what is kept for the backward pass."""
    if setup.device == "cuda":
        return "fused" if setup.half else "math"
    return "math" if setup.half and length <= SHORT and not setup.gradient_checkpointing else "fused"


def layer_activation_bytes(shape: Shape, length: int, setup: Setup) -> float:
    """Bytes that a layer keeps per token for its backward pass, in eager PyTorch, under autocast in bfloat16.

    Counted tensor by tensor: the residual stream and the norms of Llama's family in float32, the input of each linear
    layer, queries, keys, values and the attention's result, the MLP's inner states. Fused attention keeps a number per
    head and, with padding, a mask of `length` numbers per token, and repeats keys and values to the width of the
    queries; math attention keeps `length` probabilities per head. An adapter keeps its input and its narrow states;
    frozen norms keep one tensor less.
    """
    kind, rank, half = attention_kind(length, setup), setup.lora_rank, setup.half
    width, queries, keys, mlp, heads = shape.width, shape.queries, shape.keys, shape.mlp, shape.heads
    masked = kind == "fused" and setup.padded
    scores = FLOAT * heads * (1 if kind == "fused" else length) + (setup.size * length if masked else 0)
    if shape.family == "gpt2":
        states = {(False, "fused"): 32, (False, "math"): 32, (True, "fused"): 22 if rank else 20, (True, "math"): 26}
        narrow = (8 if half else 16) * rank if rank else 16
        return states[half, kind] * width + 2 * setup.size * mlp + scores + (16 + narrow if rank else narrow)
    gated = ((18 if rank else 26) if half else (16 if rank else 24)) * width + 4 * setup.size * mlp
    repeated = masked or kind == "math"
    if not half:
        own = 16 * queries if repeated else 8 * (queries + keys)
    elif kind == "math":
        own = 14 * queries
    else:
        own = (10 if rank else 8) * queries if repeated else (6 if rank else 4) * queries + 4 * keys
    if shape.family == "qwen3":
        norms = 4 if rank else 6 if half else 8
        own += norms * (queries + keys) + FLOAT * (heads + shape.kv_heads)
    return gated + own + scores + 8 + (14 if half else 28) * rank


def activation_bytes(shape: Shape, length: int, setup: Setup) -> float:
    """Bytes that a trunk keeps per token for its backward pass; with checkpointing, each layer's input in float32.

    The backward pass then has the activations of one layer besides.
    """
    layer = layer_activation_bytes(shape, length, setup)
    # The final norm's states, unless it is frozen, and rotary positions. With checkpointing GPT-2's frozen norm keeps
    # its input, which no layer has kept.
    gpt2 = shape.family == "gpt2"
    frozen = setup.lora_rank and not (gpt2 and setup.gradient_checkpointing)
    norm = 0 if frozen else (4 if gpt2 else 8) * shape.width
    ends = norm + ((0 if setup.lora_rank else 24) if gpt2 else 8 * shape.head_width + 12)
    if setup.gradient_checkpointing:
        return shape.layers * FLOAT * shape.width + layer + ends
    return shape.layers * layer + ends


def passing_bytes(shape: Shape, setup: Setup) -> float:
    """Bytes per token that a pass without gradients holds at its widest place, the MLP of a layer."""
    inner = 2 if shape.family == "gpt2" else 3
    return 3 * FLOAT * shape.width + inner * setup.size * shape.mlp


def head_activation_bytes(shape: Shape, setup: Setup) -> float:
    """Bytes that the value head keeps per sampled token: its input; with `mlp`, two tensors of four times its width."""
    if setup.critic == "none":
        return 0
    outputs = FLOAT * setup.outputs if setup.outputs > 1 else 0
    return FLOAT * (shape.width + (2 * 4 * shape.width if setup.head == "mlp" else 0)) + outputs


def frozen_bytes(shape: Shape, half: bool = True) -> int:
    """Bytes of a frozen model; `half` has the trunk's matrices in bfloat16, the rest stays float32."""
    matrices = trunk_matrices(shape) if half else 0
    return HALF * matrices + FLOAT * (parameters(shape) - matrices)


def critic_shape(shape: Shape, setup: Setup) -> Shape:
    """The shape of a separate critic's trunk."""
    return setup.trunk or shape


def head_count(shape: Shape, setup: Setup) -> int:
    """Parameters of all value heads."""
    return 0 if setup.critic == "none" else setup.members * head_parameters(shape, setup.head, setup.outputs)


def adapter_parameters(shape: Shape, setup: Setup) -> int:
    """Parameters of the adapter."""
    return lora_parameters(shape, setup.lora_rank) if setup.adapter is None else setup.adapter


def critic_parameters(shape: Shape, setup: Setup) -> tuple[int, int]:
    """Parameters of the trunks of separate critics, and how many of them are trained."""
    if setup.critic != "separate":
        return 0, 0
    trunk = critic_shape(shape, setup)
    attention = trunk.layers * sum(i * o for i, o in attention_matrices(trunk))
    whole = trunk_parameters(trunk)
    trained = {"all": whole, "all but attention": whole - attention, "head": 0}[setup.critic_trains]
    return setup.members * whole, setup.members * trained


def trained_parameters(shape: Shape, setup: Setup) -> int:
    """Number of trained parameters: model or adapter, value heads, trunks of separate critics."""
    model = adapter_parameters(shape, setup) if setup.lora_rank else parameters(shape)
    return model + head_count(shape, setup) + critic_parameters(shape, setup)[1]


def micro_rows(rows: int, batch: Batch, setup: Setup) -> int:
    """Rows of the largest micro-batch of a pass over `rows` rows."""
    budget = setup.micro_batch_tokens
    return rows if budget is None else max(min(rows, budget // batch.length), 1)


def cache_capacity(prompt: int, new: int) -> int:
    """Tokens per row for which a growing KV cache has allocated memory at the end of a rollout.

    A buffer that is full is replaced by one with half as much again, at least `SPARE_TOKENS` more.
    """
    capacity = prompt + max(SPARE_TOKENS, prompt // 2)
    while capacity < prompt + new - 1:
        capacity += 1 + max(SPARE_TOKENS, (capacity + 1) // 2)
    return capacity


def cache_bytes(shape: Shape, setup: Setup = Setup()) -> int:
    """KV cache per token: 2 · layers · key-value heads · head width numbers.

    A growing cache in bfloat16 holds the keys of rotary positions in float32.
    """
    keys = FLOAT if not setup.static_cache and shape.family != "gpt2" else setup.size
    return shape.layers * shape.keys * (keys + setup.size)


def chunk_logits(shape: Shape, tokens: float, setup: Setup) -> float:
    """Logits of a chunk of the vocabulary projection, for at most `tokens` tokens."""
    return shape.vocabulary * min(tokens, max(CHUNK_LOGITS[setup.device] / shape.vocabulary, MIN_CHUNK))


def kept_bytes(shape: Shape, batch: Batch, setup: Setup) -> dict[str, float]:
    """Bytes of the parts that are in memory throughout a run."""
    lora, half = bool(setup.lora_rank), setup.half
    trained = trained_parameters(shape, setup)
    trunks, trained_trunks = critic_parameters(shape, setup)
    below = frozen_bytes(shape, half and setup.device == "cuda") if lora else 0
    critics = FLOAT * (trunks + head_count(shape, setup))
    parts: dict[str, float] = {
        "weights": FLOAT * trained + below + FLOAT * (trunks - trained_trunks) - critics,
        "critic": critics,
        "moments": 2 * FLOAT * trained,
        "reference": frozen_bytes(shape, half) if setup.reference and not lora else 0,
    }
    if setup.processes > 1 and setup.shard == "none":
        parts["DDP buckets"] = FLOAT * trained
    if setup.shard == "full":
        parts = sharded(parts, shape, setup)
    prompt, sampled = EXPERIENCE
    sampled += ID * setup.support
    return parts | {"experience": batch.rows * (prompt * batch.prompt + sampled * batch.new)}


def sharded(parts: Mapping[str, float], shape: Shape, setup: Setup) -> dict[str, float]:
    """The parts of one process; heads and adapters are whole in each."""
    whole = head_count(shape, setup) + (adapter_parameters(shape, setup) if setup.lora_rank else 0)
    adapter = whole - head_count(shape, setup)
    replicated = {"weights": FLOAT * adapter, "critic": FLOAT * head_count(shape, setup), "moments": 2 * FLOAT * whole}
    return {
        name: replicated.get(name, 0) + (size - replicated.get(name, 0)) / setup.processes
        for name, size in parts.items()
    }


def gathered_bytes(shape: Shape) -> float:
    """The largest parts of a sharded model that are whole at once: its embeddings, with norm and projection, and two
    layers, since the next one is gathered while one computes."""
    ends = parameters(shape) - shape.layers * layer_parameters(shape)
    return FLOAT * (ends + min(2, shape.layers) * layer_parameters(shape))


def update_moments(shape: Shape, batch: Batch, setup: Setup) -> list[dict[str, float]]:
    """Bytes by part, in addition to those kept, at each point of an update that may be its peak.

    With one micro-batch per minibatch, gradients grow while activations shrink, so those are the two ends of the
    backward pass. With several, the gradients of the first are there throughout.
    """
    own, lora = setup.critic == "separate", bool(setup.lora_rank)
    rows = -(-batch.rows // batch.minibatches)
    micro = micro_rows(rows, batch, setup)
    tokens, sampled = micro * batch.length, micro * batch.new
    critic, trained_critics = critic_shape(shape, setup), critic_parameters(shape, setup)[1]
    gradients = FLOAT * trained_parameters(shape, setup) / (setup.processes if setup.shard == "full" else 1)
    before = gradients if micro < rows else 0.0
    # The vocabulary's gradient is formed in the forward pass; that of a tied embedding is added to it last.
    forming = 0.0 if lora else float(FLOAT * projection(shape))
    completing = (forming if shape.tied else 0.0) + (forming if before else 0.0)
    # A backward pass needs the copies of frozen matrices too, where those are float32.
    copied = 0 if lora and setup.device == "cuda" else trunk_matrices(shape)
    copied += adapter_parameters(shape, setup) if lora else 0
    copied += trunk_matrices(critic) if own and trained_critics else 0
    copies = HALF * (copied + projection(shape)) if setup.half else 0
    policy = tokens * activation_bytes(shape, batch.length, setup) + sampled * head_activation_bytes(shape, setup)
    critics = 0.0
    if own and trained_critics:
        critics = tokens * activation_bytes(critic, batch.length, replace(setup, lora_rank=0))
    own_gradients = gradients * trained_critics / trained_parameters(shape, setup)
    chunk = chunk_logits(shape, sampled, setup)
    logits = chunk * (FLOAT * (1 + setup.logit_tensors) + (HALF if setup.half else 0))
    moments = [
        # The policy's loss is computed before a separate critic runs.
        {"gradients": before + forming, "activations": policy, "logits": logits},
        {"gradients": before + forming, "activations": policy + critics, "logits": 0.0},
        # Its backward pass comes first.
        {"gradients": max(before, own_gradients) + forming, "activations": policy, "logits": 0.0},
        {"gradients": gradients + completing, "activations": 0.0, "logits": 0.0},
    ]
    extra = {"gathered weights": gathered_bytes(shape)} if setup.shard == "full" else {}
    return [moment | {"autocast copies": copies} | extra for moment in moments]


def update_bytes(shape: Shape, batch: Batch, setup: Setup) -> dict[str, float]:
    """Bytes of an update at its peak, in addition to those kept."""
    return max(update_moments(shape, batch, setup), key=lambda parts: sum(parts.values()))


def large_bytes(shape: Shape, moment: Mapping[str, float], setup: Setup) -> float:
    """Bytes of a moment of an update in tensors of at least `LARGE`: those as large as the vocabulary, as a rule."""
    vocabulary, half = FLOAT * projection(shape), HALF * projection(shape)
    owned, trained = critic_parameters(shape, setup)
    embeddings = setup.members if owned and trained == owned else 0
    embeddings += 0 if setup.lora_rank else 1
    large = 0.0
    if vocabulary >= LARGE:
        # Whole embeddings: all gradients but those of the layers.
        layers = FLOAT * trained_parameters(shape, setup) - embeddings * vocabulary
        complete = moment["gradients"] >= FLOAT * trained_parameters(shape, setup)
        large += moment["gradients"] - (layers if complete else 0)
    if half >= LARGE and setup.half:
        large += half
    return large + (moment["logits"] if moment["logits"] >= LARGE else 0.0)


def freed_bytes(shape: Shape, batch: Batch, setup: Setup, moment: Mapping[str, float]) -> float:
    """Bytes that a process on a CPU still holds at the peak of an update, though their tensors have been freed.

    Runs with sharded models have the C library return them (`processes.return_freed_memory`).
    """
    if setup.device != "cpu" or setup.shard == "full":
        return 0.0
    small, large = small_and_large_bytes(shape, batch, setup)
    return small + large - sum(moment.values())


def small_and_large_bytes(shape: Shape, batch: Batch, setup: Setup) -> tuple[float, float]:
    """Highest sums of an update's tensors below and above `LARGE`; they need not meet."""
    moments = update_moments(shape, batch, setup)
    large = [large_bytes(shape, x, setup) for x in moments]
    return max(sum(x.values()) - y for x, y in zip(moments, large, strict=True)), max(large)


def sampling_bytes(shape: Shape, batch: Batch, setup: Setup) -> dict[str, float]:
    """Bytes of a rollout at its end, in addition to those kept."""
    copied = adapter_parameters(shape, setup) if setup.lora_rank else trunk_matrices(shape)
    decode = HALF * (copied + (projection(shape) if setup.static_cache else 0)) if setup.half else 0
    capacity = batch.prompt + batch.new if setup.static_cache else cache_capacity(batch.prompt, batch.new)
    parts: dict[str, float] = {
        "decode copy": decode,
        "KV cache": batch.rows * capacity * cache_bytes(shape, setup),
        "logits": 5 * FLOAT * batch.rows * shape.vocabulary,
    }
    if setup.shard == "full":
        parts["gathered weights"] = FLOAT * parameters(shape) if setup.gathered else gathered_bytes(shape)
    return parts


def scoring_bytes(shape: Shape, batch: Batch, setup: Setup) -> dict[str, float]:
    """Bytes of a full pass without gradients over all rows, in addition to those kept."""
    rows = micro_rows(batch.rows, batch, setup)
    copied = adapter_parameters(shape, setup) if setup.lora_rank else trunk_matrices(shape)
    copied += projection(shape) if setup.device == "cuda" else 0
    parts: dict[str, float] = {
        "autocast copies": HALF * copied if setup.half else 0,
        "activations": rows * batch.length * passing_bytes(shape, setup),
        "logits": FLOAT * chunk_logits(shape, rows * batch.new, setup),
    }
    if setup.shard == "full":
        parts["gathered weights"] = gathered_bytes(shape)
    return parts


def saving_bytes(shape: Shape, batch: Batch, setup: Setup) -> dict[str, float]:
    """Bytes of one of a checkpoint's files, which PyTorch's writer makes in RAM, twice, before it writes it, and what
    the C library kept of the update's small tensors (see `freed_bytes`).

    Files hold the weights and moments of a process's part; parts that all processes have are divided among them.
    """
    total = 3 * FLOAT * trained_parameters(shape, setup)
    largest = 0 if setup.lora_rank else FLOAT * projection(shape)
    file = min(max(total // FILES, SMALLEST_FILE, largest), max(LARGEST_FILE, largest), total)
    parts = {"a file of the checkpoint": SERIALIZED * file / setup.processes}
    if setup.shard == "none":
        parts["freed, not returned"], _ = small_and_large_bytes(shape, batch, setup)
    return parts


def memory(shape: Shape, batch: Batch, setup: Setup) -> Parts:
    """Bytes by moment and part: `kept` throughout, and in addition those of rollout, scoring, update and save.

    Left out are reward models, Python and libraries, the CUDA context, and memory that is fragmented.
    """
    update = update_bytes(shape, batch, setup)
    freed = freed_bytes(shape, batch, setup, update)
    return {
        "kept": kept_bytes(shape, batch, setup),
        "rollout": sampling_bytes(shape, batch, setup),
        "scoring": scoring_bytes(shape, batch, setup),
        "update": update | ({"freed, not returned": freed} if freed else {}),
        "save": saving_bytes(shape, batch, setup) if setup.device == "cpu" else {},
    }


def peak(parts: Mapping[str, Mapping[str, float]]) -> float:
    """Peak memory: the kept part plus the largest moment."""
    kept, *moments = (sum(part.values()) for part in parts.values())
    return kept + max(moments)
