"""From a configuration to the learner of an agent."""

from __future__ import annotations

import torch
from torch import nn

from tokencredit.control.agent import Agent
from tokencredit.learn.learner import Learner, UpdateSettings
from tokencredit.learn.objective import Objective, PolicyLoss, PolicyOutputs
from tokencredit.learn.optim import build_optimizer, hidden_matrices, schedule
from tokencredit.processes import Processes
from tokencredit.settings.control import ControlConfig


def build_learner(args: ControlConfig, agent: Agent, processes: Processes) -> Learner:
    """The learner of an agent: optimizer, schedule, objective and the generator that shuffles."""
    optim, entropy = args.optim, args.ppo.entropy_coef > 0

    def evaluate(model: nn.Module, inputs: dict[str, torch.Tensor], loss: PolicyLoss) -> PolicyOutputs:
        outputs: PolicyOutputs = model(**inputs, policy_loss=loss, entropy=entropy)
        return outputs

    return Learner(
        agent,
        build_agent_optimizer(args, agent),
        evaluate,
        Objective(
            clip=args.ppo.clip_range(),
            dual_clip=args.ppo.dual_clip,
            value_clip=args.critic.clip,
            value_coef=args.critic.coef,
            entropy_coef=args.ppo.entropy_coef,
            reduction=args.ppo.reduction,
            horizon=1,
        ),
        build_update(args),
        schedule(
            optim.schedule,
            warmup=optim.warmup,
            total=max(args.run.iterations, optim.warmup + 1),
            final_scale=optim.final_scale,
        ),
        torch.Generator().manual_seed(args.seed + 1),
        processes,
    )


def build_agent_optimizer(args: ControlConfig, agent: Agent) -> torch.optim.Optimizer:
    """One optimizer for actor and critic; at equal rates they are one group, which takes half the time of two."""
    actor, critic = (list(part.parameters()) for part in (agent.actor_parts(), agent.critic_parts()))
    groups = [{"params": actor, "lr": args.optim.lr}, {"params": critic, "lr": args.critic.lr, "critic": True}]
    if args.optim.lr == args.critic.lr:
        groups = [{"params": actor + critic, "lr": args.optim.lr}]
    return build_optimizer(
        [group | {"weight_decay": args.optim.weight_decay} for group in groups if group["params"]],
        args.optim.name,
        hidden=hidden_matrices(agent),
        eps=args.optim.eps,
    )


def build_update(args: ControlConfig) -> UpdateSettings:
    """How updates go through an experience; a policy gradient takes one step on all of it."""
    ppo, plain = args.ppo, args.algorithm == "policy_gradient"
    return UpdateSettings(
        epochs=1 if plain else ppo.epochs,
        minibatches=1 if plain else ppo.minibatches,
        micro_batch_tokens=ppo.micro_batch_tokens,
        whiten_minibatches=args.advantage.whitened_over("minibatch"),
        target_kl=ppo.target_kl,
        max_grad_norm=args.optim.max_grad_norm,
        grad_norm_type=args.optim.norm_order(),
    )
