"""Weights that other libraries saved: value and score heads, wrapped models, pickles."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tokencredit.errors import ConfigError

HEADS = ("v_head.summary", "v_head", "value_head.summary", "value_head", "score")
"""Names of value and score heads of one linear layer in other libraries' models, TRL's and LLaMA-Factory's first."""
WEIGHTS = ".safetensors"
WRAPPER = "pretrained_model."
"""What TRL's value-head models may prepend to the names of weights."""
HEAD_FILES = (f"value_head{WEIGHTS}", "value_head.bin")
"""Files of a value head beside a model's or an adapter's weights, LLaMA-Factory's and Tokencredit's name first."""
PICKLE = "pytorch_model.bin"
"""TRL's file of a value head beside an adapter; beside config.json, a model's weights."""
CONVERSION = (
    'python -c "import torch, safetensors.torch as s; s.save_file({{k: v.clone().contiguous() for k, v in '
    "torch.load({source!r}, map_location='cpu', weights_only=True).items(){chosen}}}, {target!r}, "
    "{{'format': 'pt'}})\""
)
"""Command that makes safetensors of a pickle."""


def read_weights(kind: Any, folder: str, dtype: torch.dtype, code: bool, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A model by an Auto class, from safetensors only, and what its loading found."""
    refuse_pickle(Path(folder), "pytorch_model*.bin", "model")

    def read(**more: Any) -> tuple[Any, dict[str, Any]]:
        model, loaded = kind.from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=code,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
            **more,
        )
        return model, loaded

    model, loaded = read()
    if any(key.startswith(WRAPPER) for key in loaded["unexpected_keys"]):
        model, loaded = read(key_mapping={f"^{re.escape(WRAPPER)}": ""})
    return model, loaded


def head_layer(file: Path) -> str | None:
    """The name of another library's value or score head in a safetensors file; None if there is none."""
    try:
        with safe_open(file, framework="pt") as weights:
            names = set(weights.keys())
    except (OSError, SafetensorError):
        return None  # loading it raises the reason
    return next((layer for layer in HEADS if f"{layer}.weight" in names), None)


def find_head(folder: Path) -> tuple[Path, str] | None:
    """The file and name of another library's value or score head in a model's folder; None if there is none.

    Raises:
        ConfigError: it is in a pickle.
    """
    for file in [folder / HEAD_FILES[0], *sorted(folder.glob(f"model*{WEIGHTS}"))]:
        if file.is_file() and (layer := head_layer(file)) is not None:
            return file, layer
    refuse_pickle(folder, HEAD_FILES[1], "value_head")
    if not (folder / "config.json").is_file():
        refuse_pickle(folder, PICKLE, "value_head")
    return None


def refuse_pickle(folder: Path, pattern: str, target: str) -> None:
    """Raise `ConfigError` if weights are in a pickle and not in safetensors, with the command that converts them."""
    found = sorted(folder.glob(pattern))
    if not found or list(folder.glob(f"{target}*{WEIGHTS}")):
        return
    chosen = " if k.startswith('v_head.')" if target == "value_head" else ""
    command = CONVERSION.format(source=str(found[0]), target=str(folder / f"{target}{WEIGHTS}"), chosen=chosen)
    raise ConfigError(
        f"{found[0]} is a pickle, which can run code and is not read"
        + (f" ({len(found)} such files: load and save the model with safe_serialization)" if found[1:] else "")
        + f"; convert it once, if you trust it: {command}"
    )
