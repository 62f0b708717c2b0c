"""Metrics of all iterations of a run, compact in memory, and their means."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from tokencredit.runs.jsonl import is_number

WINDOW = 5
"""Most iterations averaged at either end of a run."""
Row = Mapping[str, float]


class History(Sequence[Row]):
    """Rows of metrics, stored by column: eight bytes per number, a tenth of a dict per row.

    Missing values and None are NaN.
    """

    def __init__(self) -> None:
        self._columns: dict[str, array[float]] = {}
        self._rows = 0

    def append(self, row: Mapping[str, float | None]) -> None:
        """Add a row."""
        for name in row:
            if name not in self._columns:
                self._columns[name] = array("d", [math.nan] * self._rows)
        for name, column in self._columns.items():
            value = row.get(name)
            column.append(math.nan if value is None else value)
        self._rows += 1

    def column(self, name: str) -> Sequence[float]:
        """One metric in all rows; empty if no row has it."""
        return self._columns.get(name, array("d"))

    def __len__(self) -> int:
        return self._rows

    @overload
    def __getitem__(self, at: int) -> Row: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Row]: ...
    def __getitem__(self, at: int | slice) -> Row | Sequence[Row]:
        if isinstance(at, slice):
            return [self[row] for row in range(*at.indices(self._rows))]
        return {name: column[at] for name, column in self._columns.items()}

    def __iter__(self) -> Iterator[Row]:
        return (self[row] for row in range(self._rows))


def finite(values: Iterable[Any]) -> Iterator[float]:
    """The finite numbers among the values."""
    return (float(value) for value in values if is_number(value))


def mean(values: Iterable[Any]) -> float | None:
    """Mean of the finite numbers among the values; None if there are none."""
    numbers = list(finite(values))
    return sum(numbers) / len(numbers) if numbers else None


def final_window(iterations: int) -> int:
    """Number of final iterations averaged: `WINDOW`, or half of a run shorter than twice that, without its start."""
    return min(WINDOW, max(1, iterations // 2))


def final_mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """A metric's mean over the last `final_window` iterations; None if it has no finite number there."""
    return mean(row.get(name) for row in rows[-final_window(len(rows)) :])
