"""Stream of a run's batches: prompts and the uniforms that completions are sampled with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokencredit.distributed.processes import Processes
from tokencredit.learn.rng import from_hex, to_hex
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.text.data.prompts import PromptBatch, Prompts
from tokencredit.text.data.tasks import TaskBatch, Tasks


class BatchStream:
    """Prompts and uniforms of successive batches; each process takes its share.

    The stream has its own generator, so that samples depend neither on shuffling nor on another stream.
    """

    def __init__(self, prompts: Prompts | Tasks, settings: RolloutConfig, processes: Processes, seed: int):
        self.prompts, self.settings, self.processes = prompts, settings, processes
        self.generator = torch.Generator().manual_seed(seed)
        self.drawn = 0
        """Prompts drawn so far; the position in their sequence."""

    def next_batch(self) -> tuple[PromptBatch | TaskBatch, Tensor]:
        """This process's prompts or episodes of the next batch, and its uniforms `[share, max_new_tokens]`.

        Completions of one prompt stay in one process.
        """
        settings = self.settings
        size, group = settings.batch_size, settings.per_prompt  # which may change when a run is resumed
        rows = share_of_rows(self.processes, size, group)
        prompts = self.prompts.batch(self.drawn * group + rows.start, rows.stop - rows.start, group)
        self.drawn += size // group
        uniforms = torch.rand(size, settings.max_new_tokens, generator=self.generator)
        return prompts, uniforms[rows]

    def state_dict(self) -> dict[str, Any]:
        """Position and RNG state."""
        return {"drawn": self.drawn, "sampling": to_hex(self.generator.get_state())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        self.drawn = state["drawn"]
        self.generator.set_state(from_hex(state["sampling"]))


def share_of_rows(processes: Processes, rows: int, group: int) -> slice:
    """This process's part of rows that come in groups, none of which is split."""
    groups = processes.share(rows // group)
    return slice(groups.start * group, groups.stop * group)
