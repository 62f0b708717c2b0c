"""Options of the commands that sample from a model and score it: prompts, rewards, sampling.

Imported before anything heavy, so neither torch nor transformers may be imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from tokencredit.errors import ConfigError
from tokencredit.settings.data import EnvironmentConfig, PromptsConfig, RewardTerm, ScoreConfig
from tokencredit.settings.fields import check, refuse_unused, setting
from tokencredit.settings.rollout import EngineName, OffPolicyConfig, SamplingConfig
from tokencredit.settings.run_kind import ModelSource, refuse_foreign_code, with_engine
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import MAX_SEED, KLConfig, StopConfig

Sampling = TypeVar("Sampling", bound=SamplingConfig)

SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "stop")
"""Options of `ScoringOptions` that are sampling settings."""
FROM_PYTHON = {
    "reward": ("reward_funcs",),
    "prompts": ("train_dataset", "eval_dataset"),
    "env": ("environment_factory", "tools"),
}
"""Options, and the arguments of `PPOTrainer` in whose place a run's folder has none."""
FLAGS = {
    "reward": "--reward '[{function: …}]'",
    "prompts": "--prompts.text or --prompts.dataset",
    "env": "--env.factory or --tools",
}
"""The options that give them, in words."""


@dataclass
class ScoringOptions:
    """Prompts, rewards and sampling; null and empty stand for the run's own settings."""

    seed: int | None = setting(None, at_least=0, at_most=MAX_SEED)
    """Seed of all randomness; null for the run's, or 1."""
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    """Prompts, with the keys of `tokencredit train`; the run's without a text or dataset."""
    reward: list[RewardTerm] = field(default_factory=list)
    """Reward terms, as in `tokencredit train`; empty for the run's."""
    reference: str | None = None
    """Reference model of the KL: folder of a run or a model, or a hub id; null for the run's own, or none."""
    max_new_tokens: int | None = setting(None, at_least=1)
    """Longest completion, in tokens; null for the run's, or 24."""
    temperature: float | None = setting(None, above=0)
    """Sampling temperature; null for the run's, or 1."""
    top_k: int | None = setting(None, at_least=1)
    """Top-k sampling; null for the run's, or none."""
    top_p: float | None = setting(None, above=0, at_most=1)
    """Nucleus sampling; null for the run's, or none."""
    min_p: float | None = setting(None, above=0, at_most=1)
    """Min-p sampling; null for the run's, or none."""
    stop: list[str] | None = None
    """Stop strings; null for the run's, or none."""
    engine: EngineName | None = None
    """Sampling engine; null for local, whatever the run's was (docs/engines.md)."""
    server: str | None = setting(None, needs="engine: vllm")
    """Address of a vLLM server; null for vLLM in this process, whatever the run's was."""
    server_folder: str | None = setting(None, needs="server")
    """Folder through which weights reach the server; null for a temporary folder of this machine."""
    dtype: Literal["float32", "bfloat16", "auto"] | None = None
    """Compute dtype; null for the run's, or auto, which is bfloat16 where the device computes in it."""
    trust_remote_code: bool = False
    """Run code from the model's repository."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values that cannot work."""
        check(self)
        if not self.given("prompts") and self.prompts != PromptsConfig():
            raise ConfigError(f"prompts has neither text nor dataset; give {FLAGS['prompts']}")
        if "" in (self.stop or ()):
            raise ConfigError("stop has an empty text, which would end every completion; leave it out")
        refuse_unused(self, rows=())

    def given(self, key: str) -> bool:
        """True if these options have prompts, rewards or an environment of their own."""
        own = {"reward": bool(self.reward), "prompts": bool(self.prompts.text or self.prompts.dataset)}
        return own.get(key, False)

    def needs(self) -> tuple[str, ...]:
        """The keys of `FROM_PYTHON` that must be given or the run's own."""
        return tuple(FROM_PYTHON)

    def sampling(self, own: Sampling) -> Sampling:
        """Sampling settings: a run's own with those that are given."""
        given = {key: value for key in SAMPLING if (value := getattr(self, key)) is not None}
        longest = given.get("max_new_tokens", own.max_new_tokens)
        return replace(own, **given, min_new_tokens=min(own.min_new_tokens, longest))

    def configure(self, source: ModelSource, no_code: bool = False) -> PPOConfig:
        """The source's configuration with prompts, rewards, seed and dtype that are given.

        Args:
            source: the model.
            no_code: refuse rewards and models that would execute user code.

        Raises:
            ConfigError: prompts or rewards are neither given nor the run's own, or user code is refused.
        """
        missing = [key for key in self.needs() if not self.given(key)]
        python = source.config.python
        lost = {key: names for key in missing if (names := [name for name in FROM_PYTHON[key] if name in python])}
        if lost:
            arguments = ", ".join(", ".join(names) for names in lost.values())
            raise ConfigError(
                f"{source.name!r} was begun in Python with {arguments}, which its folder does not hold; give "
                f"{' and '.join(FLAGS[key] for key in lost)}, or evaluate it there: PPOTrainer(…).evaluate()"
            )
        if (missing := [key for key in missing if key != "env"]) and not source.scored:
            raise ConfigError(f"{source.name!r} has no {missing[0]} of its own; give {FLAGS[missing[0]]}")
        config, model = source.config, source.config.model
        if self.given("prompts"):
            training_prompts = replace(config.eval, text=None, dataset=None, split="train")
            config = replace(config, prompts=self.prompts, eval=training_prompts)
        trust = self.trust_remote_code or model.trust_remote_code
        model = replace(model, dtype=self.dtype or model.dtype, trust_remote_code=trust)
        seed = config.seed if self.seed is None else self.seed
        reward, no_update = self.reward or config.reward, OffPolicyConfig()
        config = replace(config, seed=seed, model=model, reward=reward, off_policy=no_update)
        config = with_engine(config, self.engine or "local", self.server, self.server_folder)
        refuse_foreign_code(config, no_code)
        return config


@dataclass
class EvaluateOptions(ScoringOptions):
    """Options of `tokencredit evaluate`."""

    samples: int | None = setting(None, at_least=1)
    """Number of prompts; null for the run's, or 64."""
    best_of: int | None = setting(None, at_least=1)
    """Completions per prompt; null for the run's, or 1."""
    env: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """Environment, with the keys of `tokencredit train`; the run's without one. Limits, such as env.max_turns, are the
    run's unless they differ from their defaults."""
    tools: list[str] = field(default_factory=list)
    """Functions that the policy may call; empty for the run's."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values that cannot work."""
        super().__post_init__()
        self.env.check()

    def given(self, key: str) -> bool:
        """As `ScoringOptions.given`; an environment can do without prompts, and may pay its own reward."""
        played = self.env.factory is not None or (key == "env" and bool(self.tools))
        return played or super().given(key)

    def configure(self, source: ModelSource, no_code: bool = False) -> PPOConfig:
        """As `ScoringOptions.configure`, with the settings of the evaluation."""
        if self.given("env"):
            run = source.config
            env = self.env.with_limits_of(run.env) if self.env.factory is not None else run.env
            source = replace(source, config=replace(run, env=env, tools=self.tools or run.tools))
        config = super().configure(source, no_code)
        evaluation = replace(
            config.eval,
            max_new_tokens=None,
            temperature=None,
            samples=self.samples or config.eval.samples,
            best_of=self.best_of or config.eval.best_of,
        )
        # Nothing is trained, so the rules about training do not limit the sampling.
        kl = KLConfig(config.kl.coef, config.kl.place, config.kl.estimator)
        rollout = self.sampling(config.evaluation_sampling())
        return replace(config, rollout=rollout, eval=evaluation, kl=kl, stop=StopConfig(), score=ScoreConfig())


RANKED = "pairs: not unranked"
"""The condition that pairs are ranked by a reward."""


@dataclass
class PairsOptions(ScoringOptions):
    """Options of `tokencredit pairs`."""

    samples: int = setting(4, at_least=2)
    """Completions per group; a group has one prompt."""
    groups: int | None = setting(None, at_least=1)
    """Number of groups, through the prompts in turn; null for one per prompt."""
    pairs: Literal["best-worst", "all", "unranked"] = "best-worst"
    """Pairs of a group: the best against the worst completion, all, or two completions without a reward, for
    `tokencredit label`."""
    margin: float = setting(0.0, needs=RANKED, at_least=0)
    """Least difference of the rewards of a pair; equal rewards never make one."""
    noise: float = setting(0.0, needs=RANKED, at_least=0, at_most=1)
    """Probability that a preference is flipped, as label noise; rows then have the field `flipped`."""
    batch_size: int = setting(64, at_least=1)
    """Completions sampled at once, at least one group; lower it when memory runs out."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values that cannot work."""
        super().__post_init__()
        for key in ("reward", "reference"):
            if self.pairs == "unranked" and getattr(self, key):
                raise ConfigError(f"{key} is given, which has no effect with pairs: unranked; leave one of them out")

    def configure(self, source: ModelSource, no_code: bool = False) -> PPOConfig:
        """As `ScoringOptions.configure`; refuses runs of several turns."""
        config = super().configure(source, no_code)
        if config.several_turns():
            raise ConfigError(f"{source.name!r} is a run of several turns; pairs are of completions of one turn")
        return config

    def needs(self) -> tuple[str, ...]:
        """As `ScoringOptions.needs`; unranked pairs need no reward."""
        return ("prompts",) if self.pairs == "unranked" else super().needs()
