"""Settings of the policy, its adapter and its critic, and of the sharding of models over processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tokencredit.settings.fields import Group, setting
from tokencredit.settings.parts import Part

EXISTS = "kind: not none, own"
LEARNS = (EXISTS, "coef or epochs")
"""Conditions of critic settings: there is a critic of ours, and it learns."""

READS_PREFIXES = "kind: not none or advantage.estimator: own"
"""The condition that something may read the scores of prefixes."""


@dataclass
class LoraConfig(Group):
    """A new LoRA adapter, trained instead of the model's weights; needs PEFT."""

    rank: int = setting(0, at_least=0)
    """Rank of the adapter; 0 for full fine-tuning."""
    alpha: float = setting(16.0, needs="rank", above=0)
    """LoRA alpha: the adapter's output is scaled by alpha / rank."""
    dropout: float = setting(0.0, needs="rank", at_least=0, below=1)
    """Dropout on the adapter's input during updates."""
    target_modules: list[str] | None = setting(None, needs="rank")
    """Names of the layers that get an adapter; null for every linear layer except the output projection."""


@dataclass
class TunedModelConfig(Group):
    """Settings of a trained language model."""

    name: str = "builtin:reviews"
    """Model to train: a Hugging Face hub id, a folder, `builtin:reviews`, or `builtin:grid` or `builtin:calculator`
    with the environment of that name. It may be a PEFT adapter."""
    adapter: Literal["continue", "merge"] = "continue"
    """Use of an adapter given in `model.name`. `continue` trains it further; its initial state is the reference.
    `merge` merges it into the weights, then trains a new adapter (`lora.rank`) or the whole model."""
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """Compute dtype of forward and backward passes. `auto` picks bfloat16 where the CPU or GPU has arithmetic for it; a
    run keeps its choice. Trained weights, logits and optimizer state stay float32."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    quantization: Literal["nf4", "int8"] | None = setting(None, needs="adapter: continue")
    """Load the linear layers below an adapter (`lora.rank`, or the model's own) in 4 bits (nf4) or 8 (int8); needs
    bitsandbytes. A model that was saved quantised by it needs no setting. `policy/` is an adapter of the unquantised
    model."""
    dropout: bool = False
    """Keep the model's own dropout during updates; the ratio then no longer starts at 1. Other noise, such as router
    jitter, is always off."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, at the cost of one more forward pass per update step."""
    trust_remote_code: bool = False
    """Run code from the model's repository."""


@dataclass
class ModelConfig(TunedModelConfig):
    """The policy and its reference model."""

    compile: bool = False
    """Compile training and scoring passes with `torch.compile`; needs a GPU or a C++ compiler, and about a minute at
    the start. Sampling is compiled only with a static cache (`rollout.cache`)."""


@dataclass
class CriticTraining(Group):
    """Critic settings shared by language models and agents."""

    kind: Literal["shared", "separate", "none"] = "shared"
    """Critic: a value head on the policy's trunk (shared), a model of its own (separate), or none."""
    lr: float = setting(1e-3, needs=LEARNS, above=0)
    """Learning rate of the value head."""
    coef: float = setting(0.5, needs=EXISTS, at_least=0)
    """Weight of the value loss in the sum with the policy loss. With 0 the critic learns only in its own passes
    (`epochs`)."""
    clip: float | None = setting(0.2, needs=EXISTS, above=0)
    """Value clipping: within an update, a value that has moved further than this from where it began gets no gradient
    to move on. In units of value, or for texts of the returns' running deviation where that is above 1; null for
    none."""
    epochs: int = setting(0, needs=EXISTS, at_least=0)
    """Extra passes over each batch for the critic's own parameters, after the policy update, in minibatches of the same
    size. They minimize the value loss alone, with `clip` and without `coef`."""

    @property
    def ours(self) -> bool:
        """True for a critic that the update trains."""
        return self.kind in ("shared", "separate")


@dataclass
class CriticConfig(CriticTraining):
    """The critic: its model and how it learns."""

    kind: Literal["shared", "separate", "none"] | Part = "shared"
    """Critic: a value head on the policy's trunk (shared), a model of its own (separate), none, or your own.
    See docs/your-own.md."""
    kwargs: dict[str, Any] = setting(dict, needs="kind: own")
    """Keyword arguments of a critic of your own."""
    loss: Literal["mse", "histogram"] = setting("mse", needs=LEARNS)
    """Value loss. mse: half the squared error; values and returns are divided by the returns' running deviation where
    that is above 1. histogram: cross-entropy against a Gaussian-smoothed histogram of returns with 51 bins (HL-Gauss).
    Its mean is the value. The bins span all returns so far, so that one extreme return widens them for good; see
    score.clip."""
    clip: float | None = setting(0.2, needs=(EXISTS, "loss: mse"), above=0)
    prefix_every: int | Literal["auto"] = setting("auto", needs=READS_PREFIXES, at_least=0)
    """Tokens between the prefixes of a completion that are scored, by classifiers, reward models and terms with
    `prefix: true`; 0 for none. The values are then a fit of the returns to these scores, to which the critic adds what
    it learns of the rest (docs/algorithms.md). auto: as many as cost a quarter of the policy's own passes, and none
    where no term scores prefixes, or in episodes of several turns."""
    name: str | None = setting(None, needs="kind: separate")
    """Model that a separate critic starts from, causal and with the policy's vocabulary: a reward model, or a run,
    whose critic is taken. null for the critic of the run whose policy is `model.name`, or else a copy of the policy."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """A separate critic as an adapter of its own on the policy's frozen base, of which there is one copy for policy,
    critic and reference; the policy has an adapter too (`model.lora`). A new one begins as the base or, with another
    library's value head beside the policy's adapter, as that adapter."""
    layers: int | None = setting(None, needs=EXISTS, at_least=1)
    """Trunk layers below the value head, counted from the embedding; null for all. A shared critic reads the policy's
    hidden states at that layer, normalized; with `detach`, it is a probe. A separate critic keeps only these layers,
    and with half of them costs about half."""
    head: Literal["linear", "mlp"] = setting("mlp", needs=EXISTS)
    """Value head on the last hidden state: one linear layer, or an MLP with a hidden width of four times the
    trunk's."""
    activation: Literal["gelu", "relu"] = setting("gelu", needs=(EXISTS, "head: mlp"))
    """Activation between the two layers of an mlp head."""
    trunk_lr: float | None = setting(None, needs=("kind: separate", "coef or epochs", "not detach"), above=0)
    """Learning rate of a separate critic's trunk; null for optim.lr."""
    init: Literal["saved", "zeros", "orthogonal", "default"] = setting("saved", needs=EXISTS)
    """Initialization of the value head. saved: the head of a run's critic (`critic.name`, or with `model.name` the
    run's policy), else zeros. zeros: last layer zero, so it predicts 0. orthogonal: orthogonal weights. default:
    PyTorch's. With `model.name`, only `saved` also loads that critic's trunk."""
    pretrain: int = setting(0, needs=LEARNS, at_least=0)
    """Largest number of batches on which the critic alone is trained before the first iteration. Each is freshly
    sampled, and takes as many steps as an iteration. Pretraining ends early once the explained variance of new batches
    stops rising. These batches do not count in run.iterations."""
    detach: bool = setting(False, needs=(*LEARNS, "kind: separate or coef"))
    """Stop the gradient of the value loss at the head: a shared trunk is trained by the policy alone, a separate one
    stays frozen."""

    @property
    def start_anew(self) -> str:
        """Advice for a new critic in place of a saved one."""
        return "set critic.init: zeros" if self.name is None else "leave out critic.name"


@dataclass
class ShardingConfig(Group):
    """Details of `run.shard`."""

    layers: list[str] | None = setting(None, needs="run.shard: not none")
    """Names of the modules that are gathered one at a time, with * for a number, such as `model.layers.*`; null for
    the model's layers."""
    reshard_after_forward: bool = setting(True, needs="run.shard: not none")
    """Free gathered weights after a forward pass and gather them again in the backward pass: less memory, more
    communication."""
    offload: Literal["none", "frozen"] = setting("none", needs="run.shard: not none")
    """Models kept in the memory of the CPU between their passes: none, or the frozen ones, such as the reference."""
    sampling: Literal["gathered", "layers"] = setting("gathered", needs="run.shard: not none")
    """Weights while sampling: gathered holds the whole policy; layers gathers one layer at a time for each token, which
    is slower and takes the least memory. With `rollout.engine: vllm`, which has a copy, layers gathers them only for
    the full pass after sampling, and one tensor at a time for a sync."""
