"""The actor-critic of the Gymnasium world: multilayer perceptrons on flat observations."""

from __future__ import annotations

import math
from itertools import pairwise

from gymnasium import spaces
from torch import Tensor, nn

from tokencredit.control.actions import actions_of
from tokencredit.core.projection import TokenLoss, TokenStats
from tokencredit.learn.update import Evaluation
from tokencredit.runs.control_config import AgentConfig

ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU}


class Agent(nn.Module):
    """An actor and, unless `args.critic` is none, a critic."""

    def __init__(self, observations: spaces.Box, actions: spaces.Space, args: AgentConfig):
        """Make the layers, orthogonal with gains √2 inside, 0.01 for the actor's last layer and 1 for the critic's.

        Huang et al. 2022, "The 37 implementation details of PPO", core detail 2.

        Args:
            observations: a flat Box.
            actions: the environment's space.
            args: sizes and kinds.

        Raises:
            ConfigError: actions of a kind that is not supported.
        """
        super().__init__()
        self.distribution = actions_of(actions, args.log_std, args.actions)
        sizes, activation = [observations.shape[0], *args.hidden], ACTIVATIONS[args.activation]
        self.actor_body = layers(sizes, activation)
        self.actor_head = linear(sizes[-1], self.distribution.outputs, 0.01)
        self.critic_body = layers(sizes, activation) if args.critic == "separate" else None
        self.critic_head = linear(sizes[-1], 1, 1.0) if args.critic != "none" else None

    def critic_parts(self) -> nn.ModuleList:
        """What belongs to the critic alone."""
        return nn.ModuleList(filter(None, (self.critic_body, self.critic_head)))

    def outputs(self, observations: Tensor) -> Tensor:
        """The actor's outputs, from which `distribution` makes actions."""
        return self.actor_head(self.actor_body(observations))

    def values(self, observations: Tensor) -> Tensor:
        """Values `[...]` of observations `[..., size]`; 0 without a critic."""
        if self.critic_head is None:
            return observations.new_zeros(observations.shape[:-1])
        return self.critic_head((self.critic_body or self.actor_body)(observations)).squeeze(-1)

    def forward(
        self, observations: Tensor, actions: Tensor, policy_loss: TokenLoss, entropy: bool = False
    ) -> Evaluation:
        """Evaluate steps again: what an update needs of each.

        Args:
            observations: `[batch, time, size]`.
            actions: `[batch, time, parts]`.
            policy_loss: what to minimise of the actions' log-probabilities and entropies.
            entropy: whether the loss needs the entropies.
        """
        logprobs, entropies = self.distribution.logprobs(self.outputs(observations), actions)
        wanted = entropies if entropy else None
        loss = policy_loss(
            TokenStats(logprobs.flatten(), None if wanted is None else wanted.flatten(), None), slice(None)
        )
        return Evaluation(
            loss, self.values(observations), logprobs.detach(), None if wanted is None else wanted.detach()
        )


def layers(sizes: list[int], activation: type[nn.Module]) -> nn.Sequential:
    """Linear layers from each size to the next, each followed by the activation."""
    return nn.Sequential(*(m for a, b in pairwise(sizes) for m in (linear(a, b, math.sqrt(2)), activation())))


def linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    """A layer that starts with orthogonal weights of this gain and no bias."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer
