"""From a configuration to a run's models: policy, critic and reference, at its start and after its end."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tokencredit.errors import ConfigError
from tokencredit.learn.rng import preserved
from tokencredit.processes import Processes
from tokencredit.runs.resuming import started_from
from tokencredit.settings.model import CriticConfig, LoraConfig, ModelConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.text.engines.local import LocalEngine
from tokencredit.text.engines.static import StaticDecoding
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.building import build_policy, check_trained, skip_draws
from tokencredit.text.models.checks import check_policy, static_decoding
from tokencredit.text.models.critic import saved_critics
from tokencredit.text.models.loading import (
    check_language_model,
    check_origin,
    end_ids,
    fingerprint,
    load_language_model,
    load_tokenizer,
)
from tokencredit.text.models.parts import width
from tokencredit.text.models.peft_models import attached, merge, on_head, take_over
from tokencredit.text.models.precision import Precision, choose, round_frozen


@dataclass(frozen=True)
class Models:
    """A policy, the model it is compared with, and how both are run."""

    policy: ActorCritic
    reference: ActorCritic | None
    """The policy itself, whose adapter is then switched to its start, where only an adapter is trained."""
    tokenizer: PreTrainedTokenizerBase
    precision: Precision
    decoding: StaticDecoding | None
    """Sampling with a static cache; None with one that grows."""
    notes: list[str]
    """What `auto` stands for, and where the critic comes from, if that is worth saying."""

    def engine(self, budget: int | None) -> LocalEngine:
        """The local engine for the policy."""
        ends = end_ids(self.policy.lm, self.tokenizer)
        return LocalEngine(self.policy, self.tokenizer, ends, self.precision, budget, self.decoding)


def name_of(model: torch.nn.Module) -> str:
    """The name that a model from Python was loaded by; empty if it never was."""
    return str(getattr(getattr(model, "config", None), "_name_or_path", ""))


def load_start(
    args: PPOConfig, model: str | torch.nn.Module | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The language model that training starts from, and its tokenizer; a loaded model is taken as it is.

    An adapter that the model has is on its layers; `merged` adds it to the weights.
    """
    if model is None or isinstance(model, str):
        lm, tokenizer = load_language_model(args.model, tokenizer)
    else:
        lm = take_over(model)
        tokenizer = tokenizer or load_tokenizer(args.model)
        check_language_model(args.model, lm, tokenizer)
    if args.model.adapter == "merge" and attached(lm) is None:
        raise ConfigError(f"model.adapter is merge, and {args.model.name!r} has no adapter; leave it out")
    if args.model.adapter == "merge":  # the merged model is checked
        return lm, tokenizer
    if attached(lm) is not None and on_head(lm):
        raise ConfigError(
            f"the adapter of {args.model.name!r} is on the output projection too, where it would be ignored; "
            "set model.adapter: merge"
        )
    check_policy(args.model.name, lm)
    return lm, tokenizer


def merged(args: ModelConfig, lm: PreTrainedModel) -> PreTrainedModel:
    """The model with the adapter that it starts from added to its weights, if the configuration asks for that."""
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
) -> Models:
    """The policy with its critic, and the reference model, on the device of the passes.

    A new critic draws its weights from PyTorch's global generator. In bfloat16 the weights of frozen products are
    rounded: the reference model's, and on a GPU those under LoRA if the model was `named` and so belongs to the run.

    Raises:
        ConfigError: a critic or an adapter that cannot be used, or no parameter of the policy is trained.
    """
    lm = merged(args.model, lm)
    adapted = bool(args.model.lora.rank) or peft_config is not None or attached(lm) is not None
    reference = ActorCritic(deepcopy(lm), compiled=args.model.compile) if args.kl.coef > 0 and not adapted else None
    skip_draws(lm, models=1 if reference is None else 2)
    policy, notes = build_policy(lm, tokenizer, args.model, args.critic, peft_config)
    check_trained(args.model.name, policy)
    policy.to(precision.device)
    if reference is None and args.kl.coef > 0:
        switches = policy.adapter is not None and policy.adapter.hold_reference()
        reference = policy if switches else ActorCritic(deepcopy(policy.lm), compiled=args.model.compile)
    if reference is not None and reference is not policy:
        reference.requires_grad_(False).to(precision.device)
    decoding, more = choose_decoding(args, policy, precision)
    if precision.half:
        if reference is not None and reference is not policy:
            round_frozen(reference.lm)
        adapter, on_gpu = policy.adapter, precision.device.type == "cuda"
        if named and on_gpu and adapter is not None and adapter.adds and not adapter.whole:
            round_frozen(policy.lm)
    return Models(policy, reference, tokenizer, precision, decoding, [*precision.notes, *notes, *more])


def choose_decoding(
    args: PPOConfig, policy: ActorCritic, precision: Precision
) -> tuple[StaticDecoding | None, list[str]]:
    """Decoding with a static cache if `rollout.cache` asks for it, and notes; `auto` takes it on a GPU.

    Raises:
        ConfigError: `static` was asked for, and the model cannot be sampled so.
    """
    cache = args.rollout.cache
    if cache == "dynamic" or (cache == "auto" and precision.device.type != "cuda"):
        return None, []
    decoding = static_decoding(policy, precision, compiled=args.model.compile)
    if not isinstance(decoding, str):
        return decoding, []
    if cache == "static":
        raise ConfigError(f"rollout.cache is static, which cannot be had: {decoding}; set it to dynamic")
    return None, [f"rollout.cache auto: dynamic, which is slower on a GPU, since {decoding}"]


def load_run_models(
    run: Path, args: PPOConfig, which: str, processes: Processes, *, reference: bool = False, critic: bool = False
) -> Models:
    """The models of a run that has ended, on its device and in its dtype.

    Args:
        run: its folder.
        args: its configuration.
        which: `policy`, `best`, or `base` for the model that it started from.
        processes: the job.
        reference: also load the reference model, if the run has one; a note says so if it cannot be had.
        critic: also load the critic, if the run has one.

    Raises:
        ConfigError: the run has no such policy, or not the critic that it should have, or the model it started from
            cannot be had any more.
    """
    if which != "base" and not (run / which).is_dir():
        raise ConfigError(
            f"{str(run)!r} has no {which}/; a run writes policy/ at its end, and best/ with eval.every; "
            "base (--base) is the model that it started from"
        )
    # Once trained, an adapter belongs to its folder, and nothing is trained here.
    plain = replace(args.model, lora=LoraConfig(), gradient_checkpointing=False, compile=False)
    own = plain if which == "base" else replace(plain, name=str(run / which), adapter="continue")
    name = own.name
    values = args.critic if which == "base" else replace(args.critic, name=None, init="saved")
    if not critic:
        values = CriticConfig(kind="none")
    if critic and which != "base" and values.kind != "none" and (have := len(saved_critics(name))) != values.members:
        raise ConfigError(
            f"{name!r} has {have or 'no'} critic, though critic.kind of the run is {values.kind} and critic.members "
            f"{values.members}; its files are incomplete"
        )
    with preserved():
        lm, tokenizer = _load_base(run, args, plain) if which == "base" else load_start(replace(args, model=own))
        precision = choose(args.model.dtype, width(lm), processes, run)
        base, notes = None, []
        if reference and args.kl.coef > 0:
            try:
                base = ActorCritic(_load_base(run, args, plain)[0]).requires_grad_(False).to(precision.device)
            except ConfigError as error:
                notes = [f"no KL to the model that the run started from: {error}"]
        policy, more = build_policy(lm, tokenizer, own, values)
    policy.requires_grad_(False).to(precision.device)
    decoding, last = choose_decoding(replace(args, model=own), policy, precision)
    return Models(policy, base, tokenizer, precision, decoding, [*notes, *more, *last])


def _load_base(run: Path, args: PPOConfig, model: ModelConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model that a run started from, and its tokenizer.

    Raises:
        ConfigError: the name leads to another model by now, as it may for one that was loaded in Python.
    """
    try:
        lm, tokenizer = load_start(replace(args, model=model))
        origin = started_from(run)
        if origin is not None:
            check_origin(origin, fingerprint(lm, tokenizer) | {"given": origin["given"]}, model.name)
        return merged(model, lm), tokenizer
    except ConfigError as error:
        raise ConfigError(
            f"the model that {str(run)!r} started from cannot be had by its model.name, {model.name!r} (one that was "
            f"loaded in Python has to be measured there): {error}"
        ) from error
