"""Batches of skipped optimizer steps, kept in a run's folder."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save_file
from torch import Tensor

from tokencredit.runs.folder import replacing

BAD_STEPS_KEPT = 20
"""Maximum number of batches that a process keeps."""


class Kept(NamedTuple):
    """A batch in its folder; later ones are greater."""

    iteration: int
    step: int
    folder: Path


def keep_batch(steps: Path, number: int, ending: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Path:
    """Write the batch of a skipped step into a new folder, and return the folder.

    Args:
        steps: folder of all skipped steps; only this process's newest are kept.
        number: the iteration.
        ending: suffix of the folder's name, a process's own: others may write and remove theirs at the same time.
        tensors: the batch.
        about: the reason, and further information.
    """
    steps.mkdir(exist_ok=True)
    before = sorted(_kept(steps, ending))
    step = 1 + max((kept.step for kept in before if kept.iteration == number), default=0)
    folder = steps / f"{number:06d}-{step}{ending}"
    with replacing(folder) as part:
        save_file({name: x.detach().contiguous() for name, x in tensors.items()}, part / "batch.safetensors")
        text = json.dumps({"iteration": number} | dict(about), indent=2)
        (part / "about.json").write_text(text + "\n", encoding="utf-8")
    for kept in before[: max(0, len(before) + 1 - BAD_STEPS_KEPT)]:
        shutil.rmtree(kept.folder)
    return folder


def _kept(steps: Path, ending: str) -> Iterator[Kept]:
    """The batches of the process with this ending."""
    for folder in steps.iterdir():
        if match := re.fullmatch(rf"(\d+)-(\d+){ending}", folder.name):
            yield Kept(int(match[1]), int(match[2]), folder)
