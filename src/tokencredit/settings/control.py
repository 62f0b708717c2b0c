"""Configuration of agents in Gymnasium environments; read before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from tokencredit.core.estimators import ESTIMATORS
from tokencredit.errors import ConfigError
from tokencredit.settings.fields import check, refuse_idle, setting
from tokencredit.settings.model import EXISTS, LEARNS, CriticTraining
from tokencredit.settings.training import (
    MOST_SEED,
    AdvantageConfig,
    AuditSettings,
    OptimConfig,
    RunConfig,
    StopConfig,
    UpdateConfig,
)


@dataclass
class EnvConfig:
    """The environment, several copies of it."""

    id: str = "CartPole-v1"
    """A registered environment, or `module:Env-v0` for one that importing the module registers."""
    number: int = setting(4, at_least=1)
    """Copies that are stepped together."""
    processes: bool = False
    """Whether each copy runs in a process of its own, which pays for slow environments."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Handed to the environment."""
    normalize_observations: bool = False
    """Shift and scale observations by their running mean and deviation."""
    normalize_rewards: bool = False
    """Divide rewards by the running deviation of the discounted return, which begins anew with each episode."""
    clip: float = setting(10.0, needs="normalize_observations or normalize_rewards", above=0)
    """Normalised observations and rewards are held within ± this."""


@dataclass
class AgentConfig:
    """The actor's form, which its critic shares."""

    policy: Literal["mlp", "transformer"] = "mlp"
    """Linear layers on the last observation, or a causal transformer on the last `context` ones of the episode."""
    hidden: list[int] = field(default_factory=lambda: [64, 64])
    """Widths of the hidden layers; a transformer has a block for each, all of the same width."""
    activation: Literal["tanh", "relu", "gelu"] = setting("tanh", needs="hidden")
    """What follows each of them; in a transformer, within each block."""
    context: int = setting(8, needs="policy: transformer", at_least=1)
    """Observations that a transformer reads; before there are as many, the episode's first one is repeated."""
    heads: int = setting(4, needs="policy: transformer", at_least=1)
    """A transformer's attention heads; they divide its width."""
    log_std: float = 0.0
    """First log-deviation of continuous actions; it does not depend on the state."""
    actions: Literal["clip", "scale"] = "clip"
    """Continuous actions outside the environment's bounds are clipped to them; or [-1, 1] is scaled to the bounds."""

    def check_hidden(self) -> None:
        """Raise `ConfigError` for widths that no network, or no transformer, has."""
        for position, width in enumerate(self.hidden):
            if width < 1:
                raise ConfigError(f"agent.hidden[{position}] is {width}; it must be at least 1")
        if self.policy == "transformer" and (
            not self.hidden or len(set(self.hidden)) > 1 or self.hidden[0] % self.heads
        ):
            raise ConfigError(
                f"agent.hidden is {self.hidden}; a transformer's blocks are of one width, a multiple of agent.heads, "
                f"{self.heads}"
            )

    def observations(self) -> int:
        """How many of the last observations the agent reads at once."""
        return self.context if self.policy == "transformer" else 1


@dataclass
class AgentCriticConfig(CriticTraining):
    """The critic: layers of its own or the actor's, and how it learns."""

    kind: Literal["shared", "separate", "none"] = "separate"
    """Critic with the actor's hidden layers, with layers of its own, or none."""
    lr: float = setting(2.5e-4, needs=LEARNS, above=0)
    """Learning rate of the critic's own parameters."""
    coef: float = setting(1.0, needs=EXISTS, at_least=0)
    """Weight of the value loss beside the policy's; 0 leaves the critic to steps of its own (`epochs`)."""
    loss: Literal["mse", "huber"] = setting("mse", needs=LEARNS)
    """Value loss: half the squared error, or Huber's, in which large errors count by their size alone."""


@dataclass
class EpisodesConfig:
    """Evaluation in a copy of the environment of its own."""

    every: int = setting(0, needs="episodes or videos", at_least=0)
    """Iterations between two evaluations; 0 evaluates at the end only."""
    episodes: int = setting(10, at_least=0)
    """Episodes per evaluation; 0 for none."""
    greedy: bool = setting(True, needs="episodes or videos")
    """Whether the likeliest action is taken, or one is drawn as in training."""
    videos: int = setting(0, at_least=0)
    """Further episodes per evaluation that are recorded in `videos/`; needs `tokencredit[video]`."""


@dataclass
class AgentAuditConfig(AuditSettings):
    """Credit against the truth: fresh episodes, from whose states many continuations are played to their end."""

    episodes: int = setting(16, needs="every", at_least=2)
    """Episodes that are audited."""


@dataclass
class ControlConfig:
    """Everything that a run in the Gymnasium world is told."""

    NEEDS: ClassVar = dict.fromkeys(
        (
            "advantage.bootstrap",
            "advantage.lam_follows",
            "ppo.mask_truncated",
            "ppo.reduction",
            "run.push_to_hub",
            "run.samples",
            "run.samples_every",
            "run.show_every",
            "stop.kl",
        ),
        "a language model",
    )
    """Settings that agents share with language models, and do not read."""

    seed: int = setting(1, at_least=0, at_most=MOST_SEED)
    """The one seed behind all randomness."""
    algorithm: Literal["ppo", "policy_gradient"] = "ppo"
    """policy_gradient takes one step on the whole batch, at which the ratio is 1; of ppo it reads entropy_coef and
    micro_batch_tokens."""
    env: EnvConfig = field(default_factory=EnvConfig)
    """The environment, several copies of it."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    """The actor."""
    critic: AgentCriticConfig = field(default_factory=AgentCriticConfig)
    """The critic: layers of its own or the actor's, and how it learns."""
    steps: int = setting(128, at_least=2)
    """Steps of each copy per iteration."""
    advantage: AdvantageConfig = field(
        default_factory=lambda: AdvantageConfig(gamma=0.99, lam=0.95, whiten_over="minibatch")
    )
    """How rewards become credit."""
    ppo: UpdateConfig = field(default_factory=lambda: UpdateConfig(entropy_coef=0.01))
    """The clipped update."""
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(lr=2.5e-4, eps=1e-5, warmup=0, final_scale=0.0, max_grad_norm=0.5)
    )
    """The optimizer and its schedule; the critic's own learning rate is `critic.lr`."""
    threads: int | None = setting(1, at_least=1)
    """PyTorch's threads; null leaves their number to PyTorch. Small networks are fastest on one."""
    stop: StopConfig = field(default_factory=StopConfig)
    """When a run ends before its last iteration."""
    eval: EpisodesConfig = field(default_factory=EpisodesConfig)
    """Evaluation in a copy of the environment of its own."""
    audit: AgentAuditConfig = field(default_factory=AgentAuditConfig)
    """Credit against the truth, measured while training."""
    run: RunConfig = field(default_factory=lambda: RunConfig(iterations=976, show_every=0, save_every=100))
    """How long it runs, and what it leaves where."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for what cannot work."""
        check(self)
        self.agent.check_hidden()
        batch = self.env.number * self.steps
        if self.algorithm == "ppo" and batch % self.ppo.minibatches:
            raise ConfigError(
                f"ppo.minibatches is {self.ppo.minibatches}; it must divide the batch, "
                f"env.number {self.env.number} × steps {self.steps} = {batch}"
            )
        needs = ESTIMATORS[self.advantage.estimator]
        if needs.group or needs.baseline:
            raise ConfigError(
                f"advantage.estimator is {self.advantage.estimator}, which is for texts: one score per row"
            )
        self.advantage.check_critic(self.critic.kind, texts=False)
        self.critic.check_warmup(self.run.iterations)
        refuse_idle(self)

    @classmethod
    def from_yaml(cls, path: str | Path) -> ControlConfig:
        """The configuration in a YAML file, as `--config` reads it.

        Raises:
            ConfigError: there is no such file, or it has a key or value that is refused.
        """
        from tokencredit.settings.parsing import from_yaml

        return from_yaml(cls, path)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> ControlConfig:
        """The configuration of some settings, with dotted or nested keys, and defaults for the rest.

        Raises:
            ConfigError: a key or value is refused, or a key is given twice.
        """
        from tokencredit.settings.parsing import from_dict

        return from_dict(cls, settings)
