"""Where a run that was cut short goes on: at its newest good checkpoint, with settings that may have changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokencredit.errors import ConfigError
from tokencredit.runs.checkpoint import DamagedCheckpoint, read_checkpoint
from tokencredit.settings.yaml import load_yaml

LINES = ("metrics.jsonl", "samples.jsonl")
"""Files of a run that grow with each iteration; a checkpoint knows how long they were."""


FIXED = ("seed", "model", "optim.name", "agent", "env", "algorithm")
"""Settings, or groups of them, that decide what a checkpoint holds."""
FREE = ("model.compile", "model.gradient_checkpointing", "model.trust_remote_code", "env.processes")
"""Those of them that do not."""


def saved(checkpoints: Path) -> list[int]:
    """The iterations of which there are checkpoints, in order."""
    return sorted(int(folder.name) for folder in checkpoints.glob("*") if folder.name.isdecimal())


def newest(checkpoints: Path, process: int, run: Path) -> tuple[int, dict[str, Any] | None, list[str]]:
    """The newest checkpoint that can be used.

    Args:
        checkpoints: their folder.
        process: this process's number.
        run: the run's folder; its metrics and samples must reach as far as they did.

    Returns:
        Its iteration, what stands in it, and a line on each newer one that is damaged; 0 and None without checkpoints.

    Raises:
        ConfigError: there are checkpoints, and all of them are damaged.
    """
    damaged = []
    for number in reversed(saved(checkpoints)):
        folder = checkpoints / f"{number:06d}"
        try:
            state = read_checkpoint(folder, process)
            for name in LINES:
                if not 0 <= state["files"][name] <= size(run / name):
                    raise DamagedCheckpoint(f"{name} has lost lines that stood in it")
            for name, kind in (("trainer", dict), ("seconds", float), ("bad_in_a_row", int)):
                if not isinstance(state[name], kind):
                    raise DamagedCheckpoint(f"{name} is {state[name]!r}")
            return number, state, damaged
        except (DamagedCheckpoint, KeyError, TypeError) as error:
            damaged.append(f"the checkpoint {folder} cannot be used, so the one before it is: {error}")
    if damaged:
        raise ConfigError("; ".join([*damaged, "there is none before it; begin anew with another --run.dir"]))
    return 0, None, []


def size(file: Path) -> int:
    """A file's size; 0 if there is none."""
    return file.stat().st_size if file.exists() else 0


def changes(file: Path, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings that differ from those in a run's config.yaml: before and now, by their keys.

    What the file does not have, such as a setting that is newer than it, has not changed; nor has a run that moved.
    """
    then = flat(load_yaml(file.read_text(encoding="utf-8")))
    now = flat(config)
    return {key: (then[key], now[key]) for key in now if key in then and then[key] != now[key] and key != "run.dir"}


def fixed(key: str) -> bool:
    """Whether a setting must stay what it was when the run began."""
    return key not in FREE and any(key == group or key.startswith(f"{group}.") for group in FIXED)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their whole keys, such as `model.name`; lists are values."""
    settings: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            settings |= flat(value, f"{prefix}{key}.")
        else:
            settings[prefix + key] = value
    return settings
