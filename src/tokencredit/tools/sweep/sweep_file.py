"""Read a sweep file: its runs, each with its whole configuration and state."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tokencredit.errors import ConfigError, TooManyBadSteps
from tokencredit.provenance.parts import Part, label
from tokencredit.runs.folder import read_parts, saved
from tokencredit.runs.jsonl import COUNT, NUMBER, read_object, require
from tokencredit.runs.resuming import changes
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.offline import OfflineSettings
from tokencredit.settings.parts import plain
from tokencredit.settings.reader import grouped, read_yaml
from tokencredit.settings.run_kind import (
    RUN_KINDS,
    RunKind,
    foreign_code,
    other_run_kind,
    refuse_by_command,
    refuse_foreign_code,
    refuse_python,
)
from tokencredit.settings.text import PPOConfig

KEYS = ("kind", "base", "grid", "variants", "seeds", "dir")
COMPARISON = "comparison"
"""Folder of the comparison, beside the variants' folders."""
SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,=+-]{0,99}")
"""Valid names of variants, which are folder names."""


@dataclass(frozen=True, eq=False)
class SweepRun:
    """One run of a sweep."""

    run_kind: RunKind
    variant: str
    seed: int
    folder: Path
    config: PPOConfig | ControlConfig | OfflineSettings

    @property
    def name(self) -> str:
        """Display name."""
        return f"{self.variant}/seed-{self.seed}"

    @property
    def log(self) -> Path:
        """File of its processes' output."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def settings(self) -> Path:
        """File of its whole configuration, from which it begins."""
        return self.folder.with_name(f"{self.folder.name}.yaml")

    @property
    def job(self) -> Path:
        """Folder of its job on a cluster."""
        return self.folder.with_name(f"{self.folder.name}.job")

    def summary(self) -> dict[str, Any]:
        """The contents of summary.json; empty before it has ended."""
        file = self.folder / "summary.json"
        if not file.is_file():
            return {}
        summary = read_object(file, file.read_text(encoding="utf-8"))
        require(file, summary, {"iterations": COUNT, "seconds": NUMBER})
        return summary

    def state(self) -> Literal["to begin", "to resume", "finished"]:
        """State of the run; one without checkpoints, or that ended before its first iteration, begins anew."""
        summary = self.summary()
        stopped_by = str(summary.get("stopped_by"))
        # A run interrupted in its last iteration has nothing left to do; one that learned nothing cannot be resumed.
        count = summary.get("iterations", 0)
        done = count >= self.config.run.iterations
        # Of epochs, the data set decides how many iterations they are.
        if isinstance(self.config, OfflineSettings) and (epochs := self.config.data.epochs):
            data, rows = self.config.data, read_parts(self.folder).get("data.dataset", {}).get("rows", 0)
            asked = epochs * (rows - data.held_out_of(rows)) - 1e-9
            done = 0 < asked <= count * data.batch_size
        # One that ended by itself is kept, also if the sweep now asks for more, which `refuse_changed` names.
        if done or stopped_by == "iterations" or stopped_by.startswith("stop."):
            return "to begin" if stopped_by == TooManyBadSteps.stopped_by else "finished"
        begun = (self.folder / "config.yaml").is_file() and summary.get("iterations") != 0
        if begun and (self.config.run.save_every or saved(self.folder)):
            return "to resume"
        return "to begin"


def read_sweep(file: Path, no_code: bool = False) -> list[SweepRun]:
    """The runs of a sweep file (docs/sweeps.md): each variant with each seed, in the file's order.

    Raises:
        ConfigError: the file or one of its variants is invalid, or with `no_code` would execute user code; nothing has
            been run or written.
    """
    sweep = read_yaml(file)
    base = sweep.get("base", {})
    if isinstance(base, str):
        sweep["base"] = read_yaml(file.parent / Path(base).expanduser())
    try:
        return expand(sweep, no_code)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def first_seeds(runs: Sequence[SweepRun], count: int | None) -> list[SweepRun]:
    """Runs with the first seeds of their sweep; all of them for None."""
    seeds = list(dict.fromkeys(run.seed for run in runs))[:count]
    return [run for run in runs if run.seed in seeds]


def expand(sweep: Mapping[str, Any], no_code: bool = False) -> list[SweepRun]:
    """Runs from a sweep file's settings, with `base` as a mapping; see `read_sweep`."""
    for key in sweep:
        if key not in KEYS:
            raise ConfigError(f"unknown key {key}; a sweep has {', '.join(KEYS)}")
    kind, folder = sweep.get("kind", "text"), sweep.get("dir")
    if not isinstance(kind, str) or kind not in RUN_KINDS:
        raise ConfigError(f"kind is {kind!r}; it must be one of {', '.join(RUN_KINDS)}")
    run_kind = RUN_KINDS[kind]
    if not isinstance(folder, str) or not folder:
        raise ConfigError(f"dir is {folder!r}; give the folder of the runs")
    seeds = check_seeds(sweep.get("seeds"))
    base = grouped(run_kind.config, mapping(sweep.get("base", {}), "base").items())
    if other := other_run_kind(base, run_kind.config):
        raise ConfigError(f"base is of kind {other.name}, and kind is {run_kind.name}; set kind: {other.name}")
    runs = []
    for name, overrides in variants(sweep).items():
        try:
            settings = merged(base, grouped(run_kind.config, overrides.items()))
            if "seed" in settings:
                raise ConfigError("seed is set by the sweep; use its key seeds instead")
            if isinstance(settings.get("run"), dict) and "dir" in settings["run"]:
                raise ConfigError("run.dir is set by the sweep; use its key dir instead")
            config: Any = run_kind.config.from_dict(settings)
            if config.run.allow_changed:
                raise ConfigError("run.allow_changed would mix runs of different parts in a sweep; leave it out")
            refuse_foreign_code(config, no_code)
            refuse_python(config, "FILE")
            refuse_by_command(config)
        except ConfigError as error:
            raise ConfigError(f"variant {name}: {error}") from error
        for seed in seeds:
            at = Path(folder).expanduser() / name / f"seed-{seed}"
            own = replace(config, seed=seed, run=replace(config.run, dir=str(at)))
            runs.append(SweepRun(run_kind, name, seed, at, own))
    return runs


def mapping(value: Any, key: str) -> dict[str, Any]:
    """The value, if it is a mapping with text keys; otherwise raises `ConfigError`."""
    if not isinstance(value, dict):
        raise ConfigError(f"{key} is {value!r}; it must be a mapping")
    for name in value:
        if not isinstance(name, str):
            raise ConfigError(f"{key} has {name!r}, which YAML does not read as text; quote it")
    return value


def check_seeds(seeds: Any) -> list[int]:
    """The seeds; raises `ConfigError` unless they are distinct whole numbers, at least one."""
    if not isinstance(seeds, list) or not seeds or any(type(seed) is not int or seed < 0 for seed in seeds):
        raise ConfigError(f"seeds is {seeds!r}; it must be a list of at least one whole number, each at least 0")
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds is {seeds}; each may appear only once")
    return seeds


def variants(sweep: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Overrides of each variant by name, from `variants` or from all combinations of `grid`."""
    if ("grid" in sweep) == ("variants" in sweep):
        raise ConfigError("give grid or variants, one of them" + (", not both" if "grid" in sweep else ""))
    if "grid" in sweep:
        return combinations(mapping(sweep["grid"], "grid"))
    overrides_of = mapping(sweep["variants"], "variants")
    if not overrides_of:
        raise ConfigError("variants is empty; give at least one")
    for name in overrides_of:
        if not SAFE.fullmatch(name) or name == COMPARISON:
            allowed = "at most 100 letters, digits and _.,=+-, beginning with a letter, digit or _, and not"
            raise ConfigError(f"variants has {name!r}, which cannot name a folder; use {allowed} {COMPARISON}")
    return {name: mapping(overrides or {}, f"variants.{name}") for name, overrides in overrides_of.items()}


def combinations(grid: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """All combinations of a grid's values, by names with the shortest unambiguous keys.

    >>> list(combinations({"advantage.lam": [0, 1], "optim.lr": [0.1]}))
    ['lam=0,lr=0.1', 'lam=1,lr=0.1']
    """
    ends = [key.rpartition(".")[2] for key in grid]
    short = [end if ends.count(end) == 1 else key for key, end in zip(grid, ends, strict=True)]
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"grid.{key} is {values!r}; it must be a list of at least one value")
    if not grid:
        raise ConfigError("grid is empty; give at least one key")
    named: dict[str, dict[str, Any]] = {}
    for values in itertools.product(*grid.values()):
        texts = [value if isinstance(value, str) else json.dumps(value, default=str) for value in values]
        safe = (re.sub(r"[^A-Za-z0-9_.+-]+", "-", text).strip("-.") or "-" for text in texts)
        signs = ("-" * bool(re.match(r"-\d", text)) for text in texts)
        name = ",".join(map("{}={}{}".format, short, signs, safe))
        if name in named or not SAFE.fullmatch(name):
            why = "twice" if name in named else "too long or not a folder's name"
            raise ConfigError(f"grid gives the name {name} {why}; name its combinations under variants instead")
        named[name] = dict(zip(grid, values, strict=True))
    return named


def merged(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings with overrides, also of single keyword arguments (`env.kwargs.size`); a list replaces a list."""
    settings = dict(base)
    for key, value in overrides.items():
        both = isinstance(value, dict) and isinstance(settings.get(key), dict)
        settings[key] = merged(settings[key], value) if both else value
    return settings


def refuse_changed(runs: Sequence[SweepRun]) -> None:
    """Raise `ConfigError` if a run to resume or finished had other settings, models, code or data than the sweep."""
    from tokencredit.tools.sweep.current_parts import current_parts  # which imports torch

    parts: dict[str, dict[str, Part]] = {}
    for run in runs:
        file = run.folder / "config.yaml"
        if not file.is_file() or run.state() == "to begin":
            continue
        settings = changes(file, plain(run.config)).items()
        lines = [f"{key} is {now!r} and was {then!r}" for key, (then, now) in settings]
        if not lines and (before := read_parts(run.folder)):
            if run.variant not in parts:  # of which all seeds have the same
                parts[run.variant] = current_parts(run.config)
            same = parts[run.variant].items()
            lines = [f"{key} is now {label(x)}" for key, x in same if x["digest"] != before.get(key, x)["digest"]]
        if lines:
            changed = ", ".join(lines)
            raise ConfigError(
                f"{run.name} in {str(run.folder)!r} was begun with other settings: {changed}; give the sweep another "
                "dir, or move that run away"
            )


def refuse_broken(runs: Sequence[SweepRun]) -> None:
    """Raise `ConfigError` if a run names code of a user that cannot be loaded, or does not fit its settings."""
    for run in {run.variant: run for run in runs}.values():
        config = run.config
        if isinstance(config, PPOConfig | ControlConfig) and foreign_code(config):
            from tokencredit.text.run_parts import check_code  # which imports torch

            try:
                check_code(config)
            except ConfigError as error:
                raise ConfigError(f"variant {run.variant}: {error}") from error
