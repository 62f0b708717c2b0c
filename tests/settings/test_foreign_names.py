"""Other projects' names, in Python, flags and files: the key here, or no key that is only spelt alike."""

import pytest

import tokencredit as tc
from tokencredit.cli import main
from tokencredit.errors import ConfigError, pages_by_title
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.fields import settings_of, unknown_key
from tokencredit.settings.foreign_names import names_elsewhere
from tokencredit.settings.offline import DPOConfig, DPOLossConfig, SFTConfig
from tokencredit.settings.projects import projects
from tokencredit.settings.run_kind import RUN_KINDS
from tokencredit.settings.text import PPOConfig

NO_DEVICE = "it has no counterpart here (a language model takes the GPU if there is one"
FOREIGN = [
    # No other project's
    (PPOConfig, "eval.prompts.dataset", "did you mean eval.dataset?"),
    # TRL
    (PPOConfig, "learning_rate", "here it is optim.lr, critic.lr (docs/from-trl.md)"),
    (PPOConfig, "optim.learning_rate", "here it is optim.lr (docs/from-trl.md)"),
    (PPOConfig, "critic.learning_rate", "here it is critic.lr (docs/from-trl.md)"),
    (PPOConfig, "total_episodes", "here it is run.iterations (episodes / rollout.batch_size)"),
    (PPOConfig, "num_ppo_epochs", "here it is ppo.epochs (docs/from-trl.md)"),
    (PPOConfig, "init_kl_coef", "here it is kl.coef"),
    (PPOConfig, "adap_kl_ctrl", "here it is kl.target"),
    (PPOConfig, "log_with", "here it is run.trackers"),
    (PPOConfig, "early_stopping", "here it is ppo.target_kl, stop.kl, stop.reward"),
    (PPOConfig, "num_generations", "here it is rollout.per_prompt (docs/from-trl.md)"),
    (PPOConfig, "disable_dropout", "here it is model.dropout (the opposite)"),
    (PPOConfig, "ref_model", "it has no counterpart here (the reference is a frozen copy of the model"),
    (PPOConfig, "batch_size", "here it is rollout.batch_size (docs/from-trl.md)"),
    (SFTConfig, "num_train_epochs", "here it is data.epochs"),
    (SFTConfig, "max_seq_length", "here it is data.max_length"),
    (SFTConfig, "per_device_train_batch_size", "here it is data.batch_size"),
    (SFTConfig, "learning_rate", "here it is optim.lr (docs/from-trl.md)"),
    (DPOConfig, "beta", "here it is dpo.beta"),
    # verl
    (PPOConfig, "actor_rollout_ref.actor.optim.lr", "here it is optim.lr"),
    (PPOConfig, "critic.optim.lr", "here it is critic.lr, critic.trunk_lr (of a separate critic)"),
    (PPOConfig, "actor_rollout_ref.model.path", "here it is model.name"),
    (PPOConfig, "critic.model.path", "here it is critic.name"),
    (PPOConfig, "actor_rollout_ref.rollout.n", "here it is rollout.per_prompt"),
    (PPOConfig, "algorithm.adv_estimator", "here it is advantage.estimator"),
    (PPOConfig, "algorithm.kl_ctrl.kl_coef", "here it is kl.coef (docs/from-trl.md)"),
    (
        PPOConfig,
        "data.train_batch_size",
        "here it is rollout.batch_size (completions: prompts × rollout.per_prompt)",
    ),
    (PPOConfig, "actor_rollout_ref.rollout.ignore_eos", "here it is rollout.stop_at_eos (the opposite)"),
    (PPOConfig, "ignore_eos", "here it is rollout.stop_at_eos (the opposite)"),
    (PPOConfig, "data.max_response_length", "here it is rollout.max_new_tokens"),
    (
        PPOConfig,
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "here it is ppo.minibatches (their number: rollout.batch_size / size)",
    ),
    (PPOConfig, "actor_rollout_ref.actor.clip_ratio_high", "here it is ppo.clip_high"),
    (PPOConfig, "actor_rollout_ref.actor.entropy_coeff", "here it is ppo.entropy_coef"),
    (PPOConfig, "trainer.project_name", "it has no counterpart here (trackers log to the project tokencredit)"),
    # OpenRLHF
    (PPOConfig, "pretrain", "here it is model.name"),
    (PPOConfig, "reward_pretrain", "here it is reward"),
    (PPOConfig, "actor_learning_rate", "here it is optim.lr"),
    (PPOConfig, "n_samples_per_prompt", "here it is rollout.per_prompt"),
    (PPOConfig, "generate_max_len", "here it is rollout.max_new_tokens"),
    (PPOConfig, "prompt_max_len", "here it is prompts.max_length"),
    (PPOConfig, "eps_clip", "here it is ppo.clip"),
    (PPOConfig, "lambd", "here it is advantage.lam"),
    (PPOConfig, "no_advantage_std_norm", "here it is advantage.whiten (none leaves out the mean too)"),
    (PPOConfig, "normalize_reward", "here it is score.normalize"),
    (PPOConfig, "freezing_actor_steps", "here it is critic.pretrain (in batches, before the first iteration)"),
    (SFTConfig, "max_len", "here it is data.max_length"),
    # LLaMA-Factory
    (PPOConfig, "model_name_or_path", "here it is model.name"),
    (
        PPOConfig,
        "stage",
        "it has no counterpart here (the command says it: tokencredit train, sft, reward-model or dpo)",
    ),
    (PPOConfig, "lora_rank", "here it is model.lora.rank"),
    (PPOConfig, "ppo_target", "here it is kl.target"),
    (PPOConfig, "ppo_epochs", "here it is ppo.epochs"),
    (SFTConfig, "cutoff_len", "here it is data.max_length"),
    # CleanRL
    (ControlConfig, "env-id", "here it is env.id"),
    (
        ControlConfig,
        "total-timesteps",
        "here it is run.iterations (timesteps / (env.number × steps))",
    ),
    (ControlConfig, "num-envs", "here it is env.number"),
    (ControlConfig, "num-steps", "here it is steps"),
    (ControlConfig, "norm-adv", "here it is advantage.whiten"),
    (ControlConfig, "clip-vloss", "here it is critic.clip (a number; null for none)"),
    (ControlConfig, "anneal-lr", "here it is optim.schedule, optim.final_scale"),
    (ControlConfig, "cuda", NO_DEVICE),
    # Stable-Baselines3 and others for agents
    (ControlConfig, "n_steps", "here it is steps"),
    (ControlConfig, "vf_coef", "here it is critic.coef (twice Stable-Baselines3's, whose loss is not halved)"),
    (ControlConfig, "learning_rate", "here it is optim.lr, critic.lr (constant in Stable-Baselines3: optim.schedule)"),
    (ControlConfig, "max_grad_norm", "here it is optim.max_grad_norm"),
    (ControlConfig, "batch_size", "here it is ppo.minibatches (their number: env.number × steps / size)"),
    (ControlConfig, "clip_range_vf", "here it is critic.clip (a number; null for none)"),
    (ControlConfig, "policy_kwargs", "here it is agent.hidden"),
    (ControlConfig, "use_sde", "it has no counterpart here (exploration does not depend on the state)"),
    (ControlConfig, "env_name", "here it is env.id"),
    (ControlConfig, "normalize_advantages", "here it is advantage.whiten"),
    (ControlConfig, "early_stopping", "here it is ppo.target_kl, stop.reward"),
    (ControlConfig, "env.name", "here it is env.id"),
    (
        ControlConfig,
        "env.copies",
        "env has id, number, processes, kwargs, normalize_observations, normalize_rewards, clip",
    ),
    # Names that are nobody's: close in spelling is not enough
    (PPOConfig, "run.device", NO_DEVICE),
    (
        PPOConfig,
        "advantage.k",
        "advantage has estimator, kwargs, gamma, lam, lam_returns, alpha, n, whiten, scale",
    ),
    (PPOConfig, "eval.batch_size", "eval has every, samples, best_of, max_new_tokens, temperature, text"),
    (PPOConfig, "early", "see --print_config for all keys"),
    (ControlConfig, "response_length", "see --print_config for all keys"),
    # Misspelt
    (PPOConfig, "kl.coeff", "did you mean kl.coef?"),
    (PPOConfig, "rollout.max_tokens", "here it is rollout.max_new_tokens"),
    (PPOConfig, "iteration", "did you mean run.iterations?"),
    (PPOConfig, "critic_lr", "did you mean critic.lr?"),
    (PPOConfig, "optim.max-grad-norm", "did you mean optim.max_grad_norm?"),
    (PPOConfig, "lr", "did you mean critic.lr or optim.lr?"),
]


@pytest.mark.parametrize(("kind", "key", "answer"), FOREIGN, ids=[f"{row[0].__name__}-{row[1]}" for row in FOREIGN])
def test_a_key_of_the_field_has_the_right_answer_or_none(kind, key, answer):
    assert unknown_key(key, settings_of(kind)).startswith(f"unknown key {key}; {answer}")


def test_every_answer_is_a_key_here():
    known = {key for run_kind in RUN_KINDS.values() for key in settings_of(run_kind.config)}
    known |= {"model.quantization"}
    for project in projects():
        named = {key for name in project.answers for key in project.answer(name)[0]} | {*project.values, *project.fixed}
        assert {key for key in named if "(" not in key} <= known, project.title


def test_arguments_of_older_trainers():
    with pytest.raises(ConfigError) as caught:
        tc.PPOTrainer(config=None, tokenizer=None, reward_processing_classes=None)
    assert str(caught.value) == pages_by_title(
        "config is TRL's name for PPOTrainer(args) (docs/from-trl.md); "
        "tokenizer is TRL's name for PPOTrainer(processing_class) (docs/from-trl.md); "
        "reward_processing_classes is TRL's, and has no counterpart here (a reward model's tokenizer is read from its "
        "folder) (docs/from-trl.md)"
    )


def test_a_setting_of_older_trainers_as_an_argument():
    with pytest.raises(ConfigError, match=r"^log_with is TRL up to 0\.11's name for run\.trackers$"):
        tc.PPOTrainer(log_with="wandb")


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("-rtg", "here it is advantage.estimator (reward_to_go)"),
        ("-n", "here it is run.iterations (each is env.number × steps steps)"),
        ("--use_baseline", "here it is critic.kind (separate)"),
        ("--no_gpu", "it has no counterpart here (agents are trained on the CPU)"),
    ],
)
def test_flags_of_the_homework(flag, answer, capsys):
    assert main(["control", flag, "100"]) == 2
    assert f"unknown key {flag.removeprefix('--')}; {answer}" in capsys.readouterr().err


def test_a_name_set_on_a_configuration():
    config = tc.PPOConfig()
    config.num_ppo_epochs = 2
    with pytest.raises(ConfigError, match=r"^unknown key num_ppo_epochs; here it is ppo\.epochs"):
        tc.PPOTrainer(args=config)


def test_a_name_as_a_keyword():
    with pytest.raises(ConfigError, match=r"^unknown key learning_rate; here it is optim\.lr, critic\.lr"):
        tc.PPOConfig(learning_rate=1e-5)
    with pytest.raises(ConfigError, match=r"^unknown key betta; did you mean beta\?$"):
        DPOLossConfig(betta=0.1)


def test_a_name_in_a_flag_a_file_and_a_dict(tmp_path, capsys):
    told = pages_by_title("unknown key learning_rate; here it is optim.lr, critic.lr (docs/from-trl.md)\n")
    assert main(["train", "--learning_rate", "1e-5"]) == 2
    assert capsys.readouterr().err == f"tokencredit: {told}"
    file = tmp_path / "run.yaml"
    file.write_text("learning_rate: 1e-5\n")
    assert main(["train", "--config", str(file)]) == 2
    assert capsys.readouterr().err == f"tokencredit: {file}: {told}"
    with pytest.raises(ConfigError) as caught:
        tc.PPOConfig.from_dict({"learning_rate": 1e-5})
    assert str(caught.value) == told.strip()


def test_no_name_of_trls_gives_no_message():
    assert names_elsewhere(["zzz"]) == ""
