"""LLaMA-Factory (`stage: ppo`), which trains with TRL 0.9, and ms-swift (`rlhf_type: ppo`), with 0.12 and later."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tokencredit.settings.projects.translation import Project
from tokencredit.settings.projects.trl import ADAPTER, BATCH, OLD_TRL, TRAINING_ARGUMENTS, TRL, optimizer_steps
from tokencredit.settings.projects.values import (
    DEFAULT,
    Without,
    dtype,
    every,
    first,
    iterations,
    one_dataset,
    product,
    reward_models,
    whitened,
)


def own_dataset(names: Any) -> Any:
    """The file of a data set; names are LLaMA-Factory's, of its own list."""
    name = one_dataset(names)
    if isinstance(name, Without) or "." in name or "/" in name:
        return name
    return Without(f"{name} is a name in LLaMA-Factory's dataset_info.json; give its file or hub id")


def chat(template: Any) -> Any:
    """The role of plain prompts, which LLaMA-Factory makes messages of by a template."""
    return DEFAULT if template in ("default", "empty") else "user"


def lora_rank(kind: Any, rank: Any) -> Any:
    """The rank of an adapter, none if all weights are trained."""
    reason = DEFAULT if kind == "full" else Without(f"{kind} there; full or lora here")
    return rank if kind == "lora" else reason


LLAMA_FACTORY = Project(
    title="LLaMA-Factory",
    names={
        **TRAINING_ARGUMENTS,
        "model.name": "adapter_name_or_path model_name_or_path",
        "model.lora.rank": "lora_rank finetuning_type",
        "model.lora.alpha": "lora_alpha",
        "model.lora.dropout": "lora_dropout",
        "model.lora.target_modules": "lora_target",
        "model.quantization": "quantization_bit",
        "model.trust_remote_code": "trust_remote_code",
        "model.dtype": "bf16 fp16 pure_bf16",
        "reward": "reward_model reward_model_type reward_model_adapters",
        "prompts.dataset": "dataset",
        "prompts.max_length": "cutoff_len",
        "prompts.role (the chat template is the tokenizer's own)": "template",
        "prompts.chat_template_kwargs": "enable_thinking",
        "eval.dataset": "eval_dataset",
        "rollout.max_new_tokens": "max_new_tokens",
        "rollout.temperature": "temperature",
        "rollout.top_k": "top_k",
        "rollout.top_p": "top_p",
        "ppo.epochs": "ppo_epochs",
        "ppo.minibatches (their number: rollout.batch_size / size)": "ppo_buffer_size",
        "score.normalize": "ppo_score_norm ppo_whiten_rewards",
        "kl.target": "ppo_target",
        "none (the command says it: tokencredit train, sft, reward-model or dpo)": "stage do_train do_eval do_predict",
        "none (all rows are read; give a file of that many)": "max_samples",
        "none (tokencredit report draws the curves)": "plot_loss",
        "none (torchrun starts one process per GPU: docs/scaling.md)": "world_size",
        "none (the reference is the starting model, or the model without its new adapter)": "ref_model ref_model_*",
        "none (prompts.dataset names the file itself)": "dataset_dir",
        "none (PyTorch chooses the kernels)": "flash_attn use_unsloth enable_liger_kernel",
        "none (a reward model is loaded in its own dtype)": "reward_model_quantization_bit",
        "none (completions are sampled, one per beam)": "do_sample num_beams repetition_penalty length_penalty",
        "none (eval.dataset holds the prompts of evaluations)": "val_size",
        "none (rows are padded to the longest of a pass)": "packing neat_packing",
    },
    values={
        "rollout.batch_size": (f"{BATCH} ppo_buffer_size", product),
        "run.iterations": (
            "max_steps num_train_epochs rows =rollout.batch_size",
            lambda steps, *epochs: steps if steps and steps > 0 else iterations(*epochs),
        ),
        "reward": (
            "reward_model reward_model_type",
            lambda names, kind: (
                Without("an API; give a function that calls it") if kind == "api" else reward_models(names)
            ),
        ),
        "model.lora.rank": ("finetuning_type lora_rank", lora_rank),
        "model.lora.alpha": ("lora_alpha lora_rank", lambda alpha, number: float(alpha or 2 * number)),
        "model.dtype": ("bf16 fp16 pure_bf16", lambda bf16, fp16, pure: dtype(bf16 or pure, fp16)),
        "score.normalize": ("ppo_score_norm ppo_whiten_rewards", lambda n, w: "running" if n else whitened(w)),
        "score.shift_mean": (
            "ppo_score_norm ppo_whiten_rewards",
            lambda norm, whiten: DEFAULT if norm or not whiten else False,
        ),
        "prompts.dataset": ("dataset", own_dataset),
        "prompts.role": ("template", chat),
        **{key: TRL.values[key] for key in ("run.save_every", "eval.every", "optim.final_scale", "optim.warmup")},
    },
    defaults={
        **{"learning_rate": 5e-5, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "top_k": 50},
        **{"num_train_epochs": 3, "lr_scheduler_type": "linear", "warmup_steps": 0, "max_grad_norm": 1.0, "top_p": 0.7},
        **{"ppo_epochs": 4, "ppo_buffer_size": 1, "ppo_target": 6.0, "max_new_tokens": 1024, "temperature": 0.95},
        **{"finetuning_type": "lora", "lora_rank": 8, "seed": 42, "cutoff_len": 2048},
    },
    fixed={
        **{key: value for key, value in OLD_TRL.fixed.items() if key.startswith(("critic", "advantage"))},
        "prompts.template": "{{ [instruction, input | default('')] | select | join('\\n') }}",
        **{"kl.coef": 0.2, "kl.horizon": 10_000.0, "advantage.lam": 0.95, "critic.coef": 0.1, "critic.clip": 0.2},
    },
)


def accumulation(rows: Any, steps: Any, processes: Any) -> int:
    """Gradient accumulation steps of ms-swift, by default as many as give 16 rows per step."""
    return int(steps or max(1, math.ceil(16 / rows / (processes or 1))))


SWIFT = replace(
    TRL,
    title="ms-swift",
    page="",
    names=dict(TRL.names)
    | {
        "model.name": "adapters model model_name_or_path model_id_or_path",
        "model.lora.rank": "tuner_type lora_rank",
        "model.lora.target_modules": "target_modules",
        "model.dtype": "torch_dtype bf16 fp16",
        "model.quantization": "quant_bits",
        "reward": "reward_model",
        "prompts.dataset": "dataset",
        "prompts.max_length": "max_length",
        "prompts.overlong": "truncation_strategy",
        "eval.dataset": "val_dataset",
        "rollout.max_new_tokens": "response_length max_completion_length",
        "run.shard": "fsdp",
        "none (the command says it: tokencredit train, sft, reward-model or dpo)": "rlhf_type do_train do_eval",
        "none (eval.dataset holds the prompts of evaluations)": "split_dataset_ratio",
        "none (the tokenizer's own chat template formats conversations)": "template system model_type "
        "use_chat_template",
        "none (it does not change what is learned)": "load_from_cache_file overwrite_output_dir ddp_timeout attn_impl "
        "gradient_checkpointing_kwargs overwrite_cache ddp_find_unused_parameters use_cache attn_implementation",
        "none (files are on the Hugging Face hub or in folders)": "use_hf model_revision hub_token",
    },
    aliases={"sft_type": "tuner_type", "train_type": "tuner_type"},
    values=dict.fromkeys(
        ("optim.lr", "critic.lr"),
        ("learning_rate tuner_type", lambda rate, kind: rate or (1e-5 if kind == "full" else 1e-4)),
    )
    | {key: rule for key, rule in TRL.values.items() if key not in {"model.name", *ADAPTER}}
    | {
        "rollout.batch_size": (
            f"batch_size {BATCH}",
            lambda whole, *sizes: whole or product(*sizes[::2], accumulation(*sizes)),
        ),
        "ppo.minibatches": (
            f"num_mini_batches steps_per_generation {BATCH}",
            lambda parts, steps, *sizes: steps or optimizer_steps(parts, sizes[0], accumulation(*sizes)),
        ),
        "reward": ("reward_model", first),
        "critic.name": ("reward_model", first),
        "model.lora.rank": ("tuner_type lora_rank", lora_rank),
        "model.dtype": ("bf16 fp16 torch_dtype", dtype),
        "eval.every": ("eval_strategy eval_steps", lambda kind, steps: every(first(kind, "steps"), steps)),
    },
    defaults={
        **{x: y for x, y in TRL.defaults.items() if x not in ("learning_rate", "gradient_accumulation_steps")},
        **{"per_device_train_batch_size": 1, "response_length": 512, "temperature": 0.9, "stop_token": "eos"},
        **{"tuner_type": "lora", "lora_rank": 8, "lora_alpha": 32, "lora_dropout": 0.05},
        **{"lr_scheduler_type": "cosine", "adam_beta2": 0.95, "weight_decay": 0.1},
    },
)
