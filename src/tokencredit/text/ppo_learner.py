"""Build a run's learner: passes, optimizer, objective and settings of the update."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import nn

from tokencredit.distributed.processes import Processes
from tokencredit.learn.learner import Learner
from tokencredit.learn.objective import CriticOutputs, Interpolation, Objective, Passes, PolicyLoss, PolicyOutputs
from tokencredit.learn.optim import ParamGroup, build_optimizer, hidden_matrices, schedule
from tokencredit.learn.own_loss import objective_of
from tokencredit.learn.state import trainable
from tokencredit.learn.update import UpdateSettings
from tokencredit.settings.text import PPOConfig
from tokencredit.text.models.actor_critic import ActorCritic, Inputs
from tokencredit.text.models.precision import Precision
from tokencredit.text.models.run_models import Models


class TextPasses(Passes):
    """The passes of a language model and its critic, in the dtype of a run."""

    def __init__(
        self,
        policy: ActorCritic,
        precision: Precision,
        temperature: float,
        entropy: bool,
        reference: ActorCritic | None,
    ):
        """Store the options of `ActorCritic.forward`; a reference model is for an exact KL in the loss."""
        self.policy, self.precision = policy, precision
        self.options = {"temperature": temperature, "entropy": entropy, "reference": reference}
        self.separate_critic = policy.critic is not None and not policy.critic.shared

    def evaluate(self, model: nn.Module, inputs: Inputs, loss: PolicyLoss) -> PolicyOutputs:
        """Outputs of policy and critic."""
        with self.precision.autocast():
            outputs: PolicyOutputs = model(inputs, policy_loss=loss, **self.options)
        return outputs

    def critic(self, inputs: Inputs) -> CriticOutputs:
        """Outputs of the critic."""
        with self.precision.autocast():
            return self.policy.critic_outputs(inputs)


def build_learner(args: PPOConfig, models: Models, processes: Processes) -> Learner:
    """Build a run's learner: optimizer, schedule, objective and the generator for shuffling."""
    policy, precision, optim = models.policy, models.precision, args.optim
    hidden = hidden_matrices(policy.lm, exclude=policy.lm.get_output_embeddings().parameters())
    if policy.critic is not None and policy.critic.trunk is not None:
        hidden += hidden_matrices(policy.critic.trunk)
    optimizer = build_optimizer(parameter_groups(args, policy), optim.name, hidden=hidden, eps=optim.eps)
    reference = models.reference if args.kl.estimator == "full" else None
    passes = TextPasses(policy, precision, args.rollout.temperature, args.ppo.entropy_coef > 0, reference)
    return Learner(
        policy,
        optimizer,
        passes,
        build_objective(args),
        UpdateSettings(**args.ppo.passes(args.critic, args.advantage, args.optim)),
        schedule(**optim.rates(args.run.iterations)),
        torch.Generator().manual_seed(2 * args.seed + 1),
        processes,
        chain(*policy.critic.own_parameters()) if policy.critic is not None and args.critic.coef == 0 else (),
    )


def parameter_groups(args: PPOConfig, policy: ActorCritic) -> list[ParamGroup]:
    """Parameter groups of the policy, a separate critic's trunk and the value head, each with its learning rate."""
    critic, rate = policy.critic, args.optim.lr
    trunk, head = ([], []) if critic is None else critic.own_parameters()
    shared = set(trunk)  # a critic's adapter is among the policy's modules
    parts = [("lr", [p for p in trainable(policy.lm) if p not in shared], rate)]
    parts += [("trunk_lr", trunk, args.critic.trunk_lr or rate), ("value_lr", head, args.critic.lr)]
    groups: list[ParamGroup] = [
        {"params": params, "lr": lr, "metric": metric, "weight_decay": args.optim.weight_decay}
        for metric, params, lr in parts
    ]
    return [group for group in groups if group["params"]]


def build_objective(args: PPOConfig) -> Objective:
    """Build the objective of a run's updates; the trainer sets its KL coefficient before each."""
    kl, off_policy = args.kl, args.off_policy
    interpolation = Interpolation(off_policy.correct, *off_policy.bounds)
    options: dict[str, Any] = {
        **args.ppo.objective(args.critic),
        "kl_estimator": kl.estimator if kl.place == "loss" and kl.estimator != "full" else None,
        "horizon": args.rollout.max_new_tokens,
        "value_horizon": args.env.max_turns if args.advantage.unit == "turn" else None,
        "interpolation": interpolation if off_policy.proximal == "interpolated" else None,
    }
    return objective_of(args.ppo.loss, args.ppo.kwargs, options, args.ppo.divergence_limit)
