"""Checkpoints: what is written is read, and what does not fit together is refused."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from helpers.files import sign
from tokencredit.distributed.processes import Processes
from tokencredit.errors import RunStopped
from tokencredit.runs import tensor_files
from tokencredit.runs.checkpoint import (
    FORMAT,
    DamagedCheckpoint,
    as_read,
    read_checkpoint,
    size_of,
    write_checkpoint,
)
from tokencredit.runs.tensor_files import DamagedTensors, read_tensors

SHARED = {
    "weights": {"lm.a": torch.arange(12.0).view(4, 3), "lm.b": torch.ones(2, dtype=torch.bfloat16)},
    "optimizer": {"lm.a": {"step": torch.tensor(3.0), "exp_avg": torch.full((4, 3), -0.5)}},
    "numbers": [1, 2.5, None, "text", math.inf],
    "flags": np.array([True, False]),
    "nothing": torch.zeros(0, 3),
}
OWN = {"buffer": [{"returns": torch.ones(2, 1)}], "random": "ab"}
FILE = "tensors/shard-00001-model-00001-of-00001.safetensors"


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "000001"
    made.mkdir()
    write_checkpoint(made, SHARED, OWN, Processes())
    return made


def read(folder):
    return read_checkpoint(folder, Processes())


def test_a_tree_is_read_as_it_was_written(folder):
    state = read(folder)
    for kind, name in (("weights", "lm.a"), ("weights", "lm.b")):
        assert torch.equal(state[kind][name], SHARED[kind][name])
        assert state[kind][name].dtype == SHARED[kind][name].dtype
    assert state["optimizer"]["lm.a"]["step"] == 3
    assert state["numbers"] == SHARED["numbers"]
    assert state["flags"].tolist() == [True, False]
    assert state["nothing"].shape == (0, 3)
    assert state["process"]["random"] == "ab"
    assert torch.equal(state["process"]["buffer"][0]["returns"], torch.ones(2, 1))
    assert state["all_processes"] is None
    assert size_of(SHARED) == 4 * (12 + 1 + 12) + 2 * 2 + 2


def test_a_tree_as_read_is_that_of_the_files(folder):
    assert as_read({"a": (1, torch.ones(2)), "b": {"c": None}}, "x")["b"] == {"c": None}
    kept = as_read(SHARED, "state")
    state = read(folder)
    assert torch.equal(kept["weights"]["lm.a"], state["weights"]["lm.a"])
    assert kept["numbers"] == state["numbers"]
    assert as_read({"a/b": torch.ones(1), "a": {"b": np.float32(3)}}, "x")["a"] == {"b": 3.0}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": {0: 1.0}}, "^/a has the key 0; keys in a checkpoint must be texts"),
        ({"a": [{1, 2}]}, "^/a/0 is .*; in a checkpoint it must be a dict, list, number"),
        ({"a": np.array(["x"])}, "^/a cannot be kept in a checkpoint: can't convert np.ndarray"),
        ({"a/b": torch.ones(1), "a": {"b": torch.ones(1)}}, "^/a/b is the path of two tensors in a checkpoint; rename"),
    ],
)
def test_what_files_cannot_hold_is_refused(tree, message, tmp_path):
    with pytest.raises(RunStopped, match=message):
        write_checkpoint(tmp_path, tree, {}, Processes())


def test_its_files_are_json_and_safetensors(folder):
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names == {"manifest.json", "state.json", "process-0.json", "process-0.safetensors", FILE}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["format"], manifest["processes"]) == (FORMAT, 1) == (4, 1)
    assert set(manifest["files"]) == names - {"manifest.json"}


def test_large_states_are_written_file_by_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "SMALLEST_FILE", 50)
    write_checkpoint(tmp_path, SHARED, OWN, Processes())
    assert {path.name[-15:-12] for path in (tmp_path / "tensors").iterdir()} == {"003"}, "of three"
    assert len(list((tmp_path / "tensors").iterdir())) == 3
    assert torch.equal(read(tmp_path)["weights"]["lm.a"], SHARED["weights"]["lm.a"])


def test_the_number_of_processes_is_checked(folder):
    for count, complaint in (
        (0, "does not list a process's state"),
        (2, r"does not list process-1\.json"),
        (10**12, "does not list a process's state"),
        ("1", "does not list its files and processes"),
    ):
        manifest = json.loads((folder / "manifest.json").read_text()) | {"processes": count}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(DamagedCheckpoint, match=complaint):
            read(folder)


def test_files_that_are_not_in_the_manifest_are_not_read(folder):
    save_file({"/weights/lm.a": torch.zeros(4, 3)}, folder / "tensors" / "more.safetensors")
    with pytest.raises(DamagedCheckpoint, match=r"does not list tensors/more\.safetensors"):
        read(folder)


@pytest.mark.parametrize("name", ["tensors", FILE, "process-0.json"])
def test_links_are_refused(name, folder, tmp_path):
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedCheckpoint, match=r"not a folder of its own|not a regular file of the folder"):
        read(folder)


@pytest.mark.parametrize(
    "reference",
    [
        {"$tensor": "/weights/lm.a", "shape": [4, 2]},
        {"$tensor": "/weights/lm.a", "shape": 4},
        {"$tensor": "/weights/lm.c", "shape": [4]},
        {"$tensor": ["/weights/lm.a"], "shape": [4, 3]},
    ],
)
def test_references_that_do_not_fit_the_tensors_are_refused(reference, folder):
    state = json.loads((folder / "state.json").read_text())
    state["weights"]["lm.a"] = reference
    (folder / "state.json").write_text(json.dumps(state))
    sign(folder)
    with pytest.raises(DamagedCheckpoint, match=r"lm\.a|lm\.c"):
        read(folder)


def parts(folder, *offsets_and_rows):
    """Files that each hold some rows of `x`, said to begin at an offset."""
    for number, (offsets, rows) in enumerate(offsets_and_rows):
        info = {"DCP_SHARDING_INFO": json.dumps({"x": {"saved_offsets": offsets}})}
        save_file({"x": rows.contiguous()}, folder / f"{number}.safetensors", metadata=info)


ROWS = torch.arange(15.0).view(5, 3)


def test_parts_are_put_together_by_their_offsets(tmp_path):
    parts(tmp_path, ([2, 0], ROWS[2:]), ([0, 0], ROWS[:2]), ([5, 0], ROWS[5:]))
    assert torch.equal(read_tensors(tmp_path, {"x": (5, 3)}, {}, Processes())["x"], ROWS)


@pytest.mark.parametrize(
    "wrong",
    [
        [([0, 0], ROWS[:2]), ([3, 0], ROWS[3:])],  # a gap: memory would be read that nobody wrote
        [([0, 0], ROWS[:3]), ([2, 0], ROWS[2:])],  # an overlap
        [([0, 0], ROWS[:2])],  # the last rows are missing
        [([0, 0], ROWS), ([0, 0], ROWS)],
        [([0, 0], ROWS[:, :2]), ([0, 2], ROWS[:, 2:])],  # columns
        [([-1, 0], ROWS)],
        [([0, 0, 0], ROWS)],
        [("ab", ROWS)],
        [([0.5, 0], ROWS)],
        [([0, 0], ROWS.view(3, 5))],
    ],
)
def test_parts_that_do_not_fit_together_are_refused(wrong, tmp_path):
    parts(tmp_path, *wrong)
    with pytest.raises(DamagedTensors):
        read_tensors(tmp_path, {"x": (5, 3)}, {}, Processes())


def test_headers_without_a_tensor_or_with_nonsense_are_refused(tmp_path):
    for info in ("{}", "[]", "nonsense", '{"x": 3}'):
        save_file({"x": ROWS}, tmp_path / "0.safetensors", metadata={"DCP_SHARDING_INFO": info})
        with pytest.raises(DamagedTensors):
            read_tensors(tmp_path, {"x": (5, 3)}, {}, Processes())


def test_a_write_that_fails_is_an_os_error(tmp_path):
    (tmp_path / "tensors").write_text("in the way")
    with pytest.raises(OSError, match="tensors"):
        write_checkpoint(tmp_path, SHARED, OWN, Processes())


@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit])
def test_a_signal_while_tensors_are_written_or_read_is_no_failed_file(signal, folder, tmp_path, monkeypatch):
    """PyTorch's checkpoints wrap any exception of a process into one of theirs."""

    def interrupted(*_arguments):
        raise signal

    monkeypatch.setattr("torch.distributed.checkpoint.hf_storage.HuggingFaceStorageReader.read_data", interrupted)
    with pytest.raises(signal):
        read(folder)
    monkeypatch.setattr("torch.distributed.checkpoint.hf_storage.HuggingFaceStorageWriter.write_data", interrupted)
    with pytest.raises(signal):
        write_checkpoint(tmp_path, SHARED, OWN, Processes())
