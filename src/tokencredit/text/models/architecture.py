"""Find the parts of a Transformers language model, trunk, layers, attention, width, and change them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import NewGELUActivation

from tokencredit.errors import ConfigError

HASHED = 2**15
"""Numbers that `weight_hash` takes at a time, few enough for a CPU's cache."""
MIXER = -0x61C8864680B583EB
"""2⁶⁴ divided by the golden ratio, as int64: an odd factor that spreads small numbers over all bits."""


def trunk_of(lm: PreTrainedModel) -> PreTrainedModel:
    """A language model without its output projection."""
    trunk = lm.get_decoder()
    # Llama 4 for text returns itself, ModernBERT's decoder returns its projection.
    return trunk if trunk is not lm and isinstance(trunk, PreTrainedModel) else lm.model


def width(model: PreTrainedModel) -> int:
    """The size of a model's last hidden states."""
    config = model.config.get_text_config()
    # Some sizes of OPT project down before the output projection.
    return int(getattr(config, "word_embed_proj_dim", config.hidden_size))


def layers_of(trunk: nn.Module) -> nn.ModuleList:
    """The decoder layers of a trunk; `ConfigError` if it has no such list, or several."""
    return _layer_list(trunk)[1]


def _layer_list(trunk: nn.Module) -> tuple[str, nn.ModuleList]:
    outermost = layer_lists(trunk)
    if len(outermost) != 1:
        raise ConfigError(
            f"critic.layers needs a model with one list of its layers, and {type(trunk).__name__} has "
            f"{len(outermost)}; leave it out"
        )
    return outermost[0]


def layer_lists(trunk: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Each outermost `ModuleList` with as many modules as the configuration has layers, with its name."""
    config: Any = trunk.config
    count = config.get_text_config().num_hidden_layers
    lists = [(name, x) for name, x in trunk.named_modules() if isinstance(x, nn.ModuleList) and len(x) == count]
    return [(name, x) for name, x in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]


def cut_layers(trunk: PreTrainedModel, count: int) -> None:
    """Truncate a trunk, in place, to its first `count` layers, and update its configuration."""
    name, layers = _layer_list(trunk)
    config: Any = trunk.config.get_text_config()
    for key, value in list(vars(config).items()):  # such as layer_types
        if "layer" in key and isinstance(value, list) and len(value) == len(layers):
            setattr(config, key, value[:count])
    config.num_hidden_layers = count
    parent, _, child = name.rpartition(".")
    setattr(trunk.get_submodule(parent), child, layers[:count])


def layer_limit(layers: int | None, model: PreTrainedModel) -> int | None:
    """`critic.layers` if the model has more layers, None if that is all of them; `ConfigError` if it has fewer."""
    count = model.config.get_text_config().num_hidden_layers
    if layers is not None and layers > count:
        raise ConfigError(
            f"critic.layers is {layers}; it must be at most {count}, the number of layers of {type(model).__name__}"
        )
    return None if layers == count else layers


class _Reached(Exception):
    """Raised by a hook to end a forward pass after a layer."""

    def __init__(self, states: Tensor):
        super().__init__()
        self.states = states


def states_after(trunk: nn.Module, input_ids: Tensor, inputs: dict[str, Any], layer: nn.Module) -> tuple[Tensor, ...]:
    """Hidden states `[batch, time, width]` after a layer of a trunk, without computing the layers above."""

    def end(_layer: nn.Module, _args: Any, output: Any) -> None:
        raise _Reached(output_states(output))

    hook = layer.register_forward_hook(end)
    try:
        trunk(input_ids=input_ids, **inputs)
    except _Reached as reached:
        return (reached.states,)
    finally:
        hook.remove()
    raise RuntimeError("the forward pass did not reach the layer")


def output_states(output: Any) -> Tensor:
    """The hidden states in a layer's output, which is a tuple in some families."""
    states: Tensor = output[0] if isinstance(output, tuple) else output
    return states


def attention_of(trunk: nn.Module) -> list[nn.Module]:
    """The attention modules of a trunk: modules so named that hold matrices, which excludes norms."""
    named = [x for name, x in trunk.named_modules() if name.endswith(("attn", "attention"))]
    return [x for x in named if any(p.dim() > 1 for p in x.parameters())]


def weight_hash(weight: Tensor) -> int:
    """A hash of a weight's numbers, in float32, and their places, to detect changes; the same on every device.

    The sum modulo 2⁶⁴ of 32-bit words times factors of their places; other numbers share it once in 2³² times.
    """
    words = weight.detach().float().flatten().view(torch.int32)
    factors = torch.arange(1, min(len(words), HASHED) + 1, device=words.device) * MIXER
    factors = (factors ^ (factors >> 29)) * MIXER
    factors ^= factors >> 32
    total = torch.tensor(len(words), device=words.device)
    for part in words.split(HASHED):
        total = total * MIXER + (part * factors[: len(part)]).sum()
    return int(total)


def fuse_gelu(model: nn.Module) -> None:
    """Replace Transformers' tanh-approximated GELU, eight operations, by PyTorch's fused one, in place.

    Both compute x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³))); the fused one takes half the time and saves one tensor for
    the backward pass instead of four.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))
