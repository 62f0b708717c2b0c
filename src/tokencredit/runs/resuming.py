"""Find the newest valid checkpoint and the settings that changed since."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError
from tokencredit.runs.checkpoint import DamagedCheckpoint, OldCheckpoint, read_checkpoint, read_values
from tokencredit.runs.folder import AUTO_SETTINGS, CHOICES, read_python
from tokencredit.settings.data import TEXTS
from tokencredit.settings.fields import unused
from tokencredit.settings.run_kind import run_kind_of
from tokencredit.settings.yaml import flat, read_yaml

LINES = ("metrics.jsonl", "samples.jsonl")
"""Files of a run that grow with each iteration; a checkpoint records their length."""
FIXED = ("seed", "model", "critic", "optim.name", "agent", "env", "algorithm")
"""Settings, or groups of them, that determine a checkpoint's content."""
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
"""Exceptions, which may change."""


def saved(checkpoints: Path) -> list[int]:
    """Iterations with a checkpoint, in order."""
    return sorted(int(folder.name) for folder in checkpoints.glob("*") if folder.name.isdecimal())


def at_iteration(
    run: Path, number: int | None, processes: Processes, sharded: Mapping[str, Tensor] | None = None
) -> tuple[int, dict[str, Any]]:
    """A run's checkpoint of this iteration (None: the newest): its iteration, and the trainer's state.

    All processes call it; `processes` and `sharded` are as in `newest`.

    Raises:
        ConfigError: there is no such checkpoint, or it is damaged.
    """
    available = saved(run / "checkpoints")
    if not available:
        raise ConfigError(
            f"{str(run)!r} has no checkpoint; a run writes one every run.save_every iterations and at its end; "
            "audit.every audits during training"
        )
    number = available[-1] if number is None else number
    if number not in available:
        raise ConfigError(
            f"{str(run)!r} has no checkpoint of iteration {number}; there are: {', '.join(map(str, available))}"
        )
    try:
        state = read_checkpoint(run / "checkpoints" / f"{number:06d}", processes, sharded)
    except DamagedCheckpoint as error:
        raise ConfigError(f"the checkpoint of iteration {number} cannot be used: {error}") from error
    return number, for_trainer(state)


def for_trainer(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state given to `RunRecord.checkpoint`, with `process` and `all_processes` as in `read_checkpoint`."""
    return {**state["trainer"], "process": state["process"], "all_processes": state["all_processes"]}


def newest(
    checkpoints: Path, run: Path, processes: Processes, sharded: Mapping[str, Tensor] | None = None
) -> tuple[int, dict[str, Any] | None, list[str]]:
    """The newest valid checkpoint; all processes call it.

    Args:
        checkpoints: folder of the checkpoints.
        run: folder of the run; its metrics and samples must be at least as long as the checkpoint records.
        processes: the processes of the job.
        sharded: the trainer's sharded parameters, by name.

    Returns:
        Its iteration, its state, and a line per damaged newer one; 0 and None without checkpoints.

    Raises:
        ConfigError: all checkpoints are damaged or of an older version.
    """
    damaged: list[str] = []
    for number in reversed(saved(checkpoints)):
        folder = checkpoints / f"{number:06d}"
        try:
            state = read_checkpoint(folder, processes, sharded)
            for name in LINES:
                if not 0 <= state["files"][name] <= size(run / name):
                    raise DamagedCheckpoint(f"{name} has lost lines since")
            for name, kind in (("trainer", dict), ("seconds", float), ("bad_in_a_row", int)):
                if not isinstance(state[name], kind):
                    raise DamagedCheckpoint(f"{name} is {state[name]!r}")
            return number, state, damaged
        except OldCheckpoint as error:  # earlier ones are as old
            raise ConfigError(
                "; ".join(
                    [
                        *damaged,
                        f"the checkpoints of {str(run)!r} were written by an older version of Tokencredit; begin a new "
                        "run with another --run.dir, or resume it with the version that wrote them",
                    ]
                )
            ) from error
        except (DamagedCheckpoint, KeyError, TypeError) as error:
            damaged.append(f"the checkpoint {folder} cannot be used, trying the one before it: {error}")
    if damaged:
        raise ConfigError("; ".join([*damaged, "there is none before it; begin a new run with another --run.dir"]))
    return 0, None, []


def started_from(run: Path) -> dict[str, Any] | None:
    """The `origin` of a language-model run, from its newest readable checkpoint; None without one."""
    for number in reversed(saved(run / "checkpoints")):
        try:
            state: Any = read_values(run / "checkpoints" / f"{number:06d}")
            origin: dict[str, Any] = state["trainer"]["origin"]
            if {"model", "tokenizer", "given"} <= set(origin):
                return origin
        except (DamagedCheckpoint, KeyError, TypeError):
            continue
    return None


def given_in_python(run: Path) -> list[str]:
    """Names of the arguments of `PPOTrainer` that a run began with and its folder does not hold, such as reward_funcs;
    none if neither python.json nor a checkpoint, as of an older version, has them."""
    names = read_python(run)
    if names is not None:
        return names
    origin = started_from(run)
    return [] if origin is None else list(origin["given"])


def size(file: Path) -> int:
    """A file's size; 0 if there is none."""
    return file.stat().st_size if file.exists() else 0


def changes(file: Path, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that differ from a run's config.yaml: before and now, by key.

    Not counted: settings that the file lacks because they are newer, the run's folder, settings without an effect now,
    and a run's choice for a setting that is `auto`. Entries of a list may be added or removed.
    """
    then, now = flat(read_yaml(file)), flat(config)
    ignored = {"run.dir", *unused(run_kind_of(config).config, now)}
    if not (file.parent / CHOICES).is_file():  # older versions wrote the choice into config.yaml instead of `auto`
        now |= {key: then[key] for key in AUTO_SETTINGS if now.get(key) == "auto" and key in then}
    for settings in (then, now):  # null equals its default
        settings |= {key: TEXTS for key in ("prompts.text", "eval.prompts.text") if settings.get(key, 0) is None}
    both = {key: (then.get(key), now.get(key)) for key in now | then if (key in then and key in now) or "[" in key}
    return {key: values for key, values in both.items() if values[0] != values[1] and key not in ignored}


def allowed_changes(file: Path, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """As `changes`, for a run that is resumed.

    Raises:
        ConfigError: a setting has changed that a resumed run cannot change.
    """
    changed = changes(file, config)
    for key, (then, now) in changed.items():
        if fixed(key):
            raise ConfigError(f"{key} is {now!r}, but this run was begun with {then!r}; it cannot change any more")
    return changed


def fixed(key: str) -> bool:
    """True for a setting that a resumed run cannot change."""
    return key not in FREE and any(key == group or key.startswith(f"{group}.") for group in FIXED)
