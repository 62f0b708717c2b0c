"""The configuration of a language-model run.

Imported before anything heavy, so neither torch nor transformers may be imported here.
The docstring of a field is its help on the command line and its comment in `--print_config`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import attrgetter

from tokencredit.core.estimator_table import ESTIMATORS
from tokencredit.errors import ConfigError
from tokencredit.settings.data import KINDS, DefaultReward, EnvironmentConfig, PromptsConfig, RewardTerm, ScoreConfig
from tokencredit.settings.fields import check, refuse_unused, setting
from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.settings.reader import Configuration
from tokencredit.settings.rollout import OffPolicyConfig, RolloutConfig, check_server
from tokencredit.settings.training import (
    ADAPTED,
    MAX_SEED,
    AdvantageConfig,
    AuditConfig,
    EvalConfig,
    KLConfig,
    OptimConfig,
    RunConfig,
    ShardingConfig,
    StopConfig,
    UpdateConfig,
)

TOKEN_CLIP = 0.2
"""Default of `ppo.clip`, for the ratio of a token; `ppo.loss: gspo` refuses it, since nothing would be clipped."""


@dataclass
class PPOConfig(Configuration):
    """Every setting of a language-model run."""

    seed: int = setting(1, at_least=0, at_most=MAX_SEED)
    """Seed of all randomness."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy and its reference model."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The critic: its model and how it learns."""
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    """The prompts that the policy completes."""
    env: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """Environment that answers the policy, for episodes of several turns."""
    tools: list[str] = field(default_factory=list)
    """Functions that the policy may call, with type hints and docstrings: `pkg.module:name` or `path/file.py:name`.
    Their results are appended to the conversation, and the policy goes on until a turn has no call."""
    reward: list[RewardTerm] = field(default_factory=lambda: [DefaultReward()])
    """Reward terms; their weighted sum is the score of a completion. Without this key an environment's own reward is
    the only one; with it, both count. A term is a `function`, called with `kwargs`, a `classifier`, whose `output` for
    the class `label` is the reward, or a `reward_model`. The models also have `text` (their input: both, or the
    completion), `batch_size` and `dtype`; all terms have `weight`, `name`, and `retries` and `timeout` of a call.
    docs/rewards.md describes these keys."""
    score: ScoreConfig = field(default_factory=ScoreConfig)
    """Normalization, clipping and penalties of scores."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling of completions for training."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """Advantage estimation."""
    ppo: UpdateConfig = field(default_factory=UpdateConfig)
    """The PPO update."""
    off_policy: OffPolicyConfig = field(default_factory=OffPolicyConfig)
    """Corrections for tokens drawn with other log-probs than those of training."""
    kl: KLConfig = field(default_factory=KLConfig)
    """KL penalty towards the reference model."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer and learning-rate schedule; the critic's learning rates are `critic.lr` and `critic.trunk_lr`."""
    stop: StopConfig = field(default_factory=StopConfig)
    """Early-stopping rules."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation on held-out prompts, sampled as rollouts are; the best policy is kept in `best/`."""
    audit: AuditConfig = field(default_factory=AuditConfig)
    """Audits of the credit during training."""
    run: RunConfig = field(default_factory=RunConfig)
    """Length of the run and its files."""
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    """Details of `run.shard`."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values that cannot work."""
        check(self)
        self.env.check()
        if self.several_turns():
            self.reward = [term for term in self.reward if not isinstance(term, DefaultReward)]  # which is for texts
        for key, prompts in (("prompts", self.prompts), ("eval", self.eval)):
            if prompts.dataset is None and prompts.text in ([], ""):
                raise ConfigError(f"{key}.text is empty; give at least one prompt, or leave it out")
        if not self.reward and not self.env.given():
            tools = ", and tools have no reward of their own" if self.tools else ""
            raise ConfigError(f"reward is empty{tools}; give at least one term")
        for number, term in enumerate(self.reward):
            if not isinstance(term, tuple(KINDS.values())):
                kinds = ", ".join(kind.__name__ for kind in KINDS.values())
                raise ConfigError(f"reward[{number}] is a {type(term).__name__}; it must be one of {kinds}")
        if self.reward and not any(term.weight for term in self.reward):
            keys = ", ".join(f"reward[{number}].weight" for number in range(len(self.reward)))
            raise ConfigError(f"{keys}: 0, so every completion would score the same; give a term another weight")
        self.advantage.check_critic(self.critic.kind)
        self.critic.check_warmup(self.run.iterations)
        self.critic.check_places()
        self.critic.check_members()
        size, per_prompt = self.rollout.batch_size, self.rollout.per_prompt
        if self.ppo.minibatches > size:
            raise ConfigError(
                f"ppo.minibatches is {self.ppo.minibatches}; it must be at most rollout.batch_size, {size}"
            )
        if self.ppo.loss == "gspo" and self.ppo.clip >= TOKEN_CLIP:
            raise ConfigError(
                f"ppo.clip is {self.ppo.clip}, and ppo.loss is gspo, whose mean ratio of a completion hardly moves "
                f"that far; it must be below {TOKEN_CLIP}, such as ppo.clip: 0.0003 with ppo.clip_high: 0.0004"
            )
        self.rollout.check_lengths("rollout")
        shortest, longest = self.rollout.min_new_tokens, self.evaluation_sampling().max_new_tokens
        if shortest > longest:
            raise ConfigError(
                f"eval.max_new_tokens is {longest}; it must be at least rollout.min_new_tokens, {shortest}"
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
            raise ConfigError("kl.coef is 0, which cannot be adapted to kl.target; give it an initial value above 0")
        least, most = ADAPTED
        if self.kl.target is not None and not least <= self.kl.coef <= most:
            raise ConfigError(
                f"kl.coef is {self.kl.coef}; with kl.target it must be at least {least} and at most {most}"
            )
        self._check_filters()
        self.off_policy.check(self.rollout, self.model.dtype)
        self._check_overlong()
        self._check_engine()
        self._check_sharding()
        if self.several_turns():
            self.check_turns()
        refuse_unused(self)

    def evaluation_sampling(self) -> RolloutConfig:
        """Sampling settings of evaluations: those of rollouts, with the length and temperature of `eval`."""
        longest, temperature = self.eval.max_new_tokens, self.eval.temperature
        return replace(
            self.rollout,
            max_new_tokens=self.rollout.max_new_tokens if longest is None else longest,
            temperature=self.rollout.temperature if temperature is None else temperature,
        )

    def held_out_prompts(self) -> PromptsConfig | None:
        """The prompts of evaluations, by the keys of `prompts` but for their source; None for those of training."""
        held_out = self.eval
        if held_out.text is None and held_out.dataset is None:
            return None
        subset = self.prompts.config_name if held_out.dataset == self.prompts.dataset else None
        return replace(
            self.prompts, text=held_out.text, dataset=held_out.dataset, split=held_out.split, config_name=subset
        )

    def several_turns(self) -> bool:
        """True if an environment or tools answer the policy."""
        return self.env.given() or bool(self.tools)

    def _check_filters(self) -> None:
        """Raise `ConfigError` for rules that need a KL that filtered or older samples cannot estimate."""
        filters = [f"rollout.{name}" for name in self.rollout.filters()]
        causes = [f"sampling is filtered by {' and '.join(filters)}"] if filters else []
        if self.rollout.max_age:
            causes.append(f"rollout.max_age is {self.rollout.max_age}, so that tokens are drawn from earlier policies")
        proximal, limit = self.off_policy.proximal, self.ppo.target_kl
        if causes and limit is not None and proximal != "recomputed" and self.off_policy.support != "truncated":
            raise ConfigError(
                f"ppo.target_kl is {limit:g}, off_policy.proximal is {proximal}, and {' and '.join(causes)}: the KL to "
                "the policy that drew the tokens is above 0 before an update's first step, which it could end; set "
                "off_policy.proximal: recomputed, or leave ppo.target_kl out"
            )
        if not causes or (self.kl.estimator == "full" and self.kl.place == "reward"):
            return
        for key, value in (("kl.target", self.kl.target), ("stop.kl", self.stop.kl)):
            if value is not None:
                raise ConfigError(
                    f"{key} is {value:g}, and {' and '.join(causes)}; such samples do not estimate the KL: set "
                    "kl.estimator: full with kl.place: reward, or leave one of them out"
                )

    def _check_engine(self) -> None:
        """Raise `ConfigError` for settings that the sampling engine does not have."""
        engine = self.rollout.engine
        if engine == "local":
            return
        if self.run.shard != "none" and self.rollout.max_age:
            raise ConfigError(
                f"rollout.max_age is {self.rollout.max_age}, and run.shard is {self.run.shard}; batches are sampled "
                "ahead with a copy of the weights, and sharded models cannot be copied: leave one of them out"
            )
        if engine == "continuous" and self.sharding.sampling == "layers":
            raise ConfigError(
                "sharding.sampling is layers, and rollout.engine is continuous, which samples with the whole weights; "
                "set sharding.sampling: gathered"
            )
        if engine == "vllm":
            self.rollout.check_vllm("rollout")
            self.evaluation_sampling().check_vllm("eval")
        if self.rollout.server is not None:
            check_server(self.rollout.server)
            self.rollout.check_vllm_server()
        if engine == "continuous" and self.rollout.min_new_tokens:
            raise ConfigError(
                f"rollout.min_new_tokens is {self.rollout.min_new_tokens}, which continuous batching does not have; "
                "set rollout.engine: local, or leave it out"
            )

    def check_offload(self, *, adapted: bool) -> None:
        """Raise `ConfigError` if `sharding.offload` is frozen, and no model is; `adapted` is true with an adapter."""
        frozen = (self.kl.coef > 0 and not adapted) or (self.critic.kind == "separate" and self.critic.detach)
        if self.sharding.offload == "frozen" and not frozen:
            why = "with an adapter the policy is its own reference" if self.kl.coef > 0 else "kl.coef is 0"
            raise ConfigError(
                f"sharding.offload is frozen, and no model of this run is: {why}, and no separate critic has "
                "critic.detach; leave it out"
            )

    def _check_sharding(self) -> None:
        """Raise `ConfigError` for settings that sharded models do not have."""
        if self.run.shard == "none":
            return
        self.check_offload(adapted=bool(self.model.lora.rank))
        refused = {
            "model.compile": (True, "compiled passes skip the hooks that gather weights"),
            "model.adapter": ("merge", "merging needs the whole weights in each process"),
            "rollout.cache": ("static", "a static cache keeps weights of its own"),
        }
        for key, (value, reason) in refused.items():
            if attrgetter(key)(self) == value:
                raise ConfigError(
                    f"{key} is {value}, and run.shard is {self.run.shard}: {reason}; leave one of them out"
                )
        for key in ("audit.every", "critic.continuations"):
            if self.sharding.sampling == "layers" and (value := attrgetter(key)(self)):
                raise ConfigError(
                    f"{key} is {value}, and sharding.sampling is layers, in which all processes sample in step; a "
                    "process continues completions on its own: set sharding.sampling: gathered"
                )

    def check_turns(self) -> None:
        """Raise `ConfigError` for settings that episodes of several turns do not have."""
        if self.advantage.unit == "turn" and self.critic.places:
            raise ConfigError(
                "advantage.unit is turn, with one value per turn, and critic.places chooses tokens; leave one out"
            )
        refused = {
            "critic.continuations": self.critic.continuations,
            "audit.every": self.audit.every,
        }
        for key, value in refused.items():
            if value:
                raise ConfigError(
                    f"{key} is {value}, which samples continuations of a text from its middle; an environment cannot "
                    "be continued from there: leave it out"
                )
        if self.sharding.sampling == "layers":
            raise ConfigError(
                "sharding.sampling is layers, in which all processes sample in step; episodes of several turns do not: "
                "set sharding.sampling: gathered"
            )
        if self.rollout.cache == "static":
            raise ConfigError("rollout.cache is static; episodes of several turns use a dynamic cache: leave it out")
        longest = self.evaluation_sampling().max_new_tokens
        if self.eval.every and longest < self.rollout.max_new_tokens:
            raise ConfigError(
                f"eval.max_new_tokens is {longest}; with an environment it must be at least rollout.max_new_tokens, "
                f"{self.rollout.max_new_tokens}, or evaluated episodes would be cut short"
            )

    def _check_overlong(self) -> None:
        """Raise `ConfigError` for settings of long and truncated completions that conflict or have no effect."""
        score, longest, needs = self.score, self.rollout.max_new_tokens, ESTIMATORS[self.advantage.estimator]
        if bool(score.overlong_penalty) != (score.overlong_tokens is not None):
            raise ConfigError(
                f"score.overlong_penalty is {score.overlong_penalty:g}, and score.overlong_tokens is "
                f"{'null' if score.overlong_tokens is None else score.overlong_tokens}; give both, or leave both out"
            )
        if score.overlong_tokens is not None and score.overlong_tokens > longest:
            raise ConfigError(
                f"score.overlong_tokens is {score.overlong_tokens}; it must be at most rollout.max_new_tokens, "
                f"{longest}"
            )
        for key in ("missing_eos_penalty", "overlong_penalty"):
            if self.advantage.bootstrap and getattr(score, key):
                raise ConfigError(
                    f"advantage.bootstrap is True, and score.{key} is {getattr(score, key):g}; a truncated completion "
                    "would pay the penalty twice, once through the critic's value: leave one of them out"
                )
        if not self.ppo.mask_truncated:
            return
        if not (self.rollout.stop_at_eos or self.rollout.stop):
            raise ConfigError(
                "ppo.mask_truncated is True, and with rollout.stop_at_eos: false and no rollout.stop every completion "
                "is truncated; nothing would be left in the loss"
            )
        if self.advantage.bootstrap:
            raise ConfigError(
                "advantage.bootstrap and ppo.mask_truncated are both True; a masked completion "
                "needs no bootstrap: leave one of them out"
            )
        if score.missing_eos_penalty and not (needs.group or needs.baseline):
            raise ConfigError(
                f"score.missing_eos_penalty is {score.missing_eos_penalty:g}, which only truncated completions "
                "pay, and ppo.mask_truncated masks those out of the loss; leave one of them out"
            )
