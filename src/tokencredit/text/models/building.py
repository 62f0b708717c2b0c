"""Build, check and save the trained policy: a language model with its adapter and critic."""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from shutil import which
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from tokencredit.distributed.sharding import is_sharded
from tokencredit.errors import ConfigError
from tokencredit.learn.state import trainable
from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.adapters import build_adapter
from tokencredit.text.models.architecture import attention_of, cut_layers, layer_limit, trunk_of, width
from tokencredit.text.models.critic import SavedCritic, build_critic, save_model, saved_start
from tokencredit.text.models.model_checks import check_checkpointing, check_critic
from tokencredit.text.models.model_loading import (
    as_config_error,
    check_same_ids,
    check_vocabulary,
    load_model,
    load_tokenizer,
    resolve,
)
from tokencredit.text.models.peft_models import attached, merge, saved_config
from tokencredit.text.models.sharded_loading import Sharding


def build_policy(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    model: ModelConfig,
    critic: CriticConfig,
    peft_config: Any = None,
    sharding: Sharding | None = None,
) -> tuple[ActorCritic, list[str]]:
    """The trained model, `lm` with its adapter and critic, and notes on the origin of the critic.

    A `peft_config` replaces `model.lora`. With `sharding`, trunks of critics are loaded sharded, or sharded if they and
    `lm` are whole.

    Raises:
        ConfigError: the critic cannot be loaded or has another vocabulary, the adapter matches no layer or would not be
            trained, or `model.compile` lacks a compiler.
    """
    compiler = os.environ.get("CXX", "g++")
    if model.compile and not (torch.cuda.is_available() or which(compiler)):
        raise ConfigError(
            f"model.compile needs a C++ compiler, and {compiler!r} was not found; install g++, or leave it out"
        )
    of_critic = sharding.of_frozen() if sharding is not None and critic.detach else sharding
    trunks = build_trunks(critic, model, lm, tokenizer, of_critic)
    for part, how in ((lm, sharding), *((trunk, of_critic) for trunk in trunks)):
        if how is not None:
            how.apply(part)
    adapter = build_adapter(lm, model, peft_config)
    values, notes = build_critic(critic, model, lm, trunks)
    if values is not None:
        check_critic(critic.name or model.name, ActorCritic(lm, values), critic.layers)
    if model.gradient_checkpointing:
        for part in (lm, *trunks):
            enable_checkpointing(part)
        if not model.dropout:
            check_checkpointing(model.name, ActorCritic(lm))
    return ActorCritic(lm, values, adapter=adapter, compiled=model.compile), notes


def build_trunks(
    args: CriticConfig,
    model: ModelConfig,
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sharding: Sharding | None = None,
) -> list[PreTrainedModel]:
    """The trunks of separate critics, one per member: saved ones, the one of `critic.name`, or the policy's copied.

    Raises:
        ConfigError: one cannot be loaded, has another vocabulary (by its tokenizer or, without one, by its size), has
            other layers than `critic.layers`, or has no attention to freeze.
    """
    if args.kind != "separate":
        return []
    name, saved = args.name or model.name, saved_start(args, model)
    own = bool(saved) and saved[0].trunk is not None

    def load(number: int) -> PreTrainedModel:
        """The trunk of a member, cut to `critic.layers`."""
        if own:
            trunk = load_saved_trunk(saved[number], lm, model, sharding)
        elif args.name is not None:
            trunk = load_trunk(args.name, model, sharding)
        else:
            trunk = copied_trunk(lm, model, sharding)
        count = trunk.config.get_text_config().num_hidden_layers
        if own and args.layers not in (None, count):
            raise ConfigError(
                f"critic.layers is {args.layers}, and the critic saved in {name!r} has {count} layers; leave it out"
            )
        if (layers := layer_limit(args.layers, trunk)) is not None:
            cut_layers(trunk, layers)
        return trunk

    trunks = [load(number) for number in range(len(saved) if own else 1)]
    if args.name is not None or saved:
        check_vocabulary(name, trunks[0], tokenizer)
        # A critic's folder may lack a tokenizer, from which some classes would make an empty one.
        folder, files = resolve(name), ("tokenizer.json", "tokenizer_config.json")
        if any(cached_file(folder, file, _raise_exceptions_for_missing_entries=False) for file in files):
            check_same_ids(f"critic.name is {name!r}", load_tokenizer(replace(model, name=name)), tokenizer)
    while len(trunks) < args.members:
        # A sharded module cannot be copied, but loaded again.
        trunks.append(load(0) if is_sharded(trunks[0]) else deepcopy(trunks[0]))
    for trunk in trunks if args.freeze == "attention" else ():
        if not (modules := attention_of(trunk)):
            raise ConfigError(
                f"critic.freeze is attention, and {type(trunk).__name__} has no module whose name ends in attn or "
                "attention; leave it out"
            )
        for module in modules:
            module.requires_grad_(False)
    return trunks


def copied_trunk(lm: PreTrainedModel, model: ModelConfig, sharding: Sharding | None) -> PreTrainedModel:
    """A copy of the policy's trunk, with its adapter merged if it has one; a sharded one is loaded again."""
    adapted = attached(lm) is not None
    if sharding is None or not is_sharded(lm):
        return trunk_of(merge(deepcopy(lm))) if adapted else deepcopy(trunk_of(lm))
    if adapted:
        raise ConfigError(
            f"run.shard is full, and a separate critic would begin as {model.name!r} with its adapter merged; with "
            "sharded weights give a full model as critic.name, or set run.shard: none"
        )
    return load_model(AutoModelForCausalLM, model.name, resolve(model.name), model, sharding, trunk=True)


def load_trunk(name: str, model: ModelConfig, sharding: Sharding | None = None) -> PreTrainedModel:
    """Load the trunk of a model by name."""
    folder = resolve(name)
    if saved_config(folder) is not None:
        raise ConfigError(
            f"critic.name is {name!r}, which holds an adapter instead of a critic's trunk; give a full model, "
            "or the policy/ of a run whose critic.kind was separate"
        )
    return load_model(AutoModel, name, folder, model, sharding)


def load_saved_trunk(
    saved: SavedCritic, lm: PreTrainedModel, model: ModelConfig, sharding: Sharding | None = None
) -> PreTrainedModel:
    """Load the trunk of a saved critic."""
    if saved.trunk is None:
        raise ConfigError(f"{str(saved.head)!r} has no trunk beside it; the files of {saved.name!r} are incomplete")
    # AutoModel would load a wrapper around trunks such as OPT's.
    trunk_class = type(trunk_of(lm))
    with as_config_error(f"a critic from {saved.name!r}"):
        config, _ = PreTrainedConfig.get_config_dict(saved.trunk)
    auto = trunk_class if trunk_class.__name__ in (config.get("architectures") or ()) else AutoModel
    return load_model(auto, saved.name, str(saved.trunk), model, sharding)


def enable_checkpointing(model: PreTrainedModel) -> None:
    """Switch on a model's gradient checkpointing.

    Raises:
        ConfigError: it does not support gradient checkpointing.
    """
    # Newer versions of Transformers deprecate the second name.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(f"model.gradient_checkpointing is true: {error} Leave it out") from error


def check_trained(name: str, policy: ActorCritic) -> None:
    """Raise `ConfigError` if no parameter of the policy is trainable."""
    if not trainable(policy.lm):
        raise ConfigError(
            f"no parameter of the model {name!r} requires a gradient, so nothing would be trained; "
            "call requires_grad_(True) on the model, or train an adapter (model.lora.rank, peft_config)"
        )


def skip_draws(lm: PreTrainedModel, models: int) -> None:
    """Advance PyTorch's global generator by one linear value head per model: every seed's critic depends on it."""
    torch.empty(models * (width(lm) + 1)).uniform_()


def save_policy(folder: Path, policy: ActorCritic, tokenizer: PreTrainedTokenizerBase, *, writes: bool = True) -> None:
    """Write a Hugging Face model or adapter folder, with the critic beside it.

    If the policy is sharded, every process must call this, and one of them `writes`; that one gathers each model in
    turn in the memory of its CPU.
    """
    if policy.adapter is None:
        save_model(folder, policy.lm, writes)
    critics = [] if policy.critic is None else list(enumerate(policy.critic.members, start=1))
    for number, critic in critics:
        critic.save_trunk(folder, number, writes)
    if not writes:  # what follows is not collective, so a failure leaves no other process in it
        return
    if policy.adapter is not None:
        policy.adapter.save(folder)
    tokenizer.save_pretrained(folder)
    for number, critic in critics:
        critic.save_head(folder, number)
