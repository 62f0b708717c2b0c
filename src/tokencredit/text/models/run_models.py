"""A run's models: built from its configuration, loaded after training, and saved."""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import which as find_program
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tokencredit.distributed.processes import Processes
from tokencredit.distributed.sharding import is_sharded
from tokencredit.errors import ConfigError, naming
from tokencredit.learn.rng import preserved
from tokencredit.learn.state import trainable
from tokencredit.learn.training_mode import has_dropout
from tokencredit.runs.folder import read_choices
from tokencredit.runs.resuming import started_from
from tokencredit.settings.model import CriticConfig, LoraConfig, ModelConfig
from tokencredit.settings.run_kind import ModelSource
from tokencredit.settings.text import PPOConfig
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.adapters import Adapter, build_adapter, enable_checkpointing
from tokencredit.text.models.architecture import width
from tokencredit.text.models.critic import build_critic, build_trunk, saved_critic, saved_start
from tokencredit.text.models.model_checks import check_checkpointing, check_critic, check_policy
from tokencredit.text.models.model_loading import (
    bars_on_terminals,
    check_language_model,
    check_origin,
    check_same_ids,
    fingerprint,
    load_language_model,
    load_tokenizer,
    max_prompt_length,
)
from tokencredit.text.models.peft_models import adopt, attached, check_adapted, merge, on_head
from tokencredit.text.models.precision import (
    Precision,
    check_quantised,
    choose_precision,
    quantised_layers,
    round_frozen,
)
from tokencredit.text.models.sharded_loading import Sharding, distributed_config, save_model


@dataclass(frozen=True)
class Models:
    """A policy, its reference model, and how both are run."""

    policy: ActorCritic
    reference: ActorCritic | None
    """A model of its own, or the policy itself with its adapter switched to the start of the run; None without KL."""
    tokenizer: PreTrainedTokenizerBase
    precision: Precision
    notes: list[str]
    """Lines for the user: resolved `auto` settings, and the origin of the critic."""
    in_step: Processes | None = None
    """Processes that sample in step, or make the full passes of a rollout in step, if `sharding.sampling` is layers."""


def load_start(
    args: ModelConfig,
    model: str | torch.nn.Module | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    sharding: Sharding | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The language model that training starts from, and its tokenizer.

    A loaded model is used as it is. An adapter stays on its layers until `merged` adds it to the weights. With
    `sharding` each process loads its part of a model that is not loaded yet.
    """
    if model is None or isinstance(model, str):
        lm, tokenizer = load_language_model(args, tokenizer, sharding)
    else:
        if args.quantization is not None:
            raise ConfigError(
                f"model.quantization is {args.quantization}, and model is a loaded one; give its name or folder, or "
                "load it with quantization_config=BitsAndBytesConfig(…) and leave the key out"
            )
        lm = adopt(model)
        if tokenizer is None and not args.name:
            raise ConfigError("the loaded model has no name to find its tokenizer by; pass it as processing_class")
        tokenizer = tokenizer or load_tokenizer(args)
        check_language_model(args, lm, tokenizer)
    if args.adapter == "merge" and attached(lm) is None:
        raise ConfigError(f"model.adapter is merge, and {args.name!r} has no adapter; leave it out")
    if args.adapter == "merge":  # the merged model is checked
        return lm, tokenizer
    if attached(lm) is not None and on_head(lm):
        raise ConfigError(
            f"the adapter of {args.name!r} adapts the output projection, where it would be ignored; "
            "set model.adapter: merge"
        )
    check_policy(args.name, lm)
    return lm, tokenizer


def merge_notes(args: ModelConfig, lm: PreTrainedModel) -> list[str]:
    """A note on a quantised model whose adapter `merged` adds to the weights."""
    if args.adapter == "continue" or not quantised_layers(lm):
        return []
    return [f"model.adapter merge: the weights of {args.name!r} are dequantised to float32, and the adapter is added"]


def merged(args: ModelConfig, lm: PreTrainedModel) -> PreTrainedModel:
    """The model, with its adapter merged into the weights if `model.adapter` is merge."""
    if args.adapter == "continue":
        return lm
    lm = merge(lm)
    check_policy(args.name, lm)
    return lm


def build_models(
    args: PPOConfig,
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    precision: Precision,
    peft_config: Any = None,
    named: bool = True,
    sharding: Sharding | None = None,
) -> Models:
    """The policy with its critic, and the reference model, on the compute device.

    A new critic draws its weights from PyTorch's global generator. In bfloat16 frozen matrix weights are rounded: the
    reference model's and, on a GPU, those under LoRA if the model was loaded by name and so belongs to the run. Weights
    that are sharded stay as they are.

    Raises:
        ConfigError: a critic or an adapter cannot be used, or no parameter of the policy is trainable.
    """
    notes = merge_notes(args.model, lm)
    lm = merged(args.model, lm)
    check_quantised(args, lm)
    adapted = bool(args.model.lora.rank) or peft_config is not None or attached(lm) is not None
    args.check_offload(adapted=adapted)
    # The reference model is a copy; of a sharded model, which cannot be copied, one that is loaded again.
    reference, compiled = None, args.model.compile
    if args.kl.coef > 0 and not adapted:
        with preserved():
            if sharding is None or not is_sharded(lm):
                copied = deepcopy(lm)
            else:
                copied, _ = load_language_model(args.model, tokenizer, sharding.of_frozen())
        reference = ActorCritic(copied, compiled=compiled)
    # One linear head per model is drawn in vain, since every seed's critic depends on it.
    torch.empty((1 if reference is None else 2) * (width(lm) + 1)).uniform_()
    policy, more = build_policy(lm, tokenizer, args.model, args.critic, peft_config, sharding)
    notes += more
    check_trained(args.model.name, policy)
    _place(policy, precision.device)
    if reference is None and args.kl.coef > 0:
        switches = policy.adapter is not None and policy.adapter.hold_reference()
        if not switches and sharding is not None:
            raise ConfigError(
                "run.shard is full, and the reference model cannot be the policy with its adapter switched off, since "
                "more than the adapter is trained; freeze the rest, or set kl.coef: 0"
            )
        reference = policy if switches else ActorCritic(deepcopy(policy.lm), compiled=compiled)
    if reference is not None and reference is not policy:
        reference.requires_grad_(False)
        if sharding is not None:
            sharding.of_frozen().apply(reference.lm)
        _place(reference, precision.device)
        if precision.bfloat16 and sharding is None:
            round_frozen(reference.lm)
    if sharding is not None and named and distributed_config() is None:
        notes.append(
            "run.shard full: this version of Transformers loads models whole, before each process keeps its part"
        )
    if precision.bfloat16 and sharding is None and named and _rounds_policy(args, policy, precision):
        round_frozen(policy.lm)
    in_step = sharding.processes if sharding is not None and args.sharding.sampling == "layers" else None
    return Models(policy, reference, tokenizer, precision, [*precision.notes, *notes], in_step)


def _rounds_policy(args: PPOConfig, policy: ActorCritic, precision: Precision) -> bool:
    """True if the weights under a policy's adapter can be in bfloat16: on a GPU, and where passes have autocast."""
    adapter, on_gpu = policy.adapter, precision.device.type == "cuda"
    autocast = args.rollout.engine != "continuous"  # Transformers calls it in a thread without autocast
    return on_gpu and autocast and adapter is not None and adapter.adds and not adapter.whole


def _place(model: ActorCritic, device: torch.device) -> None:
    """Move a model to the compute device, except for sharded modules, which are there or offloaded."""
    if not is_sharded(model.lm):
        model.to(device)
    elif model.critic is not None:
        model.critic.head.to(device)


def build_policy(
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    model: ModelConfig,
    critic: CriticConfig,
    peft_config: Any = None,
    sharding: Sharding | None = None,
) -> tuple[ActorCritic, list[str]]:
    """The trained model, `lm` with its adapter and critic, and notes on the origin of the critic.

    A `peft_config` replaces `model.lora`. With `sharding`, the critic's trunk is loaded sharded, or sharded if it and
    `lm` are whole.

    Raises:
        ConfigError: the critic cannot be loaded or has another vocabulary, the adapter matches no layer or would not be
            trained, or `model.compile` lacks a compiler.
    """
    compiler = os.environ.get("CXX", "g++")
    if model.compile and not (torch.cuda.is_available() or find_program(compiler)):
        raise ConfigError(
            f"model.compile needs a C++ compiler, and {compiler!r} was not found; install g++, or leave it out"
        )
    of_critic = sharding.of_frozen() if sharding is not None and critic.detach else sharding
    trunk = build_trunk(critic, model, lm, tokenizer, of_critic)
    for part, how in ((lm, sharding), (trunk, of_critic)):
        if part is not None and how is not None:
            how.apply(part)
    in_vain = model.dropout and not any(has_dropout(part) for part in (lm, trunk) if part is not None)
    adapter = build_adapter(lm, model, peft_config)
    if shares := bool(critic.lora.rank):
        add_critic(critic, model, adapter)
    values, notes = build_critic(critic, model, lm, trunk, adapter if shares else None)
    if in_vain:
        notes.append("model.dropout is true, which has no effect: the model has no dropout")
    if trunk is not None and critic.name is None and quantised_layers(lm) and saved_start(critic, model) is None:
        notes.append(
            "critic.kind separate: the critic begins as a whole, dequantised copy of the policy in float32; with "
            "critic.lora.rank it shares the quantised base"
        )
    if values is not None:
        check_critic(critic.name or model.name, ActorCritic(lm, values), critic.layers)
    if model.gradient_checkpointing:
        for part in filter(None, (lm, trunk)):
            enable_checkpointing(part, adapter if shares else None)
        if not model.dropout:
            check_checkpointing(model.name, ActorCritic(lm))
    return ActorCritic(lm, values, adapter=adapter, compiled=model.compile), notes


def add_critic(critic: CriticConfig, model: ModelConfig, adapter: Adapter | None) -> None:
    """Add the critic's adapter to those of the policy; `ConfigError` if the policy has none, and so no frozen base."""
    if adapter is None:
        raise ConfigError(
            f"critic.lora.rank is {critic.lora.rank}, and all weights of the policy are trained, so that there is no "
            "frozen base to share; set model.lora.rank, or leave it out"
        )
    if adapter.whole:
        raise ConfigError(
            f"critic.lora.rank is {critic.lora.rank}, and no folder holds the base below the policy's adapter, so that "
            "the critic could not be loaded again; save the merged model first (docs/serving.md), or leave it out"
        )
    saved = saved_start(critic, model)
    adapted = saved is not None and saved.adapted
    if critic.name is not None and not adapted:
        raise ConfigError(
            f"critic.lora.rank is {critic.lora.rank}, and critic.name is {critic.name!r}, whose critic has weights of "
            "its own, or none; give a run with critic.lora, or leave out one of the two"
        )
    adapter.add_critic(critic, saved.folder if saved is not None and adapted else None)


def check_trained(name: str, policy: ActorCritic) -> None:
    """Raise `ConfigError` if no parameter of the policy is trainable."""
    check_adapted(name, policy.lm)
    if not trainable(policy.lm):
        raise ConfigError(
            f"no parameter of the model {name!r} requires a gradient, so nothing would be trained; "
            "call requires_grad_(True) on the model, or train an adapter (model.lora.rank, peft_config)"
        )


def save_policy(
    folder: Path,
    policy: ActorCritic,
    tokenizer: PreTrainedTokenizerBase,
    beside: Path | None = None,
    *,
    writes: bool = True,
) -> None:
    """Write a Hugging Face model or adapter folder, and the critic into a folder `beside` it.

    Other programs read every weights file of a model's folder, so the critic has its own. If the policy is sharded,
    every process must call this, and one of them `writes`; that one gathers each model in turn in the memory of its
    CPU.
    """
    critic = None if beside is None else policy.critic
    with bars_on_terminals():
        if policy.adapter is None:
            save_model(folder, policy.lm, writes)
        if critic is not None and beside is not None:
            critic.save_trunk(beside, writes)
    if not writes:  # what follows is not collective, so a failure leaves no other process in it
        return
    if policy.adapter is not None:
        policy.adapter.save(folder)
    tokenizer.save_pretrained(folder)
    if critic is not None and beside is not None:
        critic.save_head(beside, tokenizer)


def load_source(
    source: ModelSource, which: str, processes: Processes, *, reference: bool = False, critic: bool = False
) -> Models:
    """Load a run's or a named model to sample from, with a run's critic if asked; arguments as in `load_run_models`.

    Raises:
        ConfigError: the model cannot be loaded, or is not a run and `which` asks for another of the run's models.
    """
    args = source.config
    if source.run is not None:
        return load_run_models(source.run, args, which, processes, reference=reference, critic=critic)
    if which != "policy":
        raise ConfigError(f"which is {which!r}, and only a run has that; {source.name!r} is a model")
    with preserved():
        lm, tokenizer = load_start(args.model)
        precision = choose_precision(args.model.dtype, processes, None)
        policy, notes = build_policy(lm, tokenizer, args.model, CriticConfig(kind="none"))
    policy.requires_grad_(False).to(precision.device)
    return Models(policy, None, tokenizer, precision, notes)


def with_reference(models: Models, reference: ModelSource, processes: Processes) -> Models:
    """The models with the policy of another source, of the same vocabulary, as the reference model."""
    with naming("--reference"):
        other = load_source(reference, "policy", processes)
    check_same_ids(f"--reference is {reference.name!r}", other.tokenizer, models.tokenizer)
    context, needed = (max_prompt_length(x.lm, 0) for x in (other.policy, models.policy))
    if context is not None and (needed is None or context < needed):
        raise ConfigError(
            f"--reference is {reference.name!r}, whose context has {context} tokens; it must have at least the "
            f"model's{'' if needed is None else f', {needed}'}"
        )
    return replace(models, reference=other.policy)


def load_run_models(
    run: Path, args: PPOConfig, which: str, processes: Processes, *, reference: bool = False, critic: bool = False
) -> Models:
    """Load the models of a finished run, on its device and in its dtype.

    `which` is `policy`, `best`, or `base` for the model that the run started from. With `reference` and `critic` these
    are loaded too, if the run has them; if that fails for the reference model, a note says why.

    Raises:
        ConfigError: the policy, the critic or the model that the run started from is missing.
    """
    if which != "base" and not (run / which).is_dir():
        raise ConfigError(
            f"{str(run)!r} has no {which}/; a run writes policy/ at its end, and best/ with eval.every; "
            "base (--base) is the model that it started from"
        )
    # A trained adapter is loaded from its folder, so no new one is made, and nothing is trained here.
    plain = replace(args.model, lora=LoraConfig(), dropout=False, gradient_checkpointing=False, compile=False)
    model = plain if which == "base" else replace(plain, name=str(run / which), adapter="continue")
    values = args.critic if critic else CriticConfig(kind="none")
    # The base has no adapter beside which the critic's could be, and a new critic has learned nothing yet.
    if which == "base" and (values.lora.rank or values.init != "saved" or saved_start(values, plain) is None):
        values = CriticConfig(kind="none")
    if which != "base" and values.ours:
        every = read_choices(run).get("critic.prefix_every", values.prefix_every)
        values = replace(values, name=None, init="saved", prefix_every=every)
        if saved_critic(model.name) is None:
            raise ConfigError(
                f"{model.name!r} has no critic, though critic.kind of the run is {values.kind}; its files are "
                "incomplete"
            )
    with preserved():
        lm, tokenizer = _load_base(run, plain) if which == "base" else load_start(model)
        precision = choose_precision(args.model.dtype, processes, run)
        base, notes = None, []
        if reference and args.kl.coef > 0:
            try:
                base = ActorCritic(_load_base(run, plain)[0]).requires_grad_(False).to(precision.device)
            except ConfigError as error:
                notes = [f"no KL to the model that the run started from: {error}"]
        policy, more = build_policy(lm, tokenizer, model, values)
    policy.requires_grad_(False).to(precision.device)
    return Models(policy, base, tokenizer, precision, [*notes, *more])


def _load_base(run: Path, model: ModelConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model that a run started from, and its tokenizer; `ConfigError` if `model.name` now names another."""
    try:
        lm, tokenizer = load_start(model)
        origin = started_from(run)
        if origin is not None:
            check_origin(origin, fingerprint(lm, tokenizer), model.name)
        return merged(model, lm), tokenizer
    except ConfigError as error:
        raise ConfigError(
            f"the model that {str(run)!r} started from cannot be loaded by its model.name, {model.name!r} (a model "
            f"that was loaded in Python must be evaluated from Python): {error}"
        ) from error
