"""Settings of the policy, its adapter and its critic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from tokencredit.settings.fields import Group, setting

T = TypeVar("T")

EXISTS = "kind: not none"
LEARNS = (EXISTS, "coef or epochs")
"""Conditions of critic settings: there is a critic, and it learns."""


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
    the start. Sampling is compiled only with `rollout.cache: static`."""


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
    warmup: int = setting(0, needs=LEARNS, at_least=0)
    """Iterations at the start in which only the critic learns."""
    epochs: int = setting(0, needs=EXISTS, at_least=0)
    """Extra passes over each batch for the critic's own parameters, after the policy update, in minibatches of the same
    size. They minimize the value loss alone, with `clip` and without `coef`."""
    buffer: int = setting(0, needs="epochs", at_least=0)
    """Earlier iterations whose batches are replayed in these extra passes, oldest first and without `clip`. Their
    returns come from older policies: the faster the policy moves, the less they fit. Each of them adds as many steps as
    the new batch. It also takes device memory: 18 bytes per completion token and 9 per prompt token, padding included,
    or the size of an agent's observations."""

    def frozen(self, iteration: int, policy: Iterable[T], critic: Iterable[T]) -> list[T]:
        """Parameters that the joint steps of an iteration leave alone.

        The policy's while the critic warms up. The critic's own while its loss has no weight, so that old momentum does
        not move them.
        """
        return [*(policy if iteration <= self.warmup else ()), *(critic if self.coef == 0 else ())]


@dataclass
class CriticConfig(CriticTraining):
    """The critic: its model and how it learns."""

    loss: Literal["mse", "histogram"] = setting("mse", needs=LEARNS)
    """Value loss. mse: half the squared error; values and returns are divided by the returns' running deviation where
    that is above 1. histogram: cross-entropy against a Gaussian-smoothed histogram of returns with 51 bins (HL-Gauss).
    Its mean is the value. The bins span all returns so far, so that one extreme return widens them for good; see
    score.clip."""
    clip: float | None = setting(0.2, needs=(EXISTS, "loss: mse"), above=0)
    prefix_every: int | Literal["auto"] = setting("auto", needs=EXISTS, at_least=0)
    """Tokens between the prefixes of a completion that are scored, by classifiers, reward models and terms with
    `prefix: true`; 0 for none. The values are then a fit of the returns to these scores, to which the critic adds what
    it learns of the rest (docs/algorithms.md). auto: as many as cost a quarter of the policy's own passes, and none
    where no term scores prefixes, or in episodes of several turns."""
    name: str | None = setting(None, needs="kind: separate")
    """Model that a separate critic starts from, causal and with the policy's vocabulary: a reward model, or `policy/`
    of a run, whose saved critic is taken if there is one. null for the critic saved with `model.name`, or else a copy
    of the policy."""
    layers: int | None = setting(None, needs=EXISTS, at_least=1)
    """Trunk layers below the value head, counted from the embedding; null for all. A shared critic reads the policy's
    hidden states at that layer, normalized; with `detach`, it is a probe. A separate critic keeps only these layers,
    and with half of them costs about half."""
    members: int = setting(1, needs="kind: separate", at_least=1)
    """Number of separate critics whose values are averaged. Completion i of a batch trains only critic i modulo
    `members`, which divides a prompt's completions among them, as in AsyPPO (arXiv 2510.01656), whose masks by
    disagreement are not implemented. More than one needs `clip: null`."""
    head: Literal["linear", "mlp"] = setting("mlp", needs=EXISTS)
    """Value head on the last hidden state: one linear layer, or an MLP with a hidden width of four times the
    trunk's."""
    trunk_lr: float | None = setting(None, needs=("kind: separate", "not detach"), above=0)
    """Learning rate of a separate critic's trunk; null for optim.lr."""
    init: Literal["saved", "zeros", "orthogonal", "default"] = setting("saved", needs=EXISTS)
    """Initialization of the value head. saved: the one saved with the model, else zeros. zeros: last layer zero, so it
    predicts 0. orthogonal: orthogonal weights. default: PyTorch's. Only `saved` also loads the critic's trunk saved
    with `model.name`."""
    pretrain: int = setting(0, needs=LEARNS, at_least=0)
    """Largest number of batches on which the critic alone is trained before the first iteration. Each is freshly
    sampled, and takes as many steps as an iteration. Pretraining ends early once the explained variance of new batches
    stops rising. These batches do not count in run.iterations."""
    continuations: int = setting(0, needs=LEARNS, at_least=0)
    """Continuations sampled from each of `continued_states` states per completion. At these states their mean return
    replaces the sampled return as the critic's target, as in VinePPO. With 4 continuations of 1 state, sampling and
    scoring cost about three times as much: each continuation is half a completion on average. 0 for none."""
    continued_states: int = setting(1, needs="continuations", at_least=1)
    """States per completion that are continued, evenly spread."""
    detach: bool = setting(False, needs=LEARNS)
    """Stop the gradient of the value loss at the head: a shared trunk is trained by the policy alone, a separate one
    stays frozen."""
