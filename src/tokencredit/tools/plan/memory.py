"""Memory of a run's parts in bytes, measured on fake tensors: the model's own code runs, without weights or numbers.

Sizes are per process. The passes of an iteration run in PyTorch's `FakeTensorMode`, and `LiveMemory` sums the storages
that live at each moment. Fake tensors are on the CPU; for a GPU, the settings in which its passes differ are replaced.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import masking_utils
from transformers.cache_utils import DynamicSlidingWindowLayer

from tokencredit.core import logprobs
from tokencredit.learn.optim import build_optimizer, hidden_matrices
from tokencredit.learn.state import trainable
from tokencredit.runs.tensor_files import file_numbers
from tokencredit.text.models import actor_critic
from tokencredit.text.models.actor_critic import ActorCritic, Extent, Inputs
from tokencredit.text.models.architecture import layers_of, trunk_of
from tokencredit.text.models.kv_cache import SpareCapacityLayer
from tokencredit.text.models.precision import Precision
from tokencredit.tools.plan.live_memory import FakeMemory, LiveMemory
from tokencredit.tools.plan.model_skeletons import build_skeletons
from tokencredit.tools.plan.passes import Passes
from tokencredit.tools.plan.work import Batch, Work

FLOAT, TOKEN_ID = 4, 4
"""Bytes of a number in float32, and of a kept token id."""
SERIALIZED = 2
"""Copies of a checkpoint's file in RAM while it is written: 472 MB were measured for a file of 240 MB."""
EXPERIENCE = (9, 47)
"""Bytes kept per prompt token and per sampled token, padding included: ids and mask; and for sampled tokens uniform
number, log-probs of policy and reference, values, KL, rewards, advantages, returns and their masks."""

Parts = dict[str, dict[str, float]]
"""Bytes by moment and part: `kept` throughout, and the additional ones of each moment."""


@dataclass(frozen=True)
class Measured:
    """Sizes of a run's models, and the memory of one process."""

    parameters: int
    """Of the language model, without its adapter."""
    trained: int
    saved: float
    """Bytes of the saved policy and critic: an adapter without the model below it."""
    checkpoint: float
    """Bytes of a checkpoint: trained weights and moments."""
    parts: Parts


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """A context in which an attribute has another value."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def whole_extent(inputs: Inputs) -> Extent:
    """The extent of rows without padding, which has no numbers to read."""
    rows, time = inputs["mask"].shape
    return Extent(time, 0, torch.arange(rows * time))


@contextmanager
def fake_device(work: Work) -> Iterator[None]:
    """A context of fake tensors, in which passes take the kernels of the run's device."""
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        # The growing KV cache compares addresses, which are all alike here, as they are in a run that drops no rows.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        stack.enter_context(replaced(Extent, "of", whole_extent))
        # Transformers would keep every mask of a fake tensor, as of one that is traced.
        stack.enter_context(replaced(masking_utils, "is_tracing", lambda *_: False))
        # Everything is where it belongs, and fake parameters cannot be replaced, as moving them would.
        stack.enter_context(replaced(torch.nn.Module, "to", lambda module, *_, **__: module))
        if work.device == "cuda":
            stack.enter_context(replaced(logprobs, "CHUNK_LOGITS", logprobs.CHUNK_LOGITS_ON_ACCELERATORS))
            stack.enter_context(replaced(actor_critic, "SHORT", 0))
            if not work.half:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


def measure(work: Work) -> Measured:
    """Measure a run's parts; errors as `build_skeletons`."""
    capacity = final_capacity(work.batch)
    with fake_device(work):
        policy, reference = build_skeletons(work)
        shares = Shares(work, policy)
        models = [policy] if reference is None else [policy, reference]
        tensors = [x for model in models for x in (*model.parameters(), *model.buffers())]
        projection = policy.lm.get_output_embeddings().weight.shape
        live = FakeMemory(work, {x.untyped_storage()._cdata for x in tensors}, projection)
        passes = Passes(work, policy, reference, Precision(work.dtype, torch.device("cpu")))
        state = optimizer_state(policy, work)
        with live:
            stages = {
                "rollout": sampling_parts(live, passes, capacity),
                "scoring": scoring_parts(live, passes),
                "update": update_parts(live, passes, shares),
            }
        if work.device == "cpu":
            stages["save"] = saving_parts(work, state, live.peaks[0])
        kept = {
            "weights": shares.bytes(policy.lm.parameters()),
            "critic": shares.bytes([] if policy.critic is None else policy.critic.parameters()),
            "moments": sum(shares.bytes(moments, of=p) for p, moments in state.items()),
            "reference": shares.bytes([] if reference is None else reference.lm.parameters()),
            "DDP buckets": 0.0 if work.sharded or work.options.processes == 1 else float(nbytes(state)),
            "experience": experience_bytes(work),
        }
        adapted = any(not p.requires_grad for p in policy.lm.parameters())
        written = [*(trainable(policy.lm) if adapted else policy.lm.parameters()), *critic_parameters(policy)]
        return Measured(
            parameters=sum(p.numel() for name, p in policy.lm.named_parameters() if "lora_" not in name),
            trained=sum(p.numel() for p in state),
            saved=nbytes(written),
            checkpoint=nbytes(state) + sum(nbytes(moments) for moments in state.values()),
            parts={"kept": kept, **stages},
        )


class Shares:
    """One process's share of tensors: an N-th of sharded ones; value heads and adapters are whole in each process."""

    def __init__(self, work: Work, policy: ActorCritic):
        """Find the parameters that stay whole."""
        heads = [] if policy.critic is None else [p for x in policy.critic.members for p in x.head.parameters()]
        adapted = any(not p.requires_grad for p in policy.lm.parameters())
        self.whole = {id(p) for p in (*heads, *(trainable(policy.lm) if adapted else ()))}
        self.processes = work.options.processes if work.sharded else 1

    def bytes(self, tensors: Iterable[Tensor], of: Tensor | None = None) -> float:
        """Bytes of tensors in a process; they are sharded like `of`, or like themselves."""
        return sum(x.nbytes / (1 if id(x if of is None else of) in self.whole else self.processes) for x in tensors)


def nbytes(tensors: Iterable[Tensor]) -> float:
    """Bytes of tensors."""
    return sum(x.nbytes for x in tensors)


def critic_parameters(policy: ActorCritic) -> list[Tensor]:
    """The parameters of the critic, none without one."""
    return [] if policy.critic is None else list(policy.critic.parameters())


def optimizer_state(policy: ActorCritic, work: Work) -> dict[Tensor, list[Tensor]]:
    """The optimizer's moments of each trained parameter, after a step."""
    excluded = policy.lm.get_output_embeddings().parameters()
    hidden = hidden_matrices(policy.lm, exclude=excluded) if work.config.optim.name == "muon" else []
    for member in () if policy.critic is None or not hidden else policy.critic.members:
        hidden += [] if member.trunk is None else hidden_matrices(member.trunk)
    optimizer = build_optimizer([{"params": trainable(policy), "lr": 1e-9}], work.config.optim.name, hidden=hidden)
    for p in trainable(policy):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return {p: [x for x in optimizer.state[p].values() if x.dim()] for p in trainable(policy)}


def experience_bytes(work: Work) -> float:
    """Bytes of the tensors of a rollout that an update reads."""
    batch, config = work.batch, work.config
    prompt, sampled = EXPERIENCE
    if config.off_policy.support == "truncated":
        sampled += TOKEN_ID * (config.rollout.top_k or 0)
    if work.exact_kl:
        sampled += FLOAT * work.lm_config.get_text_config().hidden_size
    return float(batch.rows * (prompt * batch.prompt + sampled * batch.new))


def sampling_parts(live: LiveMemory, passes: Passes, capacity: int) -> dict[str, float]:
    """A rollout at its peak: after the prompts, or with the cache and the buffers of its last step."""
    work, batch = passes.work, passes.work.batch
    with passes.sampling(batch) as sampling:
        # The cache grows out of the prompts' activations, so it is labelled once they are read.
        sampling.prefill()
        cache = sampling.steps.cache.layers
        prompts = live.peak
        held = label_cache(live, cache)
        prompts.update({"activations": prompts["activations"] - held, "KV cache": held})
        live.reset()
        # The cache of the last step, without the steps before it.
        if batch.new > 2 and not passes.static:
            for layer in cache:
                lengthen(layer, batch, capacity)
            sampling.steps.end += batch.new - 2
        label_cache(live, cache)
        sampling.step()
    parts = max(prompts, live.peak, key=lambda parts: sum(parts.values()))
    del sampling, cache
    gc.collect()
    live.reset()
    if work.device == "cuda" and work.half and passes.static:
        parts["bfloat16 copies"] += projection_copy(passes)
    if work.sharded:
        whole = work.config.sharding.sampling == "gathered"
        parts["gathered weights"] = nbytes(passes.policy.lm.parameters()) if whole else gathered_bytes(passes.policy)
    return parts


def label_cache(live: LiveMemory, cache: Iterable[Any]) -> float:
    """Count keys and values as the KV cache; returns their bytes."""
    held = [x for layer in cache for x in getattr(layer, "buffers", (layer.keys, layer.values))]
    tensors = [x for x in held if isinstance(x, Tensor)]
    for x in tensors:
        live.label(x, "KV cache")
    return sum({x.untyped_storage()._cdata: float(x.untyped_storage().nbytes()) for x in tensors}.values())


def final_capacity(batch: Batch) -> int:
    """Tokens per row for which a growing KV cache has memory at the end of a rollout."""
    tiny = SpareCapacityLayer()
    for length in (batch.prompt, *[1] * (batch.new - 1)):
        tiny.update(torch.empty(1, 1, length, 1), torch.empty(1, 1, length, 1))
    (capacity,) = {x.shape[-2] for x in tiny.buffers if x is not None}
    return capacity


def lengthen(layer: Any, batch: Batch, capacity: int) -> None:
    """Bring a growing cache layer to the length of a rollout's last step, and to its capacity then."""
    if not isinstance(layer, SpareCapacityLayer | DynamicSlidingWindowLayer):
        return
    keys, values, seen = layer.keys, layer.values, batch.prompt + batch.new - 2
    assert keys is not None
    assert values is not None
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.update(*(x.new_empty(*x.shape[:-2], batch.new - 2, x.shape[-1]) for x in (keys, values)))
        return
    buffers = [x.new_empty(*x.shape[:-2], capacity, x.shape[-1]) for x in (keys, values)]
    layer.buffers = [*buffers]
    layer.keys, layer.values = (torch.narrow(x, -2, 0, seen) for x in buffers)


def scoring_parts(live: LiveMemory, passes: Passes) -> dict[str, float]:
    """A full pass without gradients over the largest micro-batch, at its peak."""
    work = passes.work
    inputs = passes.inputs(work.micro_rows(work.batch.rows, work.batch), work.batch)
    passes.score(passes.policy, inputs)
    if passes.policy.critic is not None:
        passes.value(inputs)
    return finished(live, passes)


def update_parts(live: LiveMemory, passes: Passes, shares: Shares) -> dict[str, float]:
    """The pass over a minibatch's last and largest micro-batch, at its peak; gradients of earlier ones are there."""
    work, trained = passes.work, trainable(passes.policy)
    rows = work.micro_rows(work.minibatch_rows, work.batch)
    for p in trained:
        p.register_post_accumulate_grad_hook(lambda p: live.label(p.grad, "gradients"))
        if rows < work.minibatch_rows:
            p.grad = torch.zeros_like(p)
            live.label(p.grad, "gradients")
    inputs = passes.inputs(rows, work.batch)
    if work.config.critic.members > 1:
        inputs["member"] = torch.zeros(rows, dtype=torch.long)
    passes.train(inputs)
    retained = live.retained
    parts = finished(live, passes)
    parts["gradients"] *= shares.bytes(trained) / nbytes(trained)
    if work.device == "cpu" and not work.sharded and retained >= 1:
        parts["freed, not returned"] = retained
    return parts


def finished(live: LiveMemory, passes: Passes) -> dict[str, float]:
    """The parts of full passes at their peak."""
    parts, work = live.peak, passes.work
    live.reset()
    if work.device == "cuda" and work.half:
        parts["bfloat16 copies"] += projection_copy(passes)
    if work.sharded:
        parts["gathered weights"] = gathered_bytes(passes.policy)
    return parts


def projection_copy(passes: Passes) -> float:
    """Bytes of the vocabulary projection's copy in bfloat16, which a GPU multiplies with."""
    return float(passes.policy.lm.get_output_embeddings().weight.nbytes / 2)


def gathered_bytes(policy: ActorCritic) -> float:
    """The largest parts of a sharded model that are whole at once: its embeddings, with norm and projection, and two
    layers, since the next one is gathered while one computes."""
    layers = [nbytes(layer.parameters()) for layer in layers_of(trunk_of(policy.lm))]
    return nbytes(policy.lm.parameters()) - sum(layers) + sum(sorted(layers)[-2:])


def saving_parts(work: Work, state: Mapping[Tensor, list[Tensor]], small: float) -> dict[str, float]:
    """One of a checkpoint's files, which PyTorch's writer makes in RAM before it writes it, and the `small` tensors
    whose memory the C library kept of the update."""
    tensors = {f"{i}/{j}": x for i, (p, moments) in enumerate(state.items()) for j, x in enumerate((p, *moments))}
    files: dict[int, float] = {}
    for name, number in file_numbers(tensors).items():
        files[number] = files.get(number, 0.0) + tensors[name].nbytes
    parts = {"a file of the checkpoint": SERIALIZED * max(files.values()) / work.options.processes}
    return parts if work.sharded else parts | {"freed, not returned": small}
