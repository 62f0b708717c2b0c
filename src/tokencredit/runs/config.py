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
class LoraConfig:
    """A low-rank adapter, trained instead of the model's own weights; needs PEFT."""

    rank: int = setting(0, at_least=0)
    """Rank of the adapter; 0 trains the whole model."""
    alpha: float = setting(16.0, above=0)
    """Its output is scaled by alpha / rank."""
    dropout: float = setting(0.0, at_least=0, below=1)
    """Dropout on its input, in updates."""
    target_modules: list[str] | None = None
    """Names of the layers that get one; null for every linear layer but the output projection."""


@dataclass
class ModelConfig:
    """The policy, its critic and its reference."""

    name: str = "builtin:reviews"
    """A Hugging Face hub id, a folder, or `builtin:reviews`."""
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """Number format of the model passes; auto is bfloat16 where the machine is faster in it. All else, the weights
    included, stays in float32."""
    critic: Literal["shared", "separate"] = "shared"
    """Whether the critic is a head on the policy's own trunk, or a model of its own."""
    critic_name: str | None = None
    """The model that a separate critic starts from, such as a reward model; null for a copy of the policy."""
    value_head: Literal["linear", "mlp"] = "mlp"
    """The critic on the trunk's last hidden state: one layer, or two with a hidden width four times the trunk's."""
    value_head_init: Literal["zeros", "orthogonal"] = "zeros"
    """How the head starts: with a last layer that says 0, or with orthogonal weights."""
    value_head_gain: float = setting(1.0, above=0)
    """Gain of its last layer when it starts orthogonal."""
    value_head_hidden_gain: float = setting(math.sqrt(2), above=0)
    """Gain of the layer before that, in a head of two."""
    detach_critic: bool = False
    """Whether the value loss stops at the head and leaves the trunk alone."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """A low-rank adapter, trained instead of the model's own weights; needs PEFT."""
    dropout: bool = False
    """Whether updates use the model's own dropout; the ratio then no longer starts at 1."""
    gradient_checkpointing: bool = False
    """Whether updates compute activations twice to hold fewer of them."""
    compile: bool = False
    """Whether passes over whole texts go through `torch.compile`, which takes a minute at first and needs a GPU or a
    C++ compiler. Sampling stays as it is."""
    trust_remote_code: bool = False
    """Whether code from the model's repository may run."""


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
    """One term of the reward: exactly one of function, classifier and reward_model, and what belongs to it."""

    function: str | None = None
    """A Python function: `pkg.module:name`, `path/file.py:name`, or a ready-made one (docs/rewards.md): length, count,
    regex, lexicon_sentiment, repetition, distinct, reference_fluency, similarity."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Settings that the function is given by name."""
    classifier: str | None = None
    """A sequence classifier: hub id, folder, or `builtin:reviews`."""
    label: str | None = None
    """The classifier's label that is rewarded; null is NEGATIVE for `builtin:reviews`, and refused for any other."""
    output: Literal["probability", "logit", "log_odds"] = "probability"
    """What of that label is the reward."""
    reward_model: str | None = None
    """A model with one output, as TRL's RewardTrainer saves it: hub id or folder."""
    text: Literal["both", "completion"] = "both"
    """What a classifier or reward model reads: prompt and completion, or the completion alone."""
    batch_size: int = setting(64, at_least=1)
    """Texts that it reads at once."""
    weight: float = 1.0
    """Factor of this term in the sum."""
    name: str | None = None
    """Its name in metrics and messages; by default that of the function, the label, or the reward model's folder."""
    retries: int = setting(2, at_least=0)
    """How often a call that failed is made again, after 1, 2, 4 and so on to 60 seconds: one that raised, gave no list
    of numbers or ran into the timeout. Of any kind of term, though meant for functions that ask a service."""
    timeout: float | None = setting(None, above=0)
    """Seconds that a call, of all completions of the batch, may take; null for as long as it likes. With a timeout, a
    function that is no coroutine runs in a thread."""

    def __post_init__(self) -> None:
        """Fill in the label of the built-in classifier."""
        if self.classifier == "builtin:reviews" and self.label is None:
            self.label = "NEGATIVE"

    def source(self) -> tuple[str, str]:
        """Where the term comes from: `function`, `classifier` or `reward_model`, and its value.

        Raises:
            ConfigError: none of them is given, or more than one, or kwargs for something that is no function.
        """
        sources = {"function": self.function, "classifier": self.classifier, "reward_model": self.reward_model}
        given = [(kind, value) for kind, value in sources.items() if value is not None]
        if len(given) != 1:
            has = " and ".join(kind for kind, _ in given) or "none"
            raise ConfigError(f"needs exactly one of {', '.join(sources)}; it has {has}")
        if self.kwargs and self.function is None:
            raise ConfigError(f"has kwargs, which only a function takes; it has {given[0][0]}")
        return given[0]


@dataclass
class SamplingConfig:
    """How a completion is drawn.

    top_k, top_p, min_p and min_new_tokens keep tokens from being drawn; log-probabilities, KL and ratio remain those
    of the whole distribution, in sampling and in training alike.
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


@dataclass
class RolloutConfig(SamplingConfig):
    """How many completions are sampled, and how."""

    batch_size: int = setting(64, at_least=1)
    """Completions an iteration, over all processes."""
    per_prompt: int = setting(1, at_least=1)
    """Completions of each prompt; it divides batch_size."""


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
    """Bring advantages to mean 0 and deviation 1."""
    whiten_over: Literal["batch", "minibatch"] = "batch"
    """What they are brought to it over."""

    def options(self) -> dict[str, Any]:
        """The settings of the estimators themselves, for `core.advantages.estimate`."""
        return {key: value for key, value in vars(self).items() if key not in ("estimator", "whiten", "whiten_over")}

    def whitened_over(self, what: str) -> bool:
        """Whether advantages are whitened over batches, or over minibatches."""
        return self.whiten and self.whiten_over == what


@dataclass
class UpdateConfig:
    """The clipped update."""

    epochs: int = setting(4, at_least=1)
    """Passes over each batch."""
    minibatches: int = setting(4, at_least=1)
    """Optimiser steps a pass."""
    micro_batch_tokens: int | None = setting(None, at_least=2)
    """Tokens that a model reads at once in the update and in scoring, prompts and padding included; null for no limit.
    Lower it when memory runs out; it changes no gradient."""
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
    critic_warmup: int = setting(0, at_least=0)
    """First iterations in which only the critic learns."""
    target_kl: float | None = setting(None, above=0)
    """End an update once its policy is this far, in nats a token, from the one that sampled; null for never."""

    def objective(self) -> dict[str, Any]:
        """What `learn.update.Objective` takes of these settings."""
        both = (self.clip, self.clip if self.clip_high is None else self.clip_high)
        names = ("dual_clip", "value_clip", "value_coef", "entropy_coef", "reduction")
        return {"clip": both} | {name: getattr(self, name) for name in names}


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

    normalize: Literal["none", "batch", "running"] = "none"
    """Divide scores by their deviation: this batch's, or that of all scores so far."""
    shift_mean: bool = True
    """Whether normalising also takes off their mean, so that about half of the scores become negative."""
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
    eps: float = setting(1e-8, above=0)
    """AdamW's ε, which bounds its steps where gradients are tiny."""
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

    def norm_order(self) -> float:
        """The norm as a number: 2, or infinity."""
        return {"l2": 2.0, "max": math.inf}[self.grad_norm_type]


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
class EvalConfig(SamplingConfig):
    """Evaluation on held-out prompts, with sampling of its own; the best policy is kept in `best/`."""

    every: int = setting(0, at_least=0)
    """Iterations between two evaluations; 0 for none."""
    samples: int = setting(64, at_least=1)
    """Prompts an evaluation, over all processes."""
    best_of: int = setting(1, at_least=1)
    """Completions a prompt; eval/best is the mean over prompts of the best of them."""
    prompts: PromptsConfig | None = None
    """The held-out prompts; null for the training prompts."""


@dataclass
class RunConfig:
    """How long it runs, and what it leaves where."""

    dir: str | None = None
    """The run's folder, which must not hold a run already unless that is resumed; null takes a new one,
    `runs/DATE-TIME`."""
    iterations: int = setting(40, at_least=1)
    """Rollouts, each followed by one update."""
    samples: int = setting(8, at_least=0)
    """Completions an iteration kept in samples.jsonl, token by token."""
    samples_every: int = setting(1, at_least=1)
    """Iterations between two that keep completions; raise it where samples.jsonl would grow too large."""
    save_every: int = setting(10, at_least=0)
    """Iterations between two checkpoints, from which `--resume` goes on; the last iteration, and each that evaluates
    best, get one too. 0 writes none, unless the run is asked to stop."""
    keep_last: int = setting(2, at_least=1)
    """Newest checkpoints that are kept, beside the one that evaluated best."""
    max_bad_steps: int = setting(3, at_least=1)
    """Losses, gradients or rewards in a row that are not finite, whose steps are left out, before the run stops."""
    show_every: int = setting(10, at_least=0)
    """Iterations between two tables of samples on the screen; 0 for none."""
    trackers: list[Tracker] = field(default_factory=lambda: ["tensorboard"])
    """Where metrics go beside metrics.jsonl; any of Accelerate's trackers that is installed."""
    push_to_hub: str | None = None
    """Repository on the Hugging Face hub that the policy is uploaded to at the end; null for none."""


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


def check(config: Any, prefix: str = "") -> None:
    """Raise `ConfigError` for the first field, at any depth, that is outside its range or not one of its choices."""
    hints = get_type_hints(type(config))
    for item in fields(config):
        key, value = prefix + item.name, getattr(config, item.name)
        if value is None and type(None) not in get_args(hints[item.name]):
            raise ConfigError(f"{key} is null; it must have a value")
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
