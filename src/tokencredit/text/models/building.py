"""The policy that is trained: a language model with its adapter and critic, checked, built and saved."""

from __future__ import annotations

import os
from pathlib import Path
from shutil import which
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tokencredit.errors import ConfigError
from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.text.models.actor_critic import ActorCritic, positions
from tokencredit.text.models.critic import build_critic, build_trunk
from tokencredit.text.models.loading import add_adapter, lora_config, width


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
        ConfigError: a critic that cannot be loaded or has another vocabulary, an adapter that fits no layer, or no
            compiler where one is needed.
    """
    check_compiler(model)
    trunk = build_trunk(critic, model, lm, tokenizer)
    adapter = None
    if model.lora.rank or peft_config is not None:
        adapter = add_adapter(lm, peft_config or lora_config(model.lora))
    values, notes = build_critic(critic, model, lm, trunk)
    if model.gradient_checkpointing:
        for part in filter(None, (lm, trunk)):
            # Newer versions of Transformers warn about the older name.
            enable = getattr(part, "activation_checkpointing_enable", part.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
    return ActorCritic(lm, values, adapter=adapter, compiled=model.compile), notes


def check_compiler(model: ModelConfig) -> None:
    """Raise `ConfigError` if `model.compile` has no compiler to use."""
    compiler = os.environ.get("CXX", "g++")
    if model.compile and not (torch.cuda.is_available() or which(compiler)):
        raise ConfigError(
            f"model.compile needs a C++ compiler, and there is no {compiler!r}; install g++, or leave it out"
        )


@torch.no_grad()
def check_projection(name: str, lm: PreTrainedModel) -> None:
    """Make sure that hidden states and output projection give the very logits that the model itself gives.

    Raises:
        ConfigError: they do not, because the model scales or shapes its logits in a way of its own.
    """
    ids = torch.arange(min(4, lm.config.get_text_config().vocab_size), device=lm.device).unsqueeze(0)
    model = ActorCritic(lm)
    mask, position_ids = positions(torch.ones_like(ids, dtype=torch.bool), 0)
    ours = model.logits(model.hidden(ids, mask, position_ids))
    theirs = lm(input_ids=ids, attention_mask=mask).logits.float()
    if not torch.allclose(ours, theirs, atol=1e-3, rtol=1e-3):
        raise ConfigError(f"{name!r} shapes its logits in a way that is not supported: {type(lm).__name__}")


def skip_draws(lm: PreTrainedModel, models: int) -> None:
    """Draw from PyTorch's global generator what one-layer heads of so many models would take.

    Models that need no values had such heads once; without their draws every seed would begin with another critic.
    """
    torch.empty(models * (width(lm) + 1)).uniform_()


def save_policy(folder: Path, policy: ActorCritic, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write an ordinary Hugging Face folder (of an adapter, if there is one), with the critic beside it."""
    (policy.adapter or policy.lm).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if policy.critic is not None:
        policy.critic.save(folder)
