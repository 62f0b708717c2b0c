"""Tables of other projects' names: the values here that their settings stand for, or the reason for none."""

import pytest

from tokencredit.settings.projects import projects
from tokencredit.settings.projects.llama_factory import LLAMA_FACTORY, SWIFT
from tokencredit.settings.projects.openrlhf import OPENRLHF
from tokencredit.settings.projects.translation import translate
from tokencredit.settings.projects.trl import OLD_TRL, TRL
from tokencredit.settings.projects.verl import VERL
from tokencredit.settings.text import PPOConfig


@pytest.mark.parametrize("project", [x for x in projects() if x.values], ids=lambda project: project.title)
def test_defaults_alone_are_settings_here_or_named(project):
    made = translate(project, {})
    assert {"optim.lr", "ppo.epochs"} <= set(made.settings)
    read = {name for names, _ in project.values.values() for name in names.split() if not name.startswith("=")}
    assert read - {"rows"} <= set(project.answers) | {"actor.use_dynamic_bsz"}, "a rule reads names of the table"
    assert set(project.defaults) <= set(project.answers)


def test_the_trainers_of_both_ages_differ_as_theirs_do():
    new, old = translate(TRL, {"whiten_rewards": True}).settings, translate(OLD_TRL, {"early_stopping": True}).settings
    assert (new["critic.kind"], new["score.normalize"], new["score.shift_mean"]) == ("separate", "batch", False)
    assert (old["critic.kind"], old["ppo.target_kl"], old["kl.target"]) == ("shared", 1.5, 6.0)
    assert {"stop.kl", "stop.reward"}.isdisjoint(old), "the first key of several is meant where a rule decides"
    PPOConfig.from_dict(new)
    PPOConfig.from_dict(old)


VERLS, OPENRLHFS = "algorithm.adv_estimator", "algo.advantage.estimator"
COSINE = {"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 1e-5}
CLIPS = {f"actor.clip_ratio{side}": 0.2 + 0.05 * n for n, side in enumerate(("_low", "", "_high"))}


@pytest.mark.parametrize(
    ("project", "given", "expected"),
    [
        *[(VERL, {VERLS: x}, {"advantage.whiten": "none"}) for x in ("grpo", "rloo", "remax")],
        *[(VERL, {VERLS: f"reinforce_plus_plus{x}"}, {"advantage.whiten": "batch"}) for x in ("", "_baseline")],
        (VERL, {"actor.optim.lr_scheduler_type": "cosine"}, {"optim.final_scale": 0.0}),
        (VERL, {"actor.optim.lr_warmup_steps": 5}, {"optim.warmup": 5}),  # its constant schedule warms up
        (VERL, {}, {"advantage.whiten": "batch", "ppo.clip": 0.2, "ppo.clip_high": 0.2}),
        (VERL, CLIPS, {"ppo.clip": 0.2, "ppo.clip_high": 0.3}),
        *[(OPENRLHF, {OPENRLHFS: x}, {"advantage.whiten": "none"}) for x in ("group_norm", "dr_grpo", "rloo")],
        (OPENRLHF, {}, {"advantage.whiten": "batch"}),
        (OPENRLHF, {OPENRLHFS: "reinforce_baseline"}, {"advantage.whiten": "batch", "advantage.scale": False}),
        (OPENRLHF, {OPENRLHFS: "dr_grpo", "no_advantage_std_norm": True}, {"advantage.scale": False}),
        (OPENRLHF, {"actor.lr_scheduler": "constant"}, {"optim.warmup": 0}),
        (SWIFT, {}, {"optim.lr": 1e-4, "critic.lr": 1e-4, "rollout.batch_size": 16, "optim.warmup": 0}),
        (SWIFT, {"train_type": "full"}, {"optim.lr": 1e-5, "critic.lr": 1e-5}),
        (SWIFT, {"tuner_type": "full", "learning_rate": 2e-6}, {"optim.lr": 2e-6}),
        (SWIFT, {"per_device_train_batch_size": 3, "world_size": 4}, {"rollout.batch_size": 24}),
        (SWIFT, {"per_device_train_batch_size": 32, "num_mini_batches": 2}, {"ppo.minibatches": 2}),
        (SWIFT, {"per_device_train_batch_size": 2, "num_mini_batches": 2}, {"ppo.minibatches": 1}),
        (TRL, {}, {"optim.final_scale": 0.0}),
        *[(TRL, COSINE | {"lr_scheduler_kwargs": {"min_lr_rate": x}}, {"optim.final_scale": x}) for x in (0.2, 0)],
        (SWIFT, COSINE | {"lr_scheduler_kwargs": '{"min_lr": 1e-6}'}, {"optim.final_scale": 0.1}),
        (LLAMA_FACTORY, COSINE | {"lr_scheduler_kwargs.min_lr": 1e-6}, {"optim.final_scale": 0.1}),
        *[
            (project, {"lr_scheduler_type": f"constant{ending}", "warmup_steps": 5}, {"optim.warmup": steps})
            for project in (TRL, LLAMA_FACTORY, SWIFT)
            for ending, steps in {"": 0, "_with_warmup": 5}.items()
        ],
    ],
)
def test_values_are_those_that_the_project_trains_with(project, given, expected):
    found = translate(project, given).settings
    assert {key: found.get(key) for key in expected} == pytest.approx(expected)


GRPO_VALUES = {
    **{"use_vllm": True, "vllm_mode": "colocate", "loss_type": "dapo", "scale_rewards": "none"},
    **{"importance_sampling_level": "sequence", "max_tool_calling_iterations": 2},
    **{"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 3.0},
}


@pytest.mark.parametrize(
    ("project", "given", "key", "reason"),
    [
        (VERL, {"actor.clip_ratio": 0.3}, "ppo.clip", "0.3 in verl before April 2025; 0.2 since"),
        (VERL, {"actor.clip_ratio": 0.3}, "ppo.clip_high", "0.3 in verl before April 2025; 0.2 since"),
        (OPENRLHF, {"no_advantage_std_norm": True}, "advantage.whiten", "mean only there; none or batch here"),
        (LLAMA_FACTORY, {"finetuning_type": "freeze"}, "model.lora.rank", "freeze there; full or lora here"),
        (SWIFT, {"train_type": "adalora"}, "model.lora.rank", "adalora there; full or lora here"),
        (TRL, COSINE, "optim.final_scale", "cosine_with_min_lr with lr_scheduler_kwargs {}; one of min_lr_rate"),
        *[
            (TRL, {"lr_scheduler_type": kind, "lr_scheduler_kwargs": options}, "optim.final_scale", f"{kind} with")
            for kind, options in (("cosine", {"num_cycles": 2}), ("cosine_with_min_lr", {"min_lr": 0, "num_cycles": 2}))
        ],
        *[
            (TRL, {name: value}, TRL.answer(name)[0][0], "a value of GRPO there; docs/from-trl.md has its counterpart")
            for name, value in GRPO_VALUES.items()
        ],
    ],
)
def test_values_that_are_no_settings_here_are_left_with_the_reason(project, given, key, reason):
    made = translate(project, given)
    assert made.undecided[key].startswith(reason)
    assert not {key, "off_policy.level"} & made.settings.keys()
    assert not made.without.keys() & given.keys(), "which are answered once"
