"""The actor-critic: a causal language model with its critic, evaluated on whole responses or a token at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tokencredit.core.logprobs import token_logprobs, token_loss
from tokencredit.core.projection import TokenStats, in_columns, multiply
from tokencredit.learn.objective import PolicyLoss, PolicyOutputs
from tokencredit.text.models.critic import Critic

Inputs = dict[str, Tensor]
"""Prompts and their responses, by name:

- `prompt_ids`: `[batch, prompt]`, padded on the left;
- `prompt_mask`: `[batch, prompt]`, true at the prompt's own tokens;
- `response_ids`: `[batch, time]`, padded on the right; the padding may hold anything;
- `mask`: `[batch, time]`, true at sampled tokens, which come first; nothing is computed of the others;
- `ref_hidden`: `[batch, time, width]`, only for an exact KL: the reference model's `response_hidden`.
"""


class ActorCritic(nn.Module):
    """A causal language model, and a critic unless there is none.

    The model is used in two halves, so that no `[batch, time, vocabulary]` tensor is ever needed: `hidden` runs the
    trunk, and the vocabulary projection happens where its result is wanted, at response positions only.
    Dropout is off unless someone calls `train()`: the probabilities that sampled a token must be those that training
    starts from.
    """

    adapter: Any

    def __init__(
        self, lm: PreTrainedModel, critic: Critic | None = None, *, adapter: Any = None, compiled: bool = False
    ):
        """Put the parts together.

        Args:
            lm: a causal language model.
            critic: on the model's last hidden states, or on a trunk of its own.
            adapter: the PEFT model around `lm`, if it has one.
            compiled: run whole texts through `torch.compile`; sampling, a token at a time, stays as it is.
        """
        super().__init__()
        self.lm = lm
        self.critic = critic
        self.trunk_hidden = torch.compile(trunk_hidden, dynamic=True) if compiled else trunk_hidden
        self.softcap = getattr(lm.config.get_text_config(), "final_logit_softcapping", None)
        object.__setattr__(self, "adapter", adapter)  # it holds the same weights, which must not be registered twice
        self.eval()

    def hidden(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Any = None) -> Tensor:
        """Last normalised hidden states `[batch, time, width]`; `cache`, if given, is read and extended."""
        return trunk_hidden(self.lm.get_decoder(), input_ids, attention_mask, position_ids, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits of hidden states, in float32."""
        projection, device = self.lm.get_output_embeddings(), hidden.device
        if torch.is_autocast_enabled(device.type):
            states = hidden.flatten(0, -2)
            logits = states.new_empty(len(states), len(projection.weight), dtype=torch.float32)
            with torch.autocast(device.type, enabled=False):
                multiply(states, projection.weight, torch.get_autocast_dtype(device.type), logits)
            logits = logits.unflatten(0, hidden.shape[:-1])
            if projection.bias is not None:
                logits += projection.bias
        elif in_columns(device, hidden.dtype) and projection.bias is None:
            columns = nn.functional.linear(projection.weight, hidden.flatten(0, -2))
            logits = columns.T.unflatten(0, hidden.shape[:-1])
        else:
            logits = projection(hidden).float()
        capped: Tensor = logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap
        return capped

    def forward(
        self,
        inputs: Inputs,
        temperature: float,
        policy_loss: PolicyLoss | None = None,
        entropy: bool = False,
        reference: ActorCritic | None = None,
    ) -> PolicyOutputs:
        """Evaluate given responses: what training needs of each token.

        Args:
            inputs: the responses.
            temperature: divides the logits, as it did in sampling.
            policy_loss: what to minimise of the tokens' log-probabilities, entropies and KL; None minimises nothing.
            entropy: also compute the entropy of each position's distribution.
            reference: also compute the exact KL to this model, from the `ref_hidden` of the inputs.

        Returns:
            The loss; log-probabilities; values of the states before each token, or None without a critic; entropies
            and exact KL, or None; in nats, each but the loss `[batch, time]` in float32. Loss and values carry
            gradients.
        """
        mask, loss = inputs["mask"], policy_loss or NoLoss()
        hidden = self.response_hidden(inputs)
        ref = None
        if reference is not None:
            ref_projection = reference.lm.get_output_embeddings()
            ref = (inputs["ref_hidden"], ref_projection.weight, ref_projection.bias)
        projection = self.lm.get_output_embeddings()
        total, stats = token_loss(
            hidden,
            projection.weight,
            inputs["response_ids"],
            loss,
            bias=projection.bias,
            ref=ref,
            mask=mask,
            temperature=temperature,
            softcap=self.softcap,
            entropy=entropy,
            additive=loss.additive,
        )
        assert stats.logprobs is not None
        values = None
        if self.critic is not None:
            values = self._values(hidden if self.critic.trunk is None else self.critic_hidden(inputs), mask)
        return PolicyOutputs(total, stats.logprobs, values, stats.entropy, stats.kl)

    def critic_values(self, inputs: Inputs) -> Tensor:
        """Values `[batch, time]` as `forward` gives them, with a gradient for the critic's own parameters alone."""
        assert self.critic is not None
        shared = self.critic.trunk is None
        with torch.set_grad_enabled(not shared):
            states = self.response_hidden(inputs) if shared else self.critic_hidden(inputs)
        return self._values(states, inputs["mask"])

    def _values(self, states: Tensor, mask: Tensor) -> Tensor:
        """The critic's values of acted tokens, 0 elsewhere."""
        assert self.critic is not None
        return states.new_zeros(mask.shape, dtype=torch.float32).masked_scatter(mask, self.critic(states[mask]))

    def logprobs(self, hidden: Tensor, inputs: Inputs, temperature: float) -> Tensor:
        """Log-probabilities `[batch, time]` of responses, nats, from their `response_hidden`."""
        projection = self.lm.get_output_embeddings()
        logprobs, _ = token_logprobs(
            hidden,
            projection.weight,
            inputs["response_ids"],
            bias=projection.bias,
            mask=inputs["mask"],
            temperature=temperature,
            softcap=self.softcap,
        )
        return logprobs

    def response_hidden(self, inputs: Inputs) -> Tensor:
        """Hidden states `[batch, time, width]` of the states before each response token."""
        return self._read(self.lm.get_decoder(), inputs)

    def critic_hidden(self, inputs: Inputs) -> Tensor:
        """The same from the trunk of a separate critic."""
        assert self.critic is not None
        assert self.critic.trunk is not None
        return self._read(self.critic.trunk, inputs)

    def _read(self, trunk: nn.Module, inputs: Inputs) -> Tensor:
        """A trunk's states before each response token, 0 past the longest; columns of mere padding are not read."""
        prompt_ids, prompt_mask, response_ids = (inputs[x] for x in ("prompt_ids", "prompt_mask", "response_ids"))
        length = max(int(inputs["mask"].sum(1).max()), 1)
        padding = int((~prompt_mask).all(0).sum())
        prompt_ids, prompt_mask = prompt_ids[:, padding:], prompt_mask[:, padding:]
        input_ids = torch.cat([prompt_ids, response_ids[:, : length - 1]], dim=1)
        attention_mask, position_ids = positions(prompt_mask, length - 1)
        hidden = self.trunk_hidden(trunk, input_ids, attention_mask, position_ids)[:, prompt_ids.shape[1] - 1 :]
        return nn.functional.pad(hidden, (0, 0, 0, response_ids.shape[1] - length))


class NoLoss:
    """Zero loss, for passes without training."""

    additive = True

    def __call__(self, now: TokenStats, at: slice) -> Tensor:
        """0, with a gradient of 0."""
        assert now.logprobs is not None
        return 0 * now.logprobs.sum()


def positions(prompt_mask: Tensor, response_length: int) -> tuple[Tensor, Tensor]:
    """Attention mask and position ids of left-padded prompts followed by `response_length` tokens.

    The padding on a response's right is not masked: causal attention lets no token before it see it, and a mask that
    is true everywhere lets attention take its fastest path.
    """
    mask = torch.cat([prompt_mask, prompt_mask.new_ones(len(prompt_mask), response_length)], dim=1)
    return mask, (mask.long().cumsum(1) - 1).clamp(min=0)


def trunk_hidden(
    trunk: nn.Module, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Any = None
) -> Tensor:
    """Last normalised hidden states `[batch, time, width]` of a transformer without its head."""
    hidden: Tensor = trunk(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=cache,
        use_cache=cache is not None,
    ).last_hidden_state
    return hidden
