"""Checkpoints: a tree of plain values and tensors, written atomically by all processes as a folder.

`checkpoints/000040/` holds `state.json`, the tree of what all processes share, with references to tensors in
`tensors/*.safetensors`; `process-0.json` and so on, each process's own state, with `process-0.safetensors` if it has
tensors; and `manifest.json` with the size and SHA-256 of each file and the versions of the software. Its form does not
depend on the number of processes, nor on sharding, but for the number of files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError, RunStopped, quoted
from tokencredit.provenance.environment import versions
from tokencredit.runs.folder import flush, safetensors_errors
from tokencredit.runs.jsonl import read_object
from tokencredit.runs.tensor_files import DamagedTensors, Shape, read_tensors, write_tensors

FORMAT = 4
"""Version of the folder layout and of the trainers' state."""
MANIFEST, STATE, TENSORS = "manifest.json", "state.json", "tensors"
IN_TENSORS, AS_ARRAY, SHAPE = "$tensor", "$array", "shape"
"""Keys of references to a tensor, and to one to be read as a NumPy array, and of its shape."""


class DamagedCheckpoint(ValueError):
    """An unusable checkpoint; the message names the file and the problem."""


def write_checkpoint(folder: Path, shared: Mapping[str, Any], own: Mapping[str, Any], processes: Processes) -> None:
    """Write a checkpoint into an empty folder, which all processes see; all call it.

    `shared` is a tree of dicts (of texts), lists, numbers, texts, None, tensors and NumPy arrays, the same in every
    process, except that each holds its own part of sharded tensors; `own` is a tree of this process's own state.

    Raises:
        OSError: a file could not be written, in any process.
        RunStopped: `shared` or `own` is no such tree.
    """
    # Tensors go into safetensors files, by all processes at once; the tree refers to them by name.
    tensors: dict[str, Tensor] = {}
    tree = _without_tensors(shared, "", tensors)
    write_tensors(folder / TENSORS, tensors, processes)
    with processes.agreed(OSError), safetensors_errors(folder):
        if processes.main:
            (folder / TENSORS).mkdir(exist_ok=True)
            _write_json(folder / STATE, tree)
        own_tensors: dict[str, Tensor] = {}
        file = folder / f"process-{processes.rank}.json"
        _write_json(file, _without_tensors(own, "", own_tensors))
        if own_tensors:
            save_file(own_tensors, file.with_suffix(".safetensors"))
            flush(file.with_suffix(".safetensors"))
    # A network's file system may not list what other machines have just written.
    listed = processes.texts(json.dumps(_files(folder)))
    files = sorted({name for names in listed for name in json.loads(names)})
    # Each process hashes some of the files, and the manifest, written last, makes the folder a checkpoint.
    with processes.agreed(OSError):
        mine = {name: _fingerprint(folder / name) for name in files[processes.rank :: processes.count]}
    fingerprints: dict[str, Any] = {}
    for text in processes.texts(json.dumps(mine)):
        fingerprints |= json.loads(text)
    with processes.agreed(OSError):
        if processes.main:
            manifest = {"format": FORMAT, "versions": versions(), "processes": processes.count}
            manifest["files"] = {name: fingerprints[name] for name in files}
            (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def size_of(state: Any) -> int:
    """Bytes of the tensors in a tree; of sharded ones, in all processes together."""
    tensors: dict[str, Tensor] = {}
    _without_tensors(state, "", tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def read_checkpoint(folder: Path, processes: Processes, sharded: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """Read the shared tree, with `process`, `all_processes` and `versions`; all processes call it.

    `process` is the tree of this process's own state. If another number of processes wrote the checkpoint, it is that
    of one of them, and `all_processes` is the list of all of them; otherwise that is None. `sharded` are the trainer's
    sharded parameters, by name: tensors of their names are read as sharded as they are.

    Raises:
        DamagedCheckpoint: a file is missing, has changed, or has another format.
    """
    with processes.agreed(DamagedCheckpoint):
        manifest = _read_json(folder / MANIFEST)
        if manifest.get("format") != FORMAT:
            raise DamagedCheckpoint(f"{MANIFEST} is of format {manifest.get('format')!r}, not {FORMAT}")
        files, count = _checked_manifest(folder, manifest)
        # A hash costs as much as reading the file, so each process checks some.
        for name in sorted(files)[processes.rank :: processes.count]:
            if _fingerprint(folder / name) != files[name]:
                raise DamagedCheckpoint(f"{name} has changed since it was written")
    with processes.agreed(DamagedCheckpoint):
        tree = _read_json(folder / STATE)
        shapes: dict[str, Shape] = {}
        _references(tree, shapes)
        own = _read_own(folder, processes.rank % count, files)
        others = None if count == processes.count else [_read_own(folder, rank, files) for rank in range(count)]
    try:
        tensors = read_tensors(folder / TENSORS, shapes, sharded or {}, processes)
    except DamagedTensors as error:
        raise DamagedCheckpoint(f"{TENSORS}: {error}") from error
    written_with = manifest.get("versions")
    state: dict[str, Any] = _with_tensors(tree, tensors)
    return state | {
        "process": own,
        "all_processes": others,
        "versions": written_with if isinstance(written_with, dict) else {},
    }


def _checked_manifest(folder: Path, manifest: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Fingerprints by file, and the number of processes that wrote them; raises `DamagedCheckpoint`."""
    files, count = manifest.get("files"), manifest.get("processes")
    if type(count) is not int or not isinstance(files, dict):
        raise DamagedCheckpoint(f"{MANIFEST} does not list its files and processes")
    if (folder / TENSORS).is_symlink() or not (folder / TENSORS).is_dir():
        raise DamagedCheckpoint(f"{TENSORS!r} is missing, or not a folder of its own")
    for name in files:
        # A manifest is untrusted: it must not make us read files elsewhere.
        path = Path(name)
        if path.parts not in ((path.name,), (TENSORS, path.name)) or not path.name:
            raise DamagedCheckpoint(f"{name!r} is not a file of the folder")
        if not (folder / name).is_file() or (folder / name).is_symlink():
            raise DamagedCheckpoint(f"{name!r} is missing, or not a regular file of the folder")
    own = {f"process-{rank}.json" for rank in range(count)} if 0 < count <= len(files) else {"a process's state"}
    if missing := sorted(({STATE} | own) - set(files)):
        raise DamagedCheckpoint(f"{MANIFEST} does not list {', '.join(missing[:3])}")
    unlisted = sorted(name for name in _files(folder) if name.startswith(f"{TENSORS}/") and name not in files)
    if unlisted:  # they would be read with the others
        raise DamagedCheckpoint(f"{MANIFEST} does not list {unlisted[0]}")
    return files, count


def _files(folder: Path) -> list[str]:
    """Names of the files of a checkpoint, except the manifest."""
    inside = list((folder / TENSORS).iterdir()) if (folder / TENSORS).is_dir() else []
    own = [path for path in folder.iterdir() if path.name not in (MANIFEST, TENSORS)]
    return sorted(path.relative_to(folder).as_posix() for path in [*own, *inside])


def _read_own(folder: Path, rank: int, files: Mapping[str, Any]) -> dict[str, Any]:
    """The state of one of the processes that wrote a checkpoint."""
    file = folder / f"process-{rank}.safetensors"
    try:
        tensors = load_file(file) if file.name in files else {}
    except (SafetensorError, ValueError) as error:
        raise DamagedCheckpoint(f"{file.name}: {error}") from error
    own: dict[str, Any] = _with_tensors(_read_json(file.with_suffix(".json")), tensors)
    return own


def read_values(folder: Path) -> dict[str, Any]:
    """The tree of a checkpoint without its tensors, unverified; raises `DamagedCheckpoint` if it is no JSON object."""
    return _read_json(folder / STATE)


def _fingerprint(file: Path) -> dict[str, Any]:
    with file.open("rb") as content:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(content, "sha256").hexdigest()}


def as_read(tree: Any, name: str) -> Any:
    """The tree as a checkpoint gives it back: with tensors on the CPU, and lists for tuples.

    Raises:
        RunStopped: a checkpoint cannot hold it; the message names the part by its path, which begins with `name`.
    """
    tensors: dict[str, Tensor] = {}
    plain = json.loads(json.dumps(_without_tensors(tree, name, tensors)))
    return _with_tensors(plain, {path: tensor.cpu().clone() for path, tensor in tensors.items()})


def _without_tensors(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The tree as JSON; its tensors are moved to `tensors`, by path."""
    if isinstance(tree, Tensor | np.ndarray):
        if name in tensors:
            raise RunStopped(f"{name} is the path of two tensors in a checkpoint; rename a key that has a /")
        try:
            tensors[name] = tree.detach().contiguous() if isinstance(tree, Tensor) else torch.from_numpy(np.array(tree))
        except (TypeError, RuntimeError) as error:
            raise RunStopped(f"{name} cannot be kept in a checkpoint: {error}") from error
        return {IN_TENSORS if isinstance(tree, Tensor) else AS_ARRAY: name, SHAPE: list(tree.shape)}
    if isinstance(tree, np.generic):
        return tree.item()
    if isinstance(tree, Mapping):
        if other := [key for key in tree if not isinstance(key, str)]:
            raise RunStopped(f"{name} has the key {quoted(other[0])}; keys in a checkpoint must be texts")
        return {key: _without_tensors(value, f"{name}/{key}", tensors) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_without_tensors(value, f"{name}/{position}", tensors) for position, value in enumerate(tree)]
    if tree is not None and not isinstance(tree, str | int | float):
        kinds = "dict, list, number, text, tensor, array, true, false or null"
        raise RunStopped(f"{name} is {quoted(tree)}; in a checkpoint it must be a {kinds}")
    return tree


def _reference(tree: Any) -> tuple[str, Shape] | None:
    """Name and shape of the tensor that a part of a tree stands for; None if it is no reference."""
    if not isinstance(tree, dict) or set(tree) not in ({IN_TENSORS, SHAPE}, {AS_ARRAY, SHAPE}):
        return None
    shape, name = tree[SHAPE], tree.get(IN_TENSORS, tree.get(AS_ARRAY))
    if not isinstance(name, str) or not isinstance(shape, list) or any(type(x) is not int or x < 0 for x in shape):
        raise DamagedCheckpoint(f"the reference to the tensor {name!r} is not valid")
    return name, tuple(shape)


def _references(tree: Any, shapes: dict[str, Shape]) -> None:
    """Collect the shapes of the tensors that a tree refers to."""
    if (reference := _reference(tree)) is not None:
        shapes[reference[0]] = reference[1]
    elif isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            _references(value, shapes)


def _with_tensors(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The tree with these tensors in place of references to them."""
    if (reference := _reference(tree)) is not None:
        name, shape = reference
        if name not in tensors:
            raise DamagedCheckpoint(f"the tensor {name!r} is missing")
        if tuple(tensors[name].shape) != shape:
            raise DamagedCheckpoint(f"the tensor {name!r} is of another shape")
        return tensors[name].numpy() if AS_ARRAY in tree else tensors[name]
    if isinstance(tree, dict):
        return {key: _with_tensors(value, tensors) for key, value in tree.items()}
    return [_with_tensors(value, tensors) for value in tree] if isinstance(tree, list) else tree


def _write_json(file: Path, tree: Any) -> None:
    file.write_text(json.dumps(tree), encoding="utf-8")
    flush(file)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return read_object(file.name, file.read_bytes())
    except (OSError, ConfigError) as error:
        raise DamagedCheckpoint(str(error)) from error
