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
from tokencredit.text.models.model_loading import as_config_error, check_vocabulary, load_model, load_tokenizer, resolve
from tokencredit.text.models.peft_models import attached, plain_decoder, saved_config
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
    check_compiler(model)
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

    def trunk(number: int) -> PreTrainedModel:
        """The trunk of a member, with all of its layers."""
        if saved and saved[0].trunk is not None:
            return load_saved_trunk(saved[number], lm, model, sharding)
        if args.name is not None:
            return load_trunk(args.name, model, sharding)
        return copied_trunk(lm, model, sharding)

    trunks = [trunk(number) for number in range(len(saved) if saved and saved[0].trunk is not None else 1)]
    if saved and saved[0].trunk is not None:
        check_kept_layers(args, name, trunks[0])
    _cut(trunks[0], args)
    if args.name is not None or saved:
        check_vocabulary(name, trunks[0], tokenizer)
        check_same_tokens(name, tokenizer, model)
    for number in range(len(trunks), args.members):
        copies = not is_sharded(trunks[0])  # a sharded module cannot be copied, but loaded again
        trunks.append(deepcopy(trunks[0]) if copies else trunk(0))
        _cut(trunks[number], args)
    if args.freeze == "attention":
        for member in trunks:
            freeze_attention(member)
    return trunks


def _cut(trunk: PreTrainedModel, args: CriticConfig) -> None:
    """Truncate a trunk to `critic.layers`, in place."""
    layers = layer_limit(args.layers, trunk)
    if layers is not None:
        cut_layers(trunk, layers)


def copied_trunk(lm: PreTrainedModel, model: ModelConfig, sharding: Sharding | None) -> PreTrainedModel:
    """A copy of the policy's trunk, with its adapter merged if it has one; a sharded one is loaded again.

    Raises:
        ConfigError: the policy is sharded and has an adapter.
    """
    if sharding is None or not is_sharded(lm):
        return plain_decoder(lm)
    if attached(lm) is not None:
        raise ConfigError(
            f"run.shard is full, and a separate critic would begin as {model.name!r} with its adapter merged; with "
            "sharded weights give a full model as critic.name, or set run.shard: none"
        )
    return load_model(AutoModelForCausalLM, model.name, resolve(model.name, "policy"), model, sharding, trunk=True)


def load_trunk(name: str, model: ModelConfig, sharding: Sharding | None = None) -> PreTrainedModel:
    """Load the trunk of a model by name, sharded if there is a `sharding`.

    Raises:
        ConfigError: it cannot be loaded, or is an adapter.
    """
    folder = resolve(name, "policy")
    if saved_config(folder) is not None:
        raise ConfigError(
            f"critic.name is {name!r}, which holds an adapter instead of a critic's trunk; give a full model, "
            "or the policy/ of a run whose critic.kind was separate"
        )
    return load_model(AutoModel, name, folder, model, sharding)


def load_saved_trunk(
    saved: SavedCritic, lm: PreTrainedModel, model: ModelConfig, sharding: Sharding | None = None
) -> PreTrainedModel:
    """Load the trunk of a saved critic, sharded if there is a `sharding`.

    Raises:
        ConfigError: it cannot be loaded.
    """
    if saved.trunk is None:
        raise ConfigError(f"{str(saved.head)!r} has no trunk beside it; the files of {saved.name!r} are incomplete")
    # AutoModel would load a wrapper around trunks such as OPT's.
    trunk_class = type(trunk_of(lm))
    with as_config_error(f"a critic from {saved.name!r}"):
        config, _ = PreTrainedConfig.get_config_dict(saved.trunk)
    auto = trunk_class if trunk_class.__name__ in (config.get("architectures") or ()) else AutoModel
    return load_model(auto, saved.name, str(saved.trunk), model, sharding)


def check_kept_layers(args: CriticConfig, name: str, trunk: PreTrainedModel) -> None:
    """Raise `ConfigError` if the number of layers of a saved trunk differs from `critic.layers`."""
    count = trunk.config.get_text_config().num_hidden_layers
    if args.layers not in (None, count):
        raise ConfigError(
            f"critic.layers is {args.layers}, and the critic saved in {name!r} has {count} layers; "
            "leave critic.layers out"
        )


def freeze_attention(trunk: PreTrainedModel) -> None:
    """Freeze the attention modules of a trunk.

    Raises:
        ConfigError: it has none.
    """
    modules = attention_of(trunk)
    if not modules:
        raise ConfigError(
            f"critic.freeze is attention, and {type(trunk).__name__} has no module whose name ends in attn or "
            "attention; leave it out"
        )
    for module in modules:
        module.requires_grad_(False)


def check_same_tokens(name: str, tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> None:
    """Check that a critic's tokenizer, if its folder has one, maps the policy's tokens to the same ids.

    Raises:
        ConfigError: it does not.
    """
    folder = resolve(name, "policy")
    # A critic's folder may lack a tokenizer, from which some classes would make an empty one.
    files = ("tokenizer.json", "tokenizer_config.json")
    if not any(cached_file(folder, file, _raise_exceptions_for_missing_entries=False) for file in files):
        return
    ids = load_tokenizer(replace(model, name=name)).get_vocab()
    different = {token: i for token, i in tokenizer.get_vocab().items() if ids.get(token) != i}
    if different:
        token, i = min(different.items(), key=lambda item: item[1])
        raise ConfigError(
            f"critic.name is {name!r}, whose tokenizer has other ids for {len(different)} of the policy's "
            f"{len(tokenizer)} tokens, such as {ids.get(token)} for {token!r}, which is {i} in the policy; use a "
            "critic with the policy's vocabulary"
        )


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


def check_compiler(model: ModelConfig) -> None:
    """Raise `ConfigError` if `model.compile` is set and there is no compiler."""
    compiler = os.environ.get("CXX", "g++")
    if model.compile and not (torch.cuda.is_available() or which(compiler)):
        raise ConfigError(
            f"model.compile needs a C++ compiler, and {compiler!r} was not found; install g++, or leave it out"
        )


def check_trained(name: str, policy: ActorCritic) -> None:
    """Raise `ConfigError` if no parameter of the policy is trainable."""
    if not trainable(policy.lm):
        raise ConfigError(
            f"no parameter of the model {name!r} requires a gradient, so nothing would be trained; "
            "call requires_grad_(True) on the model, or train an adapter (model.lora.rank, peft_config)"
        )


def skip_draws(lm: PreTrainedModel, models: int) -> None:
    """Advance PyTorch's global generator by the weights of one linear value head per model.

    Earlier versions created these unused heads; skipping their draws would change every seed's critic.
    """
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
