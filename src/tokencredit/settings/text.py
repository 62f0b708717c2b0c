"""The whole configuration of a language-model run.

Imported before anything heavy, so neither torch nor transformers may be imported here.
The text under a field is its help on the command line and its comment in `--print_config`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tokencredit.errors import ConfigError
from tokencredit.settings.data import PromptsConfig, RewardTerm, ScoreConfig
from tokencredit.settings.fields import check, setting
from tokencredit.settings.model import ModelConfig
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
    """The policy, its critic and its reference."""
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
    """The optimiser, with a learning rate for the model and one for the value head."""
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
        if self.model.critic_name is not None and self.model.critic == "shared":
            raise ConfigError(f"model.critic_name is {self.model.critic_name!r}; it needs model.critic: separate")
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
        if self.advantage.estimator in ("group_relative", "leave_one_out") and per_prompt < 2:
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
