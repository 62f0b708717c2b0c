"""Find the newest valid checkpoint and the settings that changed since."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokencredit.errors import ConfigError
from tokencredit.runs.checkpoint import DamagedCheckpoint, OldCheckpoint, read_checkpoint, read_values
from tokencredit.runs.folder import AUTO_SETTINGS, CHOICES
from tokencredit.settings.data import TEXTS
from tokencredit.settings.fields import idle
from tokencredit.settings.world import world_of
from tokencredit.settings.yaml import flat, read_yaml

LINES = ("metrics.jsonl", "samples.jsonl")
"""Files of a run that grow with each iteration; a checkpoint knows how long they were."""
FIXED = ("seed", "model", "critic", "optim.name", "agent", "env", "algorithm")
"""Settings, or groups of them, that decide what a checkpoint holds."""
FREE = (
    "model.compile",
    "model.gradient_checkpointing",
    "model.trust_remote_code",
    "critic.lr",
    "critic.coef",
    "critic.clip",
    "critic.huber_delta",
    "critic.places",
    "critic.schedule",
    "critic.warmup",
    "env.processes",
)
"""Those of them that do not."""


def saved(checkpoints: Path) -> list[int]:
    """The iterations of which there are checkpoints, in order."""
    return sorted(int(folder.name) for folder in checkpoints.glob("*") if folder.name.isdecimal())


def at_iteration(run: Path, number: int | None) -> tuple[int, dict[str, Any]]:
    """A checkpoint of a run, by its iteration, None for the newest: its number, and the state of the trainer.

    Raises:
        ConfigError: there is no such checkpoint, or it is damaged.
    """
    there = saved(run / "checkpoints")
    if not there:
        raise ConfigError(
            f"{str(run)!r} has no checkpoint; a run writes one every run.save_every iterations and at its end, and "
            "audit.every audits it while it trains"
        )
    number = there[-1] if number is None else number
    if number not in there:
        raise ConfigError(
            f"{str(run)!r} has no checkpoint of iteration {number}; there are: {', '.join(map(str, there))}"
        )
    try:
        state = read_checkpoint(run / "checkpoints" / f"{number:06d}", 0)
    except DamagedCheckpoint as error:
        raise ConfigError(f"the checkpoint of iteration {number} cannot be used: {error}") from error
    return number, {**state["trainer"], "process": state["process"]}


def newest(checkpoints: Path, process: int, run: Path) -> tuple[int, dict[str, Any] | None, list[str]]:
    """The newest checkpoint that can be used.

    Args:
        checkpoints: their folder.
        process: this process's number.
        run: the run's folder; its metrics and samples must reach as far as they did.

    Returns:
        Its iteration, its state, and a line on each newer one that is damaged; 0 and None without checkpoints.

    Raises:
        ConfigError: there are checkpoints, and all of them are damaged or of an older version.
    """
    damaged: list[str] = []
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
        except OldCheckpoint as error:  # those before it are as old
            raise ConfigError(
                "; ".join(
                    [
                        *damaged,
                        f"the checkpoints of {str(run)!r} were written by an older version of Tokencredit; begin a new "
                        "run with another --run.dir, or go on with the version that wrote them",
                    ]
                )
            ) from error
        except (DamagedCheckpoint, KeyError, TypeError) as error:
            damaged.append(f"the checkpoint {folder} cannot be used, so the one before it is: {error}")
    if damaged:
        raise ConfigError("; ".join([*damaged, "there is none before it; begin anew with another --run.dir"]))
    return 0, None, []


def started_from(run: Path) -> dict[str, Any] | None:
    """The `origin` of a run of language models, as its newest readable checkpoint holds it; None without one."""
    for number in reversed(saved(run / "checkpoints")):
        try:
            state: Any = read_values(run / "checkpoints" / f"{number:06d}")
            origin: dict[str, Any] = state["trainer"]["origin"]
            if {"model", "tokenizer", "given"} <= set(origin):
                return origin
        except (DamagedCheckpoint, KeyError, TypeError):
            continue
    return None


def size(file: Path) -> int:
    """A file's size; 0 if there is none."""
    return file.stat().st_size if file.exists() else 0


def changes(file: Path, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings that differ from those in a run's config.yaml: before and now, by their keys.

    A setting that the file lacks, because it is newer, has not changed; nor has a run that moved, or a setting without
    an effect now. Entries of a list may come and go. What a run chose for a setting that is `auto` is no change.
    """
    then, now = flat(read_yaml(file)), flat(config)
    left_out = {"run.dir", *idle(world_of(config).config, now)}
    if not (file.parent / CHOICES).is_file():  # older versions wrote the choice into config.yaml, in place of `auto`
        now |= {key: then[key] for key in AUTO_SETTINGS if now.get(key) == "auto" and key in then}
    for settings in (then, now):  # null and what it stands for are the same
        settings |= {key: TEXTS for key in ("prompts.text", "eval.prompts.text") if settings.get(key, 0) is None}
    both = {key: (then.get(key), now.get(key)) for key in now | then if (key in then and key in now) or "[" in key}
    return {key: values for key, values in both.items() if values[0] != values[1] and key not in left_out}


def allowed_changes(file: Path, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """As `changes`.

    Raises:
        ConfigError: a setting has changed that a run cannot change.
    """
    changed = changes(file, config)
    for key, (then, now) in changed.items():
        if fixed(key):
            raise ConfigError(f"{key} is {now!r}, but this run was begun with {then!r}; it cannot change any more")
    return changed


def fixed(key: str) -> bool:
    """True for a setting that must stay what it was when the run began."""
    return key not in FREE and any(key == group or key.startswith(f"{group}.") for group in FIXED)
