"""What a run needs before its first iteration: its prompts, and the models that it trains and compares with."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tokencredit.errors import ConfigError
from tokencredit.learn.optim import build_optimizer, hidden_matrices
from tokencredit.learn.state import trainable
from tokencredit.settings.text import PPOConfig
from tokencredit.text.data.prompts import Prompts, load_prompts
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.loading import build_actor_critic, room_for_prompts

if TYPE_CHECKING:
    from tokencredit.text.data.datasets import Rows


@dataclass(frozen=True)
class Models:
    """What is trained and what it is compared with."""

    policy: ActorCritic
    reference: ActorCritic | None
    """The policy itself, whose adapter is then switched off, where only an adapter is trained."""
    model: nn.Module
    """The policy as Accelerate wraps it, for passes with gradients."""
    optimizer: torch.optim.Optimizer


def check_batch_size(args: PPOConfig, processes: int) -> None:
    """Raise `ConfigError` unless the processes can share a batch."""
    if args.rollout.batch_size % (processes * args.rollout.per_prompt):
        raise ConfigError(
            f"rollout.batch_size is {args.rollout.batch_size}; it must be a multiple of {processes} processes times "
            f"rollout.per_prompt, {args.rollout.per_prompt}"
        )


def prepare_prompts(
    args: PPOConfig,
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train_dataset: Rows | None,
    eval_dataset: Rows | None,
) -> tuple[Prompts, Prompts]:
    """Prompts for training and, which may be the same, for evaluation."""
    held_out = args.eval.prompts is not None or eval_dataset is not None
    longest = args.rollout.max_new_tokens
    if args.eval.every and not held_out:
        longest = max(longest, args.eval.max_new_tokens)
    budget = args.ppo.micro_batch_tokens
    room = room_for_prompts(lm, longest, budget)
    prompts = load_prompts(args.prompts, tokenizer, seed=args.seed, room=room, dataset=train_dataset)
    if not held_out:
        return prompts, prompts
    eval_prompts = load_prompts(
        args.eval.prompts or args.prompts,
        tokenizer,
        seed=args.seed,
        room=room_for_prompts(lm, args.eval.max_new_tokens, budget),
        dataset=eval_dataset,
        group="eval.prompts",
        dataset_name="eval_dataset",
    )
    return prompts, eval_prompts


def prepare_models(
    args: PPOConfig, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, peft_config: Any, accelerator: Accelerator
) -> Models:
    """Policy with critic, reference and optimizer, where the accelerator wants them."""
    adapted = bool(args.model.lora.rank) or peft_config is not None
    base = ActorCritic(deepcopy(lm), compiled=args.model.compile) if args.kl.coef > 0 and not adapted else None
    policy = build_actor_critic(lm, tokenizer, args.model, peft_config).to(accelerator.device)
    reference = None
    if base is not None:
        reference = base.requires_grad_(False).to(accelerator.device)
    elif args.kl.coef > 0:
        reference = policy
    parts = ((policy.lm, args.optim.lr), (policy.critic_parts(), args.optim.value_lr))
    optimizer = build_optimizer(
        [{"params": trainable(p), "lr": lr, "weight_decay": args.optim.weight_decay} for p, lr in parts],
        args.optim.name,
        hidden=hidden_matrices(lm, exclude=lm.get_output_embeddings().parameters()),
        eps=args.optim.eps,
    )
    model, prepared = accelerator.prepare(policy, optimizer)
    return Models(policy, reference, model, prepared)
