"""The work of a run, from its configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
from transformers import AutoConfig

from tokencredit.errors import ConfigError, naming
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
from tokencredit.user_code.parts import load_parts, read_by_parts

SURVEYED = 1024
"""Prompts whose tokens are counted; a data set's further ones are taken to be alike."""
Device = Literal["cpu", "cuda"]
UNPLANNED = (
    "not planned: the time of rewards and environments, engines other than local, evaluations, pretraining, compiling"
)


@dataclass(frozen=True)
class BatchShape:
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
    batch: BatchShape
    """With the longest prompt and completion: for memory."""
    mean: BatchShape
    """With mean lengths: for time."""
    device: Device
    dtype: Dtype
    config: PPOConfig
    processes: int
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
    def full_passes(self) -> int:
        """Passes of the policy over whole completions after a rollout: log-probs in bfloat16, and entropies."""
        return self.half + ("entropy" in read_by_parts(self.config))

    @property
    def sharded(self) -> bool:
        """True if models are sharded over several processes."""
        return self.config.run.shard == "full" and self.processes > 1

    @property
    def reference_width(self) -> int:
        """Width of the reference's hidden states, if updates read them for an exact KL; else 0."""
        kl = self.config.kl
        exact = kl.estimator == "full" and kl.coef > 0
        return self.lm_config.get_text_config().hidden_size if exact else 0

    @property
    def minibatch_rows(self) -> int:
        """Rows of the largest minibatch."""
        return -(-self.batch.rows // self.config.ppo.minibatches)

    def micro_rows(self, rows: int, batch: BatchShape) -> int:
        """Rows of the largest micro-batch of a pass over `rows` rows."""
        budget = self.config.ppo.micro_batch_tokens
        return rows if budget is None else max(min(rows, budget // batch.length), 1)


def plan_work(
    config: PPOConfig,
    processes: int = 1,
    tokens: int | None = None,
    prompt_tokens: int | None = None,
    device: Device | None = None,
) -> Work:
    """The work of a run, from the model's configuration, its tokenizer and the prompts, without weights."""
    config = load_parts(config)  # which tells what they read
    lm_config, longest, assumptions = base_config(config.model), config.rollout.max_new_tokens, []
    check_batch_size(config, processes)
    if tokens is not None and tokens > longest:
        raise ConfigError(f"--tokens is {tokens}; it must be at most rollout.max_new_tokens, {longest}")
    if tokens is None and (config.rollout.stop_at_eos or config.rollout.stop):
        assumptions.append(
            f"every completion has {longest} tokens, rollout.max_new_tokens; --tokens gives their mean length"
        )
    device, dtype = device or this_device(), config.model.dtype
    if dtype == "auto":
        half, reason = device == "cuda", f"on a {device} device that this machine does not have"
        if device == this_device():
            half, reason = choose_for_device(torch.device(device))
        dtype = "bfloat16" if half else "float32"
        assumptions.append(f"model.dtype auto: {dtype}, {reason}")
    limit = max_prompt_length(cast(Any, SimpleNamespace(config=lm_config)), longest, config.ppo.micro_batch_tokens)
    if prompt_tokens is not None and limit is not None and prompt_tokens > limit:
        reason = "the model's context, or ppo.micro_batch_tokens, less rollout.max_new_tokens"
        raise ConfigError(f"--prompt_tokens is {prompt_tokens}; it must be at most {limit}, {reason}")
    lengths = [prompt_tokens] if prompt_tokens is not None else prompt_lengths(config, limit)
    group, mean = config.rollout.per_prompt, round(sum(lengths) / len(lengths))
    rows = -(-(config.rollout.batch_size // group) // processes) * group  # groups are not split
    return Work(
        lm_config,
        BatchShape(rows, max(lengths), longest),
        BatchShape(rows, mean, tokens or longest),
        device,
        dtype,
        config,
        processes,
        [*assumptions, UNPLANNED],
    )


def base_config(args: ModelConfig, name: str | None = None) -> Any:
    """Transformers' configuration of `model.name` or of a critic's or, for an adapter, of the model below it."""
    with naming("model.name" if name is None else "critic.name"):
        name = name or args.name
        folder = resolve(name)
        if (below := base_model(name, folder)) is not None:
            name, folder = below, resolve(below)
        with as_config_error(f"a language model from {name!r}"):
            return AutoConfig.from_pretrained(folder, trust_remote_code=args.trust_remote_code)


def prompt_lengths(config: PPOConfig, limit: int | None) -> list[int]:
    """Tokens of the run's first prompts, of which none may have more than `limit`."""
    if config.several_turns():
        raise ConfigError("the environment makes the prompts, whose length is unknown before; give --prompt_tokens")
    prompts = load_prompts(config.prompts, load_tokenizer(config.model), seed=config.seed, limit=limit)
    mask = prompts.batch(0, min(len(prompts.kept), SURVEYED)).mask
    return [int(length) for length in mask.sum(1).tolist()]


def this_device() -> Device:
    """The kind of device that a run would compute on; every accelerator counts as a GPU."""
    off = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "y", "on", "t")
    return "cuda" if torch.accelerator.is_available() and not off else "cpu"
