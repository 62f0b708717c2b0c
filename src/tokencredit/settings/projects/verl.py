"""verl: Hydra overrides of `verl.trainer.main_ppo`, and the YAML files of its trainers."""

from __future__ import annotations

from typing import Any

from tokencredit.settings.projects.translation import Project
from tokencredit.settings.projects.values import (
    DEFAULT,
    Without,
    choice,
    iterations,
    number,
    product,
    reward_models,
    rows_per_pass,
    warmup,
)


def critic_kind(enable: Any, estimator: Any) -> Any:
    """A separate critic, or none for the estimators that need none."""
    return "separate" if enable or (enable is None and estimator == "gae") else "none"


def kl_place(in_reward: Any, in_loss: Any) -> Any:
    """The place of the KL penalty."""
    return "both" if in_reward and in_loss else "loss" if in_loss else "reward" if in_reward else DEFAULT


def kl_coef(in_reward: Any, in_loss: Any, reward: Any, loss: Any) -> Any:
    """The KL coefficient, 0 if the KL is neither in the reward nor in the loss."""
    if in_reward and in_loss and reward != loss:
        return Without(f"{reward} in the reward and {loss} in the loss; one coefficient here")
    return reward if in_reward else loss if in_loss else 0.0


def kl_estimator(in_reward: Any, in_loss: Any, reward: Any, loss: Any) -> Any:
    """The KL estimator of the place that has one."""
    return choice(loss) if in_loss else choice(reward) if in_reward else DEFAULT


def kl_target(kind: Any, target: Any, _: Any) -> Any:
    """The reason that an adaptive coefficient has no target here."""
    return Without(f"{target} per token there; kl.target is per sequence") if kind == "adaptive" else DEFAULT


def own_reward(path: Any, name: Any, enable: Any, model: Any) -> Any:
    """The reward of a function, or of a reward model."""
    if path:
        return Without(f"{path}:{name or 'compute_score'} takes verl's arguments; docs/rewards.md has those here")
    if enable and model:
        return reward_models(model)
    return Without("a function for the data set there; give reward: [{function: FILE.py:NAME}]")


def clip(side: Any, both: Any) -> Any:
    """The clip range of a side; `clip_ratio` counts only where the side's own is null."""
    reason = f"{both} in verl before April 2025; 0.2 since, as clip_ratio_low and clip_ratio_high are by default"
    return side if side is not None else both if both == 0.2 else Without(reason)


KL_NAMES = "algorithm.use_kl_in_reward actor.use_kl_loss"
VERL = Project(
    title="verl",
    names={
        "model.name": "actor_rollout_ref.model.path model.path",
        "model.trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
        "model.lora.rank": "actor_rollout_ref.model.lora_rank model.lora.r model.lora.rank",
        "model.lora.alpha": "actor_rollout_ref.model.lora_alpha model.lora.alpha",
        "model.lora.target_modules": "actor_rollout_ref.model.target_modules model.lora.target_modules",
        "model.gradient_checkpointing": "actor_rollout_ref.model.enable_gradient_checkpointing "
        "enable_gradient_checkpointing",
        "model.dtype": "actor.fsdp_config.dtype actor.fsdp_config.model_dtype",
        "critic.name": "critic.model.path",
        "critic.kind": "critic.enable",
        "critic.lr, critic.trunk_lr (of a separate critic)": "critic.optim.lr",
        "critic.clip": "critic.cliprange_value",
        "critic.pretrain (in batches, before the first iteration)": "trainer.critic_warmup critic_warmup",
        "prompts.dataset": "data.train_files",
        "prompts.column": "data.prompt_key",
        "prompts.max_length": "data.max_prompt_length",
        "prompts.overlong": "data.truncation data.filter_overlong_prompts",
        "prompts.shuffle": "data.shuffle",
        "prompts.chat_template_kwargs": "data.apply_chat_template_kwargs",
        "eval.dataset": "data.val_files val_files",
        "eval.every": "trainer.test_freq test_freq",
        "eval.best_of": "rollout.val_kwargs.n",
        "eval.temperature (0 without sampling)": "rollout.val_kwargs.temperature rollout.val_kwargs.do_sample",
        "none (evaluations have the filters of rollouts)": "rollout.val_kwargs.top_p rollout.val_kwargs.top_k",
        "seed": "data.seed",
        "rollout.batch_size (completions: prompts × rollout.per_prompt)": "data.train_batch_size",
        "rollout.per_prompt": "actor_rollout_ref.rollout.n rollout.n",
        "rollout.max_new_tokens": "data.max_response_length max_response_length",
        "rollout.temperature": "actor_rollout_ref.rollout.temperature",
        "rollout.top_k": "actor_rollout_ref.rollout.top_k",
        "rollout.top_p": "actor_rollout_ref.rollout.top_p",
        "rollout.stop_at_eos (the opposite)": "actor_rollout_ref.rollout.ignore_eos",
        "rollout.engine": "actor_rollout_ref.rollout.name rollout.name",
        "rollout.engine_memory": "actor_rollout_ref.rollout.gpu_memory_utilization gpu_memory_utilization",
        "reward": "reward_model.enable reward_model.model.path custom_reward_function "
        "custom_reward_function.path custom_reward_function.name",
        "advantage.estimator": "algorithm.adv_estimator adv_estimator",
        "advantage.gamma": "algorithm.gamma",
        "advantage.lam": "algorithm.lam",
        "advantage.scale": "algorithm.norm_adv_by_std_in_grpo norm_adv_by_std_in_grpo",
        "kl.place": "algorithm.use_kl_in_reward actor.use_kl_loss use_kl_loss use_kl_in_reward",
        "kl.coef": "algorithm.kl_ctrl.kl_coef",
        "kl.coef, kl.place": "actor.kl_loss_coef kl_loss_coef",
        "kl.estimator": "algorithm.kl_penalty actor.kl_loss_type kl_penalty kl_loss_type",
        "kl.target": "algorithm.kl_ctrl.type algorithm.kl_ctrl.target_kl",
        "kl.horizon": "algorithm.kl_ctrl.horizon",
        "ppo.minibatches (their number: rollout.batch_size / size)": "actor.ppo_mini_batch_size ppo_mini_batch_size",
        "ppo.epochs": "actor.ppo_epochs ppo_epochs",
        "ppo.clip": "actor.clip_ratio_low actor.clip_ratio clip_ratio_low clip_ratio",
        "ppo.clip_high": "actor.clip_ratio_high clip_ratio_high",
        "ppo.dual_clip": "actor.clip_ratio_c clip_ratio_c",
        "ppo.entropy_coef": "actor.entropy_coeff entropy_coeff",
        "ppo.reduction": "actor.loss_agg_mode loss_agg_mode",
        "ppo.loss": "policy_loss.loss_mode",
        "ppo.micro_batch_tokens (in tokens)": "actor.ppo_max_token_len_per_gpu ppo_max_token_len_per_gpu "
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu",
        "optim.lr": "actor.optim.lr actor_rollout_ref.actor.optim.lr",
        "optim.warmup (in iterations)": "actor.optim.lr_warmup_steps_ratio actor.optim.lr_warmup_steps "
        "lr_warmup_steps_ratio lr_warmup_steps",
        "optim.schedule": "actor.optim.warmup_style actor.optim.lr_scheduler_type",
        "optim.final_scale": "actor.optim.min_lr_ratio",
        "optim.weight_decay": "actor.optim.weight_decay",
        "optim.max_grad_norm": "actor.optim.clip_grad actor.grad_clip grad_clip",
        "score.overlong": "overlong_buffer.enable overlong_buffer.len overlong_buffer.penalty_factor overlong_buffer.*",
        "run.iterations (passes × prompts × rollout.per_prompt / rollout.batch_size)": "trainer.total_epochs",
        "run.iterations": "trainer.total_training_steps total_training_steps",
        "run.dir": "trainer.default_local_dir trainer.experiment_name experiment_name default_local_dir",
        "run.trackers": "trainer.logger logger",
        "run.save_every": "trainer.save_freq save_freq",
        "run.keep_last": "trainer.max_actor_ckpt_to_keep max_actor_ckpt_to_keep",
        "none (trackers log to the project tokencredit)": "project_name",
        "none (torchrun starts one process per GPU: docs/scaling.md)": "n_gpus_per_node nnodes ray_kwargs.* device "
        "trainer.balance_batch use_legacy_worker_impl nccl_timeout *.ray_init.*",
        "none (Hydra's own settings)": "*_target_ defaults* hydra.*",
        "none (run.shard: full shards the models here)": "fsdp_config.* strategy *.strategy fsdp_size megatron.* "
        "*tensor_model_parallel_size *_parallel_size param_offload optimizer_offload use_shm hybrid_engine",
        "none (ppo.micro_batch_tokens bounds every pass)": "log_prob_* use_dynamic_bsz micro_batch_size "
        "micro_batch_size_per_gpu *_max_token_len_per_gpu forward_* critic.ppo_micro_batch_size_per_gpu "
        "critic.ppo_micro_batch_size critic.ppo_max_token_len_per_gpu",
        "none (the critic is updated with the policy, in the same minibatches)": "critic.ppo_mini_batch_size "
        "critic.ppo_epochs critic.shuffle critic.loss_agg_mode critic.grad_clip critic.optim.*",
        "none (the critic has the settings of model)": "critic.model.*",
        "none (padding is cut per micro-batch, and PyTorch chooses the kernels)": "use_remove_padding "
        "use_fused_kernels use_liger use_torch_compile fused_kernel_options.* tiled_mlp.* entropy_checkpointing "
        "entropy_from_logits_with_chunking",
        "none (vLLM has its defaults; rollout.engine_memory sets its memory)": "enforce_eager max_num_batched_tokens "
        "max_num_seqs enable_chunked_prefill free_cache_engine load_format",
        "none (a reward model runs in the trainer's process, on whole batches)": "reward_model.*",
        "none (reward terms of your own are functions: docs/rewards.md)": "reward_manager reward_manager.* "
        "reward_fn_key",
        "none (off_policy.correct corrects here)": "rollout_correction.* calculate_log_probs",
        "none (all columns are kept, and only texts are trained on)": "data.return_* data.image_* data.video_* "
        "data.custom_cls.* data.sampler.* data.datagen.*",
        "none (tools and environments are set otherwise here: docs/turns.md)": "multi_turn.* agent.*",
        "none (metrics.jsonl has the seconds of each stage)": "profiler.* global_profiler.* trace.* prometheus.*",
        "none (it is not implemented; ppo.loss and advantage.estimator have what is)": "pf_ppo.* use_pf_ppo tau_pos "
        "tau_neg policy_loss.*",
        "none (a checkpoint holds everything, and --resume RUN continues it)": "checkpoint.* max_critic_ckpt_to_keep "
        "resume_mode resume_from_path",
        "none (tokencredit evaluate scores a model before a run, or without one)": "val_before_train val_only",
        "none (write it as chat_template into the model's tokenizer_config.json, or set prompts.template)": "model."
        "custom_chat_template actor_rollout_ref.model.custom_chat_template",
        "none (a detail of verl's workers)": "actor_rollout_ref.model.* ref.* transfer_queue.*",
    },
    values={
        "critic.kind": ("critic.enable algorithm.adv_estimator", critic_kind),
        "prompts.overlong": (
            "data.truncation data.filter_overlong_prompts",
            lambda name, drop: "drop" if drop else choice(name or "error"),
        ),
        "advantage.whiten": (
            "algorithm.adv_estimator",
            lambda name: "batch" if name == "gae" or name.startswith("reinforce_plus_plus") else "none",
        ),
        "eval.temperature": (
            "trainer.test_freq rollout.val_kwargs.temperature rollout.val_kwargs.do_sample",
            lambda every, at, sampled: DEFAULT if (every or 0) < 1 else at if sampled else 0.0,
        ),
        "rollout.batch_size": ("data.train_batch_size actor_rollout_ref.rollout.n", product),
        "rollout.stop_at_eos": ("actor_rollout_ref.rollout.ignore_eos", lambda ignore: not ignore),
        "ppo.minibatches": ("data.train_batch_size actor.ppo_mini_batch_size", number),
        "ppo.clip": ("actor.clip_ratio_low actor.clip_ratio", clip),
        "ppo.clip_high": ("actor.clip_ratio_high actor.clip_ratio", clip),
        "ppo.micro_batch_tokens": (
            "actor.use_dynamic_bsz actor.ppo_max_token_len_per_gpu ppo_micro_batch_size_per_gpu",
            lambda dynamic, tokens, rows: tokens if dynamic and tokens else rows_per_pass(rows),
        ),
        "run.iterations": (
            "trainer.total_training_steps trainer.total_epochs rows data.train_batch_size",
            # An epoch leaves out the prompts of an unfinished batch.
            lambda steps, epochs, rows, size: steps or iterations(epochs, rows and max(1, rows // size) * size, size),
        ),
        "kl.place": (KL_NAMES, kl_place),
        "kl.coef": (f"{KL_NAMES} algorithm.kl_ctrl.kl_coef actor.kl_loss_coef", kl_coef),
        "kl.estimator": (f"{KL_NAMES} algorithm.kl_penalty actor.kl_loss_type", kl_estimator),
        "kl.target": ("algorithm.kl_ctrl.type algorithm.kl_ctrl.target_kl algorithm.kl_ctrl.horizon", kl_target),
        "optim.warmup": ("actor.optim.lr_warmup_steps actor.optim.lr_warmup_steps_ratio =run.iterations", warmup),
        "score.overlong": (
            "overlong_buffer.enable overlong_buffer.len overlong_buffer.penalty_factor",
            lambda on, tokens, factor: [float(tokens), float(factor or 1)] if on and tokens else DEFAULT,
        ),
        "reward": (
            "custom_reward_function.path custom_reward_function.name reward_model.enable reward_model.model.path",
            own_reward,
        ),
        "run.dir": ("trainer.default_local_dir trainer.experiment_name", lambda path, name: path or f"runs/{name}"),
    },
    defaults={
        **{"algorithm.adv_estimator": "gae", "algorithm.gamma": 1.0, "algorithm.lam": 1.0, "actor.ppo_epochs": 1},
        **{"data.train_batch_size": 1024, "data.max_response_length": 512, "actor_rollout_ref.rollout.n": 1},
        **{"actor_rollout_ref.rollout.temperature": 1.0, "actor.ppo_mini_batch_size": 256, "actor.clip_ratio": 0.2},
        **{"actor.clip_ratio_c": 3.0, "critic.cliprange_value": 0.5, "critic.optim.lr": 1e-5, "actor.optim.lr": 1e-6},
        **{"algorithm.use_kl_in_reward": False, "actor.use_kl_loss": False, "actor.kl_loss_type": "low_var_kl"},
        **{"algorithm.kl_ctrl.kl_coef": 0.001, "actor.kl_loss_coef": 0.001, "algorithm.kl_penalty": "kl"},
        **{"actor.optim.lr_scheduler_type": "constant", "actor.optim.lr_warmup_steps_ratio": 0.0},
        **{"actor.optim.min_lr_ratio": 0.0, "actor.grad_clip": 1.0},
        **{"rollout.val_kwargs.temperature": 0.0, "rollout.val_kwargs.do_sample": False},
        **{"actor.optim.weight_decay": 0.01, "trainer.total_epochs": 30, "reward_model.enable": False},
    },
    fixed={"critic.head": "linear", "critic.coef": 1.0, "critic.prefix_every": 0},
    aliases={
        f"{place}.{name}": f"overlong_buffer.{name}"
        for place in (
            "reward_model.overlong_buffer",
            "reward_model.reward_kwargs.overlong_buffer_cfg",
            "reward.reward_kwargs.overlong_buffer_cfg",
        )
        for name in ("enable", "len", "penalty_factor", "log")
    },
)
