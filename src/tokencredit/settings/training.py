"""Settings of training: sampling, credit, the update, the KL penalty, the optimizer, and the run itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tokencredit.core.estimators import ESTIMATORS
from tokencredit.errors import ConfigError
from tokencredit.settings.data import PromptsConfig
from tokencredit.settings.fields import setting
from tokencredit.settings.model import CriticTraining

if TYPE_CHECKING:
    EstimatorName = str
else:
    EstimatorName = Literal[tuple(ESTIMATORS)]
Tracker = Literal["tensorboard", "wandb", "trackio", "comet_ml", "aim", "mlflow", "clearml", "dvclive", "swanlab"]

MOST_SEED = 2**62
"""Twice that and one more is still a seed for PyTorch."""
ESTIMATOR_SETTINGS = ("gamma", "lam", "lam_returns", "alpha", "n", "scale")
"""Settings under `advantage` that one estimator or another reads."""


def read_by(key: str) -> str:
    """The condition that the estimator reads this one of `ESTIMATOR_SETTINGS`."""
    return f"estimator: {', '.join(name for name, needs in ESTIMATORS.items() if key in needs.settings)}"


WITH_BASELINE = f"estimator: {', '.join(name for name, needs in ESTIMATORS.items() if needs.baseline)}"
"""The condition that the estimator subtracts a running mean of scores."""


@dataclass
class SamplingConfig:
    """How a completion is drawn.

    top_k, top_p, min_p and min_new_tokens keep tokens from being drawn; log-probabilities, entropy, KL and ratio remain
    those of the whole distribution, in sampling and in training alike. The entropy is then computed exactly. So is the
    KL with kl.estimator: full in the reward; without it the metric is `log_ratio`, Σ log π/reference of the tokens
    drawn, because that sum estimates no KL where the tokens were not drawn from π.
    """

    max_new_tokens: int = setting(24, at_least=1)
    """Longest completion, in tokens; one that has not ended by then is cut off."""
    min_new_tokens: int = setting(0, at_least=0)
    """Tokens before which no completion ends."""
    temperature: float = setting(1.0, above=0)
    """Divides the logits, in sampling and in training alike."""
    top_k: int | None = setting(None, at_least=1)
    """Draw from the k likeliest tokens; null for all."""
    top_p: float | None = setting(None, above=0, at_most=1)
    """Draw from the likeliest tokens that together have this probability; null for all."""
    min_p: float | None = setting(None, above=0, at_most=1)
    """Draw from tokens at least this likely, relative to the likeliest; null for all."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a completion, which keeps them."""
    stop_at_eos: bool = True
    """Whether an end-of-sequence token ends a completion; if not, only stop and max_new_tokens do."""

    def filters(self) -> list[str]:
        """The settings that keep tokens from being drawn."""
        on = {
            "top_k": self.top_k is not None,
            "top_p": self.top_p is not None and self.top_p < 1,
            "min_p": self.min_p is not None,
            "min_new_tokens": self.min_new_tokens > 0,
        }
        return [name for name, is_on in on.items() if is_on]

    def check_lengths(self, group: str) -> None:
        """Raise `ConfigError` for lengths, or texts that end a completion, that leave nothing to sample."""
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"{group}.min_new_tokens is {self.min_new_tokens}; it must be at most {group}.max_new_tokens, "
                f"{self.max_new_tokens}"
            )
        if "" in self.stop:
            raise ConfigError(f"{group}.stop is {self.stop}; an empty text would end every completion, leave it out")


@dataclass
class RolloutConfig(SamplingConfig):
    """How many completions are sampled, and how."""

    batch_size: int = setting(64, at_least=1)
    """Completions per iteration, over all processes."""
    per_prompt: int = setting(1, at_least=1)
    """Completions of each prompt; it divides batch_size."""
    cache: Literal["auto", "dynamic", "static"] = "auto"
    """KV cache of sampling, in evaluations and audits too. `dynamic` grows with the completions. `static` has their
    largest size from the start, so that a GPU replays each step as a CUDA graph. `auto` is static on a GPU, if the
    model can be sampled so, and dynamic elsewhere."""


@dataclass
class AdvantageConfig:
    """How rewards become credit."""

    estimator: EstimatorName = "gae"
    """How advantages are estimated; docs/algorithms.md says when to use which."""
    gamma: float = setting(1.0, needs=read_by("gamma"), at_least=0, at_most=1)
    """Discount per token."""
    lam: float = setting(0.95, needs=read_by("lam"), at_least=0, at_most=1)
    """λ of gae and decoupled_gae: 0 trusts the critic, 1 trusts the sampled return."""
    lam_follows: bool = setting(False, needs=(read_by("lam"), "lam: not 1.0, 1"))
    """Let λ follow the critic: 1 − (1 − lam) · EV, with the explained variance EV of the sampled returns of new batches
    (a running mean, at least 0). λ is 1 while the critic explains nothing, and `lam` where it explains all."""
    lam_returns: float = setting(1.0, needs=read_by("lam_returns"), at_least=0, at_most=1)
    """λ of the critic's targets, in decoupled_gae and length_adaptive_gae."""
    alpha: float = setting(0.05, needs=read_by("alpha"), above=0)
    """Of length_adaptive_gae, whose λ is 1 − 1 / (alpha · length)."""
    n: int = setting(5, needs=read_by("n"), at_least=1)
    """Steps of n_step."""
    scale: bool = setting(True, needs=read_by("scale"))
    """Whether group_relative divides by its group's deviation."""
    baseline_decay: float = setting(1.0, needs=WITH_BASELINE, at_least=0, at_most=1)
    """Weight that earlier scores keep in uniform's running mean when a batch arrives; 1 counts all scores alike."""
    bootstrap: bool = setting(False, needs="critic.kind: not none")
    """Bootstrap from the critic where a completion was cut off at the length limit, which else counts as its end. Needs
    rewards of one number per token: a score of the whole text would be paid twice."""
    whiten: bool = True
    """Bring advantages to mean 0 and deviation 1."""
    whiten_over: Literal["batch", "minibatch"] = setting("batch", needs=("whiten", "ppo.minibatches: not 1"))
    """What they are brought to it over."""

    def options(self) -> dict[str, Any]:
        """The settings of the estimators themselves, for `core.advantages.estimate`."""
        return {key: getattr(self, key) for key in ESTIMATOR_SETTINGS}

    def check_critic(self, critic: str, texts: bool = True) -> None:
        """Raise `ConfigError` for a critic that the estimator lacks or cannot use.

        Args:
            critic: the kind of critic.
            texts: whether rows have one score each, as texts do.
        """
        needs = ESTIMATORS[self.estimator]
        if critic == "none" and needs.critic == "required":
            fits = {"baseline", "unused"} if texts else {"baseline"}
            others = ", ".join(name for name, other in ESTIMATORS.items() if other.critic in fits)
            raise ConfigError(
                f"critic.kind is none, and advantage.estimator is {self.estimator}, which needs a critic; set "
                f"critic.kind, or take one of {others}"
            )
        if critic != "none" and needs.critic == "unused":
            raise ConfigError(
                f"critic.kind is {critic}, and advantage.estimator is {self.estimator}, which uses no critic; set "
                "critic.kind: none"
            )

    def whitened_over(self, what: str) -> bool:
        """Whether advantages are whitened over batches, or over minibatches."""
        return self.whiten and self.whiten_over == what


MANY_STEPS = "algorithm: not policy_gradient"
"""What settings need that its one step, on the whole batch and at a ratio of 1, does not read."""


@dataclass
class UpdateConfig:
    """The clipped update."""

    epochs: int = setting(4, needs=MANY_STEPS, at_least=1)
    """Passes over each batch."""
    minibatches: int = setting(4, needs=MANY_STEPS, at_least=1)
    """Optimizer steps per pass."""
    micro_batch_tokens: int | None = setting(None, at_least=2)
    """Tokens that a model reads at once in the update and in scoring, prompts and padding included; null for no limit.
    Lower it when memory runs out; it changes no gradient."""
    clip: float = setting(0.2, needs=MANY_STEPS, above=0, below=1)
    """The ratio to the sampling policy is clipped to [1 − clip, 1 + clip]."""
    clip_high: float | None = setting(None, needs=MANY_STEPS, above=0)
    """The upper side of that range, where it should differ; null for clip."""
    dual_clip: float | None = setting(None, needs=MANY_STEPS, above=1)
    """Largest loss of a token with a negative advantage, in multiples of that advantage; null for no limit."""
    reduction: Literal["token", "sequence", "constant"] = "token"
    """What weighs the same in the loss: every token, every completion, or every token by a constant."""
    mask_truncated: bool = False
    """Leave completions that were cut off at the length limit out of the loss, the critic's included. Their scores
    still count in groups, running means and score.normalize."""
    entropy_coef: float = setting(0.0, at_least=0)
    """Weight of the entropy bonus."""
    target_kl: float | None = setting(None, needs=MANY_STEPS, above=0)
    """End an update once its policy is this far, in nats per token, from the one that sampled; null for never."""

    def objective(self, critic: CriticTraining) -> dict[str, Any]:
        """Arguments of `learn.objective.Objective` that language models and agents share."""
        return {
            "clip": (self.clip, self.clip if self.clip_high is None else self.clip_high),
            "dual_clip": self.dual_clip,
            "value_clip": critic.clip,
            "huber_delta": critic.huber_delta if critic.loss == "huber" else None,
            "value_coef": critic.coef,
            "entropy_coef": self.entropy_coef,
            "reduction": self.reduction,
        }

    def passes(self, critic: CriticTraining, advantage: AdvantageConfig, optim: OptimConfig) -> dict[str, Any]:
        """Arguments of `learn.learner.UpdateSettings` that language models and agents share."""
        return {
            "epochs": self.epochs,
            "minibatches": self.minibatches,
            "critic_epochs": critic.epochs,
            "critic_buffer": critic.buffer,
            "micro_batch_tokens": self.micro_batch_tokens,
            "whiten_minibatches": advantage.whitened_over("minibatch"),
            "target_kl": self.target_kl,
            "max_grad_norm": optim.max_grad_norm,
            "grad_norm_type": optim.norm_order(),
        }


ADAPTED = (1e-5, 10.0)
"""The least and the largest `kl.coef` that `kl.target` leads to."""


@dataclass
class KLConfig:
    """What holds the policy near its starting point."""

    coef: float = setting(0.05, at_least=0)
    """β, the price of a nat. With 0 there is no reference model."""
    place: Literal["reward", "loss"] = setting("reward", needs="coef")
    """Whether each token's reward pays for it, or the loss."""
    estimator: Literal["k1", "k2", "k3", "full"] = setting("k1", needs="coef")
    """k1 to k3 estimate it from the sampled token; full sums over the vocabulary."""
    target: float | None = setting(None, above=0)
    """Nats per sequence that coef is adapted to hold; null leaves coef as it is."""
    horizon: float = setting(10_000, needs="target", above=0)
    """Completions over which an adapted coef follows."""


@dataclass
class OptimConfig:
    """The optimizer and its schedule; the critic's own learning rate is `critic.lr`."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon for the matrices inside the model with adamw for the rest."""
    lr: float = setting(1e-4, above=0)
    """Learning rate of the model."""
    weight_decay: float = setting(0.0, at_least=0)
    """AdamW's weight decay."""
    eps: float = setting(1e-8, above=0)
    """AdamW's ε, which bounds its steps where gradients are tiny."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """How the learning rates fall after the warm-up."""
    warmup: int = setting(2, at_least=0)
    """Iterations over which the learning rates rise."""
    final_scale: float = setting(0.1, needs="schedule: not constant", at_least=0, at_most=1)
    """Learning rates at the end, as a share of the full ones."""
    max_grad_norm: float | None = setting(1.0, above=0)
    """Gradients with a larger norm are scaled down to it; null for never."""
    grad_norm_type: Literal["l2", "max"] = "l2"
    """The norm: over all elements, or the largest element."""

    def rates(self, iterations: int) -> dict[str, Any]:
        """Arguments of `learn.optim.schedule` for a run of so many iterations."""
        total = max(iterations, self.warmup + 1)
        return {"name": self.schedule, "warmup": self.warmup, "total": total, "final_scale": self.final_scale}

    def norm_order(self) -> float:
        """The norm as a number: 2, or infinity."""
        return {"l2": 2.0, "max": math.inf}[self.grad_norm_type]


@dataclass
class StopConfig:
    """When a run ends before its last iteration."""

    reward: float | None = None
    """Mean reward above which it is enough; null for never."""
    kl: float | None = setting(None, needs="kl.coef", above=0)
    """KL to the reference, in nats per sequence, above which it is too much; null for never."""
    patience: int = setting(1, needs="reward or kl", at_least=1)
    """Iterations in a row that must be above."""


@dataclass
class EvalConfig(SamplingConfig):
    """Evaluation on held-out prompts, with sampling of its own; the best policy is kept in `best/`."""

    every: int = setting(0, at_least=0)
    """Iterations between two evaluations; 0 for none."""
    samples: int = setting(64, at_least=1)
    """Prompts per evaluation, over all processes."""
    best_of: int = setting(1, at_least=1)
    """Completions per prompt; eval/best is the mean over prompts of the best of them."""
    prompts: PromptsConfig | None = None
    """The held-out prompts; null for the training prompts."""


@dataclass
class AuditSettings:
    """The settings of audits that language models and agents share."""

    every: int = setting(0, at_least=0)
    """Iterations between two audits in training; 0 for none."""
    continuations: int = setting(8, needs="every", at_least=2)
    """Continuations per state; more of them make the truth more precise."""
    states: int | None = setting(4, needs="every", at_least=1)
    """States per completion or episode whose credit is measured, spread over it; null for all."""
    seconds: float | None = setting(None, needs="every", above=0)
    """Longest time of an audit; the states are then measured less precisely. null for no limit."""


@dataclass
class AuditConfig(AuditSettings):
    """Credit against the truth: fresh completions, from whose states many continuations are sampled and scored."""

    completions: int = setting(16, needs="every", at_least=2)
    """Completions that are audited, over all processes."""


@dataclass
class RunConfig:
    """How long it runs, and what it leaves where."""

    dir: str | None = None
    """The run's folder, which must not hold a run already unless that is resumed; null takes a new one,
    `runs/DATE-TIME`."""
    iterations: int = setting(40, at_least=1)
    """Rollouts, each followed by one update."""
    samples: int = setting(8, at_least=0)
    """Completions per iteration kept in samples.jsonl, token by token."""
    samples_every: int = setting(1, needs="samples", at_least=1)
    """Iterations between two that keep completions; raise it where samples.jsonl would grow too large."""
    save_every: int = setting(10, at_least=0)
    """Iterations between two checkpoints, from which `--resume` goes on; the last iteration, and each that evaluates
    best, get one too. 0 writes none, unless the run is asked to stop."""
    keep_last: int = setting(2, at_least=1)
    """Newest checkpoints that are kept, beside the one that evaluated best."""
    max_bad_steps: int = setting(3, at_least=1)
    """Losses, gradients or rewards in a row that are not finite, whose steps are left out, before the run stops."""
    show_every: int = setting(10, needs="samples", at_least=0)
    """Iterations between two tables of samples on the screen; 0 for none."""
    trackers: list[Tracker] | None = None
    """Accelerate's trackers that get the metrics beside metrics.jsonl; null takes TensorBoard if it is installed."""
    push_to_hub: str | None = None
    """Repository on the Hugging Face hub that the policy is uploaded to at the end; null for none."""
