"""The compute dtype of forward and backward passes, its choice by `model.dtype: auto`, and quantised weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError, NotInstalled
from tokencredit.runs.folder import read_choices
from tokencredit.settings.model import ModelConfig
from tokencredit.settings.text import PPOConfig

BITS = {None: 0, "nf4": 4 + 8 / 64 + 32 / 64 / 256, "int8": 8}
"""Bits per weight by `model.quantization`. 4-bit blocks of 64 weights have a scale: of 32 bits or, as here, of 8, with
one of 32 per 256 blocks."""
Dtype = Literal["float32", "bfloat16"]
CPU_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")
"""PyTorch's names of instruction sets with bfloat16 products: two of x86, two of ARM."""


@dataclass(frozen=True)
class Precision:
    """Compute dtype of forward and backward passes on a device; trained weights stay float32."""

    dtype: Dtype
    device: torch.device
    reason: str | None = None
    """The reason for the choice of `auto`; None for a configured dtype."""

    @property
    def bfloat16(self) -> bool:
        """True for bfloat16, in which decoding with a KV cache and a full forward pass differ by rounding."""
        return self.dtype == "bfloat16"

    @property
    def choices(self) -> dict[str, Any]:
        """Resolved `auto` settings."""
        return {} if self.reason is None else {"model.dtype": self.dtype}

    @property
    def notes(self) -> list[str]:
        """Lines for a run's events about a resolved `auto`, or a dtype that the device only emulates."""
        if self.reason is not None:
            return [f"model.dtype auto: {self.dtype}, {self.reason}"]
        known, reason = choose_for_device(self.device) if self.bfloat16 else (True, "")
        return [] if known else [f"model.dtype bfloat16 is slower here than float32, {reason}; auto takes float32"]

    def autocast(self) -> torch.autocast:
        """A context for forward passes in this dtype."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16)

    @contextmanager
    def no_grad(self) -> Iterator[None]:
        """A context for forward passes in this dtype without gradients."""
        with torch.no_grad(), self.autocast():
            yield

    def updates(self) -> AbstractContextManager[None]:
        """A context for updates, backward passes included; deterministic on a GPU in float32.

        PyTorch's fused attention kernels sum float32 gradients in any order; its math attention does not.
        """
        exact = self.device.type == "cuda" and not self.bfloat16
        return sdpa_kernel(SDPBackend.MATH) if exact else nullcontext()


def matrix_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Layers with a matrix product, whose weight and bias autocast rounds in every forward pass."""
    layers = (module for module in model.modules() if isinstance(module, nn.Linear | Conv1D))
    return (module for module in layers if not is_quantised(module))


def rounded(module: nn.Module, dtype: torch.dtype) -> dict[str, nn.Parameter | None]:
    """Copies of a layer's own parameters in another dtype, by name."""
    parameters = {name: x for name, x in module._parameters.items() if x is not None}
    return {name: nn.Parameter(x.to(dtype), requires_grad=False) for name, x in parameters.items()}


def round_frozen(lm: PreTrainedModel) -> None:
    """Store frozen matrix weights in bfloat16, except for the vocabulary projection.

    Autocast rounds them anyway, so no result changes and they take half the memory. The model can then only be called
    under autocast. Below quantised layers memory matters most: embedding and projection are rounded too.
    """
    head = set(lm.get_output_embeddings().modules())  # several modules if PEFT wraps it
    if quantised_layers(lm):
        for module in {lm.get_input_embeddings(), lm.get_output_embeddings()}:
            if isinstance(weight := module._parameters.get("weight"), nn.Parameter) and not weight.requires_grad:
                weight.data = weight.data.to(torch.bfloat16)  # in place, since the two may share it
    for module in matrix_layers(lm):
        if module not in head and not any(p.requires_grad for p in module.parameters(recurse=False)):
            module._parameters.update(rounded(module, torch.bfloat16))


def choose_precision(
    dtype: Literal["float32", "bfloat16", "auto"], processes: Processes, run: str | Path | None
) -> Precision:
    """The configured precision, the same on every process; `auto` is bfloat16 where the device computes in it.

    The first process chooses; a resumed run, whose folder is `run`, keeps its choice.

    Raises:
        ConfigError: the folder's choices cannot be read.
    """
    if dtype != "auto":
        return Precision(dtype, processes.device)
    before = None if run is None else read_choices(Path(run)).get("model.dtype")
    if before is not None:
        half, reason = before == "bfloat16", "as when this run began"
    elif processes.main:
        half, reason = choose_for_device(processes.device)
    else:
        half, reason = False, "as the first process chose"
    return Precision("bfloat16" if processes.first(half) else "float32", processes.device, reason)


def choose_for_device(device: torch.device) -> tuple[bool, str]:
    """True if a device has bfloat16 arithmetic, rather than emulating it, and the reason as text."""
    if device.type == "cuda":
        half = torch.cuda.is_bf16_supported(including_emulation=False)
        return half, f"since this GPU {'computes in bfloat16' if half else 'only emulates bfloat16'}"
    if device.type != "cpu":
        return False, f"since bfloat16 is untested on {device.type}"
    capabilities = torch.cpu.get_capabilities()
    name = next((name for name in CPU_INSTRUCTIONS if capabilities.get(name)), None)
    if name is None:
        return False, "since this CPU has no bfloat16 instructions"
    return True, f"since this CPU has bfloat16 instructions ({name})"


def is_quantised(module: nn.Module) -> bool:
    """True for a linear layer of bitsandbytes with 4-bit or 8-bit weights."""
    weight = module._parameters.get("weight")
    return type(weight).__name__ in ("Params4bit", "Int8Params") or hasattr(weight, "quant_state")


def quantised_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The quantised layers of a model, by name."""
    return {name: module for name, module in model.named_modules() if is_quantised(module)}


def dense_weight(layer: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight `[out, in]` of a quantised layer, dequantised."""
    if hasattr(layer, "dense"):  # in a plan
        zeros: Tensor = layer.dense(dtype)
        return zeros
    from bitsandbytes.functional import dequantize_4bit

    weight = layer.weight
    if (state := getattr(weight, "quant_state", None)) is None:
        scale: Tensor = layer.state.SCB if weight.SCB is None else weight.SCB
        codes: Tensor = weight.data
        return codes.to(dtype) * (scale / 127).to(dtype).unsqueeze(1)
    state = copy(state)
    state.dtype = dtype
    dense: Tensor = dequantize_4bit(weight.data, state)
    return dense


class DenseProduct(torch.autograd.Function):
    """x Wᵀ with the dequantised weight of a layer, which is dequantised again for the gradient rather than kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        """The product, in the dtype of x."""
        ctx.layer = layer
        return nn.functional.linear(x, dense_weight(layer, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        """The gradient of x."""
        (gradient,) = gradients
        return gradient @ dense_weight(ctx.layer, gradient.dtype), None


def dense_forward(layer: Any, x: Tensor) -> Tensor:
    """The forward pass of a quantised layer, in the dtype of autocast or of x.

    Alike in sampling and training and for any batch. The 8-bit pass of bitsandbytes rounds the inputs, by columns that
    depend on the batch; its 4-bit pass takes another kernel with gradients, and computes in the first call's dtype.
    """
    kind = x.device.type
    x = x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
    product: Tensor = DenseProduct.apply(x, layer)  # type: ignore[no-untyped-call]
    return product if layer.bias is None else product + layer.bias.to(product.dtype)


def in_float32(model: nn.Module) -> None:
    """Convert a model to float32 in place, except for quantised weights, whose layers get `dense_forward`."""
    quantised = quantised_layers(model)
    if not quantised:
        nn.Module.float(model)
    for module in model.modules() if quantised else ():
        for name, x in [*module._parameters.items(), *module._buffers.items()]:
            if x is not None and x.is_floating_point() and not (name == "weight" and is_quantised(module)):
                x.data = x.data.float()
    for layer in quantised.values():
        if getattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu", False):
            layer.state_dict()  # which unpacks it
        layer.forward = MethodType(dense_forward, layer)


def dequantise(lm: PreTrainedModel) -> None:
    """Replace quantised layers by dense ones in float32, in place."""
    layers: dict[str, Any] = {**quantised_layers(lm)}
    for name, layer in layers.items():
        dense, bias, kind = dense_weight(layer), layer.bias, getattr(layer, "source_cls", nn.Linear)
        rows, columns = dense.shape
        with torch.device("meta"):
            module: Any = Conv1D(rows, columns) if kind is Conv1D else nn.Linear(columns, rows, bias is not None)
        module.weight = nn.Parameter(dense.T.contiguous() if kind is Conv1D else dense)
        module.bias = bias
        lm.set_submodule(name, module)
    vars(lm)["hf_quantizer"].remove_quantization_config(lm)
    vars(lm).pop("_weight_conversions", None)  # which would read quantised weights, and cannot write them
    lm.requires_grad_(True)


def whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and values of a model's parameters, quantised ones dequantised."""
    layers = quantised_layers(model)
    for name, parameter in model.named_parameters():
        layer = layers.get(name.removesuffix(".weight"))
        yield name, parameter.detach() if layer is None else dense_weight(layer)


def weights_in(parameters: Iterable[Tensor]) -> int:
    """Number of weights in parameters; 4-bit ones are stored two in a number."""
    states = ((p, getattr(p, "quant_state", None)) for p in parameters)
    return sum(p.numel() if state is None else state.shape.numel() for p, state in states)


def quantisation(kind: Any, name: str, args: ModelConfig, config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `kind.from_pretrained` for `model.quantization`, or for a model that was saved quantised.

    Raises:
        ConfigError: it is quantised by another library, both hold, or bitsandbytes is not installed.
    """
    if not weight_bits(kind, name, args, config):
        return {}
    saved, own = saved_bits(name, config), args.quantization
    if find_spec("bitsandbytes") is None:
        user = f"{name!r}, quantised," if saved else "model.quantization"
        raise NotInstalled(user, "bitsandbytes", "tokencredit[quant]")
    # Checked and adapted on the CPU, as others are; else Transformers would put it on a GPU.
    options: dict[str, Any] = {"device_map": {"": "cpu"}}
    if own == "nf4":
        four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        options["quantization_config"] = BitsAndBytesConfig(**four)
    elif own == "int8":
        options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    return options


def weight_bits(kind: Any, name: str, args: ModelConfig, config: Mapping[str, Any]) -> float:
    """Bits per weight of the linear layers of a model, by `model.quantization` or as saved; 0 for dense ones.

    Raises:
        ConfigError: it is quantised by another library, both hold, or a class of model is not trained quantised.
    """
    adaptable = kind in (AutoModelForCausalLM, AutoModelForSequenceClassification)
    saved, own = saved_bits(name, config), args.quantization if adaptable else None
    if saved and not adaptable:
        raise ConfigError(f"the weights of {name!r} are quantised, and it is to be trained whole; give dense weights")
    if saved and own is not None:
        raise ConfigError(
            f"model.quantization is {own}, and the weights of {name!r} are quantised already; leave it out"
        )
    return saved or BITS[own]


def saved_bits(name: str, config: Mapping[str, Any]) -> float:
    """Bits per weight of a model that bitsandbytes has quantised, 0 for a dense one; `ConfigError` for others."""
    saved = config.get("quantization_config")
    if not saved:
        return 0
    saved = saved if isinstance(saved, Mapping) else {}
    method = str(getattr(saved.get("quant_method"), "value", saved.get("quant_method", "")))
    if method.startswith("bitsandbytes") or saved.get("load_in_4bit") or saved.get("load_in_8bit"):
        four = BITS["nf4"] if saved.get("bnb_4bit_use_double_quant") else 4.5
        return BITS["int8"] if saved.get("load_in_8bit") else four
    raise ConfigError(
        f"the weights of {name!r} are quantised{f' ({method})' * bool(method)}, and an adapter can only be trained on "
        "those of bitsandbytes; give the model in float32, float16 or bfloat16, with model.quantization: nf4 or int8"
    )


def check_quantised(args: PPOConfig, lm: PreTrainedModel) -> None:
    """Raise `ConfigError` for a setting that needs dense weights, if those of the policy are quantised."""
    needs = {"model.compile": (True, "false"), "run.shard": ("full", "none"), "rollout.engine": ("vllm", "local")}
    for key, (value, instead) in needs.items() if quantised_layers(lm) else ():
        if (group := attrgetter(key)(args)) == value:
            raise ConfigError(
                f"{key} is {str(group).lower()}, and the weights of {args.model.name!r} are quantised, which goes "
                f"without it; set {key}: {instead}, or train dense weights"
            )
