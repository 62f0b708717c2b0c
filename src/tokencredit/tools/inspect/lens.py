"""What the models read and predict: logit lens, critic's lens, attention and gradient × input."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tokencredit.text.models.architecture import layers_of
from tokencredit.text.models.critic import Critic
from tokencredit.tools.inspect.parts import Parts, final_norm
from tokencredit.tools.inspect.question import Question
from tokencredit.tools.inspect.recording import Record, on_input, on_output, run_trunk


class Lens(NamedTuple):
    """Logit lens of two models on one text; tensors are `[layers + 1, positions]`, the first row the embedding."""

    tokens: tuple[Tensor, Tensor]
    """Most likely next tokens: base, tuned."""
    probabilities: tuple[Tensor, Tensor]
    """Probabilities of the text's next tokens."""
    ranks: tuple[Tensor, Tensor]
    """Their ranks; 1 is the most likely token."""
    kl: Tensor
    """KL(tuned ‖ base) of the next-token distributions, in nats."""


@torch.no_grad()
def logit_lens(
    models: tuple[Parts, Parts], records: tuple[Record, Record], positions: Sequence[int], ids: Tensor
) -> Lens:
    """Next-token distributions after each layer, by final norm and output projection (nostalgebraist 2020).

    Models and records are base and tuned, `ids` the text's token ids `[time]`; position t predicts token t + 1.
    """
    at = torch.tensor(positions, device=ids.device)
    following = ids[at + 1][:, None]
    rows: list[list[Tensor]] = []
    for states in zip(*([x.embedding, *x.states] for x in records), strict=True):  # one layer of the vocabulary at once
        base, tuned = (parts.logprobs(parts.norm(x[at])) for parts, x in zip(models, states, strict=True))
        row = [(tuned.exp() * (tuned - base)).sum(-1).clamp(min=0)]  # rounding
        for logprobs in (base, tuned):
            chosen = logprobs.gather(-1, following)
            row += [logprobs.argmax(-1), chosen[:, 0].exp(), (logprobs > chosen).sum(-1) + 1]
        rows.append(row)
    kl, base_token, base_probability, base_rank, token, probability, rank = map(torch.stack, zip(*rows, strict=True))
    return Lens((base_token, token), (base_probability, probability), (base_rank, rank), kl)


@torch.no_grad()
def critic_lens(critic: Critic, trunk: PreTrainedModel, ids: Tensor) -> Tensor:
    """Values `[layers + 1, time]` read by a critic's value head after each layer, for token ids `[time]`.

    A head that was trained on the last states reads each layer through the final norm; a head that was trained on an
    inner layer reads each as it reads its own. A separate critic is read along its own trunk, not the policy's.
    """
    trunk = critic.trunk or trunk
    layers, norm = layers_of(trunk), final_norm("the critic", trunk)
    states: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        states.append(x[0])
        return x

    with ExitStack() as hooks:
        hooks.enter_context(on_input(layers[0], keep))
        for layer in layers:
            hooks.enter_context(on_output(layer, keep))
        run_trunk(trunk, ids[None])
    return torch.stack([critic(norm(x) if critic.tap is None else x) for x in states])


@torch.no_grad()
def attention_from(parts: Parts, ids: Tensor, position: int) -> Tensor | None:
    """Attention `[layers, heads, position + 1]` from a position to itself and all before it.

    None if an attention module does not return its weights.
    """
    rows: list[Any] = []

    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        rows.append(output[1] if isinstance(output, tuple) and len(output) > 1 else None)

    with ExitStack() as stack:
        # Attention by matrix products has weights to read.
        stack.callback(parts.lm.set_attn_implementation, parts.lm.config._attn_implementation)
        parts.lm.set_attn_implementation("eager")
        for layer in parts.layers:
            stack.enter_context(layer.attention.register_forward_hook(keep))
        run_trunk(parts.trunk, ids[None, : position + 1])
    if any(not isinstance(row, Tensor) or row.shape[-1] != position + 1 for row in rows):
        return None
    return torch.stack([row[0, :, -1].float() for row in rows])


def input_gradient(parts: Parts, ids: Tensor, question: Question) -> Tensor:
    """Gradient × input of each token's embedding `[position + 1]`, in nats.

    Σ over the width of embedding · ∂ log-odds / ∂ embedding: to first order, how much the log-odds would fall if the
    token's embedding were 0.
    """
    embeddings: list[Tensor] = []

    def leaf(x: Tensor) -> Tensor:
        embeddings.append(x.detach().requires_grad_())
        return embeddings[0]

    direction, constant = parts.direction(question.up, question.down)
    with torch.enable_grad(), on_output(parts.lm.get_input_embeddings(), leaf):
        state = run_trunk(parts.trunk, ids[None, : question.position + 1])[0, -1]
        (gradient,) = torch.autograd.grad(state.double() @ direction.detach() + constant.detach(), embeddings)
    return (gradient * embeddings[0].detach())[0].sum(-1)
