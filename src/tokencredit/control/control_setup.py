"""Build the learner of an agent from a configuration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tokencredit.control.actions import Categorical
from tokencredit.control.agent import Agent
from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError
from tokencredit.learn.learner import Learner
from tokencredit.learn.objective import CriticOutputs, Objective, Passes, PolicyLoss, PolicyOutputs
from tokencredit.learn.optim import build_optimizer, hidden_matrices, schedule
from tokencredit.learn.update import UpdateSettings
from tokencredit.settings.control import AgentConfig, ControlConfig


@dataclass(frozen=True)
class AgentPasses(Passes):
    """The passes of an agent."""

    agent: Agent
    entropy: bool
    """The loss needs entropies."""
    critic_inputs = ("observations",)

    def evaluate(self, model: nn.Module, inputs: dict[str, Tensor], loss: PolicyLoss) -> PolicyOutputs:
        """Outputs of actor and critic."""
        outputs: PolicyOutputs = model(**inputs, policy_loss=loss, entropy=self.entropy)
        return outputs

    def critic(self, inputs: dict[str, Tensor]) -> CriticOutputs:
        """Outputs of the critic."""
        return CriticOutputs(self.agent.critic_values(inputs["observations"]))


def build_learner(args: ControlConfig, agent: Agent, processes: Processes) -> Learner:
    """The learner of an agent: optimizer, schedule, objective and shuffling RNG.

    Raises:
        ConfigError: a setting has no effect with the environment's actions.
    """
    check_actions(args.agent, agent)
    return Learner(
        agent,
        build_agent_optimizer(args, agent),
        AgentPasses(agent, entropy=args.ppo.entropy_coef > 0),
        Objective(**args.ppo.objective(args.critic), horizon=1),
        build_update(args),
        schedule(**args.optim.rates(args.run.iterations)),
        torch.Generator().manual_seed(args.seed + 1),
        processes,
    )


def check_actions(args: AgentConfig, agent: Agent) -> None:
    """Raise `ConfigError` for a setting of continuous actions if the environment's actions are discrete."""
    for key in ("log_std", "actions"):
        value = getattr(args, key)
        if isinstance(agent.distribution, Categorical) and value != getattr(AgentConfig(), key):
            raise ConfigError(f"agent.{key} is {value!r}, which has no effect with discrete actions; leave it out")


def build_agent_optimizer(args: ControlConfig, agent: Agent) -> torch.optim.Optimizer:
    """One optimizer for actor and critic; at equal rates a single group, which takes half the time of two."""
    actor, critic = (list(part.parameters()) for part in (agent.actor_parts(), agent.critic_parts()))
    constant = args.critic.schedule == "constant"
    critic_options = {"lr": args.critic.lr, "metric": "value_lr", "constant": constant}
    groups = [{"params": actor, "lr": args.optim.lr}, {"params": critic, **critic_options}]
    if args.optim.lr == args.critic.lr and not constant:
        groups = [{"params": actor + critic, "lr": args.optim.lr}]
    return build_optimizer(
        [group | {"weight_decay": args.optim.weight_decay} for group in groups if group["params"]],
        args.optim.name,
        hidden=hidden_matrices(agent),
        eps=args.optim.eps,
    )


def build_update(args: ControlConfig) -> UpdateSettings:
    """Update settings of an agent; a plain policy gradient takes one step on the whole batch."""
    one_step = {"epochs": 1, "minibatches": 1} if args.algorithm == "policy_gradient" else {}
    return UpdateSettings(**args.ppo.passes(args.critic, args.advantage, args.optim) | one_step)
