"""TensorBoard, W&B and their kin, by Accelerate's classes; one that fails is left out: no picture is worth the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from tokencredit.errors import ConfigError

PROJECT = "tokencredit"


def installed() -> list[str]:
    """Names of the installed trackers."""
    return [str(tracker) for tracker in get_available_trackers()]


def require_installed(names: Sequence[str]) -> None:
    """Raise `ConfigError` for a tracker that is not installed."""
    for tracker in names:
        if tracker not in installed():
            raise ConfigError(f"run.trackers has {tracker}, which is not installed: pip install {tracker}")


class Trackers:
    """The trackers of one run. Their exceptions are of any type, and all are caught."""

    def __init__(self, names: Sequence[str] | None, folder: Path, report: Callable[[str], None]):
        """Choose trackers by name.

        Args:
            names: of the trackers; None for TensorBoard if it is installed.
            folder: for those that write files.
            report: is called with a line on each failure.
        """
        self.names, self.folder, self.report = names, folder, report
        self.active: list[Any] = []

    def start(self, first: int) -> None:
        """Begin with this iteration; TensorBoard then hides earlier records of it and of later ones."""
        names = ["tensorboard"] if self.names is None else self.names
        if self.names is None and "tensorboard" not in installed():
            names = []
            self.report("no TensorBoard curves: TensorBoard is not installed (pip install tensorboard)")
        for name in names:
            kind = LOGGER_TYPE_TO_CLASS[name]
            options: dict[str, Any] = {"logging_dir": str(self.folder)} if kind.requires_logging_directory else {}
            if name == "tensorboard" and first > 1:
                options["purge_step"] = first
            try:
                tracker = kind(PROJECT, **options)
                tracker.start()
                self.active.append(tracker)
            except Exception as error:
                self.report(f"the tracker {name} is left out: {type(error).__name__}: {error}")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record an iteration's metrics."""
        for tracker in list(self.active):
            try:
                tracker.log(values, step=step)
            except Exception as error:
                self.active.remove(tracker)
                self.report(f"the tracker {tracker.name} is left out from here: {type(error).__name__}: {error}")

    def end(self) -> None:
        """Let them finish."""
        for tracker in self.active:
            try:
                tracker.finish()
            except Exception as error:
                self.report(f"the tracker {tracker.name} could not end: {type(error).__name__}: {error}")
