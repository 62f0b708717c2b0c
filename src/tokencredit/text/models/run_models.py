"""Build a run's models from its configuration: policy, critic and reference, before training and after it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tokencredit.distributed.processes import Processes
from tokencredit.distributed.sharding import is_sharded
from tokencredit.errors import ConfigError
from tokencredit.learn.rng import preserved
from tokencredit.runs.resuming import started_from
from tokencredit.settings.model import CriticConfig, LoraConfig, ModelConfig
from tokencredit.settings.source import Source
from tokencredit.settings.text import PPOConfig
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.building import build_policy, check_trained, skip_draws
from tokencredit.text.models.critic import saved_critics
from tokencredit.text.models.model_checks import check_policy
from tokencredit.text.models.model_loading import (
    check_language_model,
    check_origin,
    fingerprint,
    load_language_model,
    load_tokenizer,
    max_prompt_length,
)
from tokencredit.text.models.peft_models import adopt, attached, merge, on_head
from tokencredit.text.models.precision import Precision, choose_precision, round_frozen
from tokencredit.text.models.sharded_loading import Sharding, distributed_config


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


def name_of(model: torch.nn.Module) -> str:
    """The name or folder that a model was loaded from; empty if it was not."""
    return str(getattr(getattr(model, "config", None), "_name_or_path", ""))


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
        lm = adopt(model)
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
    lm = merged(args.model, lm)
    adapted = bool(args.model.lora.rank) or peft_config is not None or attached(lm) is not None
    args.check_offload(adapted=adapted)
    reference = None
    if args.kl.coef > 0 and not adapted:
        reference = ActorCritic(copied(lm, args.model, tokenizer, sharding), compiled=args.model.compile)
    skip_draws(lm, models=1 if reference is None else 2)
    policy, notes = build_policy(lm, tokenizer, args.model, args.critic, peft_config, sharding)
    check_trained(args.model.name, policy)
    _place(policy, precision.device)
    if reference is None and args.kl.coef > 0:
        switches = policy.adapter is not None and policy.adapter.hold_reference()
        if not switches and sharding is not None:
            raise ConfigError(
                "run.shard is full, and the reference model cannot be the policy with its adapter switched off, since "
                "more than the adapter is trained; freeze the rest, or set kl.coef: 0"
            )
        reference = policy if switches else ActorCritic(deepcopy(policy.lm), compiled=args.model.compile)
    if reference is not None and reference is not policy:
        reference.requires_grad_(False)
        if sharding is not None:
            sharding.of_frozen().apply(reference.lm)
        _place(reference, precision.device)
    if sharding is not None and named and distributed_config() is None:
        notes.append(
            "run.shard full: this version of Transformers loads models whole, before each process keeps its part"
        )
    if precision.bfloat16 and sharding is None:
        if reference is not None and reference is not policy:
            round_frozen(reference.lm)
        adapter, on_gpu = policy.adapter, precision.device.type == "cuda"
        autocast = args.rollout.engine != "continuous"  # Transformers calls it in a thread without autocast
        if named and on_gpu and autocast and adapter is not None and adapter.adds and not adapter.whole:
            round_frozen(policy.lm)
    in_step = sharding.processes if sharding is not None and args.sharding.sampling == "layers" else None
    return Models(policy, reference, tokenizer, precision, [*precision.notes, *notes], in_step)


def _place(model: ActorCritic, device: torch.device) -> None:
    """Move a model to the compute device, except for sharded modules, which are there or offloaded."""
    if not is_sharded(model.lm):
        model.to(device)
    elif model.critic is not None:
        for member in model.critic.members:
            member.head.to(device)


def copied(
    lm: PreTrainedModel, args: ModelConfig, tokenizer: PreTrainedTokenizerBase, sharding: Sharding | None
) -> PreTrainedModel:
    """A copy of a model for the reference; a sharded one is loaded again, since it cannot be copied."""
    if sharding is None or not is_sharded(lm):
        return deepcopy(lm)
    with preserved():
        return load_language_model(args, tokenizer, sharding.of_frozen())[0]


def load_source(source: Source, which: str, processes: Processes, *, reference: bool = False) -> Models:
    """Load a run's or a named model to sample from, without a critic.

    Args:
        source: the model.
        which: `policy`, `best`, or `base` for the model that the run started from; a named model is `policy`.
        processes: the job.
        reference: also load the reference model, if the run has one.

    Raises:
        ConfigError: the model cannot be loaded, or is not a run and `which` asks for another of the run's models.
    """
    args = source.config
    if source.run is not None:
        return load_run_models(source.run, args, which, processes, reference=reference)
    if which != "policy":
        raise ConfigError(f"--{which} needs a run; {source.name!r} is a model")
    with preserved():
        lm, tokenizer = load_start(args.model)
        precision = choose_precision(args.model.dtype, processes, None)
        policy, notes = build_policy(lm, tokenizer, args.model, CriticConfig(kind="none"))
    policy.requires_grad_(False).to(precision.device)
    return Models(policy, None, tokenizer, precision, notes)


def with_reference(models: Models, reference: Source, processes: Processes) -> Models:
    """The models with the policy of another source as the reference model.

    Raises:
        ConfigError: it cannot be loaded, or has other ids for the policy's tokens.
    """
    other = load_source(reference, "policy", processes)
    ids, own = other.tokenizer.get_vocab(), models.tokenizer.get_vocab()
    different = {token: i for token, i in own.items() if ids.get(token) != i}
    if different:
        token, i = min(different.items(), key=lambda item: item[1])
        raise ConfigError(
            f"--reference is {reference.name!r}, whose tokenizer has other ids for {len(different)} of the model's "
            f"{len(own)} tokens, such as {ids.get(token)} for {token!r}, which is {i} in the model; give a reference "
            "with the same vocabulary"
        )
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

    Args:
        run: the run's folder.
        args: the run's configuration.
        which: `policy`, `best`, or `base` for the model that the run started from.
        processes: the job.
        reference: also load the reference model, if the run has one; if that fails, a note says why.
        critic: also load the critic, if the run has one.

    Raises:
        ConfigError: the policy, the critic or the model that the run started from is missing.
    """
    if which != "base" and not (run / which).is_dir():
        raise ConfigError(
            f"{str(run)!r} has no {which}/; a run writes policy/ at its end, and best/ with eval.every; "
            "base (--base) is the model that it started from"
        )
    # A trained adapter is loaded from its folder, so no new one is made, and nothing is trained here.
    plain = replace(args.model, lora=LoraConfig(), gradient_checkpointing=False, compile=False)
    model = plain if which == "base" else replace(plain, name=str(run / which), adapter="continue")
    name = model.name
    values = args.critic if which == "base" else replace(args.critic, name=None, init="saved")
    if not critic:
        values = CriticConfig(kind="none")
    if critic and which != "base" and values.kind != "none" and (have := len(saved_critics(name))) != values.members:
        raise ConfigError(
            f"{name!r} has {have or 'no'} critic, though critic.kind of the run is {values.kind} and critic.members "
            f"{values.members}; its files are incomplete"
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
    """The model that a run started from, and its tokenizer.

    Raises:
        ConfigError: it cannot be loaded, or `model.name` now names another model.
    """
    try:
        lm, tokenizer = load_start(model)
        origin = started_from(run)
        if origin is not None:
            check_origin(origin, fingerprint(lm, tokenizer) | {"given": origin["given"]}, model.name)
        return merged(model, lm), tokenizer
    except ConfigError as error:
        raise ConfigError(
            f"the model that {str(run)!r} started from cannot be loaded by its model.name, {model.name!r} (a model "
            f"that was loaded in Python must be evaluated from Python): {error}"
        ) from error
