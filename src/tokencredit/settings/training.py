"""Settings of advantages, the update, the KL penalty, the optimizer and the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args, get_type_hints

from tokencredit.core.estimator_table import ESTIMATORS, SETTINGS, Estimator, EstimatorName
from tokencredit.errors import ConfigError, quoted
from tokencredit.settings.data import SEVERAL
from tokencredit.settings.fields import Group, at_home, setting
from tokencredit.settings.model import CriticTraining
from tokencredit.settings.parts import OWN, Part, is_own, label_of
from tokencredit.settings.projects.values import Tracker

MAX_SEED = 2**62
"""Largest seed; PyTorch must accept 2 · seed + 1 too."""
UNREAD = Estimator("baseline", SETTINGS)
"""What an estimator of a file may read, until its code is loaded."""


def read_by(key: str, estimators: Iterable[str] = ESTIMATORS) -> str:
    """The condition that the estimator reads this key of `core.estimator_table.SETTINGS`."""
    return f"estimator: {', '.join([*(name for name in estimators if key in ESTIMATORS[name].settings), OWN])}"


STEPWISE = [*(name for name, spec in ESTIMATORS.items() if "gamma" in spec.settings), OWN]
"""Estimators that tell the steps of an episode apart."""


@dataclass
class AdvantageSettings(Group):
    """Advantage settings shared by language models and agents."""

    estimator: EstimatorName | Part = "gae"
    """Advantage estimator, or your own (docs/your-own.md). See docs/algorithms.md for a comparison."""
    kwargs: dict[str, Any] = setting(dict, needs="estimator: own")
    """Keyword arguments of an estimator of your own."""
    gamma: float = setting(1.0, needs=read_by("gamma"), at_least=0, at_most=1)
    """Discount factor per step (token, or environment step), with a horizon of 1/(1 − gamma) steps. Keep 1 where the
    reward comes with the last token: below 1 the first tokens of long texts get little of it."""
    lam: float = setting(0.95, needs=read_by("lam"), at_least=0, at_most=1)
    """λ of gae and decoupled_gae: 0 trusts the critic, 1 trusts the sampled return."""
    lam_returns: float = setting(1.0, needs=read_by("lam_returns"), at_least=0, at_most=1)
    """λ of the critic's targets, in decoupled_gae and length_adaptive_gae."""
    alpha: float = setting(0.05, needs=read_by("alpha"), above=0)
    """α of length_adaptive_gae: λ = 1 − 1 / (alpha · length)."""
    n: int = setting(5, needs=read_by("n"), at_least=1)
    """Steps of the n_step return."""
    whiten: Literal["none", "batch", "minibatch"] = "batch"
    """Whiten advantages (zero mean, unit variance) over the whole batch, or within each minibatch."""

    def options(self) -> dict[str, Any]:
        """Arguments of the estimators, for `core.estimators.estimate`."""
        return {key: value for key, value in vars(self).items() if key in SETTINGS}

    def reads(self) -> Estimator:
        """The inputs of the estimator."""
        own = self.estimator
        return ESTIMATORS.get(own, UNREAD) if isinstance(own, str) else Estimator.of(own)

    def check_critic(self, critic: CriticTraining) -> None:
        """Raise `ConfigError` for a critic that the estimator lacks or does not use, or a setting that it ignores."""
        needs, reason, own = self.reads(), "", is_own(self.estimator)
        if critic.kind == "none" and needs.critic == "required":
            known = get_args(get_type_hints(type(self))["estimator"])[0]
            free = ", ".join(name for name in get_args(known) if ESTIMATORS[name].critic != "required")
            reason = f"which needs a critic; set critic.kind, or take one of {free}"
        if critic.kind != "none" and needs.critic == "unused" and not own:
            reason = "which uses no critic; set critic.kind: none"
        if reason:
            name = label_of(self.estimator)
            raise ConfigError(f"critic.kind is {label_of(critic.kind)}, and advantage.estimator is {name}, {reason}")
        for key, value in self.options().items() if own else ():
            if key not in needs.settings and value != getattr(type(self)(), key):
                name = label_of(self.estimator)
                reason = f"which advantage.estimator {name} does not read; let it take {key}, or leave it out"
                raise ConfigError(f"advantage.{key} is {quoted(value)}, {reason}")


@dataclass
class AdvantageConfig(AdvantageSettings):
    """Advantage estimation."""

    lam: float | Literal["auto"] = setting(  # type: ignore[assignment]  # agents have no prefixes
        "auto", needs=read_by("lam"), at_least=0, at_most=1
    )
    """λ of gae and decoupled_gae: 0 trusts the values, 1 trusts the sampled return. auto, with scores of prefixes
    (`critic.prefix_every`), is the one whose advantages agree best with the effects of their tokens in other
    completions (docs/algorithms.md); 0.95 without such scores."""
    scale: bool = setting(True, needs=read_by("scale"))
    """Divide group_relative advantages by the group's standard deviation."""
    unit: Literal["token", "turn"] = setting("token", needs=(SEVERAL, f"estimator: {', '.join(STEPWISE)}"))
    """Steps of an episode of several turns: each token, or each turn as a whole, with one value at its start and one
    advantage for all its tokens. gamma and lam then count turns."""
    bootstrap: bool = setting(False, needs="critic.kind: not none, own")
    """Bootstrap from the critic where a completion was truncated; false treats the truncation as its end. True needs
    rewards per token: with one score per text, that score and the critic's value would both be paid."""


MANY_STEPS = "algorithm: not policy_gradient"
"""The condition of settings that the single policy-gradient step, at a ratio of 1, does not read."""


@dataclass
class PPOSettings(Group):
    """Settings of the PPO update shared by language models and agents."""

    loss: Literal["clip"] | Part = "clip"
    """Policy loss: PPO's, or one of your own (docs/your-own.md)."""
    kwargs: dict[str, Any] = setting(dict, needs="loss: own")
    """Keyword arguments of a loss of your own."""
    epochs: int = setting(4, needs=MANY_STEPS, at_least=1)
    """Passes over each batch."""
    minibatches: int = setting(4, needs=MANY_STEPS, at_least=1)
    """Minibatches per pass; each is one optimizer step."""
    micro_batch_tokens: int | None = setting(None, at_least=2)
    """Maximum tokens per micro-batch in updates and scoring, prompts and padding included; null for no limit. Lower it
    when memory runs out; gradients do not change."""
    clip: float = setting(0.2, needs=MANY_STEPS, above=0, below=1)
    """Clip range of the ratio to the sampling policy: [1 − clip, 1 + clip]."""
    clip_high: float | None = setting(None, needs=MANY_STEPS, above=0)
    """Upper clip range, 1 + clip_high, if it should differ; null for clip."""
    dual_clip: float | None = setting(None, needs=MANY_STEPS, above=1)
    """Dual clip: limit of the loss where the advantage is negative, in multiples of the advantage, such as 3; null for
    none."""
    entropy_coef: float = setting(0.0, at_least=0)
    """Weight of the entropy bonus."""
    target_kl: float | None = setting(None, needs=MANY_STEPS, above=0)
    """KL to the sampling policy, in nats per token, above which the rest of an update is skipped; null for never."""

    def objective(self, critic: CriticTraining) -> dict[str, Any]:
        """Arguments of `learn.objective.Objective`."""
        return {
            "clip": (self.clip, self.clip if self.clip_high is None else self.clip_high),
            "dual_clip": self.dual_clip,
            "value_clip": critic.clip,
            "value_coef": critic.coef,
            "entropy_coef": self.entropy_coef,
        }

    def passes(self, critic: CriticTraining, advantage: AdvantageSettings, optim: OptimConfig) -> dict[str, Any]:
        """Arguments of `learn.learner.UpdateSettings`."""
        return {
            "epochs": self.epochs,
            "minibatches": self.minibatches,
            "critic_epochs": critic.epochs,
            "micro_batch_tokens": self.micro_batch_tokens,
            "whiten_minibatches": advantage.whiten == "minibatch",
            "target_kl": self.target_kl,
            "max_grad_norm": optim.max_grad_norm,
            "grad_norm": optim.grad_norm,
        }


class PolicyLoss(NamedTuple):
    """A policy loss of ours."""

    settings: tuple[str, ...]
    """Settings under `ppo` that it reads."""
    objective: str
    """Name of its class in `learn.objective`."""
    options: Mapping[str, Any] = {}
    """Fields of the class."""


LOSSES = {
    "clip": PolicyLoss(("clip", "clip_high", "dual_clip"), "Objective"),
    "gspo": PolicyLoss(("clip", "clip_high"), "SequenceObjective"),
    "cispo": PolicyLoss(("clip", "clip_high"), "WeightedObjective", {"outside": "clip"}),
    "sao": PolicyLoss(("clip", "clip_high"), "WeightedObjective", {"outside": "mask"}),
    "dppo_tv": PolicyLoss(("divergence_limit",), "WeightedObjective", {"divergence": "tv", "divergence_limit": 0.15}),
    "dppo_kl": PolicyLoss(("divergence_limit",), "WeightedObjective", {"divergence": "kl", "divergence_limit": 0.05}),
}
"""Policy losses by name. The limits of a divergence are those of verl's example of DPPO."""
if TYPE_CHECKING:
    LossName: TypeAlias = str
else:
    LossName = Literal[tuple(LOSSES)]


def of_loss(key: str) -> str:
    """The condition that the loss reads this key."""
    own = [OWN] * (key != "divergence_limit")
    return f"loss: {', '.join([*(name for name, loss in LOSSES.items() if key in loss.settings), *own])}"


@dataclass
class UpdateConfig(PPOSettings):
    """The PPO update."""

    clip: float = setting(0.2, needs=(of_loss("clip"), "loss: not cispo or not clip_high"), above=0, below=1)
    """Clip range of the ratio to the sampling policy: [1 − clip, 1 + clip]. gspo needs a far smaller one, such as
    3e-4; cispo has only the upper side."""
    clip_high: float | None = setting(None, needs=of_loss("clip_high"), above=0)
    dual_clip: float | None = setting(None, needs=of_loss("dual_clip"), above=1)
    loss: LossName | Part = "clip"
    """Policy loss. clip is PPO's, which clips the ratio of a token; gspo clips the mean ratio of a completion; cispo
    weighs the policy gradient by the ratio up to a bound; sao masks tokens whose ratio is outside the range; dppo_tv
    and dppo_kl mask tokens whose probability has changed too far; docs/your-own.md says how to write one."""
    divergence_limit: float | None = setting(None, needs=of_loss("divergence_limit"), above=0)
    """Largest change of a token's probability (dppo_tv), or KL of that change in nats (dppo_kl), before the token is
    masked; null for 0.15 and 0.05."""
    reduction: Literal["token", "sequence", "constant"] = "token"
    """Loss reduction: mean over all tokens (token), mean of per-completion means (sequence), or sum over tokens divided
    by batch size × longest completion (constant)."""
    mask_truncated: bool = False
    """Mask truncated completions out of the loss, the value loss included. Their scores still count in groups, running
    means and score.normalize."""

    def objective(self, critic: CriticTraining) -> dict[str, Any]:
        """Arguments of `learn.objective.Objective`."""
        return super().objective(critic) | {"reduction": self.reduction}


ADAPTED = (1e-5, 10.0)
"""Range of an adapted `kl.coef`."""


@dataclass
class KLConfig(Group):
    """KL penalty towards the reference model."""

    coef: float = setting(0.05, at_least=0)
    """KL coefficient β: the price of a nat in units of the reward, wherever the penalty is. In the loss it is divided
    by what whitening divides the advantages by. With 0 no reference model is loaded."""
    place: Literal["reward", "loss", "both"] = setting("reward", needs="coef")
    """Place of the KL penalty: subtracted from each token's reward; added to the loss, where it ignores that a token
    leads to later ones; or both, which with `estimator: full` is the whole gradient with the least noise."""
    estimator: Literal["k1", "k2", "k3", "full"] = setting("k1", needs="coef")
    """KL estimator: k1, k2 or k3 from the sampled token, or the full sum over the vocabulary, for `place: loss` and
    `both`: it costs the reference's projection in each update step, and both one more pass of the policy."""
    target: float | None = setting(None, above=0)
    """Target KL to the reference, in nats per sequence: coef, which is then the initial value, rises while the KL is
    above it and falls while it is below. null for a fixed coef."""
    horizon: float = setting(10_000.0, needs="target", above=0)
    """Horizon of the adaptation to `target`, in completions; a longer one adapts more slowly."""
    error_clip: float = setting(0.2, needs="target", above=0)
    """Clip of the relative error, KL / target − 1, in the adaptation; a wider one adapts faster far from the target."""

    @property
    def passes(self) -> int:
        """Forward passes per iteration outside of updates: the reference's, and one of the policy for `both`."""
        return (self.coef > 0) * (1 + (self.place == "both"))


@dataclass
class OptimConfig(Group):
    """Optimizer and learning-rate schedule; a critic has learning rates of its own under `critic`."""

    name: Literal["adamw", "muon"] = "adamw"
    """Optimizer: adamw, or muon for the model's hidden matrices with adamw for the rest."""
    lr: float = setting(1e-4, above=0)
    """Peak learning rate."""
    weight_decay: float = setting(0.0, at_least=0)
    """Decoupled weight decay of all trained weights, the critic's too."""
    eps: float = setting(1e-8, above=0)
    """AdamW's ε, which bounds its steps where gradients are tiny."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Decay of the learning rates after the warm-up."""
    warmup: int = setting(2, at_least=0)
    """Warm-up of the learning rates, in iterations."""
    final_scale: float = setting(0.1, needs="schedule: not constant", at_least=0, at_most=1)
    """Final learning rate, as a fraction of the peak."""
    max_grad_norm: float | None = setting(1.0, above=0)
    """Gradient clipping: a larger gradient is scaled down to this norm, over all trained parameters together. null
    for none."""
    grad_norm: Literal["l2", "max"] = setting("l2", needs="max_grad_norm")
    """Norm of `max_grad_norm` and of the metric `grad_norm`: L2, or the largest magnitude of an element (L∞)."""

    def rates(self, iterations: int) -> dict[str, Any]:
        """Arguments of `learn.optim.schedule` for a run of this many iterations."""
        total = max(iterations, self.warmup + 1)
        return {"name": self.schedule, "warmup": self.warmup, "total": total, "final_scale": self.final_scale}


@dataclass
class StopSettings(Group):
    """Early-stopping rules shared by language models and agents."""

    reward: float | None = None
    """Mean reward of an iteration (metric `reward`, or an agent's `train/average_return`) above which the run stops;
    null for never."""
    patience: int = setting(1, needs="reward or kl", at_least=1)
    """Consecutive iterations above a threshold (`reward`, or for texts `kl`; either counts) before the run stops."""


@dataclass
class StopConfig(StopSettings):
    """Early-stopping rules."""

    kl: float | None = setting(None, needs="kl.coef", above=0)
    """KL to the reference above which the run stops, in nats per sequence; null for never."""


@dataclass
class EvalConfig(Group):
    """Evaluation on held-out prompts, sampled as rollouts are; the best policy is kept in `best/`."""

    every: int = setting(0, at_least=0)
    """Iterations between evaluations; 0 for none."""
    samples: int = setting(64, at_least=1)
    """Number of prompts per evaluation, over all processes."""
    best_of: int = setting(1, at_least=1)
    """Completions per prompt. The metric `eval/best` is the mean over prompts of the best completion's score; `best/`
    is chosen by the mean over all."""
    max_new_tokens: int | None = setting(None, at_least=1)
    """Longest completion, in tokens; null for rollout.max_new_tokens."""
    temperature: float | None = setting(None, at_least=0)
    """Sampling temperature; 0 for the most likely tokens, null for rollout.temperature."""
    text: list[str] | str | None = setting(None, needs="not dataset")
    """Held-out prompt or prompts; without these and `dataset`, evaluations have the training prompts. All else is as
    under `prompts`."""
    dataset: str | None = None
    """Dataset of held-out prompts, read by the keys of `prompts`, such as prompts.column."""
    split: str = setting("train", needs="dataset")
    """Split of the dataset."""


@dataclass
class AuditSettings(Group):
    """Audit settings shared by language models and agents."""

    every: int = setting(0, at_least=0)
    """Iterations between audits during training; 0 for none."""
    continuations: int = setting(8, needs="every", at_least=2)
    """Continuations per state; more of them make the true values more precise."""
    states: int | None = setting(4, needs="every", at_least=1)
    """States audited per completion or episode, evenly spread; null for all. A state of a completion is the text before
    one of its tokens."""
    seconds: float | None = setting(None, needs="every", above=0)
    """Time limit of an audit, in seconds; states get fewer continuations to meet it. null for no limit."""
    at_end: bool = True
    """Audit the final policy, in at most 8 % of the run's time; runs shorter than 20 seconds are not audited."""


@dataclass
class AuditConfig(AuditSettings):
    """Audit of credit: values and advantages of fresh completions against the mean return of many continuations."""

    completions: int = setting(16, needs="every", at_least=2)
    """Completions per audit, over all processes."""
    calls: int | None = setting(None, at_least=1)
    """Most reward calls of an audit: texts that each reward term scores, prefixes included; states get fewer
    continuations to meet it. null for no limit."""
    tokens: int | None = setting(None, at_least=1)
    """Most tokens that an audit samples; states get fewer continuations to meet it. null for no limit."""


@dataclass
class RunSettings(Group):
    """Length and files of a run, shared by language models and agents."""

    dir: str | None = None
    """Folder of the run, which must be new or empty unless the run is resumed; null for `runs/DATE-TIME`."""
    iterations: int = setting(40, at_least=1)
    """Number of iterations: one rollout and one update each."""
    save_every: int = setting(10, at_least=0)
    """Iterations between checkpoints, from which `--resume` continues. The last iteration and each new best evaluation
    get one too. With 0 there is none of them, only one when the run is interrupted."""
    keep_last: int = setting(2, at_least=1)
    """Number of newest checkpoints to keep, beside that of the best evaluation."""
    timeout: float = setting(1800.0, at_least=1)
    """Seconds after which a process of several counts as hanging: it gave no sign of life, or kept the others waiting
    at a common step. The job then ends, or torchrun restarts it. Keep it above the longest time that one process may
    work while others wait: reward calls with all retries, a save."""
    allow_changed: list[str] = field(default_factory=list)
    """Parts, as a run's parts.json names them, that may differ from those that a resumed run began with, such as
    `reward[0].function`. Each change is an event, and a line in the curves."""
    trackers: list[Tracker] | None = None
    """Experiment trackers (of Accelerate) that log the settings and metrics; TensorBoard, W&B, Trackio and MLflow also
    completions with their credit, as `show_every` says. null for TensorBoard if it is installed."""

    def __post_init__(self) -> None:
        """Put the home folder in place of `~`."""
        super().__post_init__()
        self.dir = self.dir and at_home(self.dir)


@dataclass
class RunConfig(RunSettings):
    """Length of the run and its files."""

    shard: Literal["none", "full"] = "none"
    """Sharding of the models over the processes of the job: none holds them whole in each, full splits the weights,
    gradients and moments of policy, separate critics and reference model (PyTorch's FSDP2)."""

    samples: int | Literal["all"] = setting(8, at_least=0)
    """Completions per iteration logged to samples.jsonl token by token, the first of the batch; 0 for none. all keeps
    every completion, as a Parquet file per iteration in samples/, and the first 8 in samples.jsonl."""
    show_every: int = setting(10, needs="samples", at_least=0)
    """Iterations between tables of samples on the screen and in trackers, which also have the first and the last
    iteration's; 0 for none."""
    push_to_hub: str | None = None
    """Hugging Face hub repository to which the final policy is uploaded; null for none."""
