"""What a run is told: one dataclass a group, the whole in `PPOConfig`.

This file is read before anything heavy is imported, so it may import neither torch nor transformers.
The text under a field is its help on the command line and its comment in `--print_config`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tokencredit.runs.errors import ConfigError

Estimator = Literal[
    "gae",
    "td",
    "one_step",
    "monte_carlo",
    "n_step",
    "decoupled_gae",
    "length_adaptive_gae",
    "total_return",
    "reward_to_go",
    "uniform",
    "group_relative",
    "leave_one_out",
]
Tracker = Literal["tensorboard", "wandb", "trackio", "comet_ml", "aim", "mlflow", "clearml", "dvclive", "swanlab"]


def setting(default: Any, **limits: float) -> Any:
    """A field with a range: `at_least`, `above`, `at_most` or `below`."""
    return field(default=default, metadata=limits)


@dataclass
class ModelConfig:
    """The policy, its critic and its reference."""

    name: str = "builtin:reviews"
    """A Hugging Face hub id, a folder, or `builtin:reviews`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the model passes; weights, statistics and losses stay in float32."""
    value_head: Literal["linear", "mlp"] = "mlp"
    """The critic on the model's last hidden state: one layer, or two with a hidden width four times the model's."""


@dataclass
class PromptsConfig:
    """What the policy continues."""

    text: list[str] | str = field(default_factory=lambda: ["This movie was really"])
    """One prompt, or a list that batches go through in turn. Not used with a dataset."""
    dataset: str | None = None
    """A .jsonl, .json, .csv or .parquet file, a folder that Dataset.save_to_disk wrote, or a hub id."""
    split: str = "train"
    """Its split."""
    column: str = "prompt"
    """Its column of prompts: texts or conversations. All other columns go to the reward."""
    config_name: str | None = None
    """Its subset, on the hub."""
    shuffle: bool | None = None
    """A new order in each pass, from the seed; null shuffles a dataset and takes texts in turn."""
    max_length: int | None = setting(None, at_least=1)
    """The most tokens of a prompt; null for what max_new_tokens leaves of the model's context, which always holds."""
    overlong: Literal["error", "drop", "truncate"] = "error"
    """What happens to a longer one: refused, left out, or cut down to its end."""
    add_bos: bool | None = None
    """Put a beginning-of-sequence token before each prompt; null leaves that to the tokenizer or chat template."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Handed to the chat template of conversations, such as `enable_thinking: false`."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` if two sources of prompts are given."""
        if self.dataset is not None and self.text not in ([], PromptsConfig().text):
            raise ConfigError("prompts.text and prompts.dataset are both given; leave one of them out")


@dataclass
class RewardTerm:
    """One term of the reward, computed on prompt and completion together."""

    classifier: str = "builtin:reviews"
    """A sequence classifier: hub id, folder, or `builtin:reviews`."""
    label: str = "NEGATIVE"
    """The label that is rewarded."""
    output: Literal["probability", "logit", "log_odds"] = "probability"
    """What of that label is the reward."""
    weight: float = 1.0
    """Factor of this term in the sum."""
    name: str | None = None
    """Its name in metrics and messages; by default the label."""


@dataclass
class RolloutConfig:
    """How completions are sampled."""

    batch_size: int = setting(64, at_least=1)
    """Completions an iteration, over all processes."""
    per_prompt: int = setting(1, at_least=1)
    """Completions of each prompt; it divides batch_size."""
    max_new_tokens: int = setting(24, at_least=1)
    """Longest completion, in tokens; one that has not ended by then is cut off."""
    temperature: float = setting(1.0, above=0)
    """Divides the logits, in sampling and in training alike."""


@dataclass
class AdvantageConfig:
    """How rewards become credit."""

    estimator: Estimator = "gae"
    """How advantages are estimated; docs/algorithms.md says when to use which."""
    gamma: float = setting(1.0, at_least=0, at_most=1)
    """Discount a token."""
    lam: float = setting(0.95, at_least=0, at_most=1)
    """λ of gae and decoupled_gae: 0 trusts the critic, 1 trusts the sampled return."""
    lam_returns: float = setting(1.0, at_least=0, at_most=1)
    """λ of the critic's targets, in decoupled_gae and length_adaptive_gae."""
    alpha: float = setting(0.05, above=0)
    """Of length_adaptive_gae, whose λ is 1 − 1 / (alpha · length)."""
    n: int = setting(5, at_least=1)
    """Steps of n_step."""
    scale: bool = True
    """Whether group_relative divides by its group's deviation."""
    whiten: bool = True
    """Bring the batch's advantages to mean 0 and deviation 1."""


@dataclass
class UpdateConfig:
    """The clipped update."""

    epochs: int = setting(4, at_least=1)
    """Passes over each batch."""
    minibatches: int = setting(4, at_least=1)
    """Optimiser steps a pass."""
    micro_batch_size: int | None = setting(None, at_least=1)
    """Completions in memory at once during the update; null takes a whole minibatch."""
    clip: float = setting(0.2, above=0, below=1)
    """The ratio to the sampling policy is clipped to [1 − clip, 1 + clip]."""
    clip_high: float | None = setting(None, above=0)
    """The upper side of that range, where it should differ; null for clip."""
    dual_clip: float | None = setting(None, above=1)
    """Largest loss of a token with a negative advantage, in multiples of that advantage; null for no limit."""
    reduction: Literal["token", "sequence", "constant"] = "token"
    """What weighs the same in the loss: every token, every completion, or every token by a constant."""
    value_clip: float | None = setting(0.2, above=0)
    """Largest change of a value that the value loss rewards in one update; null for no clipping."""
    value_coef: float = setting(0.5, at_least=0)
    """Weight of the value loss."""
    entropy_coef: float = setting(0.0, at_least=0)
    """Weight of the entropy bonus."""
    target_kl: float | None = setting(None, above=0)
    """End an update once its policy is this far, in nats a token, from the one that sampled; null for never."""


@dataclass
class KLConfig:
    """What holds the policy near its starting point."""

    coef: float = setting(0.05, at_least=0)
    """β, the price of a nat. With 0 there is no reference model."""
    place: Literal["reward", "loss"] = "reward"
    """Whether each token's reward pays for it, or the loss."""
    estimator: Literal["k1", "k2", "k3", "full"] = "k1"
    """k1 to k3 estimate it from the sampled token; full sums over the vocabulary."""
    target: float | None = setting(None, above=0)
    """Nats a sequence that coef is adapted to hold; null leaves coef as it is."""
    horizon: float = setting(10_000, above=0)
    """Completions over which an adapted coef follows."""


@dataclass
class ScoreConfig:
    """What happens to a completion's score before it becomes reward."""

    clip: float | None = setting(None, above=0)
    """Scores are held within ± this; null leaves them."""
    missing_eos_penalty: float = setting(0.0, at_least=0)
    """Taken off where a completion was cut off before it ended."""


@dataclass
class OptimConfig:
    """The optimiser, with a learning rate for the model and one for the value head."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon for the matrices inside the model with adamw for the rest."""
    lr: float = setting(1e-4, above=0)
    """Learning rate of the model."""
    value_lr: float = setting(1e-3, above=0)
    """Learning rate of the value head."""
    weight_decay: float = setting(0.0, at_least=0)
    """AdamW's weight decay."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """How the learning rates fall after the warm-up."""
    warmup: int = setting(2, at_least=0)
    """Iterations over which the learning rates rise."""
    final_scale: float = setting(0.1, at_least=0, at_most=1)
    """Learning rates at the end, as a share of the full ones."""
    max_grad_norm: float | None = setting(1.0, above=0)
    """Gradients with a larger norm are scaled down to it; null for never."""
    grad_norm_type: Literal["l2", "max"] = "l2"
    """The norm: over all elements, or the largest element."""


@dataclass
class StopConfig:
    """When a run ends before its last iteration."""

    reward: float | None = None
    """Mean reward above which it is enough; null for never."""
    kl: float | None = setting(None, above=0)
    """KL to the reference, in nats a sequence, above which it is too much; null for never."""
    patience: int = setting(1, at_least=1)
    """Iterations in a row that must be above."""


@dataclass
class RunConfig:
    """How long it runs, and what it leaves where."""

    dir: str | None = None
    """The run's folder, which must not hold a run already; null takes a new one, `runs/DATE-TIME`."""
    iterations: int = setting(40, at_least=1)
    """Rollouts, each followed by one update."""
    samples: int = setting(8, at_least=0)
    """Completions an iteration kept in samples.jsonl, token by token."""
    show_every: int = setting(10, at_least=0)
    """Iterations between two tables of samples on the screen; 0 for none."""
    trackers: list[Tracker] = field(default_factory=lambda: ["tensorboard"])
    """Where metrics go beside metrics.jsonl; any of Accelerate's trackers that is installed."""


@dataclass
class PPOConfig:
    """Everything that a run in the token world is told."""

    seed: int = setting(1, at_least=0)
    """The one seed behind all randomness."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy, its critic and its reference."""
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    """What the policy continues."""
    reward: list[RewardTerm] = field(default_factory=lambda: [RewardTerm()])
    """Terms of the reward; their weighted sum is the score of a completion."""
    score: ScoreConfig = field(default_factory=ScoreConfig)
    """What happens to a completion's score before it becomes reward."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """How completions are sampled."""
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
    run: RunConfig = field(default_factory=RunConfig)
    """How long it runs, and what it leaves where."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for what cannot work."""
        check(self)
        if not self.prompts.text:
            raise ConfigError("prompts.text is empty; give at least one prompt")
        if not self.reward:
            raise ConfigError("reward is empty; give at least one term")
        size, per_prompt = self.rollout.batch_size, self.rollout.per_prompt
        if self.ppo.minibatches > size:
            raise ConfigError(
                f"ppo.minibatches is {self.ppo.minibatches}; it must be at most rollout.batch_size, {size}"
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


def check(config: Any, prefix: str = "") -> None:
    """Raise `ConfigError` for the first field, at any depth, that is outside its range or not one of its choices."""
    hints = get_type_hints(type(config))
    for item in fields(config):
        key, value = prefix + item.name, getattr(config, item.name)
        if is_dataclass(value):
            check(value, f"{key}.")
        elif isinstance(value, list):
            for position, element in enumerate(value):
                if is_dataclass(element):
                    check(element, f"{key}[{position}].")
        elif get_origin(hints[item.name]) is Literal and value not in get_args(hints[item.name]):
            choices = ", ".join(get_args(hints[item.name]))
            raise ConfigError(f"{key} is {value!r}; it must be one of {choices}")
        elif item.metadata and value is not None:
            _check_range(key, value, **item.metadata)


def _check_range(
    key: str,
    value: float,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
    below: float = math.inf,
) -> None:
    if at_least <= value <= at_most and above < value < below:
        return
    limits = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    wanted = [f"{word} {limit:g}" for word, limit in limits.items() if math.isfinite(limit)]
    if not math.isfinite(value):
        wanted.append("finite")
    raise ConfigError(f"{key} is {value!r}; it must be {' and '.join(wanted)}")
