"""Actor-critic for Gymnasium on flat observations: multilayer perceptrons or transformers."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from tokencredit.control.actions import actions_of
from tokencredit.core.vocab_projection import TokenStats
from tokencredit.learn.objective import CriticOutputs, PolicyLoss, PolicyOutputs
from tokencredit.settings.control import AgentConfig


class Agent(nn.Module):
    """An actor and, optionally, a critic."""

    def __init__(
        self, observations: spaces.Space[Any], actions: spaces.Space[Any], args: AgentConfig, critic: str = "separate"
    ):
        """Build the layers with orthogonal weights: gain √2 for hidden layers, 0.01 for the actor's head, 1 for values.

        Huang et al. 2022, "The 37 implementation details of PPO", core detail 2. Observations are flat, and stacked if
        the policy is a transformer. A `shared` critic stands on the actor's hidden layers.

        Raises:
            ConfigError: the action space is not supported.
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
        """Layers of the actor, including shared ones, and its log standard deviation."""
        return nn.ModuleList([self.distribution, self.actor_body, self.actor_head])

    def critic_parts(self) -> nn.ModuleList:
        """Layers of the critic that the actor does not share."""
        return nn.ModuleList(filter(None, (self.critic_body, self.critic_head)))

    def outer_parameters(self) -> list[Tensor]:
        """Matrices at the agent's ends: its action head, and what a transformer makes of observations."""
        transformers = (body for body in (self.actor_body, self.critic_body) if isinstance(body, Transformer))
        inputs = [matrix for body in transformers for matrix in (body.embedding.weight, body.positions)]
        return [self.actor_head.weight, *inputs]

    def outputs(self, observations: Tensor) -> Tensor:
        """The actor's outputs: parameters of the action distribution."""
        outputs: Tensor = self.actor_head(self.actor_body(observations))
        return outputs

    def values(self, observations: Tensor) -> Tensor | None:
        """Values `[...]` of observations `[..., size]`; None without a critic."""
        if self.critic_head is None:
            return None
        values: Tensor = self.critic_head((self.critic_body or self.actor_body)(observations)).squeeze(-1)
        return values

    def critic_values(self, observations: Tensor) -> Tensor:
        """Values of observations `[batch, time, size]`, with a gradient only for the critic's own layers."""
        assert self.critic_head is not None
        rows = observations.flatten(0, 1)
        with torch.set_grad_enabled(self.critic_body is not None):
            states = (self.critic_body or self.actor_body)(rows)
        values: Tensor = self.critic_head(states).view(observations.shape[:2])
        return values

    def forward(
        self, observations: Tensor, actions: Tensor, policy_loss: PolicyLoss, entropy: bool = False
    ) -> PolicyOutputs:
        """Policy loss, log-probabilities, values and entropies of steps, from tensors `[batch, time, …]`."""
        shape = observations.shape[:2]
        rows = observations.flatten(0, 1)  # a linear layer on three dimensions takes twice the operations
        outputs = self.outputs(rows)
        logprobs = self.distribution.logprobs(outputs, actions.flatten(0, 1))
        entropies = self.distribution.entropy(outputs) if entropy else None
        loss = policy_loss(TokenStats(logprobs, entropies, None), slice(None))
        values = self.values(rows)
        entropies = None if entropies is None else entropies.detach().reshape(shape)
        stats = TokenStats(logprobs.detach().view(shape), entropies, None)
        return PolicyOutputs(loss, stats, None if values is None else CriticOutputs(values.view(shape)))


def body(size: int, args: AgentConfig) -> nn.Module:
    """Hidden layers for observations of this size."""
    return Transformer(size, args) if args.policy == "transformer" else Perceptron(size, args)


class Perceptron(nn.Module):
    """Linear layers with an activation after each."""

    def __init__(self, size: int, args: AgentConfig):
        super().__init__()
        self.layers = nn.ModuleList(linear(a, b, math.sqrt(2)) for a, b in pairwise([size, *args.hidden]))
        self.activation = getattr(nn.functional, args.activation)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states `[..., width]` of observations; functional calls, since module calls are slow at this size."""
        for layer in self.layers:
            x = self.activation(nn.functional.linear(x, layer.weight, layer.bias))  # type: ignore[arg-type]
        return x


class Transformer(nn.Module):
    """A causal transformer over the last observations; returns the hidden state of the newest one."""

    def __init__(self, size: int, args: AgentConfig):
        super().__init__()
        width, self.shape, activation = args.hidden[0], (args.context, size), getattr(nn.functional, args.activation)
        self.embedding = linear(size, width, 1.0)
        self.positions = nn.Parameter(torch.empty(args.context, width).normal_(std=0.02))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, args.heads, 4 * width, 0.0, activation, batch_first=True, norm_first=True)
            for _ in args.hidden
        )
        self.norm = nn.LayerNorm(width)
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(args.context), persistent=False)

    def forward(self, observations: Tensor) -> Tensor:
        """Hidden states `[..., width]` of observations `[..., context · size]`, the oldest first."""
        leading = observations.shape[:-1]
        x = self.embedding(observations.reshape(-1, *self.shape)) + self.positions
        for block in self.blocks:
            x = block(x, src_mask=self.causal, is_causal=True)
        states: Tensor = self.norm(x[:, -1]).unflatten(0, leading)
        return states


def linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    """A linear layer with orthogonal initial weights of this gain and zero bias."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
