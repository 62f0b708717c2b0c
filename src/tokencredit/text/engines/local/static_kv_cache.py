"""Decoding with a static KV cache: every step uses the same memory, so a GPU can replay it as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from tokencredit.distributed.processes import connection_lost
from tokencredit.learn.rng import preserved
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.text.data.prompts import PromptBatch
from tokencredit.text.engines.local.sampling import sample
from tokencredit.text.models.actor_critic import ActorCritic, cache_argument, trunk_hidden, trunk_inputs
from tokencredit.text.models.architecture import trunk_of
from tokencredit.text.models.kv_cache import CachedSteps
from tokencredit.text.models.model_checks import close, error_line, example_inputs, rounding
from tokencredit.text.models.precision import Precision, matrix_layers, rounded

ATTENTION = "tokencredit_decoding"
"""Name under which `decoding_attention` is registered with Transformers."""
SEGMENTS = 8
"""Segments by which the visible part of a cache grows, so that attention reads at most an eighth of it in vain."""
HALF_TOLERANCE = 0.25
"""Largest mean rounding difference of log-probs in bfloat16, in nats."""
ALIGNMENT = 64
"""Divisor of the columns of a cache and its segments; attention kernels copy an unaligned mask."""


class StaticDecoding:
    """A second model around a policy's weights, for decoding; under autocast its matrix weights are bfloat16 copies.

    Autocast would round these weights at every step. Rounding them once per rollout gives the same results, and a step
    only reads 2 bytes per weight.
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
        """A context in which the model has the policy's current weights."""
        dtype = autocast_dtype(self.policy.lm.device)
        pairs = list(zip(self.policy.lm.modules(), self.model.lm.modules(), strict=True))
        for module, copy in pairs:
            copy._buffers.update(module._buffers)
            copy._parameters.update(module._parameters)
        try:
            if dtype is not None:
                self._round(dtype)
            yield self.model
        finally:
            for module, copy in pairs:
                copy._parameters.update(module._parameters)

    def _round(self, dtype: torch.dtype) -> None:
        """Round the weights that autocast would round at each step."""
        # Of the vocabulary projection that is the weight alone, on a GPU; see `core.vocab_projection.project`.
        head = self.model.lm.get_output_embeddings()
        for module in matrix_layers(self.model.lm):
            if module is not head:
                module._parameters.update(rounded(module, dtype))
            elif head.weight.is_cuda:
                head._parameters["weight"] = rounded(head, dtype)["weight"]

    def steps(self, model: ActorCritic, prompt_mask: Tensor, limit: int) -> StaticSteps:
        """The steps for prompts with this mask, `[batch, prompt]`, and at most `limit` new tokens."""
        return StaticSteps(self.policy, model, self.run, prompt_mask, limit)


def static_decoding(policy: ActorCritic, precision: Precision, *, compiled: bool) -> StaticDecoding | str:
    """Decoding with a static KV cache, or the reason why a policy does not support it.

    As a check, a few tokens are sampled in float32 and in the run's dtype, on a GPU by CUDA graph. Their log-probs must
    match a full forward pass.
    """
    if (obstacle := static_obstacle(policy)) is not None:
        return obstacle
    kind = type(policy.lm).__name__
    try:
        with preserved():
            decoding = StaticDecoding(policy, compiled=compiled)
            for checked in (replace(precision, dtype="float32"), precision):
                with checked.no_grad():
                    static, expected = _sampled(policy, decoding)
                error = (static - expected).abs()
                half = checked.bfloat16 and error.mean() < HALF_TOLERANCE
                if not (half or close(static, expected, rounding(expected))):
                    other = f"{kind} then gives other log-probabilities in {checked.dtype}"
                    return f"{other}, by up to {error.max():.2g} nats"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # model code may raise anything, above all with trust_remote_code
        if connection_lost(error):
            raise
        return f"a step of {kind} ends in {error_line(error)}"
    return decoding


def static_obstacle(policy: ActorCritic) -> str | None:
    """The part of a policy's architecture that rules out a static KV cache; None if there is none."""
    lm, kind = policy.lm, type(policy.lm).__name__
    layers = DynamicCache(config=lm.config).layers
    if cache_argument(trunk_of(lm)) is None or any(type(layer) is not DynamicLayer for layer in layers):
        return f"not every layer of {kind} keeps the keys and values of all tokens"
    if lm.config._attn_implementation != "sdpa":
        return f"{kind} computes attention by {lm.config._attn_implementation!r}, not by 'sdpa'"
    if policy.adapter is not None and not policy.adapter.adds:
        return f"the adapter of {kind} is not plain LoRA, and may need its base weights unrounded"
    return None


def _sampled(policy: ActorCritic, decoding: StaticDecoding) -> tuple[Tensor, Tensor]:
    """Log-probs `[4, 6]` of tokens sampled after the example prompts, and the same by a full forward pass."""
    inputs = example_inputs(policy.lm.config.get_text_config().vocab_size, policy.lm.device)
    prompts = PromptBatch([], [], inputs["prompt_ids"], inputs["prompt_mask"], {})
    uniforms = torch.linspace(0.02, 0.98, 24, device=policy.lm.device).view(4, 6)
    settings = SamplingConfig(max_new_tokens=6, stop_at_eos=False)
    tokenizer: Any = None  # only stop strings need it
    with decoding.weights() as model:
        rollout = sample(model, prompts, uniforms, settings, tokenizer, [0], 2, steps=decoding.steps, every=6)
    return rollout.logprobs, policy.logprobs(rollout.inputs(), 1.0)[0]


class StaticSteps(CachedSteps):
    """Steps with a static KV cache; the policy itself prefills it."""

    def __init__(
        self,
        policy: ActorCritic,
        model: ActorCritic,
        run: Callable[[nn.Module, Tensor, dict[str, Any]], Tensor],
        prompt_mask: Tensor,
        limit: int,
    ):
        """Prepare for a batch of prompts with this mask, which `policy` prefills.

        `model` decodes with `decoding_attention`, by `run`: `one_token`, or a compiled version of it.
        """
        self.policy, self.trunk, self.run = policy, trunk_of(model.lm), run
        self.prompt_mask, self.end = prompt_mask, prompt_mask.shape[1]
        device, columns = prompt_mask.device, aligned(self.end + limit)
        self.segment = aligned(columns // SEGMENTS)
        self.columns = torch.arange(columns, device=device)
        self.at = torch.tensor([self.end - 1], device=device)
        self.readable = nn.functional.pad(prompt_mask, (0, columns - self.end), value=True)
        self.position_ids = prompt_mask.sum(1, keepdim=True) - 1
        dtype = autocast_dtype(device) or torch.float32
        self.zero, self.minus_inf = (torch.tensor(x, dtype=dtype, device=device) for x in (0.0, -torch.inf))
        self.layers: list[StaticLayer] = []
        self.visible, self.warm = 0, False
        self.graph: torch.cuda.CUDAGraph | None = None

    def prompts(self, prompt_ids: Tensor, per_prompt: int) -> Tensor:
        """Prefill, each prompt once per `per_prompt` consecutive rows; returns the last states `[slots, width]`."""
        prefill = CachedSteps(self.policy, self.prompt_mask[::per_prompt], 0)
        with self._autocast():
            hidden = prefill.prompts(prompt_ids[::per_prompt], per_prompt=1)
        columns, dtype = len(self.columns), autocast_dtype(hidden.device)
        self.layers = [StaticLayer(layer, columns, per_prompt, self.at, dtype) for layer in prefill.cache.layers]
        self.cache = Cache(layers=list(self.layers))
        return hidden.repeat_interleave(per_prompt, dim=0)

    def next(self, tokens: Tensor) -> Tensor:
        """Run one token `[slots, 1]` per slot; returns the states after them, `[slots, width]`."""
        self.at.add_(1)
        self.position_ids.add_(1)
        mask = (self.columns[: self.visible] <= self.at) & self.readable[:, : self.visible]
        # An additive mask in the dtype of attention; each layer would convert a boolean one again.
        mask = torch.where(mask, self.zero, self.minus_inf)[:, None, None]
        inputs = trunk_inputs(self.trunk, mask, self.position_ids, self.cache)
        return self.run(self.trunk, tokens, inputs)

    def repeat(self, step: Callable[[], None], count: int) -> None:
        """Run `step` `count` times, on a GPU by replaying a CUDA graph."""
        while count:
            if self.end >= self.visible:
                self._show(aligned(self.end + self.segment))
            steps = min(count, self.visible - self.end)
            for _ in range(steps):
                self._run_step(step)
            self.end += steps
            count -= steps

    def keep(self, active: list[bool]) -> Tensor | None:
        """Drop finished slots once half of all have finished; new shapes need a new graph."""
        if 2 * sum(active) > len(active):
            return None
        slots = torch.tensor(active).nonzero().squeeze(-1).to(self.at.device)
        self.readable, self.position_ids = self.readable[slots], self.position_ids[slots]
        for layer in self.layers:
            layer.buffers = tuple(buffer[slots] for buffer in layer.buffers)
            layer.show(self.visible)  # frees the old buffers
        self._show(self.visible)
        return slots

    def _show(self, columns: int) -> None:
        """Make the first `columns` columns visible to attention."""
        self.visible = min(columns, len(self.columns))
        for layer in self.layers:
            layer.show(self.visible)
        self.graph, self.warm = None, False

    def _run_step(self, step: Callable[[], None]) -> None:
        """Run a step: eagerly the first time, then by capturing and replaying a CUDA graph."""
        if self.graph is None:
            with self._autocast():
                if not self.warm or self.at.device.type != "cuda":
                    step()
                    self.warm = True
                    return
                graph = torch.cuda.CUDAGraph()
                capture = torch.cuda.graph(graph, capture_error_mode="thread_local")
                # A failed capture leaves its own stream current; the outer context restores it.
                with torch.cuda.stream(torch.cuda.current_stream()), capture:
                    step()
                self.graph = graph
        self.graph.replay()

    def _autocast(self) -> torch.autocast:
        """The current autocast without its weight cache: it is freed, while a graph would keep its addresses."""
        device = self.at.device
        dtype = autocast_dtype(device)
        return torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)


def one_token(trunk: nn.Module, tokens: Tensor, inputs: dict[str, Any]) -> Tensor:
    """Hidden states `[slots, width]` after one token per slot.

    A function of its own, because `torch.compile` limits recompilations per function.
    """
    return trunk_hidden(trunk, tokens, inputs)[0][:, -1]


class StaticLayer(DynamicLayer):
    """A cache layer whose keys and values are views of the visible columns of fixed-size buffers."""

    def __init__(self, prefill: Any, columns: int, repeats: int, at: Tensor, dtype: torch.dtype | None):
        """Copy a prefilled layer, each row `repeats` times, into a capacity of `columns` tokens.

        `at` `[1]` is the column that `update` writes; `dtype` is attention's, None for that of the keys.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.at, self.is_initialized = at, True
        buffers = []
        for x in (prefill.keys, prefill.values):
            # Zeros, not empty: attention multiplies masked values by 0, and 0 · NaN is NaN.
            buffer = x.new_zeros(len(x) * repeats, x.shape[1], columns, x.shape[3], dtype=dtype)
            buffer[:, :, : x.shape[2]] = x.repeat_interleave(repeats, dim=0)
            buffers.append(buffer)
        self.buffers: tuple[Tensor, ...] = tuple(buffers)

    def show(self, columns: int) -> None:
        """Make the first `columns` columns visible to attention."""
        self.keys, self.values = (buffer[:, :, :columns] for buffer in self.buffers)

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the keys and values of one token, `[slots, heads, 1, width]`; returns all visible ones."""
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(2, self.at, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self.at, value_states.to(self.values.dtype))
        return self.keys, self.values


def aligned(columns: int) -> int:
    """Round up to a multiple of `ALIGNMENT`, at least one."""
    return max(-(-columns // ALIGNMENT), 1) * ALIGNMENT


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of matrix products under autocast; None if autocast is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def decoding_attention(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """Attention of one token per row, `[batch, heads, 1, width]`, with Transformers' signature.

    Query heads that share a key head are laid out along the time axis, so that no key is copied for each of them.
    """
    batch, heads, _, width = query.shape
    query = query.reshape(batch, key.shape[1], heads // key.shape[1], width)
    output = nn.functional.scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling)
    return output.reshape(batch, 1, heads, value.shape[-1]), None


AttentionInterface.register(ATTENTION, decoding_attention)
