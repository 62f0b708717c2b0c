"""Options of the commands that sample from a model, and score it: sampling, prompts, rewards.

Imported before anything heavy, so neither torch nor transformers may be imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from tokencredit.errors import ConfigError
from tokencredit.settings.data import EvaluationEnvironment, FunctionTerm, PromptsConfig, RewardTerm, ScoreConfig
from tokencredit.settings.fields import Named, check, refuse_unused, setting
from tokencredit.settings.rollout import EngineName, OffPolicyConfig, SamplingConfig
from tokencredit.settings.run_kind import ModelSource, refuse_foreign_code, with_engine
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import MAX_SEED, KLConfig, StopConfig

Sampling = TypeVar("Sampling", bound=SamplingConfig)

SAMPLING = [item.name for item in fields(SamplingConfig)]
"""Options that are sampling settings."""
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
LONGEST = 128
"""Longest completion of a model without a run of its own, in tokens, unless its context is shorter than two of them."""


@dataclass
class SamplingOptions(Named):
    """The model and its sampling; null stands for the run's own settings, or the defaults of a model by itself."""

    seed: int | None = setting(None, at_least=0, at_most=MAX_SEED)
    """Seed of all randomness; null for the run's, or 1."""
    max_new_tokens: int | None = setting(None, at_least=1)
    """Longest completion, in tokens; null for the run's, or of a model by itself 128, at most half of its context."""
    min_new_tokens: int | None = setting(None, at_least=0)
    """Shortest completion, in tokens, before it may end; null for the run's, or 0."""
    temperature: float | None = setting(None, at_least=0)
    """Sampling temperature; 0 for the most likely tokens, null for the run's, or 1."""
    top_k: int | None = setting(None, at_least=1)
    """Top-k sampling; null for the run's, or none."""
    top_p: float | None = setting(None, above=0, at_most=1)
    """Nucleus sampling; null for the run's, or none."""
    min_p: float | None = setting(None, above=0, at_most=1)
    """Min-p sampling; null for the run's, or none."""
    stop: list[str] | None = None
    """Stop strings; null for the run's, or none."""
    stop_at_eos: bool | None = None
    """End a completion at an end-of-sequence token; null for the run's, or true."""
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
        if "" in (self.stop or ()):
            raise ConfigError("stop has an empty text, which would end every completion; leave it out")
        refuse_unused(self, rows=("environment_factory",))  # the run may have an environment

    def sampling(self, own: Sampling) -> Sampling:
        """Sampling settings: a run's own with those that are given."""
        given = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        if given.get("temperature") == 0:
            given |= {"temperature": own.temperature, "top_k": 1}
        longest = given.get("max_new_tokens", own.max_new_tokens)
        if given.get("min_new_tokens", 0) > longest:
            raise ConfigError(f"min_new_tokens is {self.min_new_tokens}; it must be at most max_new_tokens, {longest}")
        return replace(own, **{"min_new_tokens": min(own.min_new_tokens, longest)} | given)

    def own_sampling(self, source: ModelSource) -> SamplingConfig:
        """The sampling settings that hold where none are given."""
        rollout = source.config.rollout
        return rollout if source.scored else replace(rollout, max_new_tokens=LONGEST)

    def configure(self, source: ModelSource, no_code: bool = False) -> PPOConfig:
        """The source's configuration with what is given, for sampling without training.

        Args:
            source: the model.
            no_code: refuse rewards and models that would execute user code.

        Raises:
            ConfigError: sampling settings do not go together, or user code is refused.
        """
        config, model = source.config, source.config.model
        sampling = self.sampling(self.own_sampling(source))
        trust = self.trust_remote_code or model.trust_remote_code
        model = replace(model, dtype=self.dtype or model.dtype, trust_remote_code=trust)
        seed = config.seed if self.seed is None else self.seed
        # Nothing is trained, so the rules about training do not limit the sampling.
        untrained: dict[str, Any] = {
            "kl": KLConfig(config.kl.coef, config.kl.place, config.kl.estimator),
            "ppo": replace(config.ppo, target_kl=None, mask_truncated=False),
            "off_policy": OffPolicyConfig(),
            "stop": StopConfig(),
            "score": ScoreConfig(),
            "eval": replace(config.eval, max_new_tokens=None, temperature=None),
        }
        config = replace(config, seed=seed, model=model, **untrained)
        try:
            config = with_engine(config, self.engine or "local", self.server, self.server_folder)
            config = replace(config, rollout=replace(config.rollout, **{x: getattr(sampling, x) for x in SAMPLING}))
        except ConfigError as error:
            error.args = (str(error).replace("rollout.", ""),)  # these options are the keys of sampling themselves
            raise
        refuse_foreign_code(config, no_code)
        return config


@dataclass
class PromptedOptions(SamplingOptions):
    """The same with prompts."""

    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    """Prompts, with the keys of `tokencredit train`; the run's without a text or dataset."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values that cannot work."""
        if not self.given("prompts") and self.prompts != PromptsConfig():
            raise ConfigError(f"prompts has neither text nor dataset; give {FLAGS['prompts']}")
        super().__post_init__()

    def given(self, key: str) -> bool:
        """True if these options have prompts, rewards or an environment of their own."""
        return key == "prompts" and bool(self.prompts.text or self.prompts.dataset)

    def configure(self, source: ModelSource, no_code: bool = False) -> PPOConfig:
        """As `SamplingOptions.configure`, with the prompts that are given."""
        config = super().configure(source, no_code)
        if self.prompts == PromptsConfig():
            return config
        training_prompts = replace(config.eval, text=None, dataset=None, split="train")
        return replace(config, prompts=self.prompts, eval=training_prompts)


@dataclass
class GenerateOptions(PromptedOptions):
    """Options of `tokencredit generate`."""

    n: int | None = setting(None, at_least=1)
    """Number of completions of each prompt that is given, in their order, else of the run's prompts in turn; null for 1
    and 5."""


@dataclass
class ScoringOptions(PromptedOptions):
    """Options of commands that score completions: the same with rewards and a reference model."""

    max_new_tokens: int | None = setting(None, at_least=1)
    """Longest completion, in tokens; null for the run's, or 24."""
    reward: list[RewardTerm] = field(default_factory=list)
    """Reward terms, as in `tokencredit train`; empty for the run's."""
    reference: str | None = None
    """Reference model of the KL: folder of a run or a model, or a hub id; null for the run's own, or none."""

    def given(self, key: str) -> bool:
        """As `PromptedOptions.given`."""
        return bool(self.reward) if key == "reward" else super().given(key)

    def own_sampling(self, source: ModelSource) -> SamplingConfig:
        """As `SamplingOptions.own_sampling`; a model by itself is scored as a run is."""
        return source.config.rollout

    def configure(self, source: ModelSource, no_code: bool = False) -> PPOConfig:
        """As `PromptedOptions.configure`, with the rewards that are given.

        Raises:
            ConfigError: also if prompts or rewards are neither given nor the run's own.
        """
        missing = [key for key in FROM_PYTHON if not self.given(key)]
        python = source.config.python
        lost = {key: names for key in missing if (names := [name for name in FROM_PYTHON[key] if name in python])}
        if lost:
            arguments = ", ".join(", ".join(names) for names in lost.values())
            there = ", or evaluate it there: PPOTrainer(…).evaluate()"
            raise ConfigError(
                f"{source.name!r} was begun in Python with {arguments}, which its folder does not hold; give "
                f"{' and '.join(FLAGS[key] for key in lost)}{there * isinstance(self, EvaluateOptions)}"
            )
        if (missing := [key for key in missing if key != "env"]) and not source.scored:
            raise source.lacks(missing[0], FLAGS[missing[0]])
        config = replace(source.config, reward=self.reward or source.config.reward)
        return super().configure(replace(source, config=config), no_code)


@dataclass
class EvaluateOptions(ScoringOptions):
    """Options of `tokencredit evaluate`."""

    samples: int | None = setting(None, at_least=1)
    """Number of prompts; null for the run's, or 64."""
    best_of: int | None = setting(None, at_least=1)
    """Completions per prompt; null for the run's, or 1."""
    env: EvaluationEnvironment = field(default_factory=EvaluationEnvironment)
    """Environment, with the keys of `tokencredit train`; null for the run's, and for its limits."""
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
        run = source.config
        played = replace(run, env=self.env.within(run.env), tools=self.tools or run.tools)
        if not played.several_turns():
            refuse_unused(self, rows=())  # limits of no environment
        if self.env.factory is not None and not (run.several_turns() or run.python.keys() & FROM_PYTHON["env"]):
            # Prompts of texts are no rows of an environment.
            held_out = replace(run.eval, text=None, dataset=None, split="train")
            played = replace(played, prompts=PromptsConfig(), eval=held_out)
        config = super().configure(replace(source, config=played), no_code)
        sizes: dict[str, Any] = {
            "samples": self.samples or config.eval.samples,
            "best_of": self.best_of or config.eval.best_of,
        }
        return replace(config, eval=replace(config.eval, **sizes))

    def own_sampling(self, source: ModelSource) -> SamplingConfig:
        """The sampling settings of the run's evaluations; a temperature that is given undoes a greedy one."""
        own = source.config.evaluation_sampling()
        return replace(own, top_k=source.config.rollout.top_k) if self.temperature else own


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

    def given(self, key: str) -> bool:
        """As `ScoringOptions.given`; unranked pairs need nothing but prompts."""
        return (self.pairs == "unranked" and key != "prompts") or super().given(key)

    def configure(self, source: ModelSource, no_code: bool = False) -> PPOConfig:
        """As `ScoringOptions.configure`; refuses runs of several turns."""
        config = super().configure(source, no_code)
        if config.several_turns():
            raise ConfigError(f"{source.name!r} is a run of several turns; pairs are of completions of one turn")
        if self.reference is not None and not any(isinstance(term, FunctionTerm) for term in config.reward):
            raise ConfigError("reference is given, and only a reward's function could read its log-probs; leave it out")
        return config
