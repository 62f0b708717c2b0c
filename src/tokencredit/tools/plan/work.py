"""The work of a run, from its configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
from transformers import AutoConfig

from tokencredit.errors import ConfigError
from tokencredit.settings.data import FunctionTerm
from tokencredit.settings.model import ModelConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.text.data.prompts import load_prompts
from tokencredit.text.models.model_loading import (
    as_config_error,
    base_model,
    load_tokenizer,
    max_prompt_length,
    resolve,
)
from tokencredit.text.models.precision import Dtype, choose_for_device
from tokencredit.text.ppo_setup import check_batch_size

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
    device: Literal["cpu", "cuda"] | None = None
    """None for the device of this machine."""
    memory: float | None = None
    """Bytes of a device that this machine does not have."""


@dataclass(frozen=True)
class Batch:
    """The rows of one iteration of one process, all of the same length."""

    rows: int
    prompt: int
    new: int

    @property
    def length(self) -> int:
        """Tokens per row in a forward pass: the last one is never an input."""
        return self.prompt + self.new - 1


@dataclass(frozen=True)
class Work:
    """The work of a run, per process unless it says otherwise."""

    lm_config: Any
    """Transformers' configuration of the policy."""
    batch: Batch
    """With the longest prompt and completion: for memory."""
    mean: Batch
    """With mean lengths: for time."""
    padded: bool
    """Prompts differ in length, so that attention has a mask."""
    device: Literal["cpu", "cuda"]
    dtype: Dtype
    config: PPOConfig
    options: Options
    assumptions: list[str]
    """Lines for the user: lengths that were assumed, and parts that are not planned."""

    @property
    def sampled(self) -> int:
        """Tokens sampled for training by the whole job."""
        return self.config.rollout.batch_size * self.mean.new * self.config.run.iterations

    @property
    def half(self) -> bool:
        """True if passes compute in bfloat16."""
        return self.dtype == "bfloat16"

    @property
    def sharded(self) -> bool:
        """True if models are sharded over several processes."""
        return self.config.run.shard == "full" and self.options.processes > 1

    @property
    def exact_kl(self) -> bool:
        """True if updates read the reference's hidden states."""
        kl = self.config.kl
        return kl.estimator == "full" and kl.place == "loss" and kl.coef > 0

    @property
    def static_cache(self) -> bool:
        """True for decoding with a static KV cache, if the model supports it."""
        cache = self.config.rollout.cache
        return not self.sharded and (cache == "static" or (cache == "auto" and self.device == "cuda"))

    @property
    def critic_epochs(self) -> int:
        """Passes of the critic alone over a batch, buffered ones included."""
        return self.config.critic.epochs * (1 + self.config.critic.buffer)

    @property
    def minibatch_rows(self) -> int:
        """Rows of the largest minibatch."""
        return -(-self.batch.rows // self.config.ppo.minibatches)

    def micro_rows(self, rows: int, batch: Batch) -> int:
        """Rows of the largest micro-batch of a pass over `rows` rows."""
        budget = self.config.ppo.micro_batch_tokens
        return rows if budget is None else max(min(rows, budget // batch.length), 1)


def plan_work(config: PPOConfig, options: Options) -> Work:
    """The work of a run; reads the model's configuration, its tokenizer and the prompts, and no weights.

    Raises:
        ConfigError: as the run would, for a model, prompts or a batch that cannot be used; or the model cannot be
            planned.
    """
    lm_config, longest, assumptions = base_config(config.model), config.rollout.max_new_tokens, []
    check_batch_size(config, options.processes)
    if options.tokens is not None and options.tokens > longest:
        raise ConfigError(f"--tokens is {options.tokens}; it must be at most rollout.max_new_tokens, {longest}")
    if options.tokens is None and (config.rollout.stop_at_eos or config.rollout.stop):
        assumptions.append(
            f"every completion has {longest} tokens, rollout.max_new_tokens; --tokens gives their mean length"
        )
    device, dtype = options.device or this_device(), config.model.dtype
    if device != this_device() and config.model.dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
        assumptions.append(f"model.dtype auto: {dtype} on a {device} device that this machine does not have")
    elif dtype == "auto":
        half, reason = choose_for_device(torch.device(device))
        dtype = "bfloat16" if half else "float32"
        assumptions.append(f"model.dtype auto: {dtype}, {reason}")
    lengths = prompt_lengths(config, lm_config, options)
    rows, mean = -(-config.rollout.batch_size // options.processes), round(sum(lengths) / len(lengths))
    return Work(
        lm_config,
        Batch(rows, max(lengths), longest),
        Batch(rows, mean, options.tokens or longest),
        len(set(lengths)) > 1,
        device,
        dtype,
        config,
        options,
        assumptions + unplanned(config),
    )


def base_config(args: ModelConfig, name: str | None = None) -> Any:
    """Transformers' configuration of `model.name` or another model or, for an adapter, of the model below it.

    Raises:
        ConfigError: there is no such model.
    """
    name = name or args.name
    folder = resolve(name, "policy")
    if (below := base_model(name, folder)) is not None:
        name, folder = below, resolve(below, "policy")
    with as_config_error(f"a language model from {name!r}"):
        return AutoConfig.from_pretrained(folder, trust_remote_code=args.trust_remote_code)


def prompt_lengths(config: PPOConfig, lm_config: Any, options: Options) -> list[int]:
    """Tokens of the run's first prompts.

    Raises:
        ConfigError: an environment makes the prompts, and `--prompt_tokens` is not set; or as `load_prompts`.
    """
    if options.prompt_tokens is not None:
        return [options.prompt_tokens]
    if config.several_turns():
        raise ConfigError("the environment makes the prompts, whose length is unknown before; give --prompt_tokens")
    lm = cast(Any, SimpleNamespace(config=lm_config))
    limit = max_prompt_length(lm, config.rollout.max_new_tokens, config.ppo.micro_batch_tokens)
    prompts = load_prompts(config.prompts, load_tokenizer(config.model), seed=config.seed, limit=limit)
    mask = prompts.batch(0, min(len(prompts.kept), SURVEYED)).mask
    return [int(length) for length in mask.sum(1).tolist()]


def this_device() -> Literal["cpu", "cuda"]:
    """The kind of device that a run would compute on; every accelerator counts as a GPU."""
    off = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "y", "on", "t")
    return "cuda" if torch.accelerator.is_available() and not off else "cpu"


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
