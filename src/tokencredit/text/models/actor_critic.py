"""The actor-critic: a causal language model and its critic, run on whole responses or one token at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from tokencredit.core.logprobs import token_loss, token_stats
from tokencredit.core.masked import extents
from tokencredit.core.vocab_projection import TokenStats, faster_transposed, project
from tokencredit.distributed.sharding import is_sharded, within
from tokencredit.learn.objective import CriticOutputs, PolicyLoss, PolicyOutputs
from tokencredit.text.models.adapters import CRITIC, Adapter
from tokencredit.text.models.architecture import layers_of, output_states, states_after, trunk_of
from tokencredit.text.models.critic import Critic

SHORT = 64
"""Longest sequence for which PyTorch's math attention trains faster than its fused kernel in bfloat16 on a CPU."""
Inputs = dict[str, Tensor]
"""Prompts and their responses, by name:

- `prompt_ids`: `[batch, prompt]`, left-padded;
- `prompt_mask`: `[batch, prompt]`, true at prompt tokens, false at padding;
- `response_ids`: `[batch, time]`, right-padded with any token ids;
- `mask`: `[batch, time]`, true at sampled tokens; tokens run without gaps to the last of them; outputs elsewhere are 0;
- `support`: `[batch, time, k]`, only in updates on a truncated support: token ids of `Rollout.support`;
- `ref_hidden`: `[batch, time, width]`, only for an exact KL: the reference model's `response_hidden`.
"""


class Extent(NamedTuple):
    """Sizes and indices of a pass, read from its inputs once so that the pass itself makes no host sync."""

    length: int
    """Length of the longest response in tokens, up to its last sampled one; at least 1."""
    padding: int
    """Number of prompt columns that are padding in every row."""
    indices: Tensor
    """Indices of sampled tokens in the flattened `[batch, time]`."""

    @classmethod
    def of(cls, inputs: Inputs) -> Extent:
        """The extent of inputs; the one host sync of a pass."""
        mask = inputs["mask"]
        numbers = torch.stack([mask.sum(), extents(mask).max(), (~inputs["prompt_mask"]).all(0).sum()])
        tokens, longest, padding = numbers.tolist()
        return cls(max(longest, 1), padding, torch.nonzero_static(mask.flatten(), size=tokens).squeeze(1))

    def gather(self, x: Tensor) -> Tensor:
        """Entries `[tokens, …]` of `x`, `[batch, time, …]`, at sampled tokens."""
        return x.flatten(0, 1).index_select(0, self.indices)

    def scatter(self, x: Tensor, shape: torch.Size) -> Tensor:
        """`[batch, time]` with the numbers `[tokens]` at sampled tokens and 0 elsewhere."""
        return x.new_zeros(shape.numel()).index_copy(0, self.indices, x).view(shape)


class ActorCritic(nn.Module):
    """A causal language model and, unless `critic` is None, its critic.

    The model runs in two halves: `hidden` runs the trunk, and the vocabulary projection is applied at sampled tokens
    only, so that no `[batch, time, vocabulary]` tensor is ever made. Dropout is off unless `train()` is called, since
    training must start from the probabilities that tokens were sampled with.
    """

    adapter: Adapter | None

    def __init__(
        self,
        lm: PreTrainedModel,
        critic: Critic | None = None,
        *,
        adapter: Adapter | None = None,
        compiled: bool = False,
    ):
        """Combine a language model, whose trained adapter is `adapter`, with a critic on its states or its own trunk.

        With `compiled`, full forward passes use `torch.compile`.
        """
        super().__init__()
        self.lm, self.critic, self.adapter, self.compiled = lm, critic, adapter, compiled
        self.trunk_hidden = torch.compile(trunk_hidden, dynamic=True) if compiled else trunk_hidden
        self.softcap, self.factor = logit_softcap(lm), logit_factor(lm)
        self.eval()

    def hidden(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Any = None) -> Tensor:
        """Last hidden states `[batch, time, width]`, after the final norm; a `cache` is read and extended."""
        trunk = trunk_of(self.lm)
        others = trunk_inputs(trunk, attention_mask, position_ids, cache)
        return within(self.lm, trunk_hidden, trunk, input_ids, others)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits of hidden states, in float32."""
        return within(self.lm, self._logits, hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        hidden = self.scaled(hidden)
        projection, device = self.lm.get_output_embeddings(), hidden.device
        if torch.is_autocast_enabled(device.type):  # rounds the inputs as autocast does, and keeps the sum in float32
            states = hidden.flatten(0, -2)
            logits = states.new_empty(len(states), len(projection.weight), dtype=torch.float32)
            with torch.autocast(device.type, enabled=False):
                project(states, projection.weight, torch.get_autocast_dtype(device.type), logits)
            logits = logits.unflatten(0, hidden.shape[:-1])
            if projection.bias is not None:
                logits += projection.bias
        elif faster_transposed(device, hidden.dtype) and projection.bias is None:
            columns = nn.functional.linear(projection.weight, hidden.flatten(0, -2))
            logits = columns.T.unflatten(0, hidden.shape[:-1])
        else:
            logits = projection(hidden).float()
        capped: Tensor = logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap
        return capped

    def scaled(self, hidden: Tensor) -> Tensor:
        """Hidden states times the logit factor, the input of the vocabulary projection."""
        return hidden if self.factor == 1 else hidden * self.factor

    def forward(
        self,
        inputs: Inputs,
        temperature: float,
        policy_loss: PolicyLoss | None = None,
        entropy: bool = False,
        reference: ActorCritic | None = None,
        values: bool = True,
    ) -> PolicyOutputs:
        """Compute the loss, log-probs, values, entropies and KL of responses.

        Args:
            inputs: prompts and responses.
            temperature: divides the logits, as in sampling.
            policy_loss: loss as a function of log-probs, entropies and KL; None for no training.
            entropy: also compute the entropy at each position.
            reference: also compute the exact KL to this model, from `ref_hidden` in the inputs.
            values: also compute values, if there is a critic.

        Returns:
            The loss; statistics of the tokens, in float32 and nats; the critic's values of the states before each
            token, or None without them. All but the loss are `[batch, time]`. Loss and values carry gradients.
        """
        # One host sync: where the sampled tokens are. Everything after it runs without waiting for the device.
        extent, loss = Extent.of(inputs), policy_loss or NoLoss()
        # The policy: trunk, then vocabulary projection and loss at the sampled tokens only.
        total, stats, states = within(self.lm, self._losses, inputs, extent, temperature, loss, entropy, reference)
        # Back to [batch, time], with 0 where the policy did not act.
        stats = TokenStats(*(None if x is None else extent.scatter(x, inputs["mask"].shape) for x in stats))
        if self.critic is None or not values:
            return PolicyOutputs(total, stats)
        # The critic: its head on the states above, or a pass through a trunk of its own.
        return PolicyOutputs(total, stats, self._outputs(inputs, extent, states if self.critic.shared else None))

    def _losses(
        self,
        inputs: Inputs,
        extent: Extent,
        temperature: float,
        loss: PolicyLoss,
        entropy: bool,
        reference: ActorCritic | None,
    ) -> tuple[Tensor, TokenStats, Tensor]:
        """The policy's loss, its statistics at sampled tokens, and the input states of a shared critic."""
        # One pass through the trunk serves the policy and a shared critic, which may read an inner layer (`tapped`).
        hidden, *tapped = self._read(trunk_of(self.lm), inputs, extent, partial(self.trunk_hidden, tap=self._tap()))

        def at_tokens(hidden: Tensor) -> tuple[Tensor, TokenStats]:
            ref = None
            if reference is not None:  # the exact KL compares whole distributions, so the reference projects here too
                ref_projection = reference.lm.get_output_embeddings()
                ref_hidden = reference.scaled(extent.gather(inputs["ref_hidden"]))
                ref = (ref_hidden, ref_projection.weight, ref_projection.bias)
            projection = self.lm.get_output_embeddings()
            return token_loss(
                self.scaled(extent.gather(hidden)),
                projection.weight,
                extent.gather(inputs["response_ids"]),
                loss,
                bias=projection.bias,
                ref=ref,
                temperature=temperature,
                softcap=self.softcap,
                entropy=entropy,
                additive=loss.additive,
                support=extent.gather(inputs["support"]) if "support" in inputs else None,
            )

        # Chunk by chunk over the vocabulary, with the reference's weights gathered too if it is sharded.
        total, stats = within((reference or self).lm, at_tokens, hidden)
        return total, stats, [hidden, *tapped][-1]

    def critic_outputs(self, inputs: Inputs) -> CriticOutputs:
        """The critic's outputs as in `forward`, with gradients for the critic's own parameters only."""
        assert self.critic is not None
        extent, states = Extent.of(inputs), None
        if self.critic.shared:  # the policy's trunk is only read
            with torch.no_grad():
                states = self.critic_states(self.critic, inputs, extent)
        return self._outputs(inputs, extent, states)

    def _outputs(self, inputs: Inputs, extent: Extent, states: Tensor | None = None) -> CriticOutputs:
        """The critic's outputs at sampled tokens, values 0 elsewhere; `states` are the inputs of a shared critic."""
        assert self.critic is not None
        states = self.critic_states(self.critic, inputs, extent) if states is None else states
        outputs = self.critic.outputs(extent.gather(states))
        return outputs._replace(values=extent.scatter(outputs.values, inputs["mask"].shape))

    def logprobs(self, inputs: Inputs, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs `[batch, time]` of responses, in nats, and their `response_hidden`."""
        return within(self.lm, self._logprobs, inputs, temperature)

    def _logprobs(self, inputs: Inputs, temperature: float) -> tuple[Tensor, Tensor]:
        extent, projection = Extent.of(inputs), self.lm.get_output_embeddings()
        (hidden,) = self._read(trunk_of(self.lm), inputs, extent, self.trunk_hidden)
        logprobs, *_ = token_stats(
            self.scaled(extent.gather(hidden)),
            projection.weight,
            extent.gather(inputs["response_ids"]),
            bias=projection.bias,
            temperature=temperature,
            softcap=self.softcap,
        )
        assert logprobs is not None
        return extent.scatter(logprobs, inputs["mask"].shape), hidden

    def response_hidden(self, inputs: Inputs) -> Tensor:
        """Hidden states `[batch, time, width]` of the states before each response token."""
        return within(self.lm, self._read, trunk_of(self.lm), inputs, Extent.of(inputs), self.trunk_hidden)[0]

    def critic_states(self, critic: Critic, inputs: Inputs, extent: Extent | None = None) -> Tensor:
        """Input states of a critic, `[batch, time, width]`, before each response token."""
        extent = extent or Extent.of(inputs)
        if critic.trunk is not None:  # a pass through its own trunk, or through the policy's up to the layer it reads
            return within(critic.trunk, self._read, critic.trunk, inputs, extent, self.trunk_hidden)[0]
        if critic.adapter is not None:  # a pass through the policy's trunk with the critic's adapter
            with critic.adapter.switched(CRITIC):
                return within(self.lm, self._read, trunk_of(self.lm), inputs, extent, self.trunk_hidden)[0]
        layer, trunk = self._tap(), trunk_of(self.lm)
        run = self.trunk_hidden if layer is None else partial(states_after, layer=layer)
        return within(self.lm, self._read, trunk, inputs, extent, run)[0]

    def _tap(self) -> nn.Module | None:
        """The layer of the policy's trunk that the critic reads; None if it reads the last states or none."""
        tap = None if self.critic is None else self.critic.tap
        return None if tap is None else layers_of(trunk_of(self.lm))[tap - 1]

    def _read(
        self, trunk: nn.Module, inputs: Inputs, extent: Extent, run: Callable[..., tuple[Tensor, ...]]
    ) -> list[Tensor]:
        """States that `run` computes before each response token, 0 past the longest response."""
        # Columns that are padding in every row are skipped. The last response token is no input: nothing follows it.
        length, padding, response_ids = extent.length, extent.padding, inputs["response_ids"]
        prompt_ids, prompt_mask = inputs["prompt_ids"][:, padding:], inputs["prompt_mask"][:, padding:]
        input_ids = torch.cat([prompt_ids, response_ids[:, : length - 1]], dim=1)
        others = trunk_inputs(trunk, *positions(prompt_mask, length - 1))
        with nullcontext() if self.compiled else attention_for(trunk, input_ids):
            # The state before the first response token is that of the last prompt token.
            states = [x[:, prompt_ids.shape[1] - 1 :] for x in run(trunk, input_ids, others)]
        return [nn.functional.pad(x, (0, 0, 0, response_ids.shape[1] - length)) for x in states]


def attention_for(trunk: nn.Module, input_ids: Tensor) -> AbstractContextManager[None]:
    """A context in which attention takes the kernel that trains fastest; also used without gradients, for equality."""
    short = input_ids.shape[1] <= SHORT and input_ids.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    # Checkpointed layers are recomputed in the backward pass, outside this context, with the default kernel.
    if not short or any(getattr(module, "gradient_checkpointing", False) for module in trunk.modules()):
        return nullcontext()
    return sdpa_kernel(SDPBackend.MATH)


def idle_row(device: torch.device) -> Inputs:
    """Inputs of one row without acted tokens, for a pass that other processes need."""
    ids = torch.zeros(1, 1, dtype=torch.long, device=device)
    return {"prompt_ids": ids, "prompt_mask": ids == 0, "response_ids": ids, "mask": ids != 0}


class NoLoss:
    """Zero loss, for passes without training."""

    additive = True

    def __call__(self, now: TokenStats, at: slice) -> Tensor:  # noqa: ARG002  (the PolicyLoss protocol)
        """Return 0, with a gradient of 0."""
        assert now.logprobs is not None
        return 0 * now.logprobs.sum()


def positions(prompt_mask: Tensor, response_length: int) -> tuple[Tensor, Tensor]:
    """Attention mask and position ids of left-padded prompts followed by `response_length` tokens.

    Right padding is not masked: causal attention hides it from earlier tokens, and attention is fastest with a mask
    that is true everywhere.
    """
    mask = torch.cat([prompt_mask, prompt_mask.new_ones(len(prompt_mask), response_length)], dim=1)
    return mask, (mask.long().cumsum(1) - 1).clamp(min=0)


def trunk_hidden(
    trunk: nn.Module, input_ids: Tensor, inputs: dict[str, Any], tap: nn.Module | None = None
) -> tuple[Tensor, ...]:
    """Last hidden states `[batch, time, width]` of a trunk, after its final norm, and those after the layer `tap`."""
    states: list[Tensor] = []
    hook = None if tap is None else tap.register_forward_hook(lambda *call: states.append(output_states(call[2])))
    run = trunk.forward if is_sharded(trunk) else trunk  # a sharded trunk runs in `within`, between the same hooks
    try:
        hidden: Tensor = run(input_ids=input_ids, **inputs).last_hidden_state
    finally:
        if hook is not None:
            hook.remove()
    return hidden, *states


def trunk_inputs(trunk: nn.Module, attention_mask: Tensor, position_ids: Tensor, cache: Any = None) -> dict[str, Any]:
    """Keyword arguments of a trunk's forward pass other than the token ids, limited to those in its signature."""
    arguments = arguments_of(type(trunk).forward)
    if cache is not None and not any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        # A recurrent state holds the past, so the mask covers new tokens only.
        attention_mask = attention_mask[:, -position_ids.shape[1] :]
    inputs: dict[str, Any] = {"attention_mask": attention_mask, "position_ids": position_ids}
    inputs["use_cache"] = cache is not None
    inputs = {name: x for name, x in inputs.items() if name in arguments or "kwargs" in arguments}
    if cache is not None:
        name = cache_argument(trunk)
        assert name is not None, "checked at the start of a run"
        inputs[name] = cache
    return inputs


@lru_cache
def arguments_of(function: Callable[..., Any]) -> frozenset[str]:
    """Names of a function's arguments."""
    return frozenset(signature(function).parameters)


def cache_argument(trunk: nn.Module) -> str | None:
    """Name of a trunk's argument for the KV cache or recurrent state; None if it has none of the known ones.

    It is `cache` from Transformers 5.24 on.
    """
    arguments = arguments_of(type(trunk).forward)
    return next((name for name in ("cache", "past_key_values", "cache_params") if name in arguments), None)


def logit_factor(lm: PreTrainedModel) -> float:
    """Factor by which a model multiplies its vocabulary projection."""
    config = lm.config.get_text_config()
    # The same key divides in Granite and multiplies in HyperCLOVA X; `check_policy` finds any other use.
    powers = {"logit_scale": 1, "lm_head_multiplier": 1}
    powers["logits_scaling"] = 1 if config.model_type == "hyperclovax" else -1
    return math.prod(float(getattr(config, name, None) or 1.0) ** power for name, power in powers.items())


def logit_softcap(lm: PreTrainedModel) -> float | None:
    """Soft cap c of a model's logits, c · tanh(z / c); None without one."""
    config = lm.config.get_text_config()
    caps = [getattr(config, name, None) for name in ("final_logit_softcapping", "logits_soft_cap")]
    return next((cap for cap in caps if cap is not None), None)
