"""Other projects' names of settings and arguments, and those here; suggestions for keys that are not known."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from difflib import SequenceMatcher

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
"""Keys and arguments here by TRL's name, except for names that are the same; docs/from-trl.md has the same tables."""

ANSWERS = {
    # Agents: CleanRL, Stable-Baselines3, RLlib
    "steps": "n_steps num_steps",
    "run.iterations (timesteps / (env.number × steps))": "total_timesteps",
    "run.iterations (each is env.number × steps steps)": "num_iterations num_updates n_iter",
    "ppo.minibatches (their number: env.number × steps / size)": "batch_size minibatch_size mini_batch_size",
    "env.number": "num_envs n_envs",
    "env.id": "env_id env_name gym_id environment name",
    "env.normalize_observations": "norm_obs normalize_obs",
    "env.normalize_rewards": "norm_reward norm_rewards normalize_reward",
    "agent.hidden": "net_arch policy_kwargs hidden_size hidden_sizes",
    "agent.activation": "activation_fn",
    "eval.episodes": "n_eval_episodes",
    "eval.videos": "capture_video",
    "none (the environment, env.id, rewards an agent)": "reward reward_funcs reward_model",
    "none (exploration does not depend on the state)": "use_sde sde_sample_freq",
    # Runs that learn from a data set: TRL, LLaMA-Factory, OpenRLHF
    "data.batch_size": "batch_size per_device_train_batch_size train_batch_size",
    "data.micro_batch": "gradient_accumulation_steps micro_train_batch_size",
    "data.epochs": "num_train_epochs num_epochs total_epochs max_epochs",
    "data.max_length": "max_length max_len cutoff_len max_seq_length max_seq_len",
    "data.dataset": "dataset dataset_name train_files",
    "data.column": "input_key prompt_key",
    "data.completion": "output_key response_key",
    "data.chosen": "chosen_key",
    "data.rejected": "rejected_key",
    "dpo.beta": "beta pref_beta",
    "dpo.loss": "loss_type pref_loss",
    "sft.loss_on": "completion_only_loss train_on_prompt",
    "reward_model.center": "center_rewards_coefficient",
    # The model
    "model.name, run.dir": "name",
    "model.name": "model_name model_name_or_path model_path pretrain base_model model.path "
    "actor_rollout_ref.model.path",
    "model.lora.rank": "lora_rank lora_r model.lora.r finetuning_type use_peft",
    "model.lora.alpha": "lora_alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.target_modules": "lora_target lora_target_modules",
    "model.dtype": "precision torch_dtype mixed_precision pure_bf16",
    "model.gradient_checkpointing": "enable_gradient_checkpointing",
    "none (quantised models are not trained)": "load_in_8bit load_in_4bit quantization_bit",
    # Rollouts and prompts
    "rollout.batch_size (completions: prompts × rollout.per_prompt)": "data.train_batch_size rollout_batch_size",
    "rollout.per_prompt": "n_samples_per_prompt num_return_sequences group_size rollout.n actor_rollout_ref.rollout.n",
    "rollout.max_new_tokens": "max_response_length generate_max_len max_tokens max_gen_len",
    "rollout.min_new_tokens": "min_tokens generate_min_len min_length",
    "rollout.stop": "stop_strings stop_sequences stop_words",
    "rollout.stop_at_eos": "ignore_eos",
    "rollout.engine": "rollout.name actor_rollout_ref.rollout.name",
    "rollout.engine_memory": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "prompts.dataset": "dataset dataset_name prompt_data train_files",
    "prompts.column": "input_key prompt_key",
    "prompts.max_length": "prompt_max_len cutoff_len",
    "prompts.template (Jinja; a chat template is the tokenizer's own)": "template input_template",
    "eval.dataset": "val_files",
    # The reward
    "reward": "reward_pretrain reward_function reward_fn custom_reward_function remote_rm_url reward_model.model.path",
    "score.normalize": "normalize_reward use_score_norm use_score_scaling ppo_score_norm ppo_whiten_rewards",
    "score.clip": "reward_clip_range",
    "score.overlong": "overlong_buffer",
    # Credit and update
    "advantage.estimator": "adv_estimator advantage_estimator",
    "advantage.gamma": "discount discount_factor",
    "advantage.lam": "gae_lambda gae_lam lambd lambda_",
    "advantage.whiten": "norm_adv normalize_advantage normalize_advantages advantage.normalize",
    "ppo.epochs": "update_epochs n_epochs ppo_epochs num_sgd_iter max_epochs",
    "ppo.minibatches": "num_minibatches",
    "ppo.minibatches (their number: rollout.batch_size / size)": "ppo_mini_batch_size mini_batch_size train_batch_size",
    "ppo.micro_batch_tokens (in tokens)": "micro_train_batch_size micro_rollout_batch_size ppo_micro_batch_size "
    "ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu",
    "ppo.clip": "clip_coef clip_range clip_ratio clip_ratio_low clip_eps clip_param eps_clip",
    "ppo.clip_high": "clip_ratio_high",
    "ppo.dual_clip": "clip_ratio_c",
    "ppo.entropy_coef": "ent_coef entropy_coeff entropy_loss_coef",
    "ppo.reduction": "loss_agg_mode",
    "ppo.target_kl, stop.kl, stop.reward": "early_stopping",
    "critic.clip (a number; null for none)": "clip_vloss clip_range_vf value_clip",
    "critic.coef": "vf_loss_coeff value_loss_coef",
    "critic.name": "critic_pretrain critic.model.path",
    "critic.pretrain (in batches, before the first iteration)": "critic_warmup freezing_actor_steps",
    "kl.coef": "init_kl_coef",
    "kl.coef, kl.place": "kl_loss_coef",
    "kl.place": "use_kl_loss use_kl_in_reward",
    "kl.estimator": "kl_penalty kl_loss_type",
    "kl.target": "adap_kl_ctrl kl_target ppo_target",
    # Optimizer
    "optim.lr": "actor_learning_rate actor_lr actor_rollout_ref.actor.optim.lr",
    "critic.lr, critic.trunk_lr (of a separate critic)": "critic.optim.lr",
    "critic.lr": "critic_learning_rate value_lr baseline_learning_rate critic.optim.lr",
    "optim.schedule": "lr_scheduler lr_schedule",
    "optim.schedule, optim.final_scale": "anneal_lr",
    "optim.warmup (in iterations)": "lr_warmup_ratio lr_warmup_steps lr_warmup_steps_ratio",
    "optim.max_grad_norm": "grad_clip max_norm",
    "optim.name": "optimizer",
    # The run
    "run.iterations (episodes / rollout.batch_size)": "total_episodes",
    "run.iterations (passes × prompts × rollout.per_prompt / rollout.batch_size)": "num_train_epochs num_episodes "
    "total_epochs",
    "run.iterations": "total_training_steps",
    "run.dir": "exp_name experiment_name wandb_run_name save_path ckpt_path default_local_dir tensorboard_log logdir",
    "run.trackers": "track use_wandb logger log_with",
    "none (the project of trackers is tokencredit)": "wandb_project wandb_project_name project_name",
    "run.save_every": "save_freq save_interval",
    "run.keep_last": "max_ckpt_num max_actor_ckpt_to_keep",
    "run.shard": "zero_stage fsdp",
    "eval.every": "eval_freq test_freq",
    "seed": "random_seed",
    "none (the command says it: tokencredit train, sft, reward-model or dpo)": "stage do_train",
    "none (every iteration is logged)": "log_interval verbose",
    "none (torchrun starts one process per GPU: docs/scaling.md)": "n_gpus_per_node nnodes",
    "none (a language model takes the GPU if there is one: CUDA_VISIBLE_DEVICES chooses it, ACCELERATE_USE_CPU=true "
    "takes the CPU; agents are trained on the CPU)": "device cuda use_cpu no_cuda device_map gpu",
}
"""Names of CleanRL, Stable-Baselines3, TRL, verl, OpenRLHF and LLaMA-Factory by their keys here, with a note in
brackets. A name may be under several keys: the first that the configuration has, those of the note too, counts."""
OTHERS: dict[str, list[str]] = {}
for _answer, _names in ANSWERS.items():
    for _name in _names.split():
        OTHERS.setdefault(_name, []).append(_answer)

APART = ("eval", "audit", "critic")
"""Groups whose keys do not stand for the same keys of training."""
CHOICES = {
    **{"grpo": "group_relative", "rloo": "leave_one_out", "bf16": "bfloat16", "fp32": "float32", "adam": "adamw"},
    **{"float16": "", "fp16": ""},
}
"""The choice here by another name of it; empty for one that is not among them, whatever is spelt alike."""


def counterpart(name: str, known: Collection[str], group: str = "") -> str:
    """The keys here for another project's name, or that there are none; empty for a name that is not known.

    Of several keys those of `group` count, if it has any; those of a group of `APART` alone.
    """
    answers = OTHERS.get(name, []) + ([f"{TRL[name]} (docs/from-trl.md)"] if name in TRL else [])
    for answer in answers:
        keys, _, note = answer.removesuffix(")").partition(" (")
        brackets = f" ({note})" if note else ""
        if any(key not in known for key in re.findall(r"\w+\.\w+", note) if not key.endswith(".md")):
            continue
        if keys == NONE:
            return f"it has no counterpart here{brackets}"
        here = [key for key in keys.split(", ") if key in known]
        own = [key for key in here if key.startswith(f"{group}.")]
        if wanted := own or ([] if group in APART else here):
            return f"here it is {', '.join(wanted)}{brackets}"
    return ""


def close(one: str, other: str) -> float:
    """How alike two names are, from 0 to 1; 0 unless one may be a misspelling of the other."""
    alike = SequenceMatcher(None, one, other).ratio()
    return alike if alike >= 0.8 else 0.0


def misspelt(name: str, known: Iterable[str]) -> list[str]:
    """The names that are most like one, if any may be meant; dotted names part by part."""
    scores = {}
    for key in known:
        pairs = list(zip(key.split("."), name.split("."), strict=False))
        whole = key.count(".") == name.count(".")
        scores[key] = min(close(*pair) for pair in pairs) if whole else 0.0
    best = max(scores.values(), default=0.0)
    return [key for key, score in scores.items() if best and score == best]


def suggestion(key: str, known: Collection[str], otherwise: str = "see --print_config for all keys") -> str:
    """Advice on an unknown key: the key here for another project's name, or for a misspelling, or its group's keys."""
    name = key.replace("-", "_")
    group, _, last = name.rpartition(".")
    here = counterpart(name, known) or (group and counterpart(last, known, group))
    if here and name not in known:
        return here
    near = [own for own in known if own.endswith(f".{name}") or own.replace(".", "_") == name.replace(".", "_")]
    near = near or misspelt(name, known)
    if not near and not group:
        ends = {own: own.rpartition(".")[2] for own in known}
        near = [own for own, end in ends.items() if end in misspelt(name, set(ends.values()))]
    if near:
        return f"did you mean {' or '.join(near)}?"
    own_keys = [own.removeprefix(f"{group}.") for own in known if own.rpartition(".")[0] == group]
    return f"{group} has {', '.join(own_keys)}" if group and own_keys else otherwise


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
    near = misspelt(other[0], known) if other else []
    advice = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}; settings go into args"
    lines = [f"PPOTrainer takes no argument {', '.join(other)}; {advice}"] if other else []
    raise ConfigError("; ".join(filter(None, [trl_names(names), *lines])))
