"""The policy that is trained: a language model with its adapter and critic, checked, built and saved."""

from __future__ import annotations

import os
from pathlib import Path
from shutil import which
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tokencredit.errors import ConfigError
from tokencredit.learn.state import trainable
from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.adapters import build_adapter
from tokencredit.text.models.checks import check_checkpointing, check_critic
from tokencredit.text.models.critic import build_critic, build_trunk
from tokencredit.text.models.parts import width


def build_policy(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    model: ModelConfig,
    critic: CriticConfig,
    peft_config: Any = None,
) -> tuple[ActorCritic, list[str]]:
    """The model that is trained, `lm` with its adapter and its critic, and what there is to say of the critic.

    `peft_config`, if given, takes the place of `model.lora`.

    Raises:
        ConfigError: a critic that cannot be loaded or has another vocabulary, an adapter that fits no layer or would
            not be trained, or no compiler where one is needed.
    """
    check_compiler(model)
    trunk = build_trunk(critic, model, lm, tokenizer)
    adapter = build_adapter(lm, model, peft_config)
    values, notes = build_critic(critic, model, lm, trunk)
    if trunk is not None:
        check_critic(critic.name or model.name, ActorCritic(lm, values))
    if model.gradient_checkpointing:
        for part in filter(None, (lm, trunk)):
            enable_checkpointing(part)
        if not model.dropout:
            check_checkpointing(model.name, ActorCritic(lm))
    return ActorCritic(lm, values, adapter=adapter, compiled=model.compile), notes


def enable_checkpointing(model: PreTrainedModel) -> None:
    """Let a model compute activations twice to hold fewer of them.

    Raises:
        ConfigError: its code cannot.
    """
    # Newer versions of Transformers warn about the older name.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(f"model.gradient_checkpointing is true: {error} Leave it out") from error


def check_compiler(model: ModelConfig) -> None:
    """Raise `ConfigError` if `model.compile` has no compiler to use."""
    compiler = os.environ.get("CXX", "g++")
    if model.compile and not (torch.cuda.is_available() or which(compiler)):
        raise ConfigError(
            f"model.compile needs a C++ compiler, and there is no {compiler!r}; install g++, or leave it out"
        )


def check_trained(name: str, policy: ActorCritic) -> None:
    """Raise `ConfigError` if no parameter of the policy would be trained."""
    if not trainable(policy.lm):
        raise ConfigError(
            f"no parameter of the model {name!r} requires a gradient, so nothing would be trained: all are frozen; "
            "call requires_grad_(True) on the model, or train an adapter (model.lora.rank, peft_config)"
        )


def skip_draws(lm: PreTrainedModel, models: int) -> None:
    """Draw from PyTorch's global generator what one-layer heads of so many models would take.

    Models that need no values had such heads once; without their draws every seed would begin with another critic.
    """
    torch.empty(models * (width(lm) + 1)).uniform_()


def save_policy(folder: Path, policy: ActorCritic, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write an ordinary Hugging Face folder (of an adapter, if there is one), with the critic beside it."""
    if policy.adapter is None:
        policy.lm.save_pretrained(folder)
    else:
        policy.adapter.save(folder)
    tokenizer.save_pretrained(folder)
    if policy.critic is not None:
        policy.critic.save(folder)
