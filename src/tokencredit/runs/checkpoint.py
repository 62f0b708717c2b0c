"""Checkpoints: a tree of plain values and tensors, written atomically as a folder of JSON and safetensors.

`checkpoints/000040/` holds `state.json`, the tree, with references to `tensors.safetensors`; `process-0.json` and so
on, each process's own state, with `process-0.safetensors` if it has tensors; and `manifest.json` with the size and
SHA-256 of each file and the versions of the software.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import tokencredit
from tokencredit.errors import ConfigError
from tokencredit.runs.jsonl import read_object

FORMAT = 2
"""Version of the folder layout and of the trainers' state; other versions are refused."""
MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors.safetensors"
IN_TENSORS, AS_ARRAY = "$tensor", "$array"
"""Keys of references to a tensor, and to one to be read as a NumPy array."""


class DamagedCheckpoint(ValueError):
    """An unusable checkpoint; the message names the file and the problem."""


class OldCheckpoint(DamagedCheckpoint):
    """A checkpoint written by an older version of Tokencredit."""


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a tree of dicts (of texts), lists, numbers, texts, None, tensors and NumPy arrays."""
    tensors: dict[str, Tensor] = {}
    (folder / STATE).write_text(json.dumps(_without_tensors(state, "", tensors)), encoding="utf-8")
    save_file(tensors, folder / TENSORS)


def write_process(folder: Path, process: int, own: Mapping[str, Any]) -> None:
    """Write one process's own state: a tree as for `write_state`."""
    tensors: dict[str, Tensor] = {}
    (folder / f"process-{process}.json").write_text(json.dumps(_without_tensors(own, "", tensors)), encoding="utf-8")
    if tensors:
        save_file(tensors, folder / f"process-{process}.safetensors")


def size_of(state: Any) -> int:
    """Bytes of the tensors in a tree."""
    tensors: dict[str, Tensor] = {}
    _without_tensors(state, "", tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def write_manifest(folder: Path) -> None:
    """Write the manifest of the folder's files; call it last."""
    files = {file.name: _fingerprint(file) for file in sorted(folder.iterdir())}
    manifest = {"format": FORMAT, "versions": versions(), "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def read_checkpoint(folder: Path, process: int) -> dict[str, Any]:
    """The tree that was written, with this process's own state under `process`, and `versions`.

    Raises:
        OldCheckpoint: an older version wrote it.
        DamagedCheckpoint: a file is missing, has changed, or has another format.
    """
    manifest = _read_json(folder / MANIFEST)
    written = manifest.get("format")
    if written != FORMAT:
        kind = OldCheckpoint if type(written) is int and 0 < written < FORMAT else DamagedCheckpoint
        raise kind(f"{MANIFEST} is of format {written!r}, not {FORMAT}")
    files = manifest.get("files")
    if not isinstance(files, dict) or not {STATE, TENSORS} <= set(files):
        raise DamagedCheckpoint(f"{MANIFEST} does not list {STATE} and {TENSORS}")
    for name, expected in files.items():
        # A manifest is untrusted: it must not make us read files elsewhere.
        if Path(name).name != name or not (folder / name).is_file() or (folder / name).is_symlink():
            raise DamagedCheckpoint(f"{name!r} is missing, or not a regular file of the folder")
        if _fingerprint(folder / name) != expected:
            raise DamagedCheckpoint(f"{name} has changed since it was written")
    own, own_tensors = f"process-{process}.json", f"process-{process}.safetensors"
    if own not in files:
        raise DamagedCheckpoint(f"it has no {own}: it was written by fewer processes")
    written_with = manifest.get("versions")
    state: dict[str, Any] = _with_tensors(_read_json(folder / STATE), _read_tensors(folder / TENSORS))
    tensors = _read_tensors(folder / own_tensors) if own_tensors in files else {}
    return state | {
        "process": _with_tensors(_read_json(folder / own), tensors),
        "versions": written_with if isinstance(written_with, dict) else {},
    }


def read_values(folder: Path) -> dict[str, Any]:
    """The tree of a checkpoint without its tensors, unverified.

    Raises:
        DamagedCheckpoint: it is missing, or not a JSON object.
    """
    return _read_json(folder / STATE)


def versions() -> dict[str, str]:
    """Versions of the software that a bit-for-bit repetition depends on."""
    ours = {"python": platform.python_version(), "tokencredit": tokencredit.__version__}
    return ours | {name: version(name) for name in ("torch", "numpy")}


def _fingerprint(file: Path) -> dict[str, Any]:
    with file.open("rb") as content:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(content, "sha256").hexdigest()}


def _without_tensors(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The tree as JSON; its tensors are moved to `tensors`, by path."""
    if isinstance(tree, Tensor):
        tensors[name] = tree.detach().contiguous()
        return {IN_TENSORS: name}
    if isinstance(tree, np.ndarray):
        tensors[name] = torch.from_numpy(np.array(tree))
        return {AS_ARRAY: name}
    if isinstance(tree, Mapping):
        return {key: _without_tensors(value, f"{name}/{key}", tensors) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_without_tensors(value, f"{name}/{position}", tensors) for position, value in enumerate(tree)]
    return tree


def _with_tensors(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, dict):
        if set(tree) in ({IN_TENSORS}, {AS_ARRAY}):
            ((kind, name),) = tree.items()
            if name not in tensors:
                raise DamagedCheckpoint(f"the tensor {name!r} is missing")
            return tensors[name].numpy() if kind == AS_ARRAY else tensors[name]
        return {key: _with_tensors(value, tensors) for key, value in tree.items()}
    return [_with_tensors(value, tensors) for value in tree] if isinstance(tree, list) else tree


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, ValueError) as error:
        raise DamagedCheckpoint(f"{file.name}: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return read_object(file.name, file.read_bytes())
    except (OSError, ConfigError) as error:
        raise DamagedCheckpoint(str(error)) from error
