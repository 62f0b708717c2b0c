"""Action distributions from a network's outputs, for Discrete, MultiDiscrete, MultiBinary and Box spaces.

Actions are `[..., parts]`; a part is one discrete choice, or one component of a continuous action.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from tokencredit.errors import ConfigError

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class Categorical(nn.Module):
    """Independent categorical choices, each with its own logits."""

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        super().__init__()
        sizes: Any = space.n if isinstance(space, spaces.Discrete) else getattr(space, "nvec", 2)
        self.sizes = [int(n) for n in np.broadcast_to(sizes, space.shape or ()).flat]
        self.space, self.parts, self.outputs = space, len(self.sizes), sum(self.sizes)

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Gumbel noise for `sample`, −log(−log u), `[*shape, outputs]`."""
        exponential = torch.empty(*shape, self.outputs).exponential_(generator=generator)
        return exponential.log_().neg_()

    def sample(self, logits: Tensor, noise: Tensor) -> Tensor:
        """Sample actions with the Gumbel-max trick: two operations on small tensors, and no softmax."""
        return self.greedy(logits + noise)

    def greedy(self, logits: Tensor) -> Tensor:
        """The most likely actions."""
        if self.parts == 1:
            return logits.argmax(-1, keepdim=True)
        return torch.stack([part.argmax(-1) for part in logits.split(self.sizes, -1)], -1)

    def logprobs(self, logits: Tensor, actions: Tensor) -> Tensor:
        """Log-probabilities of actions, `[...]`, in nats."""
        parts = zip(logits.split(self.sizes, -1), actions.split(1, -1), strict=True)
        logprobs = [part.log_softmax(-1).gather(-1, action).squeeze(-1) for part, action in parts]
        total: Tensor = sum(logprobs[1:], logprobs[0])
        return total

    def entropy(self, logits: Tensor) -> Tensor:
        """Entropies, `[...]`, in nats."""
        log_p = [part.log_softmax(-1) for part in logits.split(self.sizes, -1)]
        entropies = [-(x.exp() * x).sum(-1) for x in log_p]
        total: Tensor = sum(entropies[1:], entropies[0])
        return total

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        """Convert actions `[copies, parts]` to the environment's format."""
        choices = actions.reshape(len(actions), *(self.space.shape or ())) + getattr(self.space, "start", 0)
        converted: np.ndarray = choices.astype(self.space.dtype)
        return converted


class Gaussian(nn.Module):
    """Independent normal components with a state-independent standard deviation."""

    def __init__(self, space: spaces.Box, log_std: float, mapping: str):
        super().__init__()
        self.space, self.mapping = space, mapping
        self.parts = self.outputs = int(np.prod(space.shape))
        self.log_std = nn.Parameter(torch.full((self.parts,), float(log_std)))

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Standard normal noise for `sample`, `[*shape, parts]`."""
        return torch.randn(*shape, self.parts, generator=generator)

    def sample(self, mean: Tensor, noise: Tensor) -> Tensor:
        """Sample actions from standard normal noise."""
        return mean + self.log_std.exp() * noise

    def greedy(self, mean: Tensor) -> Tensor:
        """The most likely actions."""
        return mean

    def logprobs(self, mean: Tensor, actions: Tensor) -> Tensor:
        """Log-densities of actions, Σ −½ ((a − μ)/σ)² − log σ − ½ log 2π, `[...]`."""
        standard = (actions - mean) * (-self.log_std).exp()
        return -0.5 * standard.square().sum(-1) - (self.log_std.sum() + self.parts * HALF_LOG_2PI)

    def entropy(self, mean: Tensor) -> Tensor:
        """Entropies, Σ log σ + ½ (1 + log 2π), `[...]`."""
        return (self.log_std.sum() + self.parts * (HALF_LOG_2PI + 0.5)).expand(mean.shape[:-1])

    def to_env(self, actions: np.ndarray) -> np.ndarray:
        """Convert actions `[copies, parts]` to the environment's format, within its bounds."""
        actions = actions.reshape(len(actions), *self.space.shape)
        low, high = self.space.low, self.space.high
        if self.mapping == "scale":
            actions = low + (high - low) * (np.clip(actions, -1, 1) + 1) / 2
        clipped: np.ndarray = np.clip(actions, low, high)
        return clipped.astype(self.space.dtype)


def actions_of(space: spaces.Space[Any], log_std: float, mapping: str) -> Categorical | Gaussian:
    """The action distribution for an action space; `ConfigError` if there is none, or no bounds to scale to."""
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        return Categorical(space)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        if mapping == "scale" and not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
            raise ConfigError(f"agent.actions is scale, but the bounds of {space} are not finite; use clip")
        return Gaussian(space, log_std, mapping)
    raise ConfigError(
        f"env.id: its actions are {space}; Discrete, MultiDiscrete, MultiBinary and continuous Box are supported"
    )
