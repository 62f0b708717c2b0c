"""Rows of episodes: columns of a data set, or none, with a seed per episode, in a reproducible order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokencredit.errors import ConfigError
from tokencredit.provenance.parts import column_names
from tokencredit.settings.data import PromptsConfig
from tokencredit.text.data.datasets import Rows, rows_of
from tokencredit.text.data.prompts import shuffled


@dataclass(frozen=True)
class TaskBatch:
    """Rows and seeds of a batch of episodes; one per episode."""

    rows: list[dict[str, Any]]
    """What an environment's `reset` is given."""
    seeds: list[int]
    """Seed of each episode; the episodes of a group share it."""
    columns: dict[str, list[Any]]
    """Columns of the data set, for reward functions."""


class Tasks:
    """An endless sequence of rows, determined by the data and the seeds."""

    def __init__(
        self, rows: Rows | None, *, name: str, seed: int, stream: int = 0, shuffle: bool = True, column: str = "prompt"
    ):
        """Keep the rows, named `name` in messages; None if environments make their own episodes.

        `seed` is that of the order, which is reshuffled in every epoch if `shuffle`, and of the episodes; `stream`
        separates those of evaluations from those of training. Environments receive the `column` of prompts, if there is
        one, as `prompt`.
        """
        if rows is not None and len(rows) == 0:
            raise ConfigError(f"{name} has no rows; give at least one, or leave it out")
        self.rows, self.name, self.seed, self.stream, self.shuffle = rows, name, seed, stream, shuffle
        self.kept = range(1 if rows is None else len(rows))
        """Indices of the rows in use: all of them."""
        columns = [] if rows is None else column_names(rows)
        if rows is not None and column != "prompt" and (column not in columns or "prompt" in columns):
            wrong = "has another column 'prompt'" if column in columns else f"has only {', '.join(columns)}"
            raise ConfigError(f"the column of prompts is {column!r}, and {name} {wrong}; name one column of prompts")
        self.other_columns = [name for name in columns if name != column]
        self._sources = {name: name for name in self.other_columns} | ({"prompt": column} if column in columns else {})
        self.columns = list(self._sources)
        """Names of the columns that environments receive."""

    def batch(self, first: int, size: int, repeat: int = 1) -> TaskBatch:
        """Rows `first` to `first + size − 1` of the endless sequence with each row repeated `repeat` times."""
        positions = [(first + place) // repeat for place in range(size)]
        rows = [self._row(position) for position in positions]
        sequences = (np.random.SeedSequence([self.seed, self.stream, position]) for position in positions)
        seeds = [int(sequence.generate_state(1)[0]) for sequence in sequences]
        return TaskBatch(rows, seeds, {name: [row.get(name) for row in rows] for name in self.other_columns})

    def values(self, column: str) -> Iterator[Any]:
        """The values of a column; none without it."""
        rows = [] if self.rows is None or column not in self.columns else self.rows
        return (row.get(column) for row in rows)

    def dropped(self) -> None:
        """None: no row is dropped."""

    def _row(self, position: int) -> dict[str, Any]:
        if self.rows is None:
            return {}
        row = self.rows[shuffled(position, len(self.kept), self.seed if self.shuffle else None)]
        return {name: row.get(source) for name, source in self._sources.items()}


def load_tasks(
    config: PromptsConfig, *, seed: int, stream: int, dataset: Rows | None = None, group: str, dataset_name: str
) -> Tasks:
    """The rows of a configuration's prompts, which may be none: environments then make their own episodes.

    Arguments and errors are those of `load_prompts` and `Tasks`.
    """
    for key, unset in (("template", None), ("max_length", None), ("overlong", "error"), ("role", None)):
        if (value := getattr(config, key)) != unset:
            raise ConfigError(f"prompts.{key} is {value!r}, and an environment makes the prompts; leave it out")
    source = rows_of(config, dataset, dataset_name, group)
    rows, name = source or (None, f"{group}.text")
    if source is None and config.text is not None:
        rows = [{config.column: x} for x in ([config.text] if isinstance(config.text, str) else config.text)]
    shuffle = source is not None if config.shuffle is None else config.shuffle
    return Tasks(rows, name=name, seed=seed, stream=stream, shuffle=shuffle, column=config.column)
