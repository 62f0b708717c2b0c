"""Memory of a run's parts in bytes, measured on fake tensors: the model's own code runs, without weights or numbers.

Sizes are per process. The passes of an iteration run in PyTorch's `FakeTensorMode`, and `LiveMemory` sums the storages
that live at each moment. Fake tensors are on the CPU; for a GPU, the settings in which its passes differ are replaced.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import masking_utils

from tokencredit.core import logprobs
from tokencredit.learn.state import trainable
from tokencredit.runs.tensor_files import file_numbers
from tokencredit.text.data.prefixes import work as weights
from tokencredit.text.models import actor_critic
from tokencredit.text.models.actor_critic import Extent, Inputs
from tokencredit.text.models.architecture import layers_of, trunk_of
from tokencredit.text.models.kv_cache import SpareCapacityLayer
from tokencredit.text.models.precision import weights_in
from tokencredit.tools.plan.passes import RewardSkeleton, SkeletonPasses, prefix_passes, reward_skeletons
from tokencredit.tools.plan.work import Work

SERIALIZED = 2
"""Copies of a checkpoint's file in RAM while it is written: 472 MB were measured for a file of 240 MB."""
EXPERIENCE = 48
"""Bytes that an update reads per token, about: ids, mask, log-probs, values, KL, reward, advantage, return."""
LARGE = 2**25
"""Bytes from which the C library (glibc) takes a tensor's memory from the kernel, and returns it when it is freed. It
keeps the memory of smaller ones for tensors to come, so their highest sum stays resident."""
HEAP = 1.1
"""Memory that the C library takes per byte of tensors; at 1, planned peaks were 0.88 to 1.02 times measured ones."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run's models, and the memory of one process."""

    parts: dict[str, dict[str, float]]
    """Bytes by moment and part: `kept` throughout, and the additional ones of each moment."""
    parameters: int
    """Of the language model, without its adapter."""
    trained: int
    """Trained parameters, the critic's included."""
    saved: float
    """Bytes of the saved policy and critic: an adapter without the model below it."""
    checkpoint: float
    """Bytes of a checkpoint: trained weights and moments."""
    prefixes: float | None = None
    """Work of reward models that score prefixes, in forward passes of the policy; None if they score none."""


def measure(work: Work) -> Sizes:
    """Measure a run's parts; errors as `build_skeletons`."""
    with fake_device(work):
        passes = SkeletonPasses(work, torch.device("cpu"))
        policy, reference, state = passes.policy, passes.reference, optimizer_state(passes)
        readers = reward_skeletons(work)
        of_rewards = [p for reader in readers for p in reader.model.parameters()]
        lm, critic = list(policy.lm.parameters()), [] if policy.critic is None else list(policy.critic.parameters())
        own = [] if reference is None else list(reference.parameters())
        adapted = any(not p.requires_grad for p in lm)
        heads = [] if policy.critic is None else list(policy.critic.head.parameters())
        # Value heads and adapters are whole in each process.
        whole = {id(p) for p in (*heads, *(trainable(policy.lm) if adapted else ()))}

        def share(tensors: Iterable[Tensor], of: Tensor | None = None) -> float:
            """Bytes of tensors in a process; they are sharded like `of`, or like themselves."""
            parts = work.processes if work.sharded else 1
            return sum(x.nbytes / (1 if id(x if of is None else of) in whole else parts) for x in tensors)

        kept = {
            "weights": share(lm),
            "critic": share(critic),
            "moments": sum(share(moments, of=p) for p, moments in state.items()),
            "reference": share(own),
            "reward models": nbytes(of_rewards),
            "DDP buckets": 0.0 if work.sharded or work.processes == 1 else nbytes(state),
            "experience": float(work.batch.rows * work.batch.length * (EXPERIENCE + 4 * work.reference_width)),
        }
        with LiveMemory(work, [*lm, *critic, *own, *of_rewards, *policy.buffers()]) as live:
            rollout, scoring = sampling_parts(live, passes), scoring_parts(live, passes)
            update = update_parts(live, passes, elsewhere=nbytes(state) - share(state))
            reward = reward_parts(live, readers)
        parts = {"kept": kept, "rollout": rollout, "scoring": scoring, **reward, "update": update}
        if work.device == "cpu":
            # PyTorch's writer makes a file in RAM before it writes it. The C library keeps the update's small tensors.
            parts["save"] = {"a file of the checkpoint": SERIALIZED * largest_file(state) / work.processes}
            parts["save"] |= {} if work.sharded else {"freed, not returned": HEAP * live.small}
        return Sizes(
            parts,
            parameters=weights_in(p for name, p in policy.lm.named_parameters() if "lora_" not in name),
            trained=sum(p.numel() for p in state),
            saved=nbytes([*(trainable(policy.lm) if adapted else lm), *critic]),
            checkpoint=nbytes(state) + sum(nbytes(moments) for moments in state.values()),
            prefixes=prefix_passes(work, readers, weights(policy.lm)),
        )


@contextmanager
def fake_device(work: Work) -> Iterator[None]:
    """A context of fake tensors, in which passes take the kernels of the run's device."""
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        # The growing KV cache compares addresses, which are all alike here, as they are in a run that drops no rows.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        stack.enter_context(patch.object(Extent, "of", whole_extent))
        # Transformers would keep every mask of a fake tensor, as of one that is traced.
        stack.enter_context(patch.object(masking_utils, "is_tracing", lambda *_: False))
        # Everything is where it belongs, and fake parameters cannot be replaced, as moving them would.
        stack.enter_context(patch.object(torch.nn.Module, "to", lambda module, *_, **__: module))
        if work.device == "cuda":
            stack.enter_context(patch.object(logprobs, "CHUNK_LOGITS", logprobs.CHUNK_LOGITS_ON_ACCELERATORS))
            stack.enter_context(patch.object(actor_critic, "SHORT", 0))
            if not work.half:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


def whole_extent(inputs: Inputs) -> Extent:
    """The extent of rows without padding, which has no numbers to read."""
    rows, time = inputs["mask"].shape
    return Extent(time, 0, torch.arange(rows * time))


def nbytes(tensors: Iterable[Tensor]) -> float:
    """Bytes of tensors."""
    return float(sum(x.nbytes for x in tensors))


def optimizer_state(passes: SkeletonPasses) -> dict[Tensor, list[Tensor]]:
    """The optimizer's moments of each trained parameter, after a step."""
    for p in trainable(passes.policy):
        p.grad = torch.zeros_like(p)
    passes.optimizer.step()
    passes.optimizer.zero_grad()
    return {p: [x for x in passes.optimizer.state[p].values() if x.dim()] for p in trainable(passes.policy)}


def sampling_parts(live: LiveMemory, passes: SkeletonPasses) -> dict[str, float]:
    """A rollout at its peak: in the prompts' pass, or in the last step."""
    work, batch = passes.work, passes.work.batch
    with passes.sampling(batch) as sampling:
        sampling.prefill()
        prompts, cache = live.resident, sampling.steps.cache.layers
        # The cache of the last step, without the steps before it.
        if not passes.static:
            before = max(batch.new - 2, 0)
            lengthen(cache, before)
            sampling.steps.end += before
        live.reset()
        sampling.step()
        tensors = [x for layer in cache for x in getattr(layer, "buffers", (layer.keys, layer.values))]
        storages = {x.untyped_storage()._cdata: x.untyped_storage() for x in tensors if isinstance(x, Tensor)}
        held, peak = float(sum(x.nbytes() for x in storages.values())), max(prompts, live.resident)
    parts = {"KV cache": held, "activations": peak - held}
    del sampling, cache, tensors, storages
    gc.collect()
    if work.sharded and work.config.sharding.sampling == "gathered":
        return parts | {"gathered weights": nbytes(passes.policy.lm.parameters())}
    return parts | beside_passes(passes, half=passes.static)


def lengthen(layers: Iterable[Any], tokens: int) -> None:
    """Append tokens to growing cache layers, at once up to where a buffer grows, so that it grows as in a run."""
    for layer in layers:
        left, spare = tokens, isinstance(layer, SpareCapacityLayer)
        if not isinstance(layer.keys, Tensor):
            continue
        if spare and len(layer.buffers[0]) != len(layer.keys):  # prompts were repeated
            layer.buffers = [None, None]
        while left:
            more = left
            if spare:
                buffer = layer.keys if layer.buffers[0] is None else layer.buffers[0]
                more = min(left, buffer.shape[-2] - layer.keys.shape[-2] + 1)
            layer.update(*(x.new_empty(*x.shape[:-2], more, x.shape[-1]) for x in (layer.keys, layer.values)))
            left -= more


def scoring_parts(live: LiveMemory, passes: SkeletonPasses) -> dict[str, float]:
    """A full pass without gradients over the largest micro-batch, at its peak."""
    work = passes.work
    live.reset()
    inputs = passes.inputs(work.micro_rows(work.batch.rows, work.batch), work.batch)
    passes.score(inputs)
    if passes.policy.critic is not None:
        passes.value(inputs)
    return {"activations": live.resident} | beside_passes(passes)


def reward_parts(live: LiveMemory, readers: Sequence[RewardSkeleton]) -> dict[str, dict[str, float]]:
    """A batch of the longest texts, or of their prefixes, in the reward model that takes most; empty without one."""
    sizes = []
    for reader in readers:
        live.reset()
        reader.read(live.work.batch.length + 1)
        sizes.append(live.resident)
    return {"reward": {"activations": max(sizes)}} if sizes else {}


def update_parts(live: LiveMemory, passes: SkeletonPasses, elsewhere: float) -> dict[str, float]:
    """The pass over a minibatch's last and largest micro-batch, at its peak; gradients of earlier ones are there.

    Other processes have so many bytes `elsewhere` of the gradients.
    """
    work = passes.work
    rows = work.micro_rows(work.minibatch_rows, work.batch)
    live.reset()
    for p in trainable(passes.policy) if elsewhere or rows < work.minibatch_rows else ():
        p.grad = torch.zeros_like(p)
    passes.train(passes.inputs(rows, work.batch))
    return {"activations and gradients": live.resident - elsewhere} | beside_passes(passes)


def beside_passes(passes: SkeletonPasses, half: bool = True) -> dict[str, float]:
    """Weights that a full pass holds beside the run's, or a rollout's in bfloat16 if `half`.

    A GPU multiplies with a copy of the vocabulary projection in bfloat16. A sharded model gathers its embeddings, with
    norm and projection, and two layers, since the next one is gathered while one computes.
    """
    work, lm, parts = passes.work, passes.policy.lm, dict[str, float]()
    if half and work.half and work.device == "cuda":
        parts["projection in bfloat16"] = lm.get_output_embeddings().weight.nbytes / 2
    if work.sharded:
        layers = [nbytes(layer.parameters()) for layer in layers_of(trunk_of(lm))]
        parts["gathered weights"] = nbytes(lm.parameters()) - sum(layers) + sum(sorted(layers)[-2:])
    return parts


def largest_file(state: Mapping[Tensor, list[Tensor]]) -> float:
    """Bytes of a checkpoint's largest file."""
    tensors = {f"{i}/{j}": x for i, (p, moments) in enumerate(state.items()) for j, x in enumerate((p, *moments))}
    files = defaultdict[int, float](float)
    for name, number in file_numbers(tensors).items():
        files[number] += tensors[name].nbytes
    return max(files.values())


class LiveMemory(TorchDispatchMode):
    """Sums the storages that operations in this context make, while they live."""

    def __init__(self, work: Work, weights: Iterable[Tensor]):
        """Leave out the storages of weights."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.work, self.weights = work, {x.untyped_storage()._cdata for x in weights}
        self.storages = set[int]()
        self.now = [0.0, 0.0]
        self.reset()

    def reset(self) -> None:
        """Forget the peaks: the highest sum of small tensors, of large ones, and of both."""
        self.small, self.large, self.peak = *self.now, sum(self.now)

    @property
    def resident(self) -> float:
        """Bytes of the peak; on a CPU with whole models, small and large tensors count even if they did not meet."""
        whole_on_cpu = self.work.device == "cpu" and not self.work.sharded
        return HEAP * (self.small + self.large) if whole_on_cpu else self.peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count the storages that it makes."""
        kwargs = kwargs or {}
        result = NotImplemented
        if func in ANSWERS and isinstance(args[0], FakeTensor):
            result = ANSWERS[func](self.work, *args, **kwargs)
        if result is NotImplemented:
            result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.storages and key not in self.weights:
            self.storages.add(key)
            self.now[size >= LARGE] += size
            self.small, self.large = max(self.small, self.now[0]), max(self.large, self.now[1])
            self.peak = max(self.peak, sum(self.now))
            weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.storages.remove(key)
        self.now[size >= LARGE] -= size


def _value(_work: Work, x: Tensor) -> Any:
    """The number in a fake tensor: a mask has padding, a count is 1."""
    return 0 if x.dtype == torch.bool else 1


def _grouped_product(_work: Work, a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Any:
    """The product of a mixture's experts in float32, of which PyTorch knows the shape in bfloat16 alone."""
    if a.dtype == torch.bfloat16 or offs is None:
        return NotImplemented
    groups = (len(offs),) if b.dim() == 2 else ()
    return a.new_empty(*groups, a.shape[-2], b.shape[-1])


ANSWERS: dict[Any, Any] = {
    torch.ops.aten._local_scalar_dense.default: _value,
    torch.ops.aten._grouped_mm.default: _grouped_product,
}
"""Results of operations on fake tensors that depend on numbers, or that PyTorch does not know."""
