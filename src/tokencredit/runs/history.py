"""The metrics of all iterations of a run, in little memory."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import overload

Row = Mapping[str, float]


class History(Sequence[Row]):
    """Rows of metrics, kept a column at a time: eight bytes a number, where a dict a row takes ten times that.

    What a row lacks, or has as None, is NaN.
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
