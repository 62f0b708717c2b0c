"""Save and restore trained weights and optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tokencredit.errors import ConfigError
from tokencredit.learn.value_heads import AdaptiveHead

MISFIT = "the checkpoint does not fit this model"


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module that require gradients."""
    return [p for p in module.parameters() if p.requires_grad]


def nbytes(parameters: Iterable[Tensor]) -> int:
    """Size of parameters in bytes."""
    return sum(p.numel() * p.element_size() for p in parameters)


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Trained weights and optimizer state, for a checkpoint."""
    return {"weights": trained_weights(model), "optimizer": optimizer_state(optimizer, model)}


def load_training_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Restore the result of `training_state`; `ConfigError` if it does not fit."""
    load_trained_weights(model, state["weights"])
    load_optimizer_state(optimizer, model, state["optimizer"])


def trained_weights(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that training changes, by name: trainable parameters and what value heads keep of returns."""
    supports = {f"{name}.support": x.support for name, x in module.named_modules() if isinstance(x, AdaptiveHead)}
    return {name: p for name, p in module.named_parameters() if p.requires_grad} | supports


def sharded_parameters(module: nn.Module) -> dict[str, Tensor]:
    """The sharded trainable parameters of a module, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad and isinstance(p, DTensor)}


@torch.no_grad()
def load_trained_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load the result of `trained_weights` into a module; `ConfigError` if they do not fit."""
    own = trained_weights(module)
    if set(own) != set(weights):
        differing = sorted(set(own) ^ set(weights))
        raise ConfigError(f"{MISFIT}: these weights are on one side only: {', '.join(differing[:3])}")
    for name, parameter in own.items():
        if parameter.shape != weights[name].shape:
            shapes = f"{list(weights[name].shape)}, not {list(parameter.shape)}"
            raise ConfigError(f"{MISFIT}: {name} has the shape {shapes}")
        parameter.copy_(weights[name])


def optimizer_state(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Any]:
    """Per-parameter optimizer state, by the parameter's name in a module; without settings."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    return {names[parameter]: dict(state) for parameter, state in optimizer.state.items()}


def load_optimizer_state(optimizer: torch.optim.Optimizer, module: nn.Module, state: Mapping[str, Any]) -> None:
    """Restore `optimizer_state`; settings, such as learning rates, stay. `ConfigError` if it does not fit."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    indices = {names[p]: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    shapes = {name: parameter.shape for parameter, name in names.items()}
    for name, values in state.items():
        if name not in indices:
            raise ConfigError(f"{MISFIT}: {name} has optimizer state, but is not trained")
        for key, value in values.items():
            if value.shape not in (shapes[name], ()):
                wrong = f"{list(value.shape)}, not {list(shapes[name])}"
                raise ConfigError(f"{MISFIT}: {key} of {name} has the shape {wrong}")
    by_index = {indices[name]: values for name, values in state.items()}
    optimizer.load_state_dict({"state": by_index, "param_groups": optimizer.state_dict()["param_groups"]})
