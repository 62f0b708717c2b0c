"""The parts of a decoder language model that write to its residual stream, and how its logits are read from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tokencredit.errors import ConfigError
from tokencredit.text.models.actor_critic import logit_factor, logit_softcap
from tokencredit.text.models.architecture import attention_of, layers_of, trunk_of

PROJECTIONS = ("o_proj", "c_proj", "out_proj", "dense", "wo")
"""Names of the output projection of an attention module."""
MLPS = ("mlp.dense_4h_to_h", "mlp", "feed_forward", "ffn", "block_sparse_moe", "fc2")
"""Names, within a layer, of the module whose output is the MLP's; BLOOM's MLP adds the residual stream itself."""
NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f", "final_norm", "layer_norm")
"""Names of a trunk's final norm."""
POST_NORMS = (
    ("post_attention_layernorm", "post_feedforward_layernorm"),  # Gemma 2, OLMo 2
    ("post_self_attn_layernorm", "post_mlp_layernorm"),  # GLM-4
)
"""Names of the norms of the outputs of attention and MLP, in models that have both."""


class Part(NamedTuple):
    """A part of a model, by its place; layers and heads count from 1."""

    kind: str
    """`embedding`, `attention`, `mlp`, `head`, `bias` or `unembedding`."""
    layer: int | None = None
    head: int | None = None

    @property
    def name(self) -> str:
        """Its name in results, such as `layer 2 head 3`; the bias of a layer is that of its attention."""
        if self.layer is None:
            return self.kind
        if self.head is not None:
            return f"layer {self.layer} head {self.head}"
        return f"layer {self.layer} {'attention bias' if self.kind == 'bias' else self.kind}"

    def record(self) -> dict[str, Any]:
        """Its place as in inspect.json."""
        return {"name": self.name, **self._asdict()}


class Layer(NamedTuple):
    """Modules of one decoder layer."""

    block: nn.Module
    attention: nn.Module
    projection: nn.Module
    """The attention's output projection; its input is the heads' outputs, side by side."""
    mlp: nn.Module
    attention_norm: nn.Module | None
    """Norm of the attention's output before it is added to the residual stream, in models with post-norms."""
    mlp_norm: nn.Module | None


@dataclass(frozen=True)
class Parts:
    """A language model by its parts."""

    lm: PreTrainedModel
    trunk: PreTrainedModel
    layers: list[Layer]
    norm: nn.Module
    """The final norm."""
    heads: int
    """Attention heads per layer."""

    def direction(self, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        """The mean logit of the tokens `up` minus that of the tokens `down`, as a function of normed states.

        Args:
            up: token ids `[n]`.
            down: token ids `[m]`.

        Returns:
            A vector `[width]` and a constant, in float64: the log-odds are their inner product with the normed state,
            plus the constant. Logits are taken before a soft cap, so that they are linear.
        """
        head = self.lm.get_output_embeddings()
        weight = head.weight[up].double().mean(0) - head.weight[down].double().mean(0)
        bias = getattr(head, "bias", None)
        constant = weight.new_zeros(()) if bias is None else bias[up].double().mean() - bias[down].double().mean()
        return weight * logit_factor(self.lm), constant

    def logprobs(self, normed: Tensor) -> Tensor:
        """Log-probs over the vocabulary `[..., vocabulary]` of states after the final norm, in nats."""
        logits = self.lm.get_output_embeddings()(normed * logit_factor(self.lm)).float()
        cap = logit_softcap(self.lm)
        return (logits if cap is None else cap * torch.tanh(logits / cap)).log_softmax(-1)

    def components(self) -> list[Part]:
        """Embedding, heads and MLPs: the parts whose outputs add up to the last state, but for biases."""
        parts = [Part("embedding")]
        for number in range(1, len(self.layers) + 1):
            parts += [Part("head", number, head) for head in range(1, self.heads + 1)]
            parts.append(Part("mlp", number))
        return parts


def read_parts(name: str, lm: PreTrainedModel) -> Parts:
    """Find the parts of a language model; `name` is for messages.

    Raises:
        ConfigError: a part is missing; the message names it.
    """
    trunk = trunk_of(lm)
    try:
        blocks = list(layers_of(trunk))
    except ConfigError as error:
        raise _unreadable(name, lm, "one list of decoder layers") from error
    layers = [_read_layer(name, lm, number, block) for number, block in enumerate(blocks, start=1)]
    heads = getattr(lm.config.get_text_config(), "num_attention_heads", None)
    if not isinstance(heads, int) or any(_inputs(layer.projection) % heads for layer in layers):
        raise _unreadable(name, lm, "the same number of attention heads in every layer")
    return Parts(lm, trunk, layers, final_norm(name, trunk), heads)


def final_norm(name: str, trunk: PreTrainedModel) -> nn.Module:
    """The norm after the last layer of a trunk.

    Raises:
        ConfigError: it has none with a known name, or has another projection after it.
    """
    layers = layers_of(trunk)
    for module in trunk.modules():
        children = dict(module.named_children())
        if layers in children.values():
            norms = [children[norm] for norm in NORMS if norm in children]
            if len(norms) == 1 and children.get("project_out") is None:
                return norms[0]
    raise _unreadable(name, trunk, f"one final norm with a known name ({', '.join(NORMS)}) as its last module")


def _read_layer(name: str, lm: PreTrainedModel, number: int, block: nn.Module) -> Layer:
    """The modules of a layer, which is number `number`."""
    where = f"in layer {number}"
    attentions = attention_of(block)
    modules = dict(block.named_modules())
    mlp = next((modules[mlp] for mlp in MLPS if mlp in modules), None)
    # Some attention modules wrap another; the innermost one has the projection.
    projections = [(x, getattr(x, names)) for x in attentions for names in PROJECTIONS if hasattr(x, names)]
    if len(projections) != 1:
        raise _unreadable(name, lm, f"one attention with an output projection ({', '.join(PROJECTIONS)}) {where}")
    if mlp is None:
        raise _unreadable(name, lm, f"an MLP with a known name ({', '.join(MLPS)}) {where}")
    norms = next((pair for pair in POST_NORMS if pair[0] in modules and pair[1] in modules), None)
    attention_norm, mlp_norm = (None, None) if norms is None else (modules[norms[0]], modules[norms[1]])
    return Layer(block, *projections[0], mlp, attention_norm, mlp_norm)


def _inputs(projection: nn.Module) -> int:
    """Number of inputs of a linear layer, also of Transformers' transposed one."""
    size: Any = getattr(projection, "in_features", getattr(projection, "nx", None))
    return int(size)


def _unreadable(name: str, model: nn.Module, missing: str) -> ConfigError:
    return ConfigError(
        f"{name!r} cannot be inspected: {type(model).__name__} lacks {missing}; take a model of another architecture"
    )
