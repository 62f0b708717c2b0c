"""The configuration of a language-model run.

Imported before anything heavy, so neither torch nor transformers may be imported here.
The docstring of a field is its help on the command line and its comment in `--print_config`; a group's is its class's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from tokencredit.errors import ConfigError
from tokencredit.settings.data import KINDS, DefaultReward, EnvironmentConfig, PromptsConfig, RewardTerm, ScoreConfig
from tokencredit.settings.fields import check, refuse, refuse_unused, setting
from tokencredit.settings.model import CriticConfig, ModelConfig, ShardingConfig
from tokencredit.settings.parts import is_own
from tokencredit.settings.reader import Configuration
from tokencredit.settings.rollout import OffPolicyConfig, RolloutConfig, check_server, differs_from_training
from tokencredit.settings.training import (
    ADAPTED,
    MAX_SEED,
    AdvantageConfig,
    AuditConfig,
    EvalConfig,
    KLConfig,
    OptimConfig,
    RunConfig,
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
    critic: CriticConfig = field(default_factory=CriticConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    env: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    tools: list[str] = field(default_factory=list)
    """Functions that the policy may call, with type hints and docstrings: `pkg.module:name` or `path/file.py:name`.
    Their results are appended to the conversation, and the policy goes on until a turn has no call."""
    reward: list[RewardTerm] = field(default_factory=lambda: [DefaultReward()])
    """Reward terms; their weighted sum is the score of a completion. Without this key an environment's own reward is
    the only one; with it, both count. A term is a `function`, called with `kwargs`, a `classifier`, whose `output` for
    the class `label` is the reward, or a `reward_model`. The models also have `text` (their input: both, or the
    completion), `batch_size` and `dtype`; all terms have `weight`, `name`, and `retries` and `timeout` of a call
    (docs/rewards.md)."""
    score: ScoreConfig = field(default_factory=ScoreConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    ppo: UpdateConfig = field(default_factory=UpdateConfig)
    off_policy: OffPolicyConfig = field(default_factory=OffPolicyConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    run: RunConfig = field(default_factory=RunConfig)
    python: dict[str, Any] = field(default_factory=dict)
    """Parts of the run from Python, by argument or key; written by trainers. No file holds them, so only Python can
    train with them again."""
    sharding: ShardingConfig = field(default_factory=ShardingConfig)

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values that cannot work."""
        check(self)
        if self.several_turns():
            self.reward = [term for term in self.reward if not isinstance(term, DefaultReward)]  # which is for texts
        self.env.check()
        self.rollout.check_lengths()
        self.advantage.check_critic(self.critic)
        self._check_data()
        self._check_critic()
        self._check_update()
        self._check_truncation()
        self._check_draws()
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
            temperature=temperature or self.rollout.temperature,
            top_k=1 if temperature == 0 else self.rollout.top_k,
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
        return self.env.factory is not None or bool(self.tools)

    def _check_data(self) -> None:
        for key, text in (("prompts.text", self.prompts.text), ("eval.text", self.eval.text)):
            if text in ([], ""):
                refuse(self, key, "give at least one prompt, or leave it out")
        if not (self.reward or self.env.factory or self.python):
            refuse(self, "reward", "give at least one term; tools have no reward of their own")
        for number, term in enumerate(self.reward):
            if not isinstance(term, tuple(KINDS.values())):
                kinds = ", ".join(kind.__name__ for kind in KINDS.values())
                raise ConfigError(f"reward[{number}] is a {type(term).__name__}; it must be one of {kinds}")
        if self.reward and not any(term.weight for term in self.reward):
            raise ConfigError("reward[…].weight is 0 in all terms, so all completions would score the same; change one")

    def _check_critic(self) -> None:
        critic = self.critic
        refused = {
            "critic.kind": critic.kind != "separate",
            "critic.detach": critic.detach,
            "critic.layers": critic.layers,
        }
        refused |= {"run.shard": self.run.shard == "full"}
        if critic.lora.rank and (keys := [key for key, holds in refused.items() if holds]):
            reason = (
                "the critic's adapter belongs to a separate, trained critic with all layers of a base that is whole"
            )
            refuse(self, f"critic.lora.rank {keys[0]}", f"{reason}; change one of them")
        if critic.prefix_every not in (0, "auto") and self.advantage.bootstrap:
            reason = "a prefix has one score, and a bootstrap needs rewards per token; leave one of them out"
            refuse(self, "critic.prefix_every advantage.bootstrap", reason)

    def _check_update(self) -> None:
        size, kl = self.rollout.batch_size, self.kl
        if self.ppo.minibatches > size:
            refuse(self, "ppo.minibatches", f"it must be at most rollout.batch_size, {size}")
        needs = self.advantage.reads()
        alike = needs.group or needs.baseline  # within a completion
        alike |= self.advantage.estimator == "total_return" and self.critic.kind == "none"
        alike = alike and not is_own(self.advantage.estimator)
        parts = {"none": 0, "batch": 1, "minibatch": self.ppo.minibatches}[self.advantage.whiten]
        if alike and parts > size // 2:
            reason = "a completion alone is whitened to mean 0, whatever its score; it must be at "
            if size == 1:
                refuse(self, "rollout.batch_size advantage.whiten", f"{reason}least 2, or set advantage.whiten: none")
            reason += f"most {size // 2}, half of rollout.batch_size, or set advantage.whiten: batch"
            refuse(self, "ppo.minibatches advantage.whiten", reason)
        if size == 1 and self.score.normalize == "batch" and self.score.shift_mean:
            reason = "a score alone is normalized to 0; it must be at least 2, or set score.normalize: running"
            refuse(self, "rollout.batch_size score.normalize", reason)
        if self.ppo.loss == "gspo" and self.ppo.clip >= TOKEN_CLIP:
            reason = f"the mean ratio of a completion hardly moves that far; it must be below {TOKEN_CLIP}, as 3e-4"
            refuse(self, "ppo.clip ppo.loss", reason)
        if size % self.rollout.per_prompt:
            refuse(self, "rollout.per_prompt", f"it must divide rollout.batch_size, {size}")
        if needs.group and self.rollout.per_prompt < 2:
            reason = "it compares the completions of one prompt, which must be at least 2"
            refuse(self, "advantage.estimator rollout.per_prompt", reason)
        if kl.place == "loss" and kl.estimator == "k1" and kl.coef > 0:
            refuse(self, "kl.estimator kl.place", "the gradient of k1 is 0 on average; use k2, k3 or full")
        if kl.place == "reward" and kl.estimator == "full" and kl.coef > 0:
            reason = "a position's exact KL is known before its token is drawn, so as a reward it teaches nothing"
            refuse(self, "kl.estimator kl.place", f"{reason}; set kl.place: both")
        if kl.place == "both" and kl.estimator != "full" and kl.coef > 0:
            refuse(self, "kl.estimator kl.place", "each half needs the exact KL; set kl.estimator: full")
        least, most = ADAPTED
        if kl.target is not None and not least <= kl.coef <= most:
            refuse(self, "kl.coef kl.target", f"to be adapted, kl.coef must be at least {least} and at most {most}")

    def _check_truncation(self) -> None:
        score, longest, needs = self.score, self.rollout.max_new_tokens, self.advantage.reads()
        pair = score.overlong
        if pair is not None and (len(pair) != 2 or pair[0] not in range(1, longest + 1) or pair[1] <= 0):
            reason = f"it must be [tokens, penalty], 1 to {longest} (rollout.max_new_tokens) and a number above 0"
            refuse(self, "score.overlong", reason)
        for key in ("missing_eos_penalty", "overlong"):
            if self.advantage.bootstrap and getattr(score, key):
                reason = "a truncated completion would pay it twice, also by the critic's value: leave one of them out"
                refuse(self, f"advantage.bootstrap score.{key}", reason)
        if not self.ppo.mask_truncated:
            return
        if not (self.rollout.stop_at_eos or self.rollout.stop or self.several_turns()):
            reason = "without rollout.stop every completion is truncated, and nothing would be left in the loss"
            refuse(self, "ppo.mask_truncated rollout.stop_at_eos", reason)
        if self.advantage.bootstrap:
            reason = "a masked completion needs no bootstrap: leave one of them out"
            refuse(self, "advantage.bootstrap ppo.mask_truncated", reason)
        if score.missing_eos_penalty and not (needs.group or needs.baseline):
            reason = "only truncated completions pay it, and they are masked out of the loss: leave one of them out"
            refuse(self, "score.missing_eos_penalty ppo.mask_truncated", reason)

    def _check_draws(self) -> None:
        """Raise `ConfigError` for rules that need a KL, and corrections that need a difference, which draws lack."""
        off_policy, max_age = self.off_policy, self.rollout.max_age
        first = off_policy.proximal == "recomputed" or off_policy.support == "truncated"  # a ratio of 1 at first
        exact = self.kl.place == "both"
        for cause in [*self.rollout.filters(), *["max_age"] * bool(max_age)]:
            if self.ppo.target_kl is not None and not first:
                reason = "the KL to the policy of the draws begins above 0; set off_policy.proximal: recomputed"
                refuse(self, f"ppo.target_kl off_policy.proximal rollout.{cause}", reason)
            for key, limit in (("kl.target", self.kl.target), ("stop.kl", self.stop.kl)):
                if limit is not None and not exact:
                    reason = "such samples do not estimate the KL: set kl.estimator: full with kl.place: both"
                    refuse(self, f"{key} rollout.{cause}", reason)
        bounds = off_policy.bounds
        if len(bounds) != 2 or not 0 <= bounds[0] < bounds[1]:
            refuse(self, "off_policy.bounds", "it must be [low, high], at least 0 and ascending")
        if off_policy.proximal == "interpolated" and not max_age:
            reason = "it goes by the age of tokens; set rollout.max_age (rollout.engine: continuous), or leave it out"
            refuse(self, "off_policy.proximal rollout.max_age", reason)
        if off_policy.proximal == "interpolated" and off_policy.correct != "none" and max_age == 1:
            # The interpolated policy of tokens of age 0 and 1 is the one that drew them.
            refuse(self, "off_policy.correct rollout.max_age", "all weights are 1 below an age of 2; leave it out")
        for key, default in (("proximal", "recomputed"), ("correct", "none")):
            if getattr(off_policy, key) != default and not differs_from_training(self.rollout, self.model.dtype):
                reason = "tokens are drawn with the log-probs of training, in float32, without filters; leave it out"
                refuse(self, f"off_policy.{key} rollout.engine model.dtype", reason)

    def _check_engine(self) -> None:
        rollout, longest = self.rollout, self.evaluation_sampling().max_new_tokens
        if rollout.min_new_tokens > longest:
            refuse(self, "eval.max_new_tokens", f"it must be at least rollout.min_new_tokens, {rollout.min_new_tokens}")
        if rollout.engine == "vllm":
            rollout.check_vllm("rollout.")
            self.evaluation_sampling().check_vllm("eval.")
        if rollout.server is not None:
            check_server(rollout.server)
            rollout.check_vllm_server("rollout.")
        if rollout.engine == "continuous" and rollout.min_new_tokens:
            reason = "continuous batching has no minimum; set rollout.engine: local, or leave it out"
            refuse(self, "rollout.min_new_tokens", reason)

    def _check_sharding(self) -> None:
        if self.run.shard == "none":
            return
        self.check_offload(adapted=bool(self.model.lora.rank))
        if self.rollout.max_age:
            reason = "batches are sampled ahead with a copy of the weights, which shards lack: leave one of them out"
            refuse(self, "rollout.max_age run.shard", reason)
        refused = {
            "model.compile": (True, "compiled passes skip the hooks that gather weights"),
            "model.adapter": ("merge", "merging needs the whole weights in each process"),
            "rollout.cache": ("static", "a static cache keeps weights of its own"),
        }
        for key, (value, reason) in refused.items():
            if attrgetter(key)(self) == value:
                refuse(self, f"{key} run.shard", f"{reason}; leave one of them out")
        if self.sharding.sampling != "layers":
            return
        alone = {"audit.every": self.audit.every, "rollout.engine": self.rollout.engine == "continuous"}
        for key in (key for key, value in alone.items() if value):
            reason = "layers are gathered by all processes in step, not by one alone: set sharding.sampling: gathered"
            refuse(self, f"{key} sharding.sampling", reason)

    def check_offload(self, *, adapted: bool) -> None:
        """Raise `ConfigError` if `sharding.offload` is frozen, and no model is; `adapted` is true with an adapter."""
        frozen = (self.kl.coef > 0 and not adapted) or (self.critic.kind == "separate" and self.critic.detach)
        if self.sharding.offload == "frozen" and not frozen:
            why = "with an adapter the policy is its own reference" if self.kl.coef > 0 else "kl.coef is 0"
            reason = f"no model of this run is: {why}, and no separate critic has critic.detach; leave it out"
            refuse(self, "sharding.offload", reason)

    def check_turns(self) -> None:
        """Raise `ConfigError` for settings that episodes of several turns do not have."""
        if self.sharding.sampling == "layers":
            refuse(self, "sharding.sampling", "episodes do not sample in step; set sharding.sampling: gathered")
        if self.rollout.cache == "static":
            refuse(self, "rollout.cache", "episodes of several turns use a dynamic cache: leave it out")
        least, turn = self.rollout.min_new_tokens, self.env.turn_tokens
        if turn is not None and turn < least + (least > 0 and not self.rollout.stop):
            reason = f"it must be above rollout.min_new_tokens, {least}, or every turn would be cut"
            refuse(self, "env.turn_tokens", reason)
        longest, most = self.evaluation_sampling().max_new_tokens, self.rollout.max_new_tokens
        if self.eval.every and longest < most:
            reason = f"it must be at least rollout.max_new_tokens, {most}, or evaluated episodes would be cut short"
            refuse(self, "eval.max_new_tokens", reason)
