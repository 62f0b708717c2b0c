"""Settings of runs in Gymnasium environments; importing them imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tokencredit.core.estimator_table import AGENT_ESTIMATORS, AgentEstimatorName
from tokencredit.settings.fields import Group, check, refuse, refuse_unused, setting
from tokencredit.settings.model import EXISTS, LEARNS, CriticTraining
from tokencredit.settings.parts import Part
from tokencredit.settings.reader import Configuration
from tokencredit.settings.training import (
    MAX_SEED,
    AdvantageSettings,
    AuditSettings,
    OptimConfig,
    PPOSettings,
    RunSettings,
    StopSettings,
    read_by,
)

HOMEWORK_TAGS = {
    "Eval_AverageReturn": "eval/average_return",
    "Eval_StdReturn": "eval/std_return",
    "Eval_AverageEpLen": "eval/average_length",
    "Train_AverageReturn": "train/average_return",
    "Train_StdReturn": "train/std_return",
    "Train_AverageEpLen": "train/average_length",
    "Train_EnvstepsSoFar": "total_steps",
}
"""Metrics of agents by the tags of Berkeley's CS 285 homework."""


@dataclass
class EnvConfig(Group):
    """The environment and its parallel copies."""

    id: str = "CartPole-v1"
    """Gymnasium id of the environment, or `module:Env-v0` for one that importing the module registers."""
    number: int = setting(4, at_least=1)
    """Number of parallel copies, stepped together."""
    processes: bool = False
    """Run each copy in its own process, which pays off for slow environments."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment."""
    normalize_observations: bool = False
    """Normalize observations by their running mean and standard deviation."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return, which is reset at each episode
    start."""
    clip: float = setting(10.0, needs="normalize_observations or normalize_rewards", above=0)
    """Clip range of observations and rewards where they are normalized, in standard deviations: [-clip, clip]."""


@dataclass
class AgentConfig(Group):
    """The actor's network, whose shape the critic shares."""

    policy: Literal["mlp", "transformer"] = "mlp"
    """Network: an MLP on the last observation, or a causal transformer on the episode's last `context` observations."""
    hidden: list[int] = field(default_factory=lambda: [64, 64])
    """Widths of the hidden layers. For a transformer: one block per entry, all of the same width."""
    activation: Literal["tanh", "relu", "gelu"] = setting("tanh", needs="hidden")
    """Activation after each hidden layer; in a transformer, inside each block."""
    context: int = setting(8, needs="policy: transformer", at_least=1)
    """Observations that a transformer reads. Early in an episode the first one is repeated as padding."""
    heads: int = setting(4, needs="policy: transformer", at_least=1)
    """Attention heads of a transformer; their number divides its width."""
    log_std: float = 0.0
    """Initial log standard deviation of continuous actions. It does not depend on the state."""
    actions: Literal["clip", "scale"] = "clip"
    """Mapping of continuous actions to the environment's bounds: clip to them, or scale [-1, 1] to them."""

    def observations(self) -> int:
        """Number of observations in the agent's input."""
        return self.context if self.policy == "transformer" else 1


@dataclass
class AgentCriticConfig(CriticTraining):
    """The critic: its network and how it learns."""

    kind: Literal["shared", "separate", "none"] = "separate"
    """Critic: on the actor's hidden layers (shared), with its own (separate), or none. One of yours is for texts."""
    lr: float = setting(2.5e-4, needs=LEARNS, above=0)
    """Learning rate of the critic's own parameters."""
    coef: float = setting(1.0, needs=EXISTS, at_least=0)
    clip: float | None = setting(0.2, needs=(EXISTS, "algorithm: not policy_gradient or epochs"), above=0)


@dataclass
class AgentAdvantageConfig(AdvantageSettings):
    """Advantage estimation."""

    estimator: AgentEstimatorName | Part = "gae"
    """Advantage estimator, or your own (docs/your-own.md). See docs/algorithms.md for a comparison. Those that compare
    scores of texts are not for agents."""
    gamma: float = setting(0.99, needs=read_by("gamma", AGENT_ESTIMATORS), at_least=0, at_most=1)
    """Discount factor per environment step, with a horizon of 1/(1 − gamma) steps."""
    lam_returns: float = setting(1.0, needs=read_by("lam_returns", AGENT_ESTIMATORS), at_least=0, at_most=1)
    """λ of the critic's targets, in decoupled_gae."""
    alpha: float = setting(0.05, needs=read_by("alpha", AGENT_ESTIMATORS), above=0)
    """α of an estimator of your own."""
    whiten: Literal["none", "batch", "minibatch"] = "minibatch"
    bootstrap: bool = setting(True, needs="critic.kind: not none")
    """Bootstrap from the critic where a time limit cut an episode off; false treats the limit as its end, worth 0. The
    end of a rollout always bootstraps."""


@dataclass
class AgentUpdateConfig(PPOSettings):
    """The PPO update."""

    entropy_coef: float = setting(0.01, at_least=0)


@dataclass
class AgentStopConfig(StopSettings):
    """Early-stopping rules."""

    patience: int = setting(1, needs="reward", at_least=1)
    """Consecutive iterations with a mean reward above `reward` before the run stops."""


@dataclass
class AgentRunConfig(RunSettings):
    """Length of the run and its files."""

    iterations: int = setting(976, at_least=1)
    save_every: int = setting(100, at_least=0)


@dataclass
class EpisodesConfig(Group):
    """Evaluation episodes in a separate copy of the environment."""

    every: int = setting(0, needs="episodes or videos", at_least=0)
    """Iterations between evaluations; 0 for one at the end only."""
    episodes: int = setting(10, at_least=0)
    """Episodes per evaluation; 0 for none."""
    greedy: bool = setting(True, needs="episodes or videos")
    """Take the most likely action; false samples actions as in training."""
    videos: int = setting(0, at_least=0)
    """Extra episodes per evaluation, recorded in the run's `videos/` and not counted in its mean; needs
    `tokencredit[video]`."""
    homework_tags: bool = setting(False, needs=("episodes", "every"))
    """Metrics of iterations with an evaluation also under the tags of Berkeley's CS 285: `Eval_AverageReturn`,
    `Train_EnvstepsSoFar`, …"""


@dataclass
class AgentAuditConfig(AuditSettings):
    """Audit of credit: fresh episodes, from whose states many continuations are played to the end."""

    episodes: int = setting(16, needs="every", at_least=2)
    """Episodes per audit."""


@dataclass
class ControlConfig(Configuration):
    """Every setting of a run in a Gymnasium environment."""

    seed: int = setting(1, at_least=0, at_most=MAX_SEED)
    """Seed of all randomness."""
    algorithm: Literal["ppo", "policy_gradient"] = "ppo"
    """Algorithm: PPO, or a plain policy gradient, which takes one step on the whole batch. Of ppo.* the latter reads
    entropy_coef, micro_batch_tokens, and a loss of your own."""
    env: EnvConfig = field(default_factory=EnvConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    critic: AgentCriticConfig = field(default_factory=AgentCriticConfig)
    steps: int = setting(128, at_least=2)
    """Environment steps per copy and iteration; with `whole_episodes` at least so many."""
    whole_episodes: bool = False
    """Batches of whole episodes: each copy begins an episode with every iteration, and plays on after `steps` steps
    until its episode ends. false cuts episodes off there and continues them in the next iteration."""
    advantage: AgentAdvantageConfig = field(default_factory=AgentAdvantageConfig)
    ppo: AgentUpdateConfig = field(default_factory=AgentUpdateConfig)
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(lr=2.5e-4, eps=1e-5, warmup=0, final_scale=0.0, max_grad_norm=0.5)
    )
    threads: int | None = setting(1, at_least=1)
    """PyTorch's CPU threads; null for PyTorch's default. Small networks are fastest on 1."""
    stop: AgentStopConfig = field(default_factory=AgentStopConfig)
    eval: EpisodesConfig = field(default_factory=EpisodesConfig)
    audit: AgentAuditConfig = field(default_factory=AgentAuditConfig)
    run: AgentRunConfig = field(default_factory=AgentRunConfig)
    python: dict[str, Any] = field(default_factory=dict)
    """Parts of the run from Python, by key; written by trainers. No file holds them, so only Python can train with them
    again."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values that cannot work."""
        check(self)
        agent, batch = self.agent, self.env.number * self.steps
        if any(width < 1 for width in agent.hidden):
            refuse(self, "agent.hidden", "each width must be at least 1")
        if agent.policy == "transformer" and (len(set(agent.hidden)) != 1 or agent.hidden[0] % agent.heads):
            refuse(self, "agent.hidden agent.heads", "a transformer needs blocks of one width, a multiple of its heads")
        if self.algorithm == "ppo" and self.ppo.minibatches > batch:
            refuse(self, "ppo.minibatches env.number steps", f"it must be at most env.number × steps, {batch}")
        if self.algorithm == "ppo" and self.advantage.whiten == "minibatch" and self.ppo.minibatches > batch // 2:
            reason = f"a step alone is whitened to 0; it must be at most {batch // 2}, half of env.number × steps"
            refuse(self, "ppo.minibatches advantage.whiten", f"{reason}, or set advantage.whiten: batch")
        self.advantage.check_critic(self.critic)
        refuse_unused(self)
