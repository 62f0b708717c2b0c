"""Settings of the models: the policy, its adapter, its critic."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from tokencredit.errors import ConfigError
from tokencredit.settings.fields import setting

T = TypeVar("T")

EXISTS = "kind: not none"
LEARNS = (EXISTS, "coef or epochs")
"""What settings of a critic need: that there is one, and that it learns."""


@dataclass
class LoraConfig:
    """A new low-rank adapter, trained instead of the model's own weights; needs PEFT."""

    rank: int = setting(0, at_least=0)
    """Rank of the adapter; 0 trains the whole model."""
    alpha: float = setting(16.0, needs="rank", above=0)
    """Its output is scaled by alpha / rank."""
    dropout: float = setting(0.0, needs="rank", at_least=0, below=1)
    """Dropout on its input, in updates."""
    target_modules: list[str] | None = setting(None, needs="rank")
    """Names of the layers that get one; null for every linear layer but the output projection."""


@dataclass
class ModelConfig:
    """The policy and its reference."""

    name: str = "builtin:reviews"
    """A Hugging Face hub id, a folder, or `builtin:reviews`; of a model, or of an adapter."""
    adapter: Literal["continue", "merge"] = "continue"
    """Use of an adapter that the model has from the start: `continue` trains it further, with its state at the start as
    the reference; `merge` adds it to the weights, and a new adapter (`lora.rank`) or the whole model is trained."""
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """Compute dtype of the model passes; auto is bfloat16 where the machine is faster in it, which is timed once per
    machine; a run keeps its choice. All else, weights and logits included, stays in float32."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """A new low-rank adapter, trained instead of the model's own weights; needs PEFT."""
    dropout: bool = False
    """Dropout of the model itself, in updates; the ratio then no longer starts at 1. Other noise, such as a router's
    jitter, is always off."""
    gradient_checkpointing: bool = False
    """Whether updates compute activations twice to hold fewer of them."""
    compile: bool = False
    """Whether passes over whole texts go through `torch.compile`, which takes a minute at first and needs a GPU or a
    C++ compiler. Sampling stays as it is."""
    trust_remote_code: bool = False
    """Whether code from the model's repository may run."""


@dataclass
class CriticTraining:
    """The settings of a critic that language models and agents share."""

    kind: Literal["shared", "separate", "none"] = "shared"
    """Critic as a head on the policy's own trunk, as a model of its own, or none."""
    lr: float = setting(1e-3, needs=LEARNS, above=0)
    """Learning rate of the value head."""
    coef: float = setting(0.5, needs=EXISTS, at_least=0)
    """Weight of the value loss beside the policy's; 0 leaves the critic to steps of its own (`epochs`)."""
    clip: float | None = setting(0.2, needs=EXISTS, above=0)
    """Largest change of a value that the value loss rewards in one update; null for no clipping."""
    warmup: int = setting(0, needs=LEARNS, at_least=0)
    """First iterations in which only the critic learns."""
    epochs: int = setting(0, needs=EXISTS, at_least=0)
    """Further passes over each batch, after the policy's update and in minibatches of the same size, in which only the
    critic's own parameters learn. They minimise the value loss alone, within `clip`; `coef` has no part in them."""

    def frozen(self, iteration: int, policy: Iterable[T], critic: Iterable[T]) -> list[T]:
        """The parameters that the joint steps of an iteration leave alone.

        The policy's while the critic warms up; the critic's own where its loss has no weight, lest old momentum moves
        them.
        """
        return [*(policy if iteration <= self.warmup else ()), *(critic if self.coef == 0 else ())]

    def check_warmup(self, iterations: int) -> None:
        """Raise `ConfigError` for a warm-up that is longer than the run; in one as long, only the critic learns."""
        if self.warmup > iterations:
            raise ConfigError(f"critic.warmup is {self.warmup}; it must be at most run.iterations, {iterations}")


@dataclass
class CriticConfig(CriticTraining):
    """The critic: where its values come from, and how it learns."""

    name: str | None = setting(None, needs="kind: separate")
    """Model that a separate critic starts from, causal and with the policy's vocabulary: a reward model, or the
    `policy/` of a run, whose critic is taken if one was saved there; null for the critic saved with `model.name`, or
    else a copy of the policy."""
    head: Literal["linear", "mlp"] = setting("mlp", needs=EXISTS)
    """Value head on the last hidden state: one layer, or two with a hidden width four times the trunk's."""
    trunk_lr: float | None = setting(None, needs=("kind: separate", "not detach"), above=0)
    """Learning rate of a separate critic's trunk; null for optim.lr."""
    init: Literal["saved", "zeros", "orthogonal", "default"] = setting("saved", needs=EXISTS)
    """Start of the value head: the one saved with the model if there is one, and zeros if not; a last layer that
    predicts 0; orthogonal weights; or PyTorch's default of each layer. Only `saved` also takes up the trunk saved with
    `model.name`."""
    gain: float = setting(1.0, needs="init: orthogonal", above=0)
    """Gain of the last layer of an orthogonal head."""
    hidden_gain: float = setting(math.sqrt(2), needs=("init: orthogonal", "head: mlp"), above=0)
    """Gain of the layer before that, in an mlp head."""
    pretrain: int = setting(0, needs=LEARNS, at_least=0)
    """Most batches from which the critic alone learns before the first iteration, while the policy stays as it is. Each
    is sampled anew, and learned from in `ppo.epochs` passes towards the sampled returns. It ends before that where the
    explained variance of new batches no longer rises, and is not counted in run.iterations."""
    detach: bool = setting(False, needs=LEARNS)
    """Stop the gradient of the value loss at the head: a shared trunk is left to the policy, a separate one stays as it
    is."""
