"""The work and the memory settings of a run, from its configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch

from tokencredit.errors import ConfigError
from tokencredit.settings.data import FunctionTerm
from tokencredit.settings.text import PPOConfig
from tokencredit.text.data.prompts import Prompts, load_prompts
from tokencredit.text.models.model_loading import load_tokenizer, max_prompt_length
from tokencredit.text.models.precision import choose_for_device
from tokencredit.text.ppo_setup import check_batch_size
from tokencredit.tools.plan.memory import Batch, Setup
from tokencredit.tools.plan.model_shape import Planned, adapter_size, plan_model, plan_trunk, saved_adapter_size

SURVEYED = 1024
"""Prompts whose tokens are counted; a data set's further ones are taken to be alike."""


@dataclass(frozen=True)
class Options:
    """Options of `tokencredit plan` beside the run's configuration."""

    processes: int = 1
    tokens: int | None = None
    """Mean length of completions; None for the longest possible."""
    prompt_tokens: int | None = None
    """Tokens of the prompts; None counts them."""
    time: bool = True
    """Estimate the time, by a calibration on this machine."""


@dataclass(frozen=True)
class Work:
    """The work of a run, per process unless it says otherwise."""

    model: Planned
    batch: Batch
    """With the longest prompt and completion: for memory."""
    mean: Batch
    """With mean lengths: for time."""
    setup: Setup
    config: PPOConfig
    options: Options
    assumptions: list[str]
    """Lines for the user: lengths that were assumed, and parts that are not planned."""

    @property
    def sampled(self) -> int:
        """Tokens sampled for training by the whole job."""
        return self.config.rollout.batch_size * self.mean.new * self.config.run.iterations


def plan_work(config: PPOConfig, options: Options) -> Work:
    """The work of a run; reads the model's configuration, its tokenizer and the prompts, and no weights.

    Raises:
        ConfigError: as the run would, for a model, prompts or a batch that cannot be used; or the model cannot be
            planned.
    """
    model = plan_model(config.model)
    check_batch_size(config, options.processes)
    assumptions, longest = list(model.notes), config.rollout.max_new_tokens
    if options.tokens is not None and options.tokens > longest:
        raise ConfigError(f"--tokens is {options.tokens}; it must be at most rollout.max_new_tokens, {longest}")
    if options.tokens is None and (config.rollout.stop_at_eos or config.rollout.stop):
        assumptions.append(
            f"every completion has {longest} tokens, rollout.max_new_tokens; --tokens gives their mean length"
        )
    lengths = prompt_lengths(config, model, options)
    rows, update = -(-config.rollout.batch_size // options.processes), config.ppo
    passes = update.epochs, update.minibatches
    assumptions += unplanned(config)
    return Work(
        model,
        Batch(rows, max(lengths), longest, *passes),
        Batch(rows, round(sum(lengths) / len(lengths)), options.tokens or longest, *passes),
        plan_setup(config, model, options, padded=len(set(lengths)) > 1),
        config,
        options,
        assumptions,
    )


def prompt_lengths(config: PPOConfig, model: Planned, options: Options) -> list[int]:
    """Tokens of the run's first prompts.

    Raises:
        ConfigError: an environment makes the prompts, and `--prompt_tokens` is not given; or as `load_prompts`.
    """
    if options.prompt_tokens is not None:
        return [options.prompt_tokens]
    if config.several_turns():
        raise ConfigError("the environment makes the prompts, whose length is unknown before; give --prompt_tokens")
    limit = max_prompt_length(model.lm, config.rollout.max_new_tokens, config.ppo.micro_batch_tokens)
    prompts = load_prompts(config.prompts, load_tokenizer(config.model), seed=config.seed, limit=limit)
    return counted(prompts)


def counted(prompts: Prompts) -> list[int]:
    """Tokens of the first prompts."""
    mask = prompts.batch(0, min(len(prompts.kept), SURVEYED)).mask
    return [int(length) for length in mask.sum(1).tolist()]


def device_kind() -> Literal["cpu", "cuda"]:
    """The kind of device that a run would compute on; every accelerator counts as a GPU."""
    off = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "y", "on", "t")
    return "cuda" if torch.accelerator.is_available() and not off else "cpu"


def plan_setup(config: PPOConfig, model: Planned, options: Options, padded: bool) -> Setup:
    """The settings that determine memory; errors as in `plan_work`."""
    critic, device = config.critic, device_kind()
    dtype = config.model.dtype
    if dtype == "auto":
        kind = torch.device(device)
        dtype = "bfloat16" if choose_for_device(kind)[0] else "float32"
    rank, adapter = config.model.lora.rank, None
    if rank:
        adapter = adapter_size(model.lm, rank, config.model.lora.target_modules)
    elif config.model.adapter == "continue":
        rank, adapter = saved_adapter_size(config.model.name, model.lm)
    exact = config.kl.estimator == "full" and config.kl.coef > 0 and config.kl.place == "loss"
    frozen = {"none": "all", "attention": "all but attention"}[critic.freeze]
    return Setup(
        critic=critic.kind,
        lora_rank=rank,
        gradient_checkpointing=config.model.gradient_checkpointing,
        micro_batch_tokens=config.ppo.micro_batch_tokens,
        reference=config.kl.coef > 0,
        head=critic.head,
        outputs=critic.bins if critic.loss == "histogram" else 1,
        trunk=plan_trunk(critic, config.model, model.shape),
        members=critic.members,
        critic_trains="head" if critic.detach else frozen,  # type: ignore[arg-type]
        adapter=adapter,
        dtype=dtype,
        device=device,
        static_cache=config.rollout.cache == "static" or (config.rollout.cache == "auto" and device == "cuda"),
        padded=padded,
        logit_tensors=3 * exact + (config.ppo.entropy_coef > 0),
        processes=options.processes,
        shard=config.run.shard,
        gathered=config.sharding.sampling == "gathered",
        support=(config.rollout.top_k or 0) if config.off_policy.support == "truncated" else 0,
    )


def unplanned(config: PPOConfig) -> list[str]:
    """Lines about parts of a run that are not planned."""
    engine = config.rollout.engine
    models = [source for kind, source in (term.source() for term in config.reward) if kind != "function"]
    parts = {
        f"memory and time of the reward models {', '.join(models)}": bool(models),
        "time of reward functions": any(isinstance(term, FunctionTerm) for term in config.reward),
        "time of the environment and its tools": config.several_turns(),
        "evaluations (eval.every)": config.eval.every > 0,
        "audits (audit.every)": config.audit.every > 0,
        "continuations (critic.continuations)": config.critic.continuations > 0,
        "pretraining of the critic (critic.pretrain)": config.critic.pretrain > 0,
        "torch.compile (model.compile)": config.model.compile,
        f"memory and time of the sampling engine {engine} (rollout.engine)": engine != "local",
    }
    left_out = [part for part, used in parts.items() if used]
    return [f"not planned: {', '.join(left_out)}"] if left_out else []
