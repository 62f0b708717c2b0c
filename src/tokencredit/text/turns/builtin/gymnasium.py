"""Gymnasium's toy environments as texts: maps and cards in words, actions by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tokencredit.errors import ConfigError, importing
from tokencredit.text.data.prompts import Prompt
from tokencredit.text.turns.protocols.episode import appended

ACTIONS = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("down", "up", "right", "left", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}
"""Names of the actions 0, 1, 2 … of each environment."""
HINTS = {
    "FrozenLake": "Walk from S to G over the frozen lake F, and around the holes H. The square in brackets is yours.\n",
    "CliffWalking": "Walk from x to T, and around the cliff C.\n",
    "Taxi": (
        "Drive the taxi, in brackets, to the passenger (1), pick them up and drop them off at the destination (2). "
        "A | is a wall, a : can be passed.\n"
    ),
    "Blackjack": "Come as close to 21 as you can, but not above.\n",
}
"""First lines of the prompt."""
MARKED = re.compile(r"\x1b\[([\d;]+)m([^\x1b]*)\x1b\[0m")
COLORS = {"34;1": "{}(1)", "35": "{}(2)", "42": "[{}+]"}
"""Marks of the colors in Taxi's maps: passenger, destination, and a taxi with its passenger."""


class Gymnasium:
    """An environment with discrete actions. A turn's action is the first name of one in its text."""

    def __init__(self, name: str, **settings: Any):
        """Make an environment by its id, such as `FrozenLake-v1`, with its keyword arguments, such as `is_slippery`."""
        with importing("env.factory gymnasium", "Gymnasium", "tokencredit[control]"):
            import gymnasium
        self._kind = name.rpartition("/")[2].partition("-")[0]
        if self._kind not in ACTIONS:
            raise ConfigError(f"it must be one of the environments that have a text: {', '.join(ACTIONS)}")
        self._actions = ACTIONS[self._kind]
        render: dict[str, Any] = {} if self._kind == "Blackjack" else {"render_mode": "ansi"}
        try:
            # Without a time limit of its own, which would look like an end; env.max_turns truncates.
            self._env = gymnasium.make(name, max_episode_steps=-1, **render, **settings)
        except (gymnasium.error.Error, TypeError) as error:
            raise ConfigError(f"Gymnasium cannot make it: {error}") from error

    def reset(self, row: Mapping[str, Any]) -> Prompt:
        """Reset with the row's seed; the text is appended to the row's prompt."""
        observation, _ = self._env.reset(seed=row["seed"])
        return appended(row.get("prompt") or "", HINTS[self._kind] + self._text(observation))

    def step(self, completion: str) -> tuple[str, float, bool]:
        """Take the action that the completion names; one that names none changes nothing and pays nothing."""
        names = "|".join(self._actions)
        named = re.search(rf"\b({names})\b", completion, re.IGNORECASE)
        if named is None:
            return f"\nThat names no action.\n{self._question()}", 0.0, False
        observation, reward, terminated, _, _ = self._env.step(self._actions.index(named.group(1).lower()))
        return "" if terminated else "\n" + self._text(observation), float(reward), bool(terminated)

    def _text(self, observation: Any) -> str:
        if self._kind == "Blackjack":
            total, dealer, ace = observation
            state = f"Your cards sum to {total}{' with an ace as 11' * bool(ace)}; the dealer shows {dealer}.\n"
        else:
            lines = str(self._env.render()).strip().splitlines()
            # A line in parentheses is the last action, which the policy knows.
            state = marked("\n".join(line for line in lines if not line.strip().startswith("("))) + "\n"
        return state + self._question()

    def _question(self) -> str:
        return f"Say {', '.join(self._actions[:-1])} or {self._actions[-1]}.\n"


def marked(text: str) -> str:
    """A map with brackets in place of colors, which may be nested."""
    while MARKED.search(text):
        text = MARKED.sub(lambda match: COLORS.get(match[1], "[{}]").format(match[2]), text)
    return text
