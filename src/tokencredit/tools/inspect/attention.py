"""Where attention goes, and which prompt tokens the log-odds depend on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tokencredit.tools.inspect.parts import Parts
from tokencredit.tools.inspect.question import Question
from tokencredit.tools.inspect.recording import hooks, on_output, run_trunk


@contextmanager
def eager(parts: Parts) -> Iterator[None]:
    """A context in which the model computes attention by matrix products, so that its weights can be read."""
    before = parts.lm.config._attn_implementation
    parts.lm.set_attn_implementation("eager")
    try:
        yield
    finally:
        parts.lm.set_attn_implementation(before)


@torch.no_grad()
def attention_from(parts: Parts, ids: Tensor, position: int) -> Tensor | None:
    """Attention `[layers, heads, position + 1]` from a position to itself and all before it.

    None if an attention module does not return its weights.
    """
    rows: list[Any] = []

    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        rows.append(output[1] if isinstance(output, tuple) and len(output) > 1 else None)

    with eager(parts), hooks() as handles:
        handles += [layer.attention.register_forward_hook(keep) for layer in parts.layers]
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
    with torch.enable_grad(), hooks() as handles:
        handles.append(on_output(parts.lm.get_input_embeddings(), leaf))
        state = run_trunk(parts.trunk, ids[None, : question.position + 1])[0, -1]
        (gradient,) = torch.autograd.grad(state.double() @ direction.detach() + constant.detach(), embeddings)
    return (gradient * embeddings[0].detach())[0].sum(-1)
