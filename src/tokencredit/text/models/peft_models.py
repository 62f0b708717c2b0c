"""Load, check, wrap and merge PEFT adapters of language models."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from tokencredit.distributed.sharding import within
from tokencredit.errors import ConfigError, importing
from tokencredit.text.models.architecture import trunk_of
from tokencredit.text.models.precision import dequantise, in_float32, quantised_layers

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CACHED = re.compile(r".*/models--([^/]+)/snapshots/[^/]+/?")
"""The folder of a hub id's cached copy."""
ADAPTER_NAME = "default"
"""PEFT's default name of an adapter."""
UNSUPPORTED = {
    "ADALORA": "it needs calls after each optimizer step, which are not made",
    "ADAPTION_PROMPT": "its parameters belong to no adapter layer, so it can be neither merged nor switched off",
    "POLY": "PEFT's own forward pass routes it, and is not called",
    "SHADOW": "PEFT's own forward pass adds it, and is not called",
    "XLORA": "PEFT's own forward pass routes it, and is not called",
}
"""Unsupported types of adapters, and why."""
UNSUPPORTED_LORA = {
    "alora_invocation_tokens": "PEFT's own forward pass places it, and is not called",
    "arrow_config": "it routes among adapters, and only one is trained",
    "monteclora_config": "it needs a loss of its own, which is not added",
}
"""Unsupported variants of LoRA by the argument that selects them, and why."""
SHARED_PARAMETERS = ("vblora_vector_bank", ".tinylora_v.", ".unilora_theta_d.")
"""Parameters shared by layers, which PEFT wrongly reports as missing on loading."""
TOLERANCE = 1e-4
"""Largest rounding difference between two computations of the same logits, in nats."""


def peft_library() -> Any:
    """The module `peft`.

    Raises:
        ConfigError: PEFT is not installed.
    """
    with importing("an adapter", "PEFT", "tokencredit[peft]"):
        import peft
    return peft


@contextmanager
def quiet() -> Iterator[None]:
    """A context without PEFT's warnings about a deprecated Transformers name and GPT-2's transposed layers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False", UserWarning)
        yield


@contextmanager
def peft_errors(what: str) -> Iterator[None]:
    """Re-raise PEFT's errors as `ConfigError`."""
    try:
        with quiet():
            yield
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, KeyError, OSError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        raise ConfigError(f"{what}: {' '.join(str(error).split())}") from error


def saved_config(folder: str) -> Any:
    """The PEFT configuration in a folder or hub repository; None if it holds no adapter."""
    what = f"cannot read {ADAPTER_CONFIG} of {folder!r}"
    with peft_errors(what):
        if find_adapter_config_file(folder) is None:
            return None
    peft = peft_library()
    with peft_errors(what):
        return peft.PeftConfig.from_pretrained(folder)


def load_adapter(lm: PreTrainedModel, folder: str) -> None:
    """Load an adapter from a folder or hub repository into its base model, in place, and attach it.

    Raises:
        ConfigError: its type is not supported, it does not match the model, or weights are missing.
    """
    peft, config = peft_library(), saved_config(folder)
    check_kind(config)
    if getattr(lm, "peft_config", None):
        raise ConfigError(f"the base model of the adapter {folder!r} has an adapter itself; merge that one into it")
    with peft_errors(f"cannot load a language model from {folder!r}"):
        cached_file(folder, ADAPTER_WEIGHTS)  # PEFT would also read a pickle
        config.inference_mode = False
        model = peft.PeftModel(lm, config, ADAPTER_NAME)
        result = model.load_adapter(folder, ADAPTER_NAME, is_trainable=True, torch_device=str(lm.device))
    missing = [key for key in result.missing_keys if not any(name in key for name in SHARED_PARAMETERS)]
    if unmatched := missing + result.unexpected_keys:
        raise ConfigError(f"the adapter {folder!r} and {ADAPTER_CONFIG} do not match; on one side only: {unmatched[0]}")
    attach(lm, model)


def name_base(folder: Path) -> None:
    """Name the base of a saved adapter, if there is one, by its hub id rather than by the folder of its cached copy."""
    file = folder / ADAPTER_CONFIG
    settings = json.loads(file.read_bytes()) if file.is_file() else {}
    if found := CACHED.fullmatch(settings.get("base_model_name_or_path") or ""):
        settings["base_model_name_or_path"] = found[1].replace("--", "/")
        file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def adopt(model: Any) -> PreTrainedModel:
    """The language model of a model passed from Python, dense weights in float32, with its adapter attached.

    Raises:
        ConfigError: it is no Transformers or PEFT model, or the type of its adapter is not supported.
    """
    if isinstance(model, PreTrainedModel):
        in_float32(model.eval())
        if getattr(model, "peft_config", None) and attached(model) is None:
            attach(model, _wrapped(model))
        return model
    peft = None
    with suppress(ConfigError):
        peft = peft_library()
    if peft is None or not isinstance(model, peft.PeftModel):
        raise ConfigError(f"model is a {type(model).__name__}; give a name, a folder, a PreTrainedModel or a PeftModel")
    check_kind(model.active_peft_config)
    in_float32(model.eval())
    lm: PreTrainedModel = model.get_base_model()
    attach(lm, model)
    return lm


def attached(lm: PreTrainedModel) -> Any:
    """The PEFT model around a language model; None without an adapter."""
    return vars(lm).get("peft_model") if getattr(lm, "peft_config", None) else None


def attach(lm: PreTrainedModel, model: Any) -> None:
    """Store the PEFT model around a language model as an attribute of it."""
    vars(lm)["peft_model"] = model  # not as a module: its weights must not be registered twice


def _wrapped(lm: PreTrainedModel) -> Any:
    """A PEFT model around a language model that Transformers has adapted, with the same adapter weights."""
    # PEFT can only adapt the layers again, with a new adapter, into which the weights are loaded.
    peft, name = peft_library(), active_adapter(lm)
    config = lm.peft_config[name]
    check_kind(config)
    before = probe_logits(lm).detach()
    trainable = copy(config)
    trainable.inference_mode = False
    if hasattr(trainable, "init_lora_weights"):
        trainable.init_lora_weights = True  # others, such as PiSSA, would change the base weights again
    with peft_errors("cannot convert the model's adapter"), warnings.catch_warnings(action="ignore"):
        state = peft.get_peft_model_state_dict(lm, adapter_name=name, save_embedding_layers=False)
        model = peft.PeftModel(lm, trainable, name)
        peft.set_peft_model_state_dict(model, {f"base_model.model.{key}": x for key, x in state.items()}, name)
    model.peft_config[name] = config
    if not reproduces(lm, before):
        raise ConfigError(
            f"the model's {config.peft_type.value} adapter cannot be converted from Transformers; "
            "load it with peft.PeftModel.from_pretrained"
        )
    return model


def check_kind(config: Any) -> None:
    """Raise `ConfigError` for an unsupported type of adapter."""
    kind, why = config.peft_type.value, UNSUPPORTED.get(config.peft_type.value)
    if config.is_prompt_learning:
        why = "PEFT's own forward pass adds its virtual tokens, and is not called"
    for argument, reason in UNSUPPORTED_LORA.items():
        if getattr(config, argument, None) is not None:
            kind, why = f"{kind} with {argument}", reason
    if why is not None:
        raise ConfigError(f"an adapter of type {kind} cannot be trained here: {why}; use LoRA or another type")


def check_adapted(name: str, lm: PreTrainedModel) -> None:
    """Raise `ConfigError` for quantised weights without an adapter."""
    if quantised_layers(lm) and attached(lm) is None:
        raise ConfigError(
            f"the weights of {name!r} are quantised, and only an adapter can be trained on them; set model.lora.rank "
            "(16, say), give peft_config, or leave out model.quantization"
        )


def merge(lm: PreTrainedModel) -> PreTrainedModel:
    """Merge a model's adapter into its weights, dequantised if they are not, in place, and return the model.

    Raises:
        ConfigError: its type of adapter cannot be merged.
    """
    what = f"cannot merge the model's {lm.peft_config[active_adapter(lm)].peft_type.value} adapter"
    before = probe_logits(lm).detach()
    with peft_errors(what):
        if quantised_layers(lm):
            _dequantise_below(lm)
        merged: PreTrainedModel = attached(lm).merge_and_unload()
    if not reproduces(merged, before):
        raise ConfigError(f"{what}: the merged model gives other logits")
    if getattr(merged, "_hf_peft_config_loaded", False):  # Transformers would save it as an adapter
        merged._hf_peft_config_loaded = False
        vars(merged).pop("_weight_conversions", None)
    return merged.requires_grad_(True)


def _dequantise_below(lm: PreTrainedModel) -> None:
    """Dequantise a model below its adapter, which is made anew on the dense layers, with the same weights."""
    peft, model, name = peft_library(), attached(lm), active_adapter(lm)
    config, state = copy(model.peft_config[name]), peft.get_peft_model_state_dict(model, adapter_name=name)
    model.unload()
    dequantise(lm)
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True
    dense = peft.PeftModel(lm, config, name)
    peft.set_peft_model_state_dict(dense, state, name)
    attach(lm, dense)
    dense.eval()


def adapter_layers(lm: PreTrainedModel) -> list[Any]:
    """PEFT's layers and wrappers in a model."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return [module for module in lm.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)]


def on_head(lm: PreTrainedModel) -> bool:
    """True if a model's output projection is adapted; Tokencredit reads its weight directly, without the adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    head = lm.get_output_embeddings()
    return head is not None and any(isinstance(module, BaseTunerLayer) for module in head.modules())


def active_adapter(lm: PreTrainedModel) -> str:
    """The name of a model's one active adapter.

    Raises:
        ConfigError: several adapters or none are active, or the active one is disabled or merged.
    """
    layers = adapter_layers(lm)
    names = sorted({name for layer in layers for name in layer.active_adapters})
    if len(names) != 1:
        active = ", ".join(names) or "none"
        raise ConfigError(f"the model must have exactly one active adapter, not {active}; select one by set_adapter")
    if any(layer.disable_adapters or getattr(layer, "merged_adapters", None) for layer in layers):
        raise ConfigError(
            f"the model's adapter {names[0]!r} is switched off or merged; call enable_adapter_layers() or "
            "unmerge_adapter(), or pass what merge_and_unload() returns"
        )
    return str(names[0])


def probe_logits(lm: PreTrainedModel) -> Tensor:
    """Logits of up to four tokens, computed by trunk and output projection as in training."""

    def logits(ids: Tensor) -> Tensor:
        hidden = trunk_of(lm)(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).last_hidden_state
        return lm.get_output_embeddings()(hidden)  # type: ignore[no-any-return]

    ids = torch.arange(min(4, lm.config.get_text_config().vocab_size), device=lm.device).unsqueeze(0)
    return within(lm, logits, ids)


@torch.no_grad()
def reproduces(lm: PreTrainedModel, logits: Tensor) -> bool:
    """True if the model's `probe_logits` are these."""
    return torch.allclose(probe_logits(lm), logits, atol=TOLERANCE, rtol=TOLERANCE)
