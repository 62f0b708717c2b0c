"""An agent's episode on the page: pictures, and the credit of each step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokencredit.errors import ConfigError
from tokencredit.report.templating import two_digits
from tokencredit.runs.jsonl import COUNT, KNOWN, Form, Leaf, is_number, read_object, require

STEPS = 1_000
"""Maximum steps of an episode that a run's folder and its page keep."""
PER_STEP = ("actions", "rewards", "values", "advantages")


def _is_action(value: Any, axes: int = 32) -> bool:
    nested = isinstance(value, list) and axes > 0  # more would be an attack on whatever reads them
    return is_number(value) or (nested and all(_is_action(part, axes - 1) for part in value))


FLAG = Leaf(lambda value: isinstance(value, bool), "true or false")
PNG = Leaf(
    lambda value: isinstance(value, str) and re.fullmatch(r"iVBORw0KGgo[A-Za-z0-9+/]+=*", value) is not None,
    "a PNG file in base64",
)
EPISODE_FILE: dict[str, Form] = {
    "iteration": COUNT,
    "greedy": FLAG,
    "terminated": FLAG,
    "return": KNOWN,
    "length": COUNT,
    "actions": [Leaf(_is_action, "a number or a list of numbers")],
    "rewards": [KNOWN],
    "values?": [KNOWN],  # with a critic
    "advantages": [KNOWN],
    "frames": [{"step": COUNT, "png": PNG}],
}
"""The form of episode.json; lists have an entry per step, of the first `STEPS`."""


def read_episode(file: Path) -> dict[str, Any] | None:
    """The episode in this file, None without one; raises `ConfigError` with the key if it is invalid."""
    if not file.is_file():
        return None
    episode = read_object(file, file.read_text(encoding="utf-8", errors="replace"))
    require(file, episode, EPISODE_FILE)
    lengths = {len(episode[name]) for name in PER_STEP if name in episode}
    if len(lengths) != 1 or not 0 < max(lengths) <= STEPS:
        raise ConfigError(f"{file}: its lists must have one length, from 1 to {STEPS}")
    if any(frame["step"] > episode["length"] for frame in episode["frames"]):
        raise ConfigError(f"{file}: a frame is of a step after the end")
    return episode


def view(episode: Mapping[str, Any]) -> dict[str, Any]:
    """The episode for the page: its story in words, and actions, numbers and pictures per step."""
    shown, length = len(episode["actions"]), episode["length"]
    end = "in a terminal state" if episode["terminated"] else "by a time limit"
    how = "the most likely actions" if episode["greedy"] else "sampled actions"
    first = f" The first {shown:,} are shown." if shown < length else ""
    numbers = {"advantage": "advantages", "value": "values", "reward": "rewards"}
    return {
        "about": f"Played after iteration {episode['iteration']} with {how}: return {two_digits(episode['return'])} in "
        f"{length:,} steps, ended {end}.{first}",
        "actions": [action_text(action) for action in episode["actions"]],
        "marks": [str(action) if isinstance(action, int) else "·" for action in episode["actions"]],
        "numbers": {name: episode[key] for name, key in numbers.items() if key in episode},
        "frames": [{"step": x["step"], "src": f"data:image/png;base64,{x['png']}"} for x in episode["frames"]],
    }


def action_text(action: Any) -> str:
    """An action in words: a number, or several in brackets."""
    return f"({', '.join(map(action_text, action))})" if isinstance(action, list) else two_digits(action)
