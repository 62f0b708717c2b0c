"""The configurations of runs that learn from a data set: `tokencredit sft`, `reward-model` and `dpo`.

Imported before anything heavy, as `settings/text.py` is.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tokencredit.settings.data import PromptsConfig
from tokencredit.settings.fields import Group, check, refuse, refuse_unused, setting
from tokencredit.settings.model import LoraConfig, TunedModelConfig
from tokencredit.settings.reader import Configuration
from tokencredit.settings.training import MAX_SEED, OptimConfig, RunSettings


@dataclass
class RowsSettings(Group):
    """A data set, and the columns of its rows."""

    dataset: str | None = None
    """Data set: a .jsonl, .json, .csv or .parquet file, a folder from Dataset.save_to_disk, or a hub id."""
    split: str = setting("train", needs="dataset")
    """Split of the data set."""
    config_name: str | None = setting(None, needs="dataset")
    """Configuration (subset) of a hub data set; null for its default."""
    column: str = setting("prompt", needs="not template")
    """Column of prompts: texts or conversations."""
    template: str | None = None
    """Jinja template that makes the prompt from other columns, such as `Question: {{ instruction }}`; null takes the
    prompt from `column`."""
    held_out: float = setting(0.0, needs="not eval.dataset", at_least=0, below=1)
    """Share of the rows kept out of training, for the metrics under `eval/`; drawn by `seed`."""
    batch_size: int = setting(16, at_least=1)
    """Rows per optimizer step, over all processes."""
    micro_batch: int | None = setting(None, at_least=1)
    """Rows per forward pass; null for the whole batch. Lower it when memory runs out; gradients do not change."""
    epochs: float | None = setting(None, above=0)
    """Passes over the data, in place of `run.iterations`."""

    def prompts(self) -> PromptsConfig:
        """Settings with which prompts are read as in `tokencredit train`."""
        return PromptsConfig(column=self.column, template=self.template, shuffle=False)

    def held_out_of(self, rows: int) -> int:
        """The number of held-out rows of so many; at least one of any share."""
        return max(round(self.held_out * rows), 1) if self.held_out else 0


@dataclass
class LengthSettings(RowsSettings):
    """Rows that become sequences of the trained model's tokens."""

    add_bos: bool | None = None
    """Beginning-of-sequence token before the prompt; as `prompts.add_bos` in `tokencredit train`."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the chat template, such as `enable_thinking: false`."""
    max_length: int | None = setting(None, at_least=2)
    """Longest prompt and completion together, in tokens; the model's context is always a limit."""
    overlong: Literal["error", "drop", "truncate"] = "error"
    """Policy for longer rows: raise an error, drop them, or cut the start of the prompt, then the end of the
    completion."""

    def prompts(self) -> PromptsConfig:
        """Settings with which prompts are read as in `tokencredit train`."""
        return replace(super().prompts(), add_bos=self.add_bos, chat_template_kwargs=self.chat_template_kwargs)


@dataclass
class CompletionsConfig(LengthSettings):
    """Prompts with the completions that the model learns to write."""

    completion: str = "completion"
    """Column of completions: texts, or the assistant's messages."""


@dataclass
class PairsConfig(RowsSettings):
    """Prompts with two completions each, of which one is preferred, as `tokencredit pairs` writes them."""

    chosen: str = "chosen"
    """Column of preferred completions: texts, or the assistant's messages."""
    rejected: str = "rejected"
    """Column of the other completions."""


@dataclass
class DPOPairsConfig(LengthSettings, PairsConfig):
    """Prompts with two completions each, of which one is preferred, as `tokencredit pairs` writes them."""


@dataclass
class HeldOutConfig(Group):
    """Metrics on rows that are not trained on."""

    every: int = setting(0, needs="data.held_out or dataset or eval_dataset", at_least=0)
    """Iterations between evaluations; 0 for one at the end."""
    dataset: str | None = None
    """Data set of held-out rows, with the columns of `data`; null for `data.held_out`."""
    split: str = setting("train", needs="dataset")
    """Its split."""
    config_name: str | None = setting(None, needs="dataset")
    """Its configuration (subset) on the hub; null for its default."""


@dataclass
class OfflineRunConfig(RunSettings):
    """Length of the run and its files."""

    iterations: int = setting(100, needs="not data.epochs", at_least=1)
    """Number of iterations: one optimizer step each."""
    save_every: int = setting(100, at_least=0)
    """Iterations between checkpoints, from which `--resume` continues; the last iteration gets one too. With 0 there is
    none of them, only one when the run is interrupted."""


@dataclass
class RewardModelStartConfig(Group):
    """The model that the reward model starts from."""

    name: str = "builtin:reviews"
    """Language model, whose vocabulary projection a new score head or its value head (`v_head`) replaces, or
    classifier: a hub id, a folder, or `builtin:reviews`. An adapter is merged, with its score head if it has one."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Compute dtype of forward and backward passes. bfloat16 rounds scores, and so their differences, to three digits;
    `auto` takes it where it is faster."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """A new LoRA adapter below the score head. `reward_model/` is the adapter with its head, or the whole model if an
    adapter was merged first."""
    quantization: Literal["nf4", "int8"] | None = setting(None, needs="lora.rank")
    """Load the linear layers below the adapter in 4 bits (nf4) or 8 (int8); needs bitsandbytes."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, at the cost of one more forward pass."""
    trust_remote_code: bool = False
    """Run code from the model's repository."""


@dataclass
class SFTLossConfig(Group):
    """Supervised fine-tuning."""

    loss_on: Literal["completion", "all"] = "completion"
    """Tokens with a loss: those of the completion, or those of the prompt too."""


@dataclass
class RewardModelLossConfig(Group):
    """The loss of a reward model: −log σ(score of chosen − score of rejected), the model of Bradley and Terry."""

    center: float | None = setting(None, above=0)
    """Weight of a penalty that keeps scores around 0, (score of chosen + score of rejected)²; null for none."""


@dataclass
class DPOLossConfig(Group):
    """Direct preference optimization, without a reward model."""

    loss: Literal["sigmoid", "ipo", "hinge", "robust"] = "sigmoid"
    """Loss. sigmoid: DPO. ipo: IPO, on log-ratios per token, as its authors use it. hinge: SLiC. robust: DPO for labels
    that are wrong with the probability `label_noise`."""
    beta: float = setting(0.1, above=0)
    """Inverse temperature β, which holds the policy to the model that it starts from; IPO's τ."""
    label_noise: float = setting(0.1, needs="loss: robust", above=0, below=0.5)
    """Probability that a pair's label is wrong."""


@dataclass
class OfflineOptimConfig(OptimConfig):
    """Optimizer and learning-rate schedule."""

    lr: float = setting(2e-5, above=0)


@dataclass
class DPOOptimConfig(OptimConfig):
    """Optimizer and learning-rate schedule."""

    lr: float = setting(1e-6, above=0)


@dataclass
class OfflineSettings(Configuration):
    """Settings shared by all runs that learn from a data set."""

    seed: int = setting(1, at_least=0, at_most=MAX_SEED)
    """Seed of all randomness."""
    model: TunedModelConfig | RewardModelStartConfig = field(default_factory=TunedModelConfig)
    data: RowsSettings = field(default_factory=RowsSettings)
    optim: OptimConfig = field(default_factory=OfflineOptimConfig)
    eval: HeldOutConfig = field(default_factory=HeldOutConfig)
    run: OfflineRunConfig = field(default_factory=OfflineRunConfig)
    python: dict[str, Any] = field(default_factory=dict)
    """Parts of the run from Python, by argument; written by trainers. No file holds them, so only Python can train with
    them again."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values that cannot work."""
        check(self)
        if self.data.micro_batch is not None and self.data.micro_batch > self.data.batch_size:
            refuse(self, "data.micro_batch", f"it must be at most data.batch_size, {self.data.batch_size}")
        refuse_unused(self)


@dataclass
class SFTConfig(OfflineSettings):
    """Every setting of supervised fine-tuning."""

    model: TunedModelConfig = field(default_factory=TunedModelConfig)
    data: CompletionsConfig = field(default_factory=CompletionsConfig)
    sft: SFTLossConfig = field(default_factory=SFTLossConfig)


@dataclass
class RewardModelConfig(OfflineSettings):
    """Every setting of a reward model's training."""

    model: RewardModelStartConfig = field(default_factory=RewardModelStartConfig)
    data: PairsConfig = field(default_factory=PairsConfig)
    reward_model: RewardModelLossConfig = field(default_factory=RewardModelLossConfig)


@dataclass
class DPOConfig(OfflineSettings):
    """Every setting of direct preference optimization."""

    model: TunedModelConfig = field(default_factory=TunedModelConfig)
    data: DPOPairsConfig = field(default_factory=DPOPairsConfig)
    dpo: DPOLossConfig = field(default_factory=DPOLossConfig)
    optim: OptimConfig = field(default_factory=DPOOptimConfig)
