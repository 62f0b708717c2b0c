"""Save and restore trained weights and optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tokencredit.learn.histogram import HistogramHead


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module that require gradients."""
    return [p for p in module.parameters() if p.requires_grad]


def nbytes(parameters: Iterable[Tensor]) -> int:
    """Size of parameters in bytes."""
    return sum(p.numel() * p.element_size() for p in parameters)


def trained_weights(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that training changes, by name: trainable parameters and histogram supports."""
    supports = {f"{name}.support": x.support for name, x in module.named_modules() if isinstance(x, HistogramHead)}
    return {name: p for name, p in module.named_parameters() if p.requires_grad} | supports


@torch.no_grad()
def load_trained_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load the result of `trained_weights` into a module.

    Raises:
        ValueError: the weights do not fit this module.
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
    """Per-parameter optimizer state, by the parameter's index as a string; without settings."""
    return {str(number): state for number, state in optimizer.state_dict()["state"].items()}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load the result of `optimizer_state`; settings, such as learning rates, stay as they are."""
    by_index = {int(index): values for index, values in state.items()}
    optimizer.load_state_dict({"state": by_index, "param_groups": optimizer.state_dict()["param_groups"]})
