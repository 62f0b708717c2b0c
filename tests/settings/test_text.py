from dataclasses import asdict
from typing import get_args

import pytest
import yaml

from tokencredit.core.estimator_table import ESTIMATORS, AgentEstimatorName, EstimatorName
from tokencredit.errors import ConfigError
from tokencredit.settings.control import AgentCriticConfig
from tokencredit.settings.data import (
    ClassifierTerm,
    EnvironmentConfig,
    FunctionTerm,
    PromptsConfig,
    RewardModelTerm,
    RewardTerm,
    ScoreConfig,
)
from tokencredit.settings.fields import settings_of
from tokencredit.settings.model import CriticConfig
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.run_kind import read_config
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import AdvantageConfig, EvalConfig, KLConfig, StopConfig, UpdateConfig


def test_the_defaults_are_valid():
    config = PPOConfig()
    assert config.prompts.texts() == ["This movie was really"]
    assert config.reward == [ClassifierTerm(classifier="builtin:reviews", label="NEGATIVE")]
    assert config.reward != [ClassifierTerm(classifier="builtin:reviews", label="POSITIVE")]


@pytest.mark.parametrize(
    ("group", "settings", "message"),
    [
        ("ppo", {"clip": 1.5}, "clip is 1.5; it must be above 0 and below 1"),
        ("ppo", {"epochs": 0}, "epochs is 0; it must be at least 1"),
        ("optim", {"lr": "1e-4"}, "lr is '1e-4'; it must be a number"),
        ("rollout", {"temperature": float("nan")}, "temperature is nan; it must be above 0 and finite"),
        ("rollout", {"temperature": float("inf")}, "temperature is inf; it must be above 0 and finite"),
        ("kl", {"estimator": "k4"}, "estimator is 'k4'; it must be one of k1, k2, k3, full"),
        ("off_policy", {"bounds": ["0.5"]}, "bounds[0] is '0.5'; it must be a number"),
        ("off_policy", {"bounds": 0.5}, "bounds is 0.5; it must be a list of numbers"),
        ("run", {"iterations": 0}, "iterations is 0; it must be at least 1"),
    ],
)
def test_a_group_is_checked_when_it_is_made_and_named_by_its_key_elsewhere(group, settings, message):
    kind = settings_of(PPOConfig)[group].hint
    with pytest.raises(ConfigError) as caught:
        kind(**settings)
    assert str(caught.value) == f"{kind.__name__}.{message}"
    with pytest.raises(ConfigError) as caught:
        PPOConfig.from_dict({group: settings})
    assert str(caught.value) == f"{group}.{message}"


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (ClassifierTerm, {"classifier": "builtin:reviews", "output": "odds"}, "output is 'odds'; it must be one of"),
        (RewardModelTerm, {"reward_model": "rm", "batch_size": 0}, "batch_size is 0; it must be at least 1"),
        (FunctionTerm, {"function": "length", "weight": float("nan")}, "weight is nan; it must be finite"),
    ],
)
def test_a_reward_term_is_checked_when_it_is_made(kind, settings, message):
    with pytest.raises(ConfigError, match=f"^{kind.__name__}.{message}"):
        kind(**settings)
    with pytest.raises(ConfigError, match=rf"^reward\[1\]\.{message}"):
        PPOConfig.from_dict({"reward": [{"function": "length"}, settings]})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rollout": RolloutConfig(min_new_tokens=30)}, r"rollout\.min_new_tokens is 30; it must be at most"),
        ({"reward": []}, r"reward is \[\]; give at least one term"),
        (
            {"reward": [FunctionTerm(function="length", weight=0.0), FunctionTerm(function="distinct", weight=-0.0)]},
            r"reward\[…\]\.weight is 0 in all terms",
        ),
        (
            {"reward": [RewardTerm()]},
            r"reward\[0\] is a RewardTerm; it must be one of FunctionTerm, ClassifierTerm, RewardModelTerm",
        ),
        ({"prompts": PromptsConfig(text=[])}, r"prompts\.text is \[\]; give at least one prompt"),
        ({"rollout": RolloutConfig(batch_size=2), "ppo": UpdateConfig(minibatches=3)}, r"ppo\.minibatches is 3"),
        (
            {
                "advantage": AdvantageConfig(estimator="uniform", whiten="minibatch"),
                "critic": CriticConfig(kind="none"),
                "ppo": UpdateConfig(minibatches=33),
            },
            r"^ppo\.minibatches is 33, and advantage\.whiten is minibatch; .* at most 32, .* advantage\.whiten: batch$",
        ),
        *[
            (
                {
                    "advantage": AdvantageConfig(estimator=estimator, whiten=whiten),
                    "critic": CriticConfig(kind="none"),
                    "rollout": RolloutConfig(batch_size=1),
                    "ppo": UpdateConfig(minibatches=1),
                },
                rf"^rollout\.batch_size is 1, and advantage\.whiten is {whiten}; .* or set advantage\.whiten: none$",
            )
            for estimator, whiten in [("uniform", "batch"), ("total_return", "batch"), ("total_return", "minibatch")]
        ],
        (
            {
                "score": ScoreConfig(normalize="batch"),
                "rollout": RolloutConfig(batch_size=1),
                "ppo": UpdateConfig(minibatches=1),
            },
            r"^rollout\.batch_size is 1, and score\.normalize is batch; .* score\.normalize: running$",
        ),
        ({"rollout": RolloutConfig(batch_size=8, per_prompt=3)}, r"rollout\.per_prompt is 3; it must divide"),
        (
            {"advantage": AdvantageConfig(estimator="leave_one_out"), "critic": CriticConfig(kind="none")},
            r"rollout\.per_prompt is 1; .* must be at least 2",
        ),
        ({"kl": KLConfig(place="loss")}, r"kl\.estimator is k1, and kl\.place is loss; .* use k2, k3 or full"),
        ({"kl": KLConfig(estimator="full")}, r"kl\.estimator is full, and kl\.place is reward; .* set kl\.place: both"),
        ({"kl": KLConfig(place="both")}, r"kl\.estimator is k1, and kl\.place is both; .* set kl\.estimator: full"),
        ({"kl": KLConfig(coef=0.0, target=5.0)}, r"kl\.coef is 0, and kl\.target is 5; .* must be at least 1e-05"),
        ({"kl": KLConfig(coef=1e-6, target=5.0)}, r"^kl\.coef is 1e-06, .* must be at least 1e-05 and"),
        ({"kl": KLConfig(coef=20, target=5.0)}, r"^kl\.coef is 20, .* at most 10\.0$"),
        (
            {"eval": EvalConfig(max_new_tokens=3), "rollout": RolloutConfig(min_new_tokens=4)},
            r"^eval\.max_new_tokens is 3; it must be at least rollout\.min_new_tokens, 4$",
        ),
        ({"eval": EvalConfig(text=[])}, r"^eval\.text is \[\]; give at least one prompt"),
        ({"rollout": RolloutConfig(stop=["END", ""])}, r"^rollout\.stop is \['END', ''\]; an empty text would end"),
        ({"seed": 2**63}, r"^seed is 9223372036854775808; it must be at least 0 and at most 4611686018427387904$"),
        (
            {"advantage": AdvantageConfig(bootstrap=True), "ppo": UpdateConfig(mask_truncated=True)},
            r"advantage\.bootstrap is true, and ppo\.mask_truncated is true; .* leave one of them out",
        ),
        (
            {"score": ScoreConfig(missing_eos_penalty=1.0), "advantage": AdvantageConfig(bootstrap=True)},
            r"advantage\.bootstrap is true, and score\.missing_eos_penalty is 1; a truncated completion would",
        ),
        (
            {"score": ScoreConfig(overlong=[4, 1.0]), "advantage": AdvantageConfig(bootstrap=True)},
            r"advantage\.bootstrap is true, and score\.overlong is \[4, 1\.0\]",
        ),
        (
            {"score": ScoreConfig(missing_eos_penalty=1.0), "ppo": UpdateConfig(mask_truncated=True)},
            r"score\.missing_eos_penalty is 1, and ppo\.mask_truncated is true; only truncated completions pay",
        ),
        (
            {"rollout": RolloutConfig(stop_at_eos=False), "ppo": UpdateConfig(mask_truncated=True)},
            r"ppo\.mask_truncated is true, and rollout\.stop_at_eos is false; .* every completion is truncated",
        ),
        *[
            (
                {"score": ScoreConfig(overlong=pair)},
                r"score\.overlong is \[.*; it must be \[tokens, penalty\], 1 to 24 ",
            )
            for pair in ([], [4], [25, 1.0], [0, 1.0], [2.5, 1.0], [4, 0.0])
        ],
        (
            {"rollout": RolloutConfig(top_k=5, min_new_tokens=2), "kl": KLConfig(target=6.0)},
            r"kl\.target is 6, and rollout\.top_k is 5;",
        ),
        (
            {"rollout": RolloutConfig(top_p=0.9), "stop": StopConfig(kl=8.5)},
            r"stop\.kl is 8\.5, and rollout\.top_p is 0\.9;",
        ),
        (
            {"rollout": RolloutConfig(min_p=0.1), "kl": KLConfig(target=6.0, estimator="full", place="loss")},
            r"kl\.target is 6, .* set kl\.estimator: full with kl\.place: both",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_key(wrong, message):
    with pytest.raises(ConfigError, match=message):
        PPOConfig(**wrong)


@pytest.mark.parametrize(
    "right",
    [
        {"rollout": RolloutConfig(top_p=1.0), "kl": KLConfig(target=6.0), "stop": StopConfig(kl=8.0)},
        {
            "rollout": RolloutConfig(top_p=0.9),
            "kl": KLConfig(target=6.0, estimator="full", place="both"),
            "stop": StopConfig(kl=8.0),
        },
        {"rollout": RolloutConfig(stop_at_eos=False, stop=["."]), "ppo": UpdateConfig(mask_truncated=True)},
        {
            "env": EnvironmentConfig(factory="builtin:grid"),  # whose `done` ends an episode
            "rollout": RolloutConfig(stop_at_eos=False),
            "ppo": UpdateConfig(mask_truncated=True),
        },
        {
            "rollout": RolloutConfig(per_prompt=4),
            "critic": CriticConfig(kind="none"),
            "advantage": AdvantageConfig(estimator="group_relative"),
            "score": ScoreConfig(missing_eos_penalty=1.0),  # moves the mean of its group
            "ppo": UpdateConfig(mask_truncated=True),
        },
        {"advantage": AdvantageConfig(estimator="uniform"), "critic": CriticConfig(kind="none")},
        {  # whose rewards may be per token
            "advantage": AdvantageConfig(estimator="reward_to_go", whiten="batch"),
            "critic": CriticConfig(kind="none"),
            "rollout": RolloutConfig(batch_size=1),
            "ppo": UpdateConfig(minibatches=1),
        },
        {
            "advantage": AdvantageConfig(estimator="uniform", whiten="none"),
            "critic": CriticConfig(kind="none"),
            "rollout": RolloutConfig(batch_size=1),
            "ppo": UpdateConfig(minibatches=1),
            "score": ScoreConfig(normalize="batch", shift_mean=False),
        },
    ],
)
def test_what_works_is_accepted(right):
    config = PPOConfig(**right)
    assert {name: getattr(config, name) for name in right} == right


def test_every_estimator_has_the_name_that_a_config_gives_it():
    assert set(get_args(EstimatorName)) == set(ESTIMATORS)
    per_step = {"gae", "td", "monte_carlo", "n_step", "decoupled_gae", "total_return", "reward_to_go"}
    assert set(get_args(AgentEstimatorName)) == per_step


def test_null_means_none_and_is_not_checked_against_a_range():
    assert PPOConfig(ppo=UpdateConfig(target_kl=None, clip_high=None)).ppo.target_kl is None


@pytest.mark.slow
def test_evaluations_at_temperature_0_take_the_most_likely_token():
    config = PPOConfig.from_dict({"rollout.temperature": 0.7, "eval.every": 1, "eval.temperature": 0})
    sampling = config.evaluation_sampling()
    assert (sampling.temperature, sampling.top_k, config.rollout.top_k) == (0.7, 1, None)


def test_a_run_reads_its_own_configuration_back(tmp_path):
    config = PPOConfig(
        seed=7,
        prompts=PromptsConfig(text=["a: b", "“c”"]),
        reward=[ClassifierTerm(classifier="builtin:reviews", label="POSITIVE", weight=-1.0)],
    )
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    assert read_config(tmp_path / "config.yaml", PPOConfig) == config


@pytest.mark.parametrize("critic", ["separate", {"kind": "separate"}, AgentCriticConfig()])
def test_a_group_of_another_type_is_refused(critic):
    with pytest.raises(ConfigError, match=r"^critic is .*; it must be a CriticConfig$"):
        PPOConfig(critic=critic)
