"""From a configuration to the objects of a run: prompts, models, pipeline and learner."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tokencredit.errors import ConfigError
from tokencredit.learn.learner import Learner, UpdateSettings
from tokencredit.learn.objective import Objective, Passes, PolicyLoss, PolicyOutputs
from tokencredit.learn.optim import ParamGroup, build_optimizer, hidden_matrices, schedule
from tokencredit.learn.rng import preserved
from tokencredit.learn.state import trainable
from tokencredit.processes import Processes
from tokencredit.runs.resuming import started_from
from tokencredit.settings.fields import refuse_idle, shown
from tokencredit.settings.model import CriticConfig, LoraConfig, ModelConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.text.data.datasets import from_python
from tokencredit.text.data.prompts import Prompts, load_prompts
from tokencredit.text.engines.local import LocalEngine
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.building import build_policy, check_trained, skip_draws
from tokencredit.text.models.checks import check_policy
from tokencredit.text.models.critic import saved_critic
from tokencredit.text.models.loading import (
    check_language_model,
    check_origin,
    end_ids,
    fingerprint,
    load_language_model,
    load_tokenizer,
    room_for_prompts,
)
from tokencredit.text.models.parts import width
from tokencredit.text.models.peft_models import attached, merge, on_head, take_over
from tokencredit.text.models.precision import Precision, choose
from tokencredit.text.pipeline import Pipeline
from tokencredit.text.rewards.calls import Term
from tokencredit.text.rewards.terms import as_terms, build_terms

if TYPE_CHECKING:
    from tokencredit.text.data.datasets import Rows


@dataclass(frozen=True)
class Models:
    """A policy, the model it is compared with, and how both are run."""

    policy: ActorCritic
    reference: ActorCritic | None
    """The policy itself, whose adapter is then switched to its start, where only an adapter is trained."""
    tokenizer: PreTrainedTokenizerBase
    precision: Precision
    notes: list[str]
    """What `model.dtype: auto` stands for, and where the critic comes from, if that is worth saying."""

    def engine(self, budget: int | None) -> LocalEngine:
        """The local engine for the policy."""
        ends = end_ids(self.policy.lm, self.tokenizer)
        return LocalEngine(self.policy, self.tokenizer, ends, self.precision, budget)


def check_arguments(
    args: PPOConfig, model: Any, processing_class: Any, peft_config: Any, train_dataset: Any, eval_dataset: Any
) -> None:
    """Raise `ConfigError` for an argument of `PPOTrainer` of the wrong kind, or one that takes a setting's place."""
    if not (model is None or isinstance(model, str) or (isinstance(model, nn.Module) and hasattr(model, "config"))):
        raise ConfigError(
            f"model is {shown(model)}; it must be a str, a hub id or folder, or a loaded model; settings go into args"
        )
    if not (processing_class is None or isinstance(processing_class, PreTrainedTokenizerBase)):
        raise ConfigError(
            f"processing_class is {shown(processing_class)}; it must be a tokenizer, such as "
            "AutoTokenizer.from_pretrained(…)"
        )
    if peft_config is not None:
        check_peft_config(args, peft_config)
    datasets = {"train_dataset": (train_dataset, args.prompts), "eval_dataset": (eval_dataset, args.eval.prompts)}
    for name, (dataset, prompts) in datasets.items():
        if dataset is None:
            continue
        from_python(dataset, name)
        for key in ("text", "dataset"):
            if prompts is not None and getattr(prompts, key) is not None:
                group = {"train_dataset": "prompts", "eval_dataset": "eval.prompts"}[name]
                raise ConfigError(f"{name} and {group}.{key} are both given; leave one of them out")
    if eval_dataset is not None and not args.eval.every:
        raise ConfigError("eval_dataset is given, which has no effect without eval.every; leave it out")
    refuse_idle(args, [name for name, (dataset, _) in datasets.items() if dataset is not None])


def check_peft_config(args: PPOConfig, peft_config: Any) -> None:
    """Raise `ConfigError` for something other than a configuration of PEFT's, or for a second adapter."""
    try:
        from peft import PeftConfig
    except ImportError as error:
        raise ConfigError("peft_config needs PEFT, which is not installed: pip install tokencredit[peft]") from error
    if not isinstance(peft_config, PeftConfig):
        raise ConfigError(
            f"peft_config is {shown(peft_config)}; it must be a configuration of PEFT's, such as peft.LoraConfig(…); "
            "Tokencredit's LoraConfig goes into args, as model.lora"
        )
    if args.model.lora.rank:
        raise ConfigError("peft_config and model.lora.rank are both given; leave one of them out")


def check_batch_size(args: PPOConfig, processes: int) -> None:
    """Raise `ConfigError` unless the processes can share a batch, and each its share among the minibatches."""
    if args.rollout.batch_size % (processes * args.rollout.per_prompt):
        raise ConfigError(
            f"rollout.batch_size is {args.rollout.batch_size}; it must be a multiple of {processes} processes times "
            f"rollout.per_prompt, {args.rollout.per_prompt}"
        )
    if args.ppo.minibatches > (rows := args.rollout.batch_size // processes):
        raise ConfigError(
            f"ppo.minibatches is {args.ppo.minibatches}; it must be at most {rows}, the completions of each of the "
            f"{processes} processes (rollout.batch_size is {args.rollout.batch_size})"
        )


def prepare_prompts(
    args: PPOConfig,
    lm: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train_dataset: Rows | None = None,
    eval_dataset: Rows | None = None,
) -> tuple[Prompts, Prompts]:
    """Prompts for training and, which may be the same, for evaluation."""
    held_out = args.eval.prompts is not None or eval_dataset is not None
    longest = args.rollout.max_new_tokens
    if args.eval.every and not held_out:
        longest = max(longest, args.eval.max_new_tokens)
    room = room_for_prompts(lm, longest, args.ppo.micro_batch_tokens)
    prompts = load_prompts(args.prompts, tokenizer, seed=args.seed, room=room, dataset=train_dataset)
    return prompts, evaluation_prompts(args, lm, tokenizer, eval_dataset) if held_out else prompts


def evaluation_prompts(
    args: PPOConfig, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dataset: Rows | None = None
) -> Prompts:
    """The prompts of evaluations: the held-out ones, or else those of training."""
    held_out = args.eval.prompts is not None or dataset is not None
    return load_prompts(
        args.eval.prompts or args.prompts,
        tokenizer,
        seed=args.seed,
        room=room_for_prompts(lm, args.eval.max_new_tokens, args.ppo.micro_batch_tokens),
        dataset=dataset,
        group="eval.prompts" if held_out else "prompts",
        dataset_name="eval_dataset",
    )


def left_out(*prompts: Prompts) -> list[str]:
    """A line on each set of prompts of which some are too long to take part."""
    return [line for line in (each.left_out() for each in dict.fromkeys(prompts)) if line]


def load_terms(args: PPOConfig, reward_funcs: Any, device: torch.device) -> list[Term]:
    """The reward's terms: those of Python callers if there are any, or else the configuration's."""
    return build_terms(args.reward, device) if reward_funcs is None else as_terms(reward_funcs, device)


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
) -> Models:
    """The policy with its critic, and the reference model, on the device of the passes.

    A new critic draws its weights from PyTorch's global generator.

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
    return Models(policy, reference, tokenizer, precision, [*precision.notes, *notes])


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
    if critic and which != "base" and values.kind != "none" and saved_critic(name) is None:
        raise ConfigError(
            f"{name!r} has no critic, though critic.kind of the run is {values.kind}; its files are incomplete"
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
    return Models(policy.requires_grad_(False).to(precision.device), base, tokenizer, precision, notes + more)


def _load_base(run: Path, args: PPOConfig, model: ModelConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model that a run started from, and its tokenizer.

    Raises:
        ConfigError: the name leads to another model by now, as it may for one that was loaded in Python.
    """
    lm, tokenizer = load_start(replace(args, model=model))
    origin = started_from(run)
    if origin is not None:
        check_origin(origin, fingerprint(lm, tokenizer) | {"given": origin["given"]}, model.name)
    return merged(model, lm), tokenizer


def build_pipeline(args: PPOConfig, models: Models, terms: list[Term], processes: Processes) -> Pipeline:
    """The pipeline of a run, around its models and reward terms."""
    budget = args.ppo.micro_batch_tokens
    return Pipeline(
        models.policy,
        models.reference,
        models.tokenizer,
        models.precision,
        models.engine(budget),
        terms,
        args.kl,
        processes,
        budget,
    )


def build_learner(args: PPOConfig, models: Models, processes: Processes) -> Learner:
    """The learner of a run: optimizer, schedule, objective and the generator that shuffles."""
    policy, precision, optim = models.policy, models.precision, args.optim
    hidden = hidden_matrices(policy.lm, exclude=policy.lm.get_output_embeddings().parameters())
    if policy.critic is not None and policy.critic.trunk is not None:
        hidden += hidden_matrices(policy.critic.trunk)
    optimizer = build_optimizer(parameter_groups(args, policy), optim.name, hidden=hidden, eps=optim.eps)
    exact_kl = args.kl.place == "loss" and args.kl.estimator == "full"
    options = {
        "temperature": args.rollout.temperature,
        "entropy": args.ppo.entropy_coef > 0,
        "reference": models.reference if exact_kl else None,
    }

    def evaluate(model: torch.nn.Module, inputs: dict[str, torch.Tensor], loss: PolicyLoss) -> PolicyOutputs:
        with precision.autocast():
            outputs: PolicyOutputs = model(inputs, policy_loss=loss, **options)
        return outputs

    def critic_values(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        with precision.autocast():
            return policy.critic_values(inputs)

    return Learner(
        policy,
        optimizer,
        Passes(evaluate, critic_values),
        build_objective(args),
        build_update(args),
        schedule(**optim.rates(args.run.iterations)),
        torch.Generator().manual_seed(2 * args.seed + 1),
        processes,
    )


def parameter_groups(args: PPOConfig, policy: ActorCritic) -> list[ParamGroup]:
    """The parameters of the policy, of a separate critic's trunk and of the value head, each with its rate."""
    critic, rate = policy.critic, args.optim.lr
    parts: list[tuple[str, torch.nn.Module, float]] = [("lr", policy.lm, rate)]
    if critic is not None and critic.trunk is not None:
        parts.append(("trunk_lr", critic.trunk, args.critic.trunk_lr or rate))
    if critic is not None:
        parts.append(("value_lr", critic.head, args.critic.lr))
    groups = [
        {"params": trainable(part), "lr": lr, "weight_decay": args.optim.weight_decay, "metric": metric}
        for metric, part, lr in parts
    ]
    return [group for group in groups if group["params"]]


def frozen_parameters(args: PPOConfig, policy: ActorCritic, iteration: int) -> list[torch.nn.Parameter]:
    """The parameters that the joint steps of an iteration leave alone.

    The policy's while the critic warms up; the critic's own where its loss has no weight, lest old momentum moves them.
    """
    frozen = trainable(policy.lm) if iteration <= args.critic.warmup else []
    return frozen + (trainable(policy.critic) if policy.critic is not None and args.critic.coef == 0 else [])


def build_objective(args: PPOConfig) -> Objective:
    """The objective of a run's updates; its KL coefficient is set before each."""
    kl = args.kl
    return Objective(
        **args.ppo.objective(args.critic),
        kl_estimator=kl.estimator if kl.place == "loss" and kl.estimator != "full" else None,
        horizon=args.rollout.max_new_tokens,
    )


def build_update(args: PPOConfig) -> UpdateSettings:
    """The course of a run's updates."""
    return UpdateSettings(**args.ppo.passes(args.critic, args.advantage, args.optim))
