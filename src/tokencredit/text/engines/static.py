"""Decoding with a KV cache of fixed size: each step uses the same memory, so a GPU can replay it as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache
from transformers.cache_utils import DynamicLayer

from tokencredit.text.engines.sampling import CachedSteps
from tokencredit.text.models.actor_critic import ActorCritic, trunk_hidden, trunk_inputs
from tokencredit.text.models.parts import trunk_of
from tokencredit.text.models.precision import products, rounded

ATTENTION = "tokencredit_decoding"
"""Name of `decoding_attention` among Transformers' attention functions."""
STRETCHES = 8
"""Parts in which a cache comes into view: attention reads at most an eighth of it before anything is written there."""
ALIGNMENT = 64
"""Columns of a cache and of its parts are multiples of it; attention kernels copy a mask that is not aligned."""


class StaticDecoding:
    """A policy's second model for decoding: the same weights, those of its products in bfloat16 under autocast.

    Autocast rounds these weights at each product anyway: rounded once per rollout, each step reads 2 bytes per weight
    instead of writing them too, and the results are the same.
    """

    def __init__(self, policy: ActorCritic, *, compiled: bool = False):
        """Copy the modules and share the tensors; `compiled` runs the trunk through `torch.compile`."""
        shared: dict[int, Any] = {id(x): x for x in chain(policy.lm.parameters(), policy.lm.buffers())}
        lm = deepcopy(policy.lm, shared)
        lm.set_attn_implementation(ATTENTION)
        self.policy, self.model = policy, ActorCritic(lm, policy.critic)
        self.run = torch.compile(one_token, dynamic=True) if compiled else one_token

    @contextmanager
    def weights(self) -> Iterator[ActorCritic]:
        """A context in which the model has the policy's weights as they are now."""
        dtype = autocast_dtype(self.policy.lm.device)
        pairs = list(zip(self.policy.lm.modules(), self.model.lm.modules(), strict=True))
        for own, copy in pairs:
            copy._buffers.update(own._buffers)
            copy._parameters.update(own._parameters)
        try:
            if dtype is not None:
                self._round(dtype)
            yield self.model
        finally:
            for own, copy in pairs:
                copy._parameters.update(own._parameters)

    def _round(self, dtype: torch.dtype) -> None:
        """Round what autocast would round at each step.

        Of the projection to the vocabulary that is the weight, on a GPU; see `core.projection.multiply`.
        """
        head = self.model.lm.get_output_embeddings()
        for module in products(self.model.lm):
            if module is not head:
                module._parameters.update(rounded(module, dtype))
            elif head.weight.is_cuda:
                head._parameters["weight"] = rounded(head, dtype)["weight"]

    def steps(self, model: ActorCritic, prompt_mask: Tensor, limit: int) -> StaticSteps:
        """`Steps` after prompts with this mask, `[batch, prompt]`, and at most `limit` tokens after them."""
        return StaticSteps(self.policy, model, self.run, prompt_mask, limit)


class StaticSteps:
    """`Steps` with a KV cache of fixed size, the prompts read by the policy itself."""

    def __init__(
        self,
        policy: ActorCritic,
        model: ActorCritic,
        run: Callable[[nn.Module, Tensor, dict[str, Any]], Tensor],
        prompt_mask: Tensor,
        limit: int,
    ):
        """Begin before prompts.

        Args:
            policy: reads the prompts.
            model: reads one token at a time, with `decoding_attention`.
            run: computes its states, as `one_token` does.
            prompt_mask: `[batch, prompt]`.
            limit: tokens after them at most.
        """
        self.policy, self.trunk, self.run = policy, trunk_of(model.lm), run
        self.prompt_mask, self.limit, self.end = prompt_mask, limit, prompt_mask.shape[1]
        device, columns = prompt_mask.device, aligned(self.end + limit)
        self.stretch = aligned(columns // STRETCHES)
        self.columns = torch.arange(columns, device=device)
        self.at = torch.tensor([self.end - 1], device=device)
        self.readable = nn.functional.pad(prompt_mask, (0, columns - self.end), value=True)
        self.position_ids = prompt_mask.sum(1, keepdim=True) - 1
        dtype = autocast_dtype(device) or torch.float32
        self.shown, self.hidden = (torch.tensor(x, dtype=dtype, device=device) for x in (0.0, -torch.inf))
        self.layers: list[StaticLayer] = []
        self.visible, self.warm = 0, False
        self.graph: torch.cuda.CUDAGraph | None = None

    def prompts(self, prompt_ids: Tensor, per_prompt: int) -> Tensor:
        """Read the prompts, each once for `per_prompt` consecutive rows; returns the states after them."""
        each = self.prompt_mask[::per_prompt]
        prefill = CachedSteps(self.policy, each, 0)
        with self._autocast():
            hidden = prefill.prompts(prompt_ids[::per_prompt], per_prompt=1)
        columns, dtype = len(self.columns), autocast_dtype(hidden.device)
        self.layers = [StaticLayer(layer, columns, per_prompt, self.at, dtype) for layer in prefill.cache.layers]
        self.cache = Cache(layers=list(self.layers))
        return hidden.repeat_interleave(per_prompt, dim=0)

    def next(self, tokens: Tensor) -> Tensor:
        """Read a token `[slots, 1]` of each slot; returns the states after them, `[slots, width]`."""
        self.at.add_(1)
        self.position_ids.add_(1)
        mask = (self.columns[: self.visible] <= self.at) & self.readable[:, : self.visible]
        # As numbers to add, in the dtype of attention: of flags each layer would make them anew.
        mask = torch.where(mask, self.shown, self.hidden)[:, None, None]
        inputs = trunk_inputs(self.trunk, mask, self.position_ids, self.cache)
        return self.run(self.trunk, tokens, inputs)

    def repeat(self, step: Callable[[], None], count: int) -> None:
        """Take a step so many times; on a GPU as replays of a graph."""
        while count:
            if self.end >= self.visible:
                self._show(aligned(self.end + self.stretch))
            now = min(count, self.visible - self.end)
            for _ in range(now):
                self._take(step)
            self.end += now
            count -= now

    def keep(self, going: list[bool]) -> Tensor | None:
        """Drop slots once half of them have ended: other shapes need another graph."""
        if 2 * sum(going) > len(going):
            return None
        slots = torch.tensor(going).nonzero().squeeze(-1).to(self.at.device)
        self.readable, self.position_ids = self.readable[slots], self.position_ids[slots]
        for layer in self.layers:
            layer.memory = tuple(memory[slots] for memory in layer.memory)
            layer.show(self.visible)  # lets go of the old memory
        self._show(self.visible)
        return slots

    def _show(self, columns: int) -> None:
        """Let attention read so many columns."""
        self.visible = min(columns, len(self.columns))
        for layer in self.layers:
            layer.show(self.visible)
        self.graph, self.warm = None, False

    def _take(self, step: Callable[[], None]) -> None:
        """Take a step: by hand the first time, then as a replay of a graph."""
        if self.graph is None:
            with self._autocast():
                if not self.warm or self.at.device.type != "cuda":
                    step()
                    self.warm = True
                    return
                graph = torch.cuda.CUDAGraph()
                capture = torch.cuda.graph(graph, capture_error_mode="thread_local")
                # A capture that fails leaves its own stream behind, as the current one.
                with torch.cuda.stream(torch.cuda.current_stream()), capture:
                    step()
                self.graph = graph
        self.graph.replay()

    def _autocast(self) -> torch.autocast:
        """Autocast as it is, without its copies of weights: it frees them later, and a graph keeps their addresses."""
        device = self.at.device
        dtype = autocast_dtype(device)
        return torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)


def one_token(trunk: nn.Module, tokens: Tensor, inputs: dict[str, Any]) -> Tensor:
    """Hidden states `[slots, width]` after a token of each slot; `torch.compile` counts its recompilations apart."""
    return trunk_hidden(trunk, tokens, inputs)[0][:, -1]


class StaticLayer(DynamicLayer):
    """A layer's keys and values in memory of fixed size, as far as they are in view."""

    def __init__(self, prefill: Any, columns: int, repeats: int, at: Tensor, dtype: torch.dtype | None):
        """Begin with a prefilled layer, each of its rows so many times.

        Args:
            prefill: Transformers' layer of the prompts.
            columns: of the memory.
            repeats: consecutive slots with the same prompt.
            at: `[1]`, the column that `update` writes.
            dtype: in which attention computes; None for that of the keys.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.at, self.is_initialized = at, True
        memory = []
        for x in (prefill.keys, prefill.values):
            # Zeros, since attention multiplies what it masks by 0, and 0 · NaN is NaN.
            new = x.new_zeros(len(x) * repeats, x.shape[1], columns, x.shape[3], dtype=dtype)
            new[:, :, : x.shape[2]] = x.repeat_interleave(repeats, dim=0)
            memory.append(new)
        self.memory: tuple[Tensor, ...] = tuple(memory)

    def show(self, columns: int) -> None:
        """Let attention read so many columns."""
        self.keys, self.values = (memory[:, :, :columns] for memory in self.memory)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the keys and values of a token, `[slots, heads, 1, width]`; returns all in view."""
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(2, self.at, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self.at, value_states.to(self.values.dtype))
        return self.keys, self.values


def aligned(columns: int) -> int:
    """The next multiple of `ALIGNMENT`, at least one."""
    return max(-(-columns // ALIGNMENT), 1) * ALIGNMENT


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of products under autocast; None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def decoding_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one token per row, `[batch, heads, 1, width]`, for Transformers.

    The query heads that share a key head stand in the place of time, so that no key is copied for each of them.
    """
    batch, heads, _, width = query.shape
    query = query.reshape(batch, key.shape[1], heads // key.shape[1], width)
    output = nn.functional.scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling)
    return output.reshape(batch, 1, heads, value.shape[-1]), None


AttentionInterface.register(ATTENTION, decoding_attention)
