"""The shape of a named model, from its configuration; weights are never read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tokencredit.errors import ConfigError
from tokencredit.settings.model import CriticConfig, ModelConfig
from tokencredit.text.models.critic import saved_start
from tokencredit.text.models.model_loading import as_config_error, base_model, resolve
from tokencredit.text.models.peft_models import saved_config
from tokencredit.text.models.precision import matrix_layers
from tokencredit.tools.plan.shape import Family, Shape, parameters, trunk_matrices

FAMILIES: dict[str, Family] = {"gpt2": "gpt2", "llama": "llama", "mistral": "llama", "qwen2": "llama", "qwen3": "qwen3"}
"""Types of models whose activations are counted by formula; those of others are estimated by the most similar one."""
TOLERANCE = 0.02
"""Largest share of a trunk's matrices that the formula may miss before a note says so."""


@dataclass(frozen=True)
class Planned:
    """A model on PyTorch's meta device, which has shapes and no memory."""

    lm: PreTrainedModel
    shape: Shape
    notes: list[str]
    """Lines for the user: parts that are estimated."""


def config_of(name: str, folder: str, trust_remote_code: bool) -> Any:
    """Transformers' configuration of a model; raises `ConfigError` if there is none."""
    with as_config_error(f"a language model from {name!r}"):
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)


def plan_model(args: ModelConfig) -> Planned:
    """The model of `model.name`, or below the adapter of that name, without its weights.

    Raises:
        ConfigError: there is no such model, or it is no causal language model with attention.
    """
    folder = resolve(args.name, "policy")
    name = base_model(args.name, folder) or args.name
    if name != args.name:
        folder = resolve(name, "policy")
    config = config_of(name, folder, args.trust_remote_code)
    with as_config_error(f"a language model from {name!r}"), torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, trust_remote_code=args.trust_remote_code)
    shape, notes = shape_of(args.name, lm)
    return Planned(lm, shape, notes)


def shape_of(name: str, lm: PreTrainedModel) -> tuple[Shape, list[str]]:
    """The shape of a model, whose parameters are counted, and notes on what is estimated.

    Raises:
        ConfigError: its configuration has no attention heads or no width.
    """
    config = lm.config.get_text_config()
    kind, gated = str(config.model_type), any(".gate" in module for module, _ in lm.named_modules())
    family = FAMILIES.get(kind, "llama" if gated else "gpt2")
    heads, width = (getattr(config, key, None) for key in ("num_attention_heads", "hidden_size"))
    if not heads or not width:
        raise ConfigError(f"the memory of {name!r} cannot be planned: a {kind} model has no attention heads")
    output, embedding = lm.get_output_embeddings(), lm.get_input_embeddings()
    mlp = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    shape = Shape(
        name=name,
        family=family,
        vocabulary=output.weight.shape[0],
        width=width,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_width=getattr(config, "head_dim", None) or width // heads,
        mlp=mlp or 4 * width,
        positions=getattr(config, "max_position_embeddings", None) or 0,
        tied=output.weight is embedding.weight,
    )
    notes = []
    if kind not in FAMILIES:
        notes.append(f"the activations of a {kind} model are estimated by those of {family.upper()}'s formula")
    matrices = sum(cast(Tensor, m.weight).numel() for m in matrix_layers(lm) if m is not output)
    if abs(matrices - trunk_matrices(shape)) > TOLERANCE * matrices:
        notes.append(f"its matrices have {matrices:,} parameters, by the formula {trunk_matrices(shape):,}")
    return replace(shape, others=lm.num_parameters() - parameters(shape)), notes


def plan_trunk(args: CriticConfig, model: ModelConfig, policy: Shape) -> Shape | None:
    """The shape of a separate critic's trunk; None for the policy's own.

    Raises:
        ConfigError: `critic.name` is no model, or has fewer layers than `critic.layers`.
    """
    if args.kind != "separate":
        return None
    shape, saved = policy, saved_start(args, model)
    if saved and saved[0].trunk is not None:
        layers = config_of(saved[0].name, str(saved[0].trunk), model.trust_remote_code).get_text_config()
        shape = without_layers(policy, layers.num_hidden_layers)
    elif args.name is not None:
        shape = plan_model(replace(model, name=args.name)).shape
    if args.layers is not None:
        if args.layers > shape.layers:
            raise ConfigError(
                f"critic.layers is {args.layers}; it must be at most {shape.layers}, the layers of the model"
            )
        shape = without_layers(shape, args.layers)
    return shape


def without_layers(shape: Shape, layers: int) -> Shape:
    """The shape with another number of layers; parameters that the formula lacks are taken to be in the layers."""
    return replace(shape, layers=layers, others=shape.others * layers // shape.layers)


def adapter_size(lm: PreTrainedModel, rank: int, targets: Sequence[str] | None) -> int:
    """Parameters of a new LoRA adapter: rank × (inputs + outputs) of each linear layer that it targets.

    Raises:
        ConfigError: no layer has a name in `targets`.
    """
    output, layers = lm.get_output_embeddings(), {id(layer) for layer in matrix_layers(lm)}
    named = {name: module for name, module in lm.named_modules() if id(module) in layers and module is not output}
    if targets is not None:
        named = {
            name: module
            for name, module in named.items()
            if any(name == target or name.endswith(f".{target}") for target in targets)
        }
        if not named:
            raise ConfigError(
                f"model.lora.target_modules is {list(targets)}; the model has no linear layer of that name"
            )
    return rank * sum(sum(cast(Tensor, module.weight).shape) for module in named.values())


def saved_adapter_size(name: str, lm: PreTrainedModel) -> tuple[int, int]:
    """Rank and number of parameters of the adapter in a model's folder; zeros without one.

    Raises:
        ConfigError: it is no LoRA adapter.
    """
    folder = resolve(name, "policy")
    if base_model(name, folder) is None:
        return 0, 0
    config = saved_config(folder)
    if config is None or config.peft_type.value != "LORA":
        raise ConfigError(f"the memory of the adapter {name!r} cannot be planned: it is no LoRA adapter")
    targets = config.target_modules
    chosen = sorted(targets) if isinstance(targets, set | list) else None
    return config.r, adapter_size(lm, config.r, chosen)
