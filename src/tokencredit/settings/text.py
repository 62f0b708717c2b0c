"""The whole configuration of a language-model run.

Imported before anything heavy, so neither torch nor transformers may be imported here.
The text under a field is its help on the command line and its comment in `--print_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokencredit.core.estimators import ESTIMATORS
from tokencredit.errors import ConfigError
from tokencredit.settings.data import PromptsConfig, RewardTerm, ScoreConfig
from tokencredit.settings.fields import check, setting
from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.settings.training import (
    AdvantageConfig,
    EvalConfig,
    KLConfig,
    OptimConfig,
    RolloutConfig,
    RunConfig,
    StopConfig,
    UpdateConfig,
)


@dataclass
class PPOConfig:
    """Everything that a run in the token world is told."""

    seed: int = setting(1, at_least=0)
    """The one seed behind all randomness."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy and its reference."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critic: where its values come from, and how it learns."""
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    """What the policy continues."""
    reward: list[RewardTerm] = field(default_factory=lambda: [RewardTerm(classifier="builtin:reviews")])
    """Terms of the reward; their weighted sum is the score of a completion."""
    score: ScoreConfig = field(default_factory=ScoreConfig)
    """What happens to a completion's score before it becomes reward."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """How many completions are sampled, and how."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """How rewards become credit."""
    ppo: UpdateConfig = field(default_factory=UpdateConfig)
    """The clipped update."""
    kl: KLConfig = field(default_factory=KLConfig)
    """What holds the policy near its starting point."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer and its schedule; the critic's own learning rate is `critic.lr`."""
    stop: StopConfig = field(default_factory=StopConfig)
    """When a run ends before its last iteration."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation on held-out prompts, with sampling of its own; the best policy is kept in `best/`."""
    run: RunConfig = field(default_factory=RunConfig)
    """How long it runs, and what it leaves where."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for what cannot work."""
        check(self)
        if not self.prompts.text and self.prompts.dataset is None:
            raise ConfigError("prompts.text is empty; give at least one prompt")
        if not self.reward:
            raise ConfigError("reward is empty; give at least one term")
        for number, term in enumerate(self.reward):
            try:
                term.source()
            except ConfigError as error:
                raise ConfigError(f"reward[{number}] {error}") from error
        self.critic.check_unused()
        self.advantage.check_unused(self.critic.kind)
        size, per_prompt = self.rollout.batch_size, self.rollout.per_prompt
        if self.ppo.minibatches > size:
            raise ConfigError(
                f"ppo.minibatches is {self.ppo.minibatches}; it must be at most rollout.batch_size, {size}"
            )
        if self.rollout.min_new_tokens > self.rollout.max_new_tokens:
            raise ConfigError(
                f"rollout.min_new_tokens is {self.rollout.min_new_tokens}; "
                f"it must be at most rollout.max_new_tokens, {self.rollout.max_new_tokens}"
            )
        if size % per_prompt:
            raise ConfigError(f"rollout.per_prompt is {per_prompt}; it must divide rollout.batch_size, {size}")
        if ESTIMATORS[self.advantage.estimator].group and per_prompt < 2:
            raise ConfigError(
                f"advantage.estimator is {self.advantage.estimator}, which compares the completions of one prompt; "
                f"rollout.per_prompt is {per_prompt} and must be at least 2"
            )
        if self.kl.place == "loss" and self.kl.estimator == "k1" and self.kl.coef > 0:
            raise ConfigError(
                "kl.estimator is k1, whose gradient in the loss is 0 on average; with kl.place: loss use k2, k3 or full"
            )
        if self.kl.target is not None and self.kl.coef == 0:
            raise ConfigError("kl.coef is 0, which no factor can adapt to kl.target; give it a first value above 0")

    @classmethod
    def from_yaml(cls, path: str | Path) -> PPOConfig:
        """The configuration in a YAML file, as `--config` reads it.

        Raises:
            ConfigError: there is no such file, or it has a key or value that is refused.
        """
        from tokencredit.settings.parsing import from_yaml

        return from_yaml(cls, path)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> PPOConfig:
        """The configuration of some settings, with dotted or nested keys, and defaults for the rest.

        Raises:
            ConfigError: a key or value is refused, or a key is given twice.
        """
        from tokencredit.settings.parsing import from_dict

        return from_dict(cls, settings)
