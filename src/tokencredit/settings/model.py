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
    C++ compiler. Sampling is compiled with `rollout.cache: static` alone."""
    trust_remote_code: bool = False
    """Whether code from the model's repository may run."""


@dataclass
class CriticTraining:
    """The settings of a critic that language models and agents share."""

    kind: Literal["shared", "separate", "none"] = "shared"
    """Critic as a head on the policy's own trunk, as a model of its own, or none."""
    lr: float = setting(1e-3, needs=LEARNS, above=0)
    """Learning rate of the value head."""
    schedule: Literal["optim", "constant"] = setting("optim", needs=LEARNS)
    """Course of the critic's learning rates: as `optim.schedule` and `optim.warmup` have it, or at full height all the
    time, so that the critic keeps up where the policy slows down."""
    coef: float = setting(0.5, needs=EXISTS, at_least=0)
    """Weight of the value loss beside the policy's; 0 leaves the critic to steps of its own (`epochs`)."""
    loss: Literal["mse", "huber", "histogram"] = setting("mse", needs=LEARNS)
    """Value loss: half the squared error; Huber's, in which large errors count by their size alone; or the
    cross-entropy of a predicted histogram of returns against one smoothed by a Gaussian (HL-Gauss), whose mean is the
    value and whose bins spread over all returns so far."""
    huber_delta: float = setting(1.0, needs="loss: huber", above=0)
    """Size of an error, in units of value, from which on `huber` is no longer half its square."""
    clip: float | None = setting(0.2, needs=(EXISTS, "loss: mse, huber"), above=0)
    """Largest change of a value that the value loss rewards in one update; null for no clipping."""
    warmup: int = setting(0, needs=LEARNS, at_least=0)
    """First iterations in which only the critic learns."""
    epochs: int = setting(0, needs=EXISTS, at_least=0)
    """Further passes over each batch, after the policy's update and in minibatches of the same size, in which only the
    critic's own parameters learn. They minimise the value loss alone, within `clip`; `coef` has no part in them."""
    buffer: int = setting(0, needs="epochs", at_least=0)
    """Number of earlier iterations whose batches take part in these passes, oldest first and without `clip`. Their
    returns are those of older policies: the further the policy moves per iteration, the more of them is wrong. They
    stay in the memory of the model's device: 18 bytes per token of a completion and 9 per token of a prompt, as padded,
    or an agent's observations. Each costs as many steps as the new batch."""

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
    layers: int | None = setting(None, needs=EXISTS, at_least=1)
    """Layers of the trunk beneath the value head, counted from the embedding; null for all. A shared critic reads the
    policy's states after so many layers, brought to mean 0 and variance 1 (a probe, with `detach`). A separate one
    keeps that many layers: with half of them it costs about half."""
    members: int = setting(1, needs="kind: separate", at_least=1)
    """Number of separate critics whose values are averaged. Completion i of a batch trains critic i modulo `members`
    alone, so that the completions of a prompt are divided among them, as in AsyPPO (arXiv 2510.01656), which takes two
    small ones; its masks by the critics' disagreement are not taken. More than one needs `clip: null`."""
    freeze: Literal["none", "attention"] = setting("none", needs=("kind: separate", "not detach"))
    """Part of a separate critic's trunk that stays as it is: `attention` leaves embeddings, MLPs, norms outside the
    attention and the head to learn (SAO, arXiv 2607.07508)."""
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
    is sampled anew, and the critic takes as many steps on it as in an iteration, towards the sampled returns. It ends
    before that where the explained variance of new batches has risen and no longer does; it is not counted in
    run.iterations."""
    pretrain_scale: float = setting(1.0, needs="pretrain", above=0)
    """Factor of the critic's learning rates (`lr`, `trunk_lr`) in the pretraining: above 1 it learns fast while the
    policy stays as it is, at rates that would later make it forget."""
    continuations: int = setting(0, needs=LEARNS, at_least=0)
    """Continuations sampled anew from each of `continued_states` states of a completion, whose mean return the critic
    learns there in place of the one that happened (after VinePPO). Their price: sampled, scored and read by the
    reference model, continuations × continued_states of them cost about half as many rollouts."""
    continued_states: int = setting(1, needs="continuations", at_least=1)
    """States of each completion that are continued, spread over it."""
    detach: bool = setting(False, needs=LEARNS)
    """Stop the gradient of the value loss at the head: a shared trunk is left to the policy, a separate one stays as it
    is."""
    bins: int = setting(51, needs="loss: histogram", at_least=16, at_most=1024)
    """Bins of the histogram. A single return far from all others makes them wide for good; see score.clip."""
    places: list[float] | None = setting(None, needs=LEARNS)
    """Places in a completion at which the value loss counts, from 0, the first token, to 1, the last; null for every
    token. [0.3, 0.6, 0.9] are those of SP3O, against values that stay flat over a completion."""

    def check_places(self) -> None:
        """Raise `ConfigError` for places that are not ascending from 0 to 1, or beside continued states elsewhere."""
        places = self.places
        if places is not None and not (places == sorted(set(places)) and places and 0 <= places[0] <= places[-1] <= 1):
            raise ConfigError(f"critic.places is {places}; it must be ascending numbers from 0 to 1, or null")
        if places is not None and self.continuations:
            raise ConfigError(
                f"critic.continuations is {self.continuations}, and critic.places is {places}; the value loss would "
                "not count at most of the states that are continued: leave one of them out"
            )

    def check_members(self) -> None:
        """Raise `ConfigError` for a value clip around old values that a member's own are not, or histograms of them."""
        if self.members > 1 and self.loss == "histogram":
            raise ConfigError(
                f"critic.loss is histogram, and critic.members is {self.members}; histograms are one critic's: leave "
                "one of them out"
            )
        if self.members > 1 and self.clip is not None:
            raise ConfigError(
                f"critic.clip is {self.clip}, and critic.members is {self.members}; a rollout keeps the mean of the "
                "critics' values, and each would be held near that instead of its own: set critic.clip: null"
            )
