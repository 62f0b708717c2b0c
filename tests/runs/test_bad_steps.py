"""Batches of skipped steps, which several processes keep in one folder."""

import torch
from safetensors.torch import load_file

from tokencredit.runs import bad_steps


def test_each_process_keeps_its_own_newest_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(bad_steps, "BAD_STEPS_KEPT", 3)
    folders = {}
    for step in range(1, 13):  # 10 comes after 9, not after 1
        for ending in ("-process-0", "-process-1"):
            folders[step, ending] = bad_steps.keep_batch(tmp_path, 7, ending, {"x": torch.tensor(step)}, {})
    kept = {f"000007-{step}{ending}" for step in (10, 11, 12) for ending in ("-process-0", "-process-1")}
    assert {folder.name for folder in tmp_path.iterdir()} == kept
    for (step, _), folder in folders.items():
        assert not folder.exists() or load_file(folder / "batch.safetensors")["x"] == step
