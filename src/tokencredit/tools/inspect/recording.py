"""Forward hooks: record the outputs of a model's parts, or replace them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tokencredit.errors import ConfigError
from tokencredit.text.models.actor_critic import trunk_inputs
from tokencredit.text.models.architecture import output_states
from tokencredit.tools.inspect.parts import Part, Parts

TOLERANCE = 1e-3
"""Largest difference between a state and the sum of its parts, relative to the state's largest entry."""
TOKENS = 4096
"""Tokens per forward pass of edited rows."""
Change = Callable[[Tensor], Tensor]
Edits = Mapping[Part, Tensor]
"""New outputs of parts: `[time, width]`; of a head `[time, head size]`, before the output projection."""


@dataclass(frozen=True)
class Record:
    """Outputs of a model's parts in one text, each `[time, …]`; lists have one entry per layer."""

    embedding: Tensor
    heads: list[Tensor]
    """`[time, heads · head size]`: inputs of the attention's output projections."""
    projected: list[Tensor]
    """Outputs of the attention's output projections, before a post-norm."""
    attention: list[Tensor]
    """What the attention adds to the residual stream, `[time, width]`."""
    mlp: list[Tensor]
    """What the MLP adds to the residual stream."""
    states: list[Tensor]
    """States after each layer."""
    normed: Tensor
    """States after the final norm."""

    def output(self, part: Part, heads: int) -> Tensor:
        """The output of a part, as `Edits` take it; `heads` is the number of heads per layer."""
        if part.layer is None:
            return self.embedding
        if part.head is not None:
            return self.heads[part.layer - 1].chunk(heads, dim=-1)[part.head - 1]
        return (self.attention if part.kind == "attention" else self.mlp)[part.layer - 1]


def run_trunk(trunk: PreTrainedModel, ids: Tensor) -> Tensor:
    """States `[batch, time, width]` after the final norm, for token ids `[batch, time]` without padding."""
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    states: Tensor = trunk(
        input_ids=ids, **trunk_inputs(trunk, torch.ones_like(ids, dtype=torch.bool), positions)
    ).last_hidden_state
    return states


def on_input(module: nn.Module, change: Change) -> Any:
    """Hook: replace a module's first tensor argument by `change` of it. A context removes it."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def on_output(module: nn.Module, change: Change) -> Any:
    """Hook: replace the states in a module's output by `change` of them. A context removes it."""

    def hook(_: nn.Module, _args: Any, output: Any) -> Any:
        changed = change(output_states(output))
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    return module.register_forward_hook(hook)


def places(parts: Parts) -> Iterator[tuple[tuple[str, int | None], Callable[[nn.Module, Change], Any], nn.Module]]:
    """By kind and layer of parts, the hook and the module that give their outputs."""
    yield ("embedding", None), on_input, parts.layers[0].block
    for number, layer in enumerate(parts.layers, start=1):
        yield ("head", number), on_input, layer.projection
        # What they add to the residual stream has passed a post-norm, if there is one.
        yield ("attention", number), on_output, layer.attention_norm or layer.projection
        yield ("mlp", number), on_output, layer.mlp_norm or layer.mlp


@torch.no_grad()
def record(name: str, parts: Parts, ids: Tensor) -> Record:
    """The outputs of a model's parts in one text, token ids `[time]`; `name` is the model's in messages.

    Raises:
        ConfigError: the outputs of attention and MLP are not all that a layer adds to its input.
    """
    saved = defaultdict[str, list[Tensor]](list)

    def save(key: str) -> Change:
        def keep(x: Tensor) -> Tensor:
            saved[key].append(x.reshape(len(ids), -1).clone())  # Falcon adds to outputs in place
            return x

        return keep

    with ExitStack() as hooks:
        for (kind, _), hook, module in places(parts):
            hooks.enter_context(hook(module, save(kind)))
        for layer in parts.layers:
            hooks.enter_context(on_output(layer.projection, save("projected")))
            hooks.enter_context(on_output(layer.block, save("states")))
        normed = run_trunk(parts.trunk, ids[None])[0]
    (embedding,), heads = saved.pop("embedding"), saved.pop("head")
    result = Record(embedding=embedding, heads=heads, normed=normed, **saved)
    _check(name, parts, result)
    return result


def _check(name: str, parts: Parts, seen: Record) -> None:
    """Raise `ConfigError` if the recorded outputs do not add up to the model's states."""
    before = seen.embedding
    for number, after in enumerate(seen.states, start=1):
        summed = before + seen.attention[number - 1] + seen.mlp[number - 1]
        if not _close(summed, after):
            raise ConfigError(
                f"{name!r} cannot be inspected: layer {number} of {type(parts.trunk).__name__} adds something else to "
                "its input than the outputs of its attention and its MLP; take a model of another architecture"
            )
        before = after
    if not _close(parts.norm(before), seen.normed):
        raise ConfigError(
            f"{name!r} cannot be inspected: {type(parts.trunk).__name__} does something else than its final norm after "
            "its last layer; take a model of another architecture"
        )


def _close(actual: Tensor, expected: Tensor) -> bool:
    """True if states agree at every position; some positions have entries a thousand times as large as others."""
    return bool(((actual - expected).abs().amax(-1) <= TOLERANCE * expected.abs().amax(-1)).all())


@torch.no_grad()
def edited_states(parts: Parts, ids: Tensor, rows: Sequence[Edits]) -> Tensor:
    """Last states `[rows, width]`, before the final norm, of a text's last position, with parts replaced in each row.

    `ids` are the text's token ids `[time]`, `rows` the new outputs in each row, at all positions.
    """
    size = max(1, TOKENS // len(ids))
    return torch.cat([_edited(parts, ids, rows[start : start + size]) for start in range(0, len(rows), size)])


def _edited(parts: Parts, ids: Tensor, rows: Sequence[Edits]) -> Tensor:
    """`edited_states` in one pass."""
    last: list[Tensor] = []

    def replace(kind: str, layer: int | None) -> Change:
        def change(x: Tensor) -> Tensor:
            new = x.reshape(len(rows), len(ids), -1).clone()
            for row, edits in enumerate(rows):
                for part, output in edits.items():
                    if (part.kind, part.layer) == (kind, layer):
                        at = new[row] if part.head is None else new[row].chunk(parts.heads, dim=-1)[part.head - 1]
                        at.copy_(output)
            return new.view_as(x)

        return change

    def keep(x: Tensor) -> Tensor:
        last.append(x[:, -1])
        return x

    wanted = {(part.kind, part.layer) for edits in rows for part in edits}
    with ExitStack() as hooks:
        for place, hook, module in places(parts):
            if place in wanted:
                hooks.enter_context(hook(module, replace(*place)))
        hooks.enter_context(on_output(parts.layers[-1].block, keep))
        run_trunk(parts.trunk, ids.expand(len(rows), -1))
    return last[0]
