"""What training has made of a model and its optimiser, to be kept and given back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tokencredit.learn.histogram import HistogramHead


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module that training may change."""
    return [p for p in module.parameters() if p.requires_grad]


def memory_of(parameters: Iterable[Tensor]) -> int:
    """Bytes of parameters."""
    return sum(p.numel() * p.element_size() for p in parameters)


def trained_weights(module: nn.Module) -> dict[str, Tensor]:
    """What training may change, by name: parameters, and supports of histograms; the rest is as it was loaded."""
    supports = {f"{name}.support": x.support for name, x in module.named_modules() if isinstance(x, HistogramHead)}
    return {name: p for name, p in module.named_parameters() if p.requires_grad} | supports


@torch.no_grad()
def load_trained_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a module what `trained_weights` gave.

    Raises:
        ValueError: the weights are not those of this module.
    """
    own = trained_weights(module)
    if set(own) != set(weights):
        differing = sorted(set(own) ^ set(weights))
        raise ValueError(f"these weights are on one side only: {', '.join(differing[:3])}")
    for name, parameter in own.items():
        if parameter.shape != weights[name].shape:
            raise ValueError(f"{name} has the shape {list(weights[name].shape)}, not {list(parameter.shape)}")
        parameter.copy_(weights[name])


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimiser remembers of each parameter, by the parameter's number as a text; no settings."""
    return {str(number): state for number, state in optimizer.state_dict()["state"].items()}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Let an optimiser remember what `optimizer_state` gave; its settings, such as rates, stay as they are."""
    memory = {int(number): values for number, values in state.items()}
    optimizer.load_state_dict({"state": memory, "param_groups": optimizer.state_dict()["param_groups"]})
