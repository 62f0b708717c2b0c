"""TRL: the names of `PPOConfig` and its scripts, of versions 0.12 to 1.9 and before, and of `GRPOConfig`."""

from __future__ import annotations

import math
from pathlib import PurePath
from typing import Any

from tokencredit.settings.projects.translation import Project, Rules
from tokencredit.settings.projects.values import (
    DEFAULT,
    Without,
    dtype,
    every,
    final_scale,
    first,
    iterations,
    layers,
    number,
    product,
    rows_per_pass,
    warmup,
    whitened,
)

BATCH = "per_device_train_batch_size gradient_accumulation_steps world_size"


def optimizer_steps(parts: Any, size: Any, accumulated: Any) -> int:
    """Optimizer steps per epoch of TRL's PPO: one per `accumulated` micro-batches, which are rows of one part."""
    each = int(size * accumulated // parts)
    return max(1, int(parts * math.ceil(each / size) // accumulated))


def repository(push: Any, name: Any, folder: Any = None) -> Any:
    """The repository to which the policy is pushed, by default named as the output folder."""
    name = name or PurePath(folder or "").name
    return Without("the name of the repository is not given") if push and not name else name if push else DEFAULT


def quantization(four: Any, eight: Any) -> Any:
    """The quantization of the base model."""
    return "nf4" if four else "int8" if eight else DEFAULT


def adapter(default: Any) -> Any:
    """The rule of a LoRA setting, which counts with `use_peft`."""
    return lambda use, value: (default if value is None else value) if use else DEFAULT


def other_value(*_: Any) -> Any:
    """The reason that a value of GRPO's is not taken over."""
    return Without("a value of GRPO there; docs/from-trl.md has its counterpart")


ADAPTER: Rules = {
    "model.lora.rank": ("use_peft lora_r", adapter(16)),
    "model.lora.alpha": ("use_peft lora_alpha", adapter(32)),
    "model.lora.dropout": ("use_peft lora_dropout", adapter(0.05)),
    "model.lora.target_modules": ("use_peft lora_target_modules", lambda use, names: layers(names) if use else DEFAULT),
    "model.quantization": ("load_in_4bit load_in_8bit", quantization),
}
"""Rules of TRL's ModelConfig."""
TRAINING_ARGUMENTS = {
    "optim.lr, critic.lr": "learning_rate",
    "run.iterations (passes × prompts × rollout.per_prompt / rollout.batch_size)": "num_train_epochs",
    "rollout.batch_size, ppo.micro_batch_tokens": "per_device_train_batch_size gradient_accumulation_steps",
    "optim.schedule": "lr_scheduler_type",
    "optim.warmup": "warmup_steps warmup_ratio",
    "optim.final_scale": "lr_scheduler_kwargs lr_scheduler_kwargs.min_lr_rate lr_scheduler_kwargs.min_lr",
    "optim.weight_decay": "weight_decay",
    "optim.max_grad_norm": "max_grad_norm",
    "optim.name": "optim optimizers",
    "optim.eps": "adam_epsilon",
    "model.dtype": "bf16 fp16 dtype torch_dtype",
    "model.gradient_checkpointing": "gradient_checkpointing",
    "model.compile": "torch_compile",
    "run.dir": "output_dir run_name",
    "run.trackers": "report_to",
    "run.save_every": "save_steps save_strategy",
    "run.keep_last": "save_total_limit",
    "run.push_to_hub": "push_to_hub hub_model_id",
    "eval.every": "eval_steps eval_strategy evaluation_strategy",
    "eval.samples": "per_device_eval_batch_size",
    "seed": "seed",
    "run.iterations": "max_steps",
    "PPOTrainer.train(resume_from_checkpoint)": "resume_from_checkpoint",
    "none (every iteration is logged)": "logging_steps logging_first_step logging_strategy logging_dir",
    "none (a terminal has one progress bar)": "disable_tqdm",
    "none (Adam's are 0.9 and 0.999)": "adam_beta1 adam_beta2",
    "none (with eval.every the policy with the best mean score is in best/)": "load_best_model_at_end "
    "metric_for_best_model greater_is_better",
    "none (DeepSpeed is not supported)": "deepspeed ds3_gather_for_generation",
    "none (every column is passed to the reward)": "remove_unused_columns",
    "none (prompts are tokenized batch by batch during training)": "dataset_num_proc dataloader_num_workers "
    "preprocessing_num_workers",
    "none (the command says it: tokencredit train, sft, reward-model or dpo)": "do_train do_eval",
    "none (a checkpoint always holds the optimizer's state, and policy/ never does)": "save_only_model",
    "none (it does not change what is learned)": "overwrite_output_dir overwrite_cache ddp_timeout "
    "ddp_find_unused_parameters gradient_checkpointing_kwargs use_cache attn_implementation",
    "run.shard": "fsdp",
}
"""Names of Transformers' TrainingArguments, which LLaMA-Factory and ms-swift have too."""
GRPO = {
    "reward": "reward_weights",
    "rollout.per_prompt": "num_generations",
    "ppo.clip_high": "epsilon_high",
    "ppo.dual_clip": "delta",
    "ppo.mask_truncated": "mask_truncated_completions",
    "advantage.scale": "scale_rewards",
    "ppo.reduction": "loss_type",
    "prompts.chat_template_kwargs": "chat_template_kwargs",
    "prompts.shuffle": "shuffle_dataset",
    "env.max_turns": "max_tool_calling_iterations",
    "rollout.engine": "use_vllm use_transformers_continuous_batching",
    "rollout.engine_memory": "vllm_gpu_memory_utilization",
    "rollout.server": "vllm_mode vllm_server_base_url",
    "off_policy.correct": "vllm_importance_sampling_correction",
    "off_policy.correct, off_policy.level": "vllm_importance_sampling_mode",
    "off_policy.bounds": "vllm_importance_sampling_clip_min vllm_importance_sampling_clip_max "
    "vllm_importance_sampling_cap",
    "ppo.entropy_coef": "entropy_coef",
    "model.dropout (the opposite)": "disable_dropout",
    "prompts.max_length": "max_prompt_length",
    "run.samples": "log_completions",
    "ppo.loss": "importance_sampling_level",
    "none (a reward model's tokenizer is read from its folder)": "reward_processing_classes",
    "none (an environment with step gives the loop to your code)": "rollout_func",
    "none (model.dtype, model.trust_remote_code; or give the loaded model to PPOTrainer)": "model_init_kwargs",
    "none (the reference stays as it is)": "sync_ref_model",
    "none (see ppo.micro_batch_tokens)": "use_liger_kernel",
}
"""Names of GRPOConfig and GRPOTrainer, but for those that stand beside one of PPOConfig's below."""
OTHER_VALUES = "advantage.scale env.max_turns off_policy.bounds ppo.loss ppo.reduction rollout.server"
"""Keys whose values GRPO writes otherwise."""
MODEL = {
    "model.name": "model_name_or_path",
    "model.lora.rank": "use_peft lora_r",
    "model.lora.alpha": "lora_alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.target_modules": "lora_target_modules",
    "model.quantization": "load_in_4bit load_in_8bit quantization_config",
    "model.trust_remote_code": "trust_remote_code",
    "prompts.dataset": "dataset_name",
    "prompts.config_name": "dataset_config",
    "prompts.split": "dataset_train_split",
    "eval.split": "dataset_test_split",
    "none (nf4 is quantised twice, and computes in model.dtype)": "bnb_4bit_quant_type use_bnb_nested_quant "
    "bnb_4bit_compute_dtype bnb_4bit_quant_storage",
    "none (download that revision into a folder, and name the folder)": "model_revision",
    "none (an adapter of a causal language model, without biases)": "lora_task_type lora_bias",
}
"""Names of TRL's ModelConfig and ScriptArguments."""

TRL = Project(
    title="TRL",
    page="docs/from-trl.md",
    names={
        **TRAINING_ARGUMENTS,
        **GRPO,
        **MODEL,
        "ppo.minibatches": "num_mini_batches steps_per_generation",
        "run.iterations (episodes / rollout.batch_size)": "total_episodes",
        "run.iterations": "max_steps num_total_batches",
        "ppo.micro_batch_tokens": "local_rollout_forward_batch_size",
        "run.show_every, run.samples, eval.every": "num_sample_generations",
        "rollout.max_new_tokens": "response_length max_completion_length",
        "rollout.stop_at_eos": "stop_token",
        "rollout.stop": "stop_token_id",
        "rollout.temperature": "temperature",
        "rollout.top_k": "top_k",
        "rollout.top_p": "top_p",
        "rollout.min_p": "min_p",
        "score.missing_eos_penalty": "missing_eos_penalty",
        "model.name, PPOTrainer(model)": "sft_model_path",
        "rollout.batch_size": "batch_size generation_batch_size",
        "reward, PPOTrainer(reward_funcs)": "reward_model_path reward_model",
        "ppo.epochs": "num_ppo_epochs num_iterations",
        "score.normalize": "whiten_rewards",
        "kl.coef": "kl_coef beta",
        "kl.estimator": "kl_estimator",
        "ppo.clip": "cliprange epsilon",
        "critic.coef": "vf_coef",
        "critic.clip": "cliprange_value",
        "advantage.gamma": "gamma",
        "advantage.lam": "lam",
        "critic.kind, critic.name": "value_model",
        "critic.name": "value_model_path",
        "PPOTrainer(args)": "config",
        "PPOTrainer(processing_class)": "tokenizer",
        "none (computed there; the launcher's number of processes)": "world_size",
        "none (computed there, over all processes)": "micro_batch_size",
        "none (computed there; here rollout.batch_size / processes)": "local_batch_size",
        "none (computed there; here rollout.batch_size / ppo.minibatches / processes)": "local_mini_batch_size",
        "none (computed there; here rollout.batch_size / ppo.minibatches)": "mini_batch_size",
        "none (the model's one active adapter; a new one has PEFT's default name)": "model_adapter_name",
        "none (the reference is the model without the new adapter, or with the initial one)": "ref_adapter_name",
        "none (the reference is a frozen copy of the model, the model with its initial adapter, or absent with "
        "kl.coef: 0)": "ref_model",
        "none (prompts are texts, padded in each batch)": "data_collator",
    },
    values={
        "model.name": ("sft_model_path model_name_or_path", first),
        "reward": ("reward_model_path reward_model", first),
        "critic.name": ("value_model_path reward_model_path reward_model", first),
        "rollout.batch_size": (f"batch_size {BATCH}", lambda whole, *parts: whole or product(*parts)),
        "ppo.minibatches": (
            "num_mini_batches steps_per_generation per_device_train_batch_size gradient_accumulation_steps",
            lambda parts, steps, *sizes: steps or optimizer_steps(parts, *sizes),
        ),
        "run.iterations": (
            "num_total_batches total_episodes num_train_epochs rows max_steps =rollout.batch_size",
            lambda batches, total, epochs, rows, _, batch: batches or iterations(epochs, rows, batch, total),
        ),
        "rollout.stop_at_eos": ("stop_token stop_token_id", lambda token, _: token == "eos"),
        "rollout.stop": (
            "stop_token_id",
            lambda token: Without(f"the text of the token {token}; the tokenizer's own end needs only stop_at_eos"),
        ),
        "score.normalize": ("whiten_rewards", whitened),
        "score.shift_mean": ("whiten_rewards", lambda on: False if on else DEFAULT),
        "optim.final_scale": (
            f"=optim.schedule lr_scheduler_type {TRAINING_ARGUMENTS['optim.final_scale']} =optim.lr",
            final_scale,
        ),
        "optim.warmup": ("warmup_steps warmup_ratio =run.iterations lr_scheduler_type", warmup),
        "optim.max_grad_norm": ("max_grad_norm", lambda _: None),  # TRL's PPO never clips, whatever its value
        "model.dtype": ("bf16 fp16 dtype torch_dtype", dtype),
        "model.dropout": ("disable_dropout", lambda off: not off),
        **{key: (GRPO[key], other_value) for key in OTHER_VALUES.split()},
        "rollout.engine": (GRPO["rollout.engine"], lambda *on: other_value() if any(on) else DEFAULT),
        "off_policy.correct": ("vllm_importance_sampling_correction vllm_importance_sampling_mode", other_value),
        **ADAPTER,
        "ppo.micro_batch_tokens": ("local_rollout_forward_batch_size", rows_per_pass),
        "run.save_every": ("save_strategy save_steps", every),
        "run.push_to_hub": ("push_to_hub hub_model_id output_dir", repository),
        "run.samples": ("num_sample_generations", lambda _: DEFAULT),
        "run.show_every": (
            "num_sample_generations =run.iterations",
            lambda times, total: 0 if not times else max(1, total // times) if total else DEFAULT,
        ),
        "eval.every": (
            "eval_strategy evaluation_strategy eval_steps",
            lambda a, b, steps: every(a or b or "no", steps),
        ),
    },
    defaults={
        **{"learning_rate": 3e-6, "num_mini_batches": 1, "response_length": 53, "temperature": 0.7, "vf_coef": 0.1},
        **{"num_ppo_epochs": 4, "kl_coef": 0.05, "kl_estimator": "k1", "cliprange": 0.2, "cliprange_value": 0.2},
        **{"gamma": 1.0, "lam": 0.95, "stop_token": "", "per_device_train_batch_size": 8, "num_train_epochs": 3},
        **{"gradient_accumulation_steps": 1, "lr_scheduler_type": "linear", "warmup_steps": 0, "seed": 42},
    },
    fixed={
        **{"critic.kind": "separate", "critic.head": "linear", "critic.prefix_every": 0},
        **{"optim.max_grad_norm": None, "advantage.whiten": "batch"},
    },
)
"""PPOConfig of TRL 0.12 to 1.9 with Transformers' TrainingArguments, GRPOConfig, and the arguments of trainers and
example scripts."""

OLD_TRL = Project(
    title="TRL up to 0.11",
    names={
        **MODEL,
        "seed": "seed",
        "model.name": "model_name_or_path model_name",
        "prompts.dataset": "dataset_name query_dataset",
        "reward": "reward_model",
        "optim.lr, critic.lr": "learning_rate",
        "rollout.batch_size": "batch_size",
        "ppo.minibatches (their number: rollout.batch_size / size)": "mini_batch_size gradient_accumulation_steps "
        "forward_batch_size",
        "ppo.epochs": "ppo_epochs",
        "run.iterations": "steps",
        "kl.coef": "init_kl_coef",
        "kl.target": "adap_kl_ctrl target",
        "kl.horizon": "horizon",
        "kl.estimator": "kl_penalty",
        "ppo.target_kl, stop.kl, stop.reward": "early_stopping",
        "ppo.target_kl": "target_kl",
        "ppo.clip": "cliprange",
        "critic.clip": "cliprange_value",
        "critic.coef": "vf_coef",
        "advantage.gamma": "gamma",
        "advantage.lam": "lam",
        "optim.max_grad_norm": "max_grad_norm",
        "score.normalize": "use_score_scaling use_score_norm whiten_rewards",
        "score.clip": "score_clip",
        "model.gradient_checkpointing": "gradient_checkpointing",
        "run.dir": "exp_name",
        "run.trackers": "log_with",
        "rollout.max_new_tokens": "max_new_tokens max_length",
        "rollout.min_new_tokens": "min_length min_new_tokens",
        "rollout.temperature": "temperature",
        "rollout.top_k": "top_k",
        "rollout.top_p": "top_p",
        "none (trackers log to the project tokencredit)": "tracker_project_name tracker_kwargs task_name",
        "none (accelerate launch configures it)": "accelerator_kwargs project_kwargs",
        "none (every column is passed to the reward)": "remove_unused_columns",
        "none (with eval.every the policy with the best mean score is in best/)": "push_to_hub_if_best_kwargs",
        "none (the cache of the device is left to PyTorch)": "optimize_cuda_cache optimize_device_cache",
        "none (updates are not compared)": "compare_steps",
        "none (no minibatch is skipped for its ratios; ppo.target_kl ends an update)": "ratio_threshold",
        "none (only causal language models are trained)": "is_encoder_decoder use_seq2seq",
        "none (adapters are recognised by themselves)": "is_peft_model",
        "none (TRL computes it of the batch size and the processes)": "world_size backward_batch_size "
        "global_backward_batch_size global_batch_size",
        "none (prompts are tokenized batch by batch during training)": "dataset_num_proc",
        "none (sampling is always on; rollout.temperature, top_k, top_p)": "do_sample pad_token_id eos_token_id",
    },
    values={
        "reward": ("reward_model", lambda name: [{"classifier": name.rpartition(":")[2], "output": "logit"}]),
        "rollout.batch_size": ("batch_size world_size", product),
        "ppo.minibatches": (
            "batch_size mini_batch_size forward_batch_size gradient_accumulation_steps",
            lambda batch, mini, forward, steps: number(batch, (forward or mini) * (steps or 1)),
        ),
        "run.iterations": ("steps =rollout.batch_size", number),
        # A coefficient of 0 is multiplied, and stays.
        "kl.target": ("target adap_kl_ctrl init_kl_coef", lambda target, *on: target if all(on) else None),
        "kl.horizon": ("horizon adap_kl_ctrl init_kl_coef", lambda horizon, *on: horizon if all(on) else DEFAULT),
        "ppo.target_kl": ("early_stopping target_kl", lambda stop, kl: 1.5 * kl if stop else None),
        **dict.fromkeys(("stop.kl", "stop.reward"), ("early_stopping", lambda _: DEFAULT)),
        "score.normalize": (
            "use_score_scaling whiten_rewards",
            lambda scale, whiten: "running" if scale else whitened(whiten),
        ),
        "score.shift_mean": (
            "use_score_scaling whiten_rewards use_score_norm",
            lambda scale, whiten, shift: bool(scale and shift) if scale or whiten else DEFAULT,
        ),
        "rollout.stop_at_eos": ("eos_token_id", lambda token: False if token == -1 else DEFAULT),
        "rollout.min_new_tokens": ("min_length min_new_tokens", lambda *n: max(0, int(first(*n)))),
        **ADAPTER,
    },
    defaults={
        **{"learning_rate": 1.41e-5, "batch_size": 128, "mini_batch_size": 128, "gradient_accumulation_steps": 1},
        **{"ppo_epochs": 4, "init_kl_coef": 0.2, "adap_kl_ctrl": True, "target": 6.0, "horizon": 10_000.0},
        **{"kl_penalty": "kl", "cliprange": 0.2, "cliprange_value": 0.2, "vf_coef": 0.1, "gamma": 1.0, "lam": 0.95},
        **{"early_stopping": False, "target_kl": 1.0, "seed": 0},
    },
    fixed={
        **{"critic.kind": "shared", "critic.head": "linear", "critic.prefix_every": 0, "advantage.whiten": "batch"},
        **{"optim.schedule": "constant", "optim.warmup": 0, "optim.max_grad_norm": None},
    },
)
"""PPOConfig of TRL up to 0.11, whose critic is a value head on the policy's trunk."""
