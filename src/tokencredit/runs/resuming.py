"""Find the newest valid checkpoint, the settings that changed since, and the command that resumes a run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_origin

from torch import Tensor

from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError
from tokencredit.provenance.environment import versions
from tokencredit.provenance.parts import Part, label
from tokencredit.runs.checkpoint import DamagedCheckpoint, read_checkpoint, read_values
from tokencredit.runs.folder import read_parts, size
from tokencredit.runs.folder import saved as saved
from tokencredit.runs.jsonl import LIMITS
from tokencredit.settings.data import TEXTS
from tokencredit.settings.fields import flat, settings_of, unused
from tokencredit.settings.parts import PYTHON
from tokencredit.settings.reader import read_yaml
from tokencredit.settings.run_kind import PARTS, RunKind, run_kind_of

LINES = ("metrics.jsonl", "samples.jsonl")
"""Files of a run that grow with each iteration; a checkpoint records their length."""
FIXED = ("seed", "model", "critic", "optim.name", "agent", "env", "algorithm", "whole_episodes", "sft.loss_on")
"""Settings, or groups of them, that determine a checkpoint's content."""
FREE = (
    "model.compile",
    "model.gradient_checkpointing",
    "model.trust_remote_code",
    "critic.lr",
    "critic.coef",
    "critic.clip",
    "env.processes",
    *LIMITS,
)
"""Exceptions, which may change."""
READ = ("prompts.column", "prompts.template", "prompts.config_name", "data.column", "data.template")
"""Settings with which the rows of every data set are read."""
FINGERPRINTED = ("model.name", "model", "processing_class")
"""Parts whose weights and tokens the trainer compares with those of the checkpoint."""


def place(run: Path, number: int) -> Path:
    """Folder of the checkpoint of an iteration."""
    return run / "checkpoints" / f"{number:06d}"


def at_iteration(
    run: Path, number: int | None, processes: Processes, sharded: Mapping[str, Tensor] | None = None
) -> tuple[int, dict[str, Any]]:
    """A run's checkpoint of this iteration (None: the newest): its iteration, and the trainer's state.

    All processes call it; `processes` and `sharded` are as in `newest`.

    Raises:
        ConfigError: there is no such checkpoint, or it is damaged.
    """
    available = saved(run)
    if not available:
        raise ConfigError(
            f"{str(run)!r} has no checkpoint; a run writes one every run.save_every iterations and at its end, with "
            "0 none; audit.every audits during training"
        )
    number = available[-1] if number is None else number
    if number not in available:
        raise ConfigError(
            f"{str(run)!r} has no checkpoint of iteration {number}; there are: {', '.join(map(str, available))}"
        )
    try:
        return number, for_trainer(read_checkpoint(place(run, number), processes, sharded))
    except DamagedCheckpoint as error:
        raise ConfigError(f"the checkpoint of iteration {number} cannot be used: {error}") from error


def for_trainer(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state given to `RunRecord.checkpoint`, with `process` and `all_processes` as in `read_checkpoint`."""
    return {**state["trainer"], "process": state["process"], "all_processes": state["all_processes"]}


def newest(
    run: Path, processes: Processes, sharded: Mapping[str, Tensor] | None = None
) -> tuple[int, dict[str, Any] | None, list[str]]:
    """The newest valid checkpoint of a run's folder: its iteration, its state, and a line per damaged newer one.

    0 and None without checkpoints. The run's metrics and samples must be at least as long as the checkpoint records.
    All processes call it; `sharded` are the trainer's sharded parameters, by name.

    Raises:
        ConfigError: all checkpoints are damaged.
    """
    damaged: list[str] = []
    for number in reversed(saved(run)):
        folder = place(run, number)
        try:
            # Hashes and formats of its files.
            state = read_checkpoint(folder, processes, sharded)
            # The lines of its iterations, which the run goes on after.
            for name in LINES:
                if not 0 <= state["files"][name] <= size(run / name):
                    raise DamagedCheckpoint(f"{name} has lost lines since")
            # Fields that the record itself reads; the trainer checks its own.
            for name, kind in (("trainer", dict), ("seconds", float), ("bad_in_a_row", int)):
                if not isinstance(state[name], kind):
                    raise DamagedCheckpoint(f"{name} is {state[name]!r}")
            return number, state, damaged
        except (DamagedCheckpoint, KeyError, TypeError) as error:
            damaged.append(f"the checkpoint {folder} cannot be used, trying the one before it: {error}")
    if damaged:
        raise ConfigError("; ".join([*damaged, "there is none before it; begin a new run with another run.dir"]))
    return 0, None, []


def started_from(run: Path) -> dict[str, Any] | None:
    """The `origin` of a language-model run, from its newest readable checkpoint; None without one."""
    for number in reversed(saved(run)):
        try:
            state: Any = read_values(place(run, number))
            origin: dict[str, Any] = state["trainer"]["origin"]
            if {"model", "tokenizer"} <= set(origin):
                return origin
        except (DamagedCheckpoint, KeyError, TypeError):
            continue
    return None


def changes(file: Path, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that differ from a run's config.yaml: before and now, by key.

    Not counted: the run's folder, and settings without an effect now. Entries of lists and dicts may come or go.
    """
    kind: Any = run_kind_of(config).config
    before, now = flat(read_yaml(file)), flat(config)
    # Compared by `changed_parts`.
    parts = {key for key in before | now if key.startswith("python")}
    parts |= {key for key in PARTS if all(str(x.get(key)).startswith(PYTHON) for x in (before, now))}
    ignored = {"run.dir", "run.allow_changed", *parts, *unused(kind, now)}
    for settings in (before, now):  # null equals its default
        if settings.get("prompts.text", 0) is None:
            settings["prompts.text"] = TEXTS
    # A key of one side alone is an entry of a list or a dict, or was left out of a file written by hand.
    dicts = tuple(f"{key}." for key, x in settings_of(kind).items() if get_origin(x.hint) is dict)
    counted = before.keys() & now | {key for key in before | now if "[" in key or key.startswith(dicts)}
    both = {key: (before.get(key), now.get(key)) for key in now | before if key in counted}
    return {key: values for key, values in both.items() if values[0] != values[1] and key not in ignored}


def changed_parts(
    before: Mapping[str, Part],
    now: Mapping[str, Part],
    changed: Mapping[str, tuple[Any, Any]],
    allowed: Collection[str],
) -> Iterator[tuple[str, str]]:
    """Parts that differ from those that a run began with, by argument or key, and a line on each for the user.

    A part that `changed` settings choose, such as a data set's split or the `kwargs` of the same code, is no part that
    was replaced.

    Raises:
        ConfigError: one is not among the `allowed`.
    """
    # Entries of lists of names, such as `tools`, count one by one.
    lists = {name: pair for name, pair in changed.items() if all(isinstance(x, list) for x in pair)}
    entries = {f"{name}[{i}]" for name, x in lists.items() for i, (a, b) in enumerate(zip_longest(*x)) if a != b}
    settings = {*changed, *entries}
    for key in {**before, **now}:
        old, new = before.get(key), now.get(key)
        if (old and old["digest"]) == (new and new["digest"]):
            continue
        rows = (f"{key.removesuffix('dataset')}split", *READ) if key.endswith("dataset") else ()
        kwargs = f"{key.partition('.')[0]}.kwargs."
        same_code = old and new and _without_arguments(old) == _without_arguments(new)
        if not settings.isdisjoint({key, *rows}) or (same_code and any(x.startswith(kwargs) for x in changed)):
            continue
        here, there = (label(part) if part else "not given" for part in (new, old))
        if not {key, key.partition("[")[0]} & {*allowed, *FINGERPRINTED}:
            raise ConfigError(
                f"{key} is {here}, and this run was begun with {there}; restore it, or go on with run.allow_changed: "
                f"{json.dumps([key])}"
            )
        yield key, f"{key} is now {here}; it was {there}"


def _without_arguments(part: Part) -> Part:
    """The description of a part but for what it is called with, and its place."""
    return {name: x for name, x in part.items() if name not in ("arguments", "given", "digest", "file")}


def changes_since(
    done: int,
    state: Mapping[str, Any] | None,
    changed: Mapping[str, tuple[Any, Any]],
    replaced: Mapping[str, str],
    processes: int,
) -> Iterator[tuple[str | None, str]]:
    """How a run differs from its checkpoint: what has changed, if it is a setting or a part, and a line for the user.

    `changed` are settings before and now, `replaced` lines on parts that have changed, by argument or key, and
    `processes` is their number now.
    """
    if state is not None and state["all_processes"] is not None:
        before, now = len(state["all_processes"]), processes
        yield (
            None,
            f"the run goes on in {now} process{'es' * (now > 1)}; the checkpoint is of {before}. Minibatches and "
            "samples stay the same; random numbers of libraries, such as those of dropout and of reward functions, do "
            "not",
        )
    yield None, f"resumed after iteration {done}" if state else "no checkpoint yet: the run begins anew"
    for key, (old, new) in changed.items():
        yield key, f"{key} is now {new!r}; it was {old!r}"
    yield from replaced.items()
    for name, version in versions().items():
        old = version if state is None else state["versions"].get(name, version)
        if old != version:
            yield None, f"{name} is now {version}; the checkpoint is of {old}"


def allowed_changes(file: Path, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """As `changes`, for a run that is resumed; raises `ConfigError` for a setting that it cannot change."""
    changed = changes(file, config)
    for key, (before, now) in changed.items():
        if key not in FREE and any(f"{key}.".startswith(f"{group}.") for group in FIXED):
            raise ConfigError(f"{key} is {now!r}, but this run was begun with {before!r}; it cannot change any more")
    return changed


def never_saved(run: Path, save_every: int) -> str:
    """What to do with a run that cannot be resumed since it saves no checkpoints; empty for others."""
    if saved(run) or save_every or not (run / "metrics.jsonl").is_file():
        return ""
    return "run.save_every is 0; begin a new run with another run.dir"


def refuse_other_parts(run: Path, parts: Mapping[str, Part]) -> None:
    """Raise `ConfigError` if a part is not the one that a run was trained with, by its digest.

    Callbacks and prompts for evaluation take no part in an audit.
    """
    before = read_parts(run)
    for key in sorted({*before, *parts}):
        was, now = before.get(key), parts.get(key)
        if key.startswith(("callbacks", "eval")) or (was and was["digest"]) == (now and now["digest"]):
            continue
        then, here = ("nothing" if part is None else label(part) for part in (was, now))
        raise ConfigError(f"{key} is {here}; the run had {then}: give the same, or restore its file")


def how_to_resume(
    run: Path, run_kind: RunKind, save_every: int, mended: Sequence[str] = (), *, python: bool, by_hand: bool
) -> str:
    """How to resume a run: the command, or for one from `python` the call, with a caution if there is no checkpoint.

    `mended` are the parts of the user, by argument or key, that have to change first.
    """
    if caution := never_saved(run, save_every):
        return f"no checkpoint is saved, so it cannot be resumed: {caution}"
    caution = "" if saved(run) else "no checkpoint is saved yet, so resuming begins anew; "
    caution += "mend it, then " if mended else ""
    parts = json.dumps(list(mended))
    if python or by_hand:
        in_trl = f'(TRL\'s settings={{"run.allow_changed": {parts}}})'
        changed = f" and args.run.allow_changed = {parts} {in_trl}" if mended else ""
        return (
            f"{caution}run your script again with args.run.dir = {str(run)!r} (TRL's output_dir){changed}, and call "
            f"trainer.{'begin' if by_hand else 'train'}(resume_from_checkpoint=True)"
        )
    changed = f" --run.allow_changed {shlex.quote(parts)}" if mended else ""
    return f"{caution}resume with: tokencredit {run_kind.command} --resume {shlex.quote(str(run))}{changed}"
