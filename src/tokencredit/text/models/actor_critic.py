"""The actor-critic: a causal language model, and a critic on its trunk or on one of its own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tokencredit.core.logprobs import token_logprobs, token_loss
from tokencredit.core.projection import TokenLoss, TokenStats, in_columns
from tokencredit.learn.update import Evaluation


class ActorCritic(nn.Module):
    """A causal language model and a value head on a last normalised hidden state: its own, or that of another trunk.

    The model is used in two halves, so that no `[batch, time, vocabulary]` tensor is ever needed: `hidden` runs the
    trunk, and the vocabulary projection happens where its result is wanted, at response positions only.
    Dropout is off unless someone calls `train()`: the probabilities that sampled a token must be those that training
    starts from.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        value_head: nn.Module | None = None,
        critic: PreTrainedModel | None = None,
        *,
        detach: bool = False,
        adapter: Any = None,
        compiled: bool = False,
    ):
        """Put the parts together.

        Args:
            lm: a causal language model.
            value_head: from hidden states `[..., width]` to `[..., 1]`; None for one linear layer that says 0.
            critic: the trunk of a separate critic; None shares the language model's.
            detach: keep the value loss out of the trunk.
            adapter: the PEFT model around `lm`, if it has one.
            compiled: run whole texts through `torch.compile`; sampling, a token at a time, stays as it is.
        """
        super().__init__()
        self.lm = lm
        self.critic = critic
        self.value_head = value_head or build_value_head("linear", width(critic or lm))
        self.detach = detach
        self.trunk_hidden = torch.compile(trunk_hidden, dynamic=True) if compiled else trunk_hidden
        self.softcap = getattr(lm.config.get_text_config(), "final_logit_softcapping", None)
        object.__setattr__(self, "adapter", adapter)  # it holds the same weights, which must not be registered twice
        self.eval()

    def critic_parts(self) -> nn.ModuleList:
        """What belongs to the critic alone."""
        return nn.ModuleList(filter(None, (self.critic, self.value_head)))

    def hidden(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Any = None) -> Tensor:
        """Last normalised hidden states `[batch, time, width]`; `cache`, if given, is read and extended."""
        return trunk_hidden(self.lm.get_decoder(), input_ids, attention_mask, position_ids, cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits of hidden states, in float32."""
        projection = self.lm.get_output_embeddings()
        half = torch.is_autocast_enabled(hidden.device.type)
        if in_columns(hidden) and projection.bias is None and not half:
            columns = nn.functional.linear(projection.weight, hidden.flatten(0, -2))
            logits = columns.T.unflatten(0, hidden.shape[:-1])
        else:
            logits = projection(hidden).float()
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def values(self, hidden: Tensor) -> Tensor:
        """Values, in float32, of the states that the critic's hidden states `[..., width]` stand for: `[...]`."""
        if self.detach:
            hidden = hidden.detach()
        with torch.autocast(hidden.device.type, enabled=False):
            return self.value_head(hidden.float()).squeeze(-1)

    def forward(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        response_ids: Tensor,
        mask: Tensor,
        temperature: float,
        policy_loss: TokenLoss | None = None,
        entropy: bool = False,
        reference: ActorCritic | None = None,
        ref_hidden: Tensor | None = None,
    ) -> Evaluation:
        """Evaluate given responses: what training needs of each token.

        Args:
            prompt_ids: `[batch, prompt]`, padded on the left.
            prompt_mask: `[batch, prompt]`, true at the prompt's own tokens.
            response_ids: `[batch, time]`, padded on the right; what stands in the padding matters to nothing before it.
            mask: `[batch, time]`, true at sampled tokens, which come first; nothing is computed of the others.
            temperature: divides the logits, as it did in sampling.
            policy_loss: what to minimise of the tokens' log-probabilities, entropies and KL; None minimises nothing.
            entropy: also compute the entropy of each position's distribution.
            reference: also compute the exact KL to this model, from its hidden states.
            ref_hidden: `[batch, time, width]`, what `reference.response_hidden` gave for the same responses.

        Returns:
            The loss; values of the states before each token; log-probabilities, and entropies and exact KL or None, in
            nats; each but the loss `[batch, time]` in float32. Loss and values carry gradients.
        """
        hidden = self.response_hidden(prompt_ids, prompt_mask, response_ids, mask)
        ref = None
        if reference is not None and ref_hidden is not None:
            ref_projection = reference.lm.get_output_embeddings()
            ref = (ref_hidden, ref_projection.weight, ref_projection.bias)
        projection = self.lm.get_output_embeddings()
        loss, stats = token_loss(
            hidden,
            projection.weight,
            response_ids,
            policy_loss or nothing,
            bias=projection.bias,
            ref=ref,
            mask=mask,
            temperature=temperature,
            softcap=self.softcap,
            entropy=entropy,
        )
        assert stats.logprobs is not None
        if self.critic is not None:
            hidden = self.critic_hidden(prompt_ids, prompt_mask, response_ids, mask)
        values = torch.zeros_like(stats.logprobs).masked_scatter(mask, self.values(hidden[mask]))
        return Evaluation(loss, values, stats.logprobs, stats.entropy, stats.kl)

    def logprobs(self, hidden: Tensor, response_ids: Tensor, mask: Tensor, temperature: float) -> Tensor:
        """Log-probabilities `[batch, time]` of tokens, nats, from the hidden states before them."""
        projection = self.lm.get_output_embeddings()
        logprobs, _ = token_logprobs(
            hidden,
            projection.weight,
            response_ids,
            bias=projection.bias,
            mask=mask,
            temperature=temperature,
            softcap=self.softcap,
        )
        return logprobs

    def response_hidden(self, prompt_ids: Tensor, prompt_mask: Tensor, response_ids: Tensor, mask: Tensor) -> Tensor:
        """Hidden states `[batch, time, width]` of the states before each response token; arguments as in `forward`."""
        return self._read(self.lm.get_decoder(), prompt_ids, prompt_mask, response_ids, mask)

    def critic_hidden(self, prompt_ids: Tensor, prompt_mask: Tensor, response_ids: Tensor, mask: Tensor) -> Tensor:
        """The same from the trunk of a separate critic."""
        return self._read(self.critic, prompt_ids, prompt_mask, response_ids, mask)

    def _read(
        self, trunk: nn.Module, prompt_ids: Tensor, prompt_mask: Tensor, response_ids: Tensor, mask: Tensor
    ) -> Tensor:
        """A trunk's states before each response token, 0 past the longest; columns of mere padding are not read."""
        length = max(int(mask.sum(1).max()), 1)
        padding = int((~prompt_mask).all(0).sum())
        prompt_ids, prompt_mask = prompt_ids[:, padding:], prompt_mask[:, padding:]
        input_ids = torch.cat([prompt_ids, response_ids[:, : length - 1]], dim=1)
        attention_mask, position_ids = positions(prompt_mask, length - 1)
        hidden = self.trunk_hidden(trunk, input_ids, attention_mask, position_ids)[:, prompt_ids.shape[1] - 1 :]
        return nn.functional.pad(hidden, (0, 0, 0, response_ids.shape[1] - length))


def nothing(now: TokenStats, at: slice) -> Tensor:
    """The loss of those who want none."""
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
    outputs = trunk(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=cache,
        use_cache=cache is not None,
    )
    return outputs.last_hidden_state


def width(model: PreTrainedModel) -> int:
    """The size of a model's hidden states."""
    return int(model.config.get_text_config().hidden_size)


def build_value_head(
    kind: str, size: int, init: str = "zeros", gain: float = 1.0, hidden_gain: float = math.sqrt(2)
) -> nn.Module:
    """A value head: one layer (`linear`), or two with a hidden width of four times `size` (`mlp`).

    With `zeros` an untrained critic says 0 rather than noise. With `orthogonal` the last layer starts with a row of
    norm `gain`, and a layer before it with orthogonal columns of norm `hidden_gain`; √2 and 1 are the usual choice
    (Huang et al. 2022, "The 37 implementation details of PPO", detail 2).
    """
    last = nn.Linear(size if kind == "linear" else 4 * size, 1)
    layers = [last] if kind == "linear" else [nn.Linear(size, 4 * size), nn.GELU(), last]
    if init == "zeros":
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
    else:
        for layer in layers[::2]:
            nn.init.orthogonal_(layer.weight, gain if layer is last else hidden_gain)
            nn.init.zeros_(layer.bias)
    return last if kind == "linear" else nn.Sequential(*layers)
