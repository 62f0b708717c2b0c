"""OpenRLHF: the command line of `openrlhf.cli.train_ppo_ray`, with today's dotted names and those before 0.10."""

from __future__ import annotations

from typing import Any

from tokencredit.settings.projects.translation import Project
from tokencredit.settings.projects.values import (
    DEFAULT,
    Without,
    iterations,
    number,
    product,
    reward_models,
    rows_per_pass,
    warmup,
)

UNSCALED = ("reinforce_baseline", "dr_grpo")
"""Estimators without a division by the deviation of a prompt's scores."""
WHITENED = ("gae", "reinforce", "reinforce_baseline")
"""Estimators whose advantages are whitened over the batch."""


def score_clip(pair: Any) -> Any:
    """The clip range of scores, symmetric here."""
    low, high = (float(x) for x in pair)
    return high if -low == high else Without(f"{low:g} to {high:g} is not symmetric")


def whiten(estimator: Any, mean_only: Any) -> Any:
    """The whitening of the advantages, by their mean and deviation or not at all here."""
    if estimator not in WHITENED:
        return "none"
    return Without("mean only there; none or batch here") if mean_only else "batch"


def reward(model: Any, url: Any, agent: Any) -> Any:
    """The reward of a reward model; functions and servers have other arguments."""
    if agent or url:
        return Without(f"{agent or url} takes OpenRLHF's arguments; docs/rewards.md and docs/turns.md have those here")
    return reward_models(model) if model else DEFAULT


def critic_name(critic: Any, model: Any, actor: Any, url: Any, agent: Any) -> Any:
    """The critic's model: by default the first reward model, or the policy's beside a server or an agent."""
    return critic or (actor if url or agent or not model else model.split(",")[0].strip())


def correction(on: Any, kind: Any) -> Any:
    """The correction by importance weights; a mask of sequences beside weights of tokens is none of those here."""
    if on and kind == "seq-mask-tis":
        return Without("seq-mask-tis masks sequences and weighs tokens; mask with off_policy.level: geometric is near")
    return DEFAULT if not on else "clip" if kind in (None, "tis") else "mask"


NAMES = {
    "model.name": "actor.model_name_or_path",
    "model.lora.rank": "ds.lora.rank",
    "model.lora.alpha": "ds.lora.alpha",
    "model.lora.dropout": "ds.lora.dropout",
    "model.lora.target_modules": "ds.lora.target_modules",
    "model.quantization": "ds.load_in_4bit",
    "model.dtype": "ds.param_dtype",
    "model.gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "reward": "reward.model_name_or_path reward.remote_url train.agent_func_path",
    "critic.name": "critic.model_name_or_path",
    "critic.lr, critic.trunk_lr (of a separate critic)": "critic.adam.lr",
    "critic.clip": "critic.value_clip",
    "critic.pretrain (in batches, before the first iteration)": "critic.freezing_steps",
    "prompts.dataset": "data.prompt_dataset",
    "prompts.split": "data.prompt_split",
    "prompts.column": "data.input_key",
    "prompts.template (Jinja; a chat template is the tokenizer's own)": "data.input_template input_template",
    "prompts.max_length": "data.prompt_max_len",
    "eval.dataset": "eval.dataset",
    "eval.split": "eval.split",
    "eval.every": "eval.steps",
    "eval.temperature": "eval.temperature",
    "eval.best_of": "eval.n_samples_per_prompt",
    "rollout.batch_size (completions: prompts × rollout.per_prompt)": "rollout.batch_size",
    "rollout.per_prompt": "rollout.n_samples_per_prompt",
    "rollout.max_new_tokens": "rollout.max_new_tokens",
    "rollout.min_new_tokens": "rollout.min_new_tokens",
    "rollout.temperature": "rollout.temperature",
    "rollout.top_p": "rollout.top_p",
    "rollout.max_new_tokens, prompts.max_length": "data.max_len",
    "rollout.engine": "vllm.num_engines",
    "rollout.engine_memory": "vllm.gpu_memory_utilization",
    "off_policy.correct": "algo.advantage.is_correction_enable algo.advantage.is_correction_type",
    "off_policy.bounds": "algo.advantage.is_correction_threshold",
    "score.normalize": "reward.normalize_enable",
    "score.clip": "reward.clip_range",
    "score.overlong": "reward.overlong_buffer_len reward.overlong_penalty_factor",
    "advantage.estimator": "algo.advantage.estimator",
    "advantage.gamma": "algo.advantage.gamma",
    "advantage.lam": "algo.advantage.lambd",
    "advantage.whiten (none leaves out the mean too)": "algo.advantage.no_std_norm",
    "ppo.minibatches (their number: rollout.batch_size / size)": "train.batch_size",
    "ppo.micro_batch_tokens (in tokens)": "train.max_tokens_per_gpu train.micro_batch_size rollout.micro_batch_size",
    "ppo.epochs": "train.max_epochs",
    "ppo.clip": "actor.eps_clip",
    "ppo.clip, ppo.clip_high": "actor.eps_clip_low_high",
    "ppo.dual_clip": "actor.dual_clip",
    "ppo.entropy_coef": "actor.entropy_coef",
    "ppo.loss": "actor.policy_loss_type",
    "kl.coef": "algo.kl.init_coef",
    "kl.target": "algo.kl.target",
    "kl.horizon": "algo.kl.horizon",
    "kl.estimator": "algo.kl.estimator",
    "kl.place": "algo.kl.use_loss",
    "optim.lr": "actor.adam.lr",
    "optim.eps": "actor.adam.eps",
    "optim.weight_decay": "actor.adam.weight_decay",
    "optim.name": "actor.optim",
    "optim.schedule": "actor.lr_scheduler",
    "optim.warmup (in iterations)": "actor.lr_warmup_ratio",
    "optim.final_scale": "actor.min_lr_ratio",
    "optim.max_grad_norm": "actor.max_norm",
    "run.iterations (passes × prompts × rollout.per_prompt / rollout.batch_size)": "train.num_episodes num_episodes",
    "run.dir": "ckpt.output_dir ckpt.path",
    "run.save_every": "ckpt.save_steps",
    "run.keep_last": "ckpt.max_num",
    "run.shard": "ds.zero_stage",
    "run.trackers": "logger.wandb.key logger.tensorboard_dir",
    "seed": "train.seed",
    "none (all rows are read; give a file of that many)": "data.max_samples",
    "none (conversations always are; prompts.role: user makes plain prompts messages)": "data.apply_chat_template",
    "none (trackers log to the project tokencredit)": "logger.wandb.* wandb_*",
    "none (every iteration is logged)": "logger.logging_steps",
    "none (torchrun starts one process per GPU: docs/scaling.md)": "*.num_nodes *.num_gpus_per_node train.colocate_* "
    "colocate_* *.offload local_rank *_num_nodes *_num_gpus_per_node",
    "none (of DeepSpeed; run.shard: full shards the models here)": "ds.* adam_offload packing_samples flash_attn "
    "attn_implementation deepspeed_enable_sleep",
    "none (vLLM has its defaults; rollout.engine_memory sets its memory)": "vllm.* vllm_* enforce_eager",
    "none (padding is cut per micro-batch)": "train.dynamic_batch_enable rollout.max_tokens_per_gpu",
    "none (every column is passed to the reward)": "data.label_key",
    "none (the critic is saved with the policy)": "critic.save_value_network",
    "none (the critic has the policy's schedule)": "critic.lr_* critic.min_lr_ratio critic.max_norm critic.adam.* "
    "critic.optim critic.muon.*",
    "none (checkpoints hold everything; policy/ is in Hugging Face's format)": "ckpt.* save_hf_ckpt load_checkpoint",
    "none (no mean of the weights is kept)": "train.enable_ema train.ema_beta",
    "none (batches are sampled ahead by rollout.max_age)": "train.async_* train.partial_rollout_enable",
    "none (prompts are not filtered by their scores)": "algo.dynamic_filtering_* dynamic_filtering*",
    "none (Adam's are 0.9 and 0.999)": "actor.adam.betas",
    "none (only texts are trained on)": "data.image_key data.max_images_per_prompt actor.freeze_visual_encoder",
    "none (one data set, read whole)": "data.prompt_probs data.dataloader_num_workers data.disable_fast_tokenizer",
    "none (same seed and threads: same run)": "train.full_determinism_enable",
}
RENAMED = """
pretrain=actor.model_name_or_path reward_pretrain=reward.model_name_or_path remote_rm_url=reward.remote_url
critic_pretrain=critic.model_name_or_path actor_learning_rate=actor.adam.lr critic_learning_rate=critic.adam.lr
l2=actor.adam.weight_decay entropy_loss_coef=actor.entropy_coef seed=train.seed bf16=ds.param_dtype
gradient_checkpointing=actor.gradient_checkpointing_enable freezing_actor_steps=critic.freezing_steps
lambd=algo.advantage.lambd gamma=algo.advantage.gamma no_advantage_std_norm=algo.advantage.no_std_norm
init_kl_coef=algo.kl.init_coef use_kl_loss=algo.kl.use_loss normalize_reward=reward.normalize_enable
prompt_data=data.prompt_dataset prompt_data_probs=data.prompt_probs generate_max_len=rollout.max_new_tokens
generate_min_len=rollout.min_new_tokens n_samples_per_prompt=rollout.n_samples_per_prompt
temperature=rollout.temperature micro_rollout_batch_size=rollout.micro_batch_size use_wandb=logger.wandb.key
micro_train_batch_size=train.micro_batch_size save_path=ckpt.output_dir max_ckpt_num=ckpt.max_num
use_tensorboard=logger.tensorboard_dir
"""
"""The names before 0.10, each with today's; the others were the ends of today's, with underscores."""


def older() -> dict[str, str]:
    """Today's names by those before 0.10; of several with the same end the first is meant."""
    today = [name for names in NAMES.values() for name in names.split()]
    ends = {"_".join(name.split(".")[first:]): name for name in reversed(today) for first in range(name.count(".") + 1)}
    return {end: name for end, name in ends.items() if "_" in end} | dict(x.split("=") for x in RENAMED.split())


OPENRLHF = Project(
    title="OpenRLHF",
    names=NAMES,
    aliases=older(),
    values={
        "reward": ("reward.model_name_or_path reward.remote_url train.agent_func_path", reward),
        "critic.name": (
            "critic.model_name_or_path reward.model_name_or_path actor.model_name_or_path reward.remote_url "
            "train.agent_func_path",
            critic_name,
        ),
        "eval.temperature": ("eval.dataset eval.temperature", lambda data, at: at if data else DEFAULT),
        "eval.best_of": ("eval.dataset eval.n_samples_per_prompt", lambda data, n: n if data else DEFAULT),
        "prompts.template": (
            "data.input_template",
            lambda text: text.replace("{}", "{{ input }}") if text else DEFAULT,
        ),
        "rollout.batch_size": ("rollout.batch_size rollout.n_samples_per_prompt", product),
        "rollout.max_new_tokens": (
            "rollout.max_new_tokens data.max_len data.prompt_max_len",
            lambda new, both, prompt: (
                new
                or (both - prompt if prompt else Without(f"{both} tokens with the prompt there; give those without it"))
            ),
        ),
        "rollout.engine": ("vllm.num_engines", lambda number: "vllm" if number else DEFAULT),
        "off_policy.correct": (
            "algo.advantage.is_correction_enable algo.advantage.is_correction_type",
            correction,
        ),
        "off_policy.bounds": (
            "algo.advantage.is_correction_enable algo.advantage.is_correction_threshold",
            lambda on, pair: [float(x) for x in pair or (0.5, 5.0)] if on else DEFAULT,
        ),
        "score.normalize": (
            "reward.normalize_enable",
            lambda on: (
                Without("mean and deviation of the reward model's config.json there; those of scores here")
                if on
                else DEFAULT
            ),
        ),
        "score.clip": ("reward.clip_range", score_clip),
        "score.overlong": (
            "reward.overlong_buffer_len reward.overlong_penalty_factor",
            lambda tokens, penalty: [float(tokens), float(penalty or 1)] if tokens else DEFAULT,
        ),
        "critic.kind": ("algo.advantage.estimator", lambda name: "separate" if name == "gae" else "none"),
        "advantage.scale": ("algo.advantage.estimator", lambda name: False if name in UNSCALED else DEFAULT),
        "advantage.whiten": ("algo.advantage.estimator algo.advantage.no_std_norm", whiten),
        "ppo.minibatches": ("=rollout.batch_size train.batch_size", number),
        "ppo.micro_batch_tokens": (
            "train.dynamic_batch_enable train.max_tokens_per_gpu train.micro_batch_size rollout.micro_batch_size",
            lambda on, tokens, rows, _: tokens if on and tokens else rows_per_pass(rows),
        ),
        "ppo.clip": ("actor.eps_clip actor.eps_clip_low_high", lambda both, pair: float(pair[0]) if pair else both),
        "ppo.clip_high": ("actor.eps_clip_low_high", lambda pair: float(pair[1])),
        "kl.place": ("algo.kl.use_loss", lambda on: "loss" if on else DEFAULT),
        "kl.target": (
            "algo.kl.target algo.kl.horizon",
            lambda kl, _: Without(f"{kl} per token there; kl.target is per sequence") if kl else DEFAULT,
        ),
        "run.iterations": ("train.num_episodes rows rollout.batch_size", iterations),
        "optim.warmup": ("actor.lr_warmup_ratio =run.iterations actor.lr_scheduler", lambda *x: warmup(0, *x)),
        "run.shard": ("ds.zero_stage", lambda stage: "full" if stage == 3 else DEFAULT),
        "run.trackers": (
            "logger.wandb.key logger.tensorboard_dir",
            lambda key, folder: ["wandb"] * bool(key) + ["tensorboard"] * bool(folder),
        ),
    },
    defaults={
        **{"actor.adam.lr": 1e-6, "critic.adam.lr": 9e-6, "actor.lr_scheduler": "cosine_with_min_lr"},
        **{"actor.lr_warmup_ratio": 0.03, "actor.min_lr_ratio": 0.1, "actor.max_norm": 1.0, "actor.eps_clip": 0.2},
        **{"critic.value_clip": 0.5, "algo.advantage.lambd": 1.0, "algo.advantage.gamma": 1.0, "train.seed": 42},
        **{"algo.advantage.estimator": "gae", "algo.kl.init_coef": 0.01, "algo.kl.estimator": "k1"},
        **{"rollout.batch_size": 1024, "rollout.n_samples_per_prompt": 1, "rollout.temperature": 1.0},
        **{"train.batch_size": 128, "train.max_epochs": 1, "train.num_episodes": 1, "reward.clip_range": (-10, 10)},
        **{"data.input_key": "input", "data.max_len": 2048, "actor.adam.betas": (0.9, 0.95)},
        **{"eval.temperature": 0.6, "eval.n_samples_per_prompt": 4},
    },
    fixed={"critic.head": "linear", "critic.prefix_every": 0, "critic.coef": 1.0},
)
