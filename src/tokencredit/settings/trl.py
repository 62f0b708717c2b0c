"""TRL's names of settings and arguments, and those here; docs/from-trl.md has the same tables with notes."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from tokencredit.errors import ConfigError

NONE = "none"
"""For a name without a counterpart here."""
WITHOUT_COUNTERPART = (
    "dataset_num_proc world_size micro_batch_size local_batch_size local_mini_batch_size mini_batch_size "
    "model_adapter_name ref_adapter_name ds3_gather_for_generation logging_steps disable_tqdm adam_beta1 "
    "adam_beta2 load_best_model_at_end metric_for_best_model deepspeed remove_unused_columns "
    "dataloader_num_workers ref_model data_collator reward_processing_classes rollout_func model_init_kwargs "
    "generation_batch_size sync_ref_model use_liger_kernel"
)
"""Names of TRL's that have no counterpart here."""
TRL = {
    **dict.fromkeys(WITHOUT_COUNTERPART.split(), NONE),
    # PPOConfig
    "learning_rate": "optim.lr, critic.lr",
    "num_mini_batches": "ppo.minibatches",
    "total_episodes": "run.iterations",
    "local_rollout_forward_batch_size": "ppo.micro_batch_tokens",
    "num_sample_generations": "run.show_every, run.samples, eval.every",
    "response_length": "rollout.max_new_tokens",
    "stop_token": "rollout.stop_at_eos",
    "stop_token_id": "rollout.stop",
    "temperature": "rollout.temperature",
    "missing_eos_penalty": "score.missing_eos_penalty",
    "sft_model_path": "model.name, PPOTrainer(model)",
    "num_total_batches": "run.iterations",
    "batch_size": "rollout.batch_size",
    "push_to_hub": "run.push_to_hub",
    "reward_model_path": "reward, PPOTrainer(reward_funcs)",
    "num_ppo_epochs": "ppo.epochs",
    "whiten_rewards": "score.normalize",
    "kl_coef": "kl.coef",
    "kl_estimator": "kl.estimator",
    "cliprange": "ppo.clip",
    "vf_coef": "critic.coef",
    "cliprange_value": "critic.clip",
    "gamma": "advantage.gamma",
    "lam": "advantage.lam",
    # TrainingArguments
    "per_device_train_batch_size": "rollout.batch_size, ppo.micro_batch_tokens",
    "gradient_accumulation_steps": "ppo.micro_batch_tokens",
    "num_train_epochs": "run.iterations",
    "lr_scheduler_type": "optim.schedule",
    "warmup_steps": "optim.warmup",
    "weight_decay": "optim.weight_decay",
    "max_grad_norm": "optim.max_grad_norm",
    "bf16": "model.dtype",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "output_dir": "run.dir",
    "report_to": "run.trackers",
    "per_device_eval_batch_size": "eval.samples",
    "max_steps": "run.iterations",
    "save_steps": "run.save_every",
    "save_strategy": "run.save_every",
    "save_total_limit": "run.keep_last",
    "eval_steps": "eval.every",
    "eval_strategy": "eval.every",
    "warmup_ratio": "optim.warmup",
    "adam_epsilon": "optim.eps",
    "fp16": "model.dtype",
    "torch_compile": "model.compile",
    "run_name": "run.dir",
    "hub_model_id": "run.push_to_hub",
    "resume_from_checkpoint": "PPOTrainer.train(resume_from_checkpoint)",
    # PPOTrainer
    "reward_model": "reward, PPOTrainer(reward_funcs)",
    "value_model": "critic.kind, critic.name",
    "optimizers": "optim.name",
    "config": "PPOTrainer(args)",
    "tokenizer": "PPOTrainer(processing_class)",
    # GRPOConfig and GRPOTrainer
    "reward_weights": "reward",
    "num_generations": "rollout.per_prompt",
    "max_completion_length": "rollout.max_new_tokens",
    "top_k": "rollout.top_k",
    "top_p": "rollout.top_p",
    "min_p": "rollout.min_p",
    "beta": "kl.coef",
    "num_iterations": "ppo.epochs",
    "steps_per_generation": "ppo.minibatches",
    "epsilon": "ppo.clip",
    "epsilon_high": "ppo.clip_high",
    "delta": "ppo.dual_clip",
    "mask_truncated_completions": "ppo.mask_truncated",
    "scale_rewards": "advantage.scale",
    "loss_type": "ppo.reduction",
    "chat_template_kwargs": "prompts.chat_template_kwargs",
    "shuffle_dataset": "prompts.shuffle",
    "max_tool_calling_iterations": "env.max_turns",
    "use_vllm": "rollout.engine",
    "vllm_mode": "rollout.server",
    "vllm_server_base_url": "rollout.server",
    "vllm_importance_sampling_correction": "off_policy.correct",
    "vllm_importance_sampling_mode": "off_policy.correct, off_policy.level",
    "vllm_importance_sampling_cap": "off_policy.bounds",
    "max_prompt_length": "prompts.max_length",
    "log_completions": "run.samples",
    "importance_sampling_level": "ppo.loss",
}
"""Keys and arguments here by TRL's name, except for names that are the same."""


def trl_names(names: Iterable[str]) -> str:
    """A message with the keys for TRL's names among these; empty if there is none."""
    found = [
        f"{name} is TRL's" + (", and has no counterpart here" if TRL[name] == NONE else f" name for {TRL[name]}")
        for name in names
        if name in TRL
    ]
    return "; ".join(found) + " (docs/from-trl.md)" if found else ""


def refuse_arguments(names: Collection[str], known: Collection[str]) -> None:
    """Raise `ConfigError` for arguments of `PPOTrainer` that it does not take; `known` are those that it takes."""
    if not names:
        return
    other = [name for name in names if name not in TRL]
    near = difflib.get_close_matches(other[0], known, n=1) if other else []
    advice = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}; settings go into args"
    lines = [f"PPOTrainer takes no argument {', '.join(other)}; {advice}"] if other else []
    raise ConfigError("; ".join(filter(None, [trl_names(names), *lines])))
