"""A run's models from their configurations alone: with random weights, or on fake tensors with none."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from tokencredit.learn.training_mode import disable_noise
from tokencredit.settings.model import ModelConfig
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.adapters import add_adapter, lora_config
from tokencredit.text.models.architecture import attention_of, cut_layers, layer_limit, trunk_of
from tokencredit.text.models.critic import build_critic, saved_start
from tokencredit.text.models.model_loading import as_config_error, base_model, fuse_gelu, resolve
from tokencredit.text.models.peft_models import saved_config
from tokencredit.text.models.precision import round_frozen
from tokencredit.text.models.run_models import enable_checkpointing
from tokencredit.tools.plan.work import Work, base_config


def build_skeletons(work: Work, layers: int | None = None) -> tuple[ActorCritic, ActorCritic | None]:
    """The policy with its adapter and critic, and the reference model if it is one of its own.

    Tensors are on PyTorch's default device, of the current fake tensor mode if there is one.

    Args:
        work: the run.
        layers: number of layers of the policy; critics have no more. None for all.

    Raises:
        ConfigError: an adapter matches no layer, the critic cannot be built, or the model is no causal language model.
    """
    config, sizes = work.config, work.lm_config if layers is None else shortened(work.lm_config, layers)
    lm, reference, adapter = causal_lm(sizes, config.model), None, adapter_config(config.model)
    if config.kl.coef > 0 and adapter is None:
        reference = ActorCritic(causal_lm(sizes, config.model)).requires_grad_(False)
        if work.half and not work.sharded:
            round_frozen(reference.lm)
    members = config.critic.members if config.critic.kind == "separate" else 0
    trunks = [critic_trunk(work, sizes, layers) for _ in range(members)]
    if adapter is not None:
        add_adapter(lm, adapter, "model.lora")
        if work.half and work.device == "cuda" and not work.sharded:
            round_frozen(lm)
    if config.model.gradient_checkpointing:
        for part in (lm, *trunks):
            enable_checkpointing(part)
    tap = config.critic.layers if layers is None or config.critic.layers is None else min(layers, config.critic.layers)
    init = "zeros" if config.critic.init == "saved" else config.critic.init
    critic, _ = build_critic(replace(config.critic, name=None, init=init, layers=tap), config.model, lm, trunks)
    return ActorCritic(lm, critic), reference


def causal_lm(sizes: Any, args: ModelConfig, kind: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """A language model of this configuration, or a trunk, prepared as a loaded one is."""
    with as_config_error(f"a language model from {args.name!r}"):
        # A copy, since cutting a trunk's layers changes its configuration.
        sizes = copy.deepcopy(sizes)
        model: PreTrainedModel = kind.from_config(sizes, dtype=torch.float32, trust_remote_code=args.trust_remote_code)
    fuse_gelu(model)
    disable_noise(model, dropout=not args.dropout)
    model.eval()
    return model


def adapter_config(args: ModelConfig) -> Any:
    """The PEFT configuration of the trained adapter; None if the whole model is trained."""
    if args.lora.rank:
        return lora_config(args.lora)
    folder = resolve(args.name, "policy")
    return None if args.adapter == "merge" or base_model(args.name, folder) is None else saved_config(folder)


def critic_trunk(work: Work, policy: Any, layers: int | None) -> PreTrainedModel:
    """The trunk of a separate critic: a saved one's, the one of `critic.name`, or the policy's."""
    args, model = work.config.critic, work.config.model
    saved = saved_start(args, model)
    if saved and saved[0].trunk is not None:
        trunk = causal_lm(base_config(model, str(saved[0].trunk)), model, AutoModel)
    elif args.name is not None:
        trunk = causal_lm(base_config(model, args.name), model, AutoModel)
    else:
        trunk = trunk_of(causal_lm(policy, model))
    limit = layer_limit(args.layers, trunk) or trunk.config.get_text_config().num_hidden_layers
    cut_layers(trunk, limit if layers is None else min(layers, limit))
    for module in attention_of(trunk) if args.freeze == "attention" else ():
        module.requires_grad_(False)
    return trunk


def shortened(config: Any, layers: int) -> Any:
    """A model's configuration with its first layers only."""
    config = copy.deepcopy(config)
    text, count = config.get_text_config(), config.get_text_config().num_hidden_layers
    for key, value in list(vars(text).items()):  # such as layer_types
        if "layer" in key and isinstance(value, list) and len(value) == count:
            setattr(text, key, value[:layers])
    text.num_hidden_layers = layers
    return config
