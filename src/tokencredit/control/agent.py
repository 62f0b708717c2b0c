"""The actor-critic of the Gymnasium world, on flat observations: multilayer perceptrons, or transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from tokencredit.control.actions import actions_of
from tokencredit.core.projection import TokenStats
from tokencredit.learn.objective import PolicyLoss, PolicyOutputs
from tokencredit.settings.control import AgentConfig

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": nn.functional.relu,
    "gelu": nn.functional.gelu,
}


class Agent(nn.Module):
    """An actor and, unless there is none, a critic."""

    def __init__(
        self, observations: spaces.Space[Any], actions: spaces.Space[Any], args: AgentConfig, critic: str = "separate"
    ):
        """Make the layers, orthogonal with gains √2 inside, 0.01 for the actor's last layer and 1 for the critic's.

        Huang et al. 2022, "The 37 implementation details of PPO", core detail 2.

        Args:
            observations: a flat Box, of `args.observations()` observations one after another.
            actions: the environment's space.
            args: sizes and kinds.
            critic: `separate`, `shared` with the actor's hidden layers, or `none`.

        Raises:
            ConfigError: actions of a kind that is not supported.
        """
        super().__init__()
        self.distribution = actions_of(actions, args.log_std, args.actions)
        assert observations.shape is not None
        size = observations.shape[0] // args.observations()
        width = args.hidden[-1] if args.hidden else size
        self.actor_body = body(size, args)
        self.actor_head = linear(width, self.distribution.outputs, 0.01)
        self.critic_body = body(size, args) if critic == "separate" else None
        self.critic_head = linear(width, 1, 1.0) if critic != "none" else None

    def actor_parts(self) -> nn.ModuleList:
        """The layers of the actor, some of which a critic may share, and the deviation of its actions."""
        return nn.ModuleList([self.distribution, self.actor_body, self.actor_head])

    def critic_parts(self) -> nn.ModuleList:
        """The layers that belong to the critic alone."""
        return nn.ModuleList(filter(None, (self.critic_body, self.critic_head)))

    def outputs(self, observations: Tensor) -> Tensor:
        """The actor's outputs, from which `distribution` makes actions."""
        outputs: Tensor = self.actor_head(self.actor_body(observations))
        return outputs

    def values(self, observations: Tensor) -> Tensor | None:
        """Values `[...]` of observations `[..., size]`; None without a critic."""
        if self.critic_head is None:
            return None
        values: Tensor = self.critic_head((self.critic_body or self.actor_body)(observations)).squeeze(-1)
        return values

    def critic_values(self, observations: Tensor) -> Tensor:
        """The same of `[batch, time, size]`, with a gradient for the layers that belong to the critic alone."""
        assert self.critic_head is not None
        rows = observations.flatten(0, 1)
        with torch.set_grad_enabled(self.critic_body is not None):
            states = (self.critic_body or self.actor_body)(rows)
        values: Tensor = self.critic_head(states).view(observations.shape[:2])
        return values

    def forward(
        self, observations: Tensor, actions: Tensor, policy_loss: PolicyLoss, entropy: bool = False
    ) -> PolicyOutputs:
        """Evaluate steps again: what an update needs of each.

        Args:
            observations: `[batch, time, size]`.
            actions: `[batch, time, parts]`.
            policy_loss: what to minimise of the actions' log-probabilities and entropies.
            entropy: whether the loss needs the entropies.
        """
        shape = observations.shape[:2]
        rows = observations.flatten(0, 1)  # a layer on three dimensions takes twice the operations
        outputs = self.outputs(rows)
        logprobs = self.distribution.logprobs(outputs, actions.flatten(0, 1))
        entropies = self.distribution.entropy(outputs) if entropy else None
        loss = policy_loss(TokenStats(logprobs, entropies, None), slice(None))
        values = self.values(rows)
        return PolicyOutputs(
            loss,
            logprobs.detach().view(shape),
            None if values is None else values.view(shape),
            None if entropies is None else entropies.detach().reshape(shape),
        )


def body(size: int, args: AgentConfig) -> nn.Module:
    """The hidden layers, from observations of this size."""
    if args.policy == "transformer":
        return Transformer(size, args)
    return Perceptron([size, *args.hidden], ACTIVATIONS[args.activation])


class Perceptron(nn.Module):
    """Linear layers with an activation after each."""

    def __init__(self, sizes: list[int], activation: Callable[[Tensor], Tensor]):
        super().__init__()
        self.layers = nn.ModuleList(linear(a, b, math.sqrt(2)) for a, b in pairwise(sizes))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """States `[..., width]` of observations; functions, since in a network this small each module called shows."""
        for layer in self.layers:
            x = self.activation(nn.functional.linear(x, layer.weight, layer.bias))  # type: ignore[arg-type]
        return x


class Transformer(nn.Module):
    """A causal transformer on the last observations; what it says of the last one."""

    def __init__(self, size: int, args: AgentConfig):
        super().__init__()
        width, self.shape = args.hidden[0], (args.context, size)
        self.embedding = linear(size, width, 1.0)
        self.positions = nn.Parameter(torch.empty(args.context, width).normal_(std=0.02))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                args.heads,
                4 * width,
                dropout=0.0,
                activation=ACTIVATIONS[args.activation],
                batch_first=True,
                norm_first=True,
            )
            for _ in args.hidden
        )
        self.norm = nn.LayerNorm(width)
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(args.context), persistent=False)

    def forward(self, observations: Tensor) -> Tensor:
        """States `[..., width]` from observations `[..., context · size]`, the oldest first."""
        leading = observations.shape[:-1]
        x = self.embedding(observations.reshape(-1, *self.shape)) + self.positions
        for block in self.blocks:
            x = block(x, src_mask=self.causal, is_causal=True)
        states: Tensor = self.norm(x[:, -1]).unflatten(0, leading)
        return states


def linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    """A layer that starts with orthogonal weights of this gain and no bias."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
