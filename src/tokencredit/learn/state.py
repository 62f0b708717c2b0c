"""Save and restore trained weights and optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tokencredit.learn.value_heads import AdaptiveHead


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module that require gradients."""
    return [p for p in module.parameters() if p.requires_grad]


def nbytes(parameters: Iterable[Tensor]) -> int:
    """Size of parameters in bytes."""
    return sum(p.numel() * p.element_size() for p in parameters)


def trained_weights(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that training changes, by name: trainable parameters and what value heads keep of returns."""
    supports = {f"{name}.support": x.support for name, x in module.named_modules() if isinstance(x, AdaptiveHead)}
    return {name: p for name, p in module.named_parameters() if p.requires_grad} | supports


def sharded_parameters(module: nn.Module) -> dict[str, Tensor]:
    """The sharded trainable parameters of a module, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad and isinstance(p, DTensor)}


@torch.no_grad()
def load_trained_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load the result of `trained_weights` into a module; `ValueError` if they do not fit."""
    own = trained_weights(module)
    if set(own) != set(weights):
        differing = sorted(set(own) ^ set(weights))
        raise ValueError(f"these weights are on one side only: {', '.join(differing[:3])}")
    for name, parameter in own.items():
        if parameter.shape != weights[name].shape:
            raise ValueError(f"{name} has the shape {list(weights[name].shape)}, not {list(parameter.shape)}")
        parameter.copy_(weights[name])


def optimizer_state(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Any]:
    """Per-parameter optimizer state, by the parameter's name in a module; without settings."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    return {names[parameter]: dict(state) for parameter, state in optimizer.state.items()}


def load_optimizer_state(optimizer: torch.optim.Optimizer, module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load the result of `optimizer_state`; settings, such as learning rates, stay. `ValueError` if it does not fit."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    indices = {names[p]: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    shapes = {name: parameter.shape for parameter, name in names.items()}
    for name, values in state.items():
        if name not in indices:
            raise ValueError(f"{name} has optimizer state, but is not trained")
        for key, value in values.items():
            if value.shape not in (shapes[name], ()):
                raise ValueError(f"{key} of {name} has the shape {list(value.shape)}, not {list(shapes[name])}")
    by_index = {indices[name]: values for name, values in state.items()}
    optimizer.load_state_dict({"state": by_index, "param_groups": optimizer.state_dict()["param_groups"]})
