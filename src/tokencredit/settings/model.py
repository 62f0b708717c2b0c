"""Settings of the models: the policy, its adapter, its critic."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from tokencredit.settings.fields import setting


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
