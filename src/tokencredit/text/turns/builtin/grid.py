"""The built-in environment `builtin:grid`: a 4 × 4 grid in words, with a goal and holes."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from typing import Any

from tokencredit.text.data.prompts import Prompt
from tokencredit.text.turns.protocols.episode import appended

SIZE, HOLES, MOVES = 4, 3, 8
DISTANCES = range(2, 5)
"""Lengths of the shortest way from the start to the goal: at most half of the moves, which leaves some for detours."""
Field = tuple[int, int]
"""Row and column."""
DIRECTIONS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


class Grid:
    """A walk to the goal, one direction per turn, in at most `MOVES` turns; a hole ends it.

    Each observation says how far the goal is, and what lies in the four directions. Its only reward is 1 for the turn
    that reaches the goal. The protocol is that of `step` (docs/turns.md).
    """

    def reset(self, row: Mapping[str, Any]) -> Prompt:
        """Draw the map of `row["seed"]`; returns the rules and the first view, after the row's prompt."""
        self._position, self._goal, self._holes = draw(random.Random(row["seed"]))
        self._moves = 0
        return appended(
            row.get("prompt") or "", f"Reach the goal in {MOVES} moves and avoid the holes.\n{self._view()}"
        )

    def step(self, completion: str) -> tuple[str, float, bool]:
        """Go in the direction that the completion names; returns the observation, the reward and the end.

        A wall stops the move. Anything that is no direction wastes the turn.
        """
        self._moves += 1
        step = DIRECTIONS.get(completion.strip().lower())
        if step is None:
            result = "No direction: say up, down, left or right."
        elif inside(there := neighbour(self._position, step)):
            self._position, result = there, "Moved."
        else:
            result = "Blocked."
        if self._position == self._goal:
            return "\nYou reached the goal.", 1.0, True
        if self._position in self._holes:
            return "\nYou fell into a hole.", 0.0, True
        if self._moves == MOVES:
            return "\nNo moves are left.", 0.0, True
        return f"\n{result}\n{self._view()}", 0.0, False

    def _view(self) -> str:
        """Way to the goal and the neighbouring fields, in lines of equal numbers of words."""
        down, right = (goal - here for goal, here in zip(self._goal, self._position, strict=True))
        way = f"{abs(down)} {'up' if down < 0 else 'down'} {abs(right)} {'left' if right < 0 else 'right'}"
        around = [f"{name.capitalize()}: {self._kind(step)}" for name, step in DIRECTIONS.items()]
        return "\n".join([f"Goal: {way}", *around, "Move:"])

    def _kind(self, step: Field) -> str:
        """Kind of the neighbouring field: wall, hole, goal or free."""
        there = neighbour(self._position, step)
        if not inside(there):
            return "wall"
        return "hole" if there in self._holes else "goal" if there == self._goal else "free"


def draw(rng: random.Random) -> tuple[Field, Field, frozenset[Field]]:
    """Draw start, goal and holes until the shortest way has one of the lengths `DISTANCES`."""
    fields = [(row, column) for row in range(SIZE) for column in range(SIZE)]
    while True:
        start, goal, *holes = rng.sample(fields, HOLES + 2)
        if shortest(start, goal, holes) in DISTANCES:
            return start, goal, frozenset(holes)


def shortest(start: Field, goal: Field, holes: Collection[Field]) -> int | None:
    """Number of moves of the shortest way around the holes; None if there is no way."""
    reached, edge, moves = {start}, {start}, 0
    while edge:
        if goal in edge:
            return moves
        around = {neighbour(field, step) for field in edge for step in DIRECTIONS.values()}
        edge = {field for field in around if inside(field) and field not in holes} - reached
        reached |= edge
        moves += 1
    return None


def neighbour(field: Field, step: Field) -> Field:
    """The field a step away."""
    return field[0] + step[0], field[1] + step[1]


def inside(field: Field) -> bool:
    """True for a field of the grid."""
    return all(0 <= index < SIZE for index in field)
