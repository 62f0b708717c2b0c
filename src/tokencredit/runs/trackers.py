"""Experiment trackers (TensorBoard, W&B and others) through Accelerate; a failing one is dropped, the run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from tokencredit.errors import NotInstalled
from tokencredit.settings.fields import flat

PROJECT = "tokencredit"
RUN_NAME = {
    "wandb": "name",
    "trackio": "name",
    "swanlab": "experiment_name",
    "mlflow": "run_name",
    "clearml": "task_name",
}
"""Arguments for a run's name, of the trackers that have one."""


class Trackers:
    """The trackers of one run. They may raise exceptions of any type; all are caught."""

    def __init__(
        self, names: Sequence[str] | None, folder: Path, report: Callable[[str], None], *, enabled: bool = True
    ) -> None:
        """Choose trackers by name.

        Args:
            names: names of the trackers; None for TensorBoard if it is installed.
            folder: output folder of trackers that write files.
            report: called with a line per failure.
            enabled: false in processes that track nothing.

        Raises:
            ConfigError: a tracker is not installed.
        """
        installed = list(map(str, get_available_trackers()))
        for name in names or ():
            if name not in installed:
                raise NotInstalled("run.trackers", name)
        self.missing = enabled and names is None and "tensorboard" not in installed
        chosen = names if names is not None else [] if self.missing else ["tensorboard"]
        self.names, self.folder, self.report = chosen if enabled else [], folder, report
        self.active: list[Any] = []

    def start(self, first: int, config: Mapping[str, Any]) -> None:
        """Start the trackers at this iteration, with the run's name and its configuration in plain dicts.

        TensorBoard then hides earlier records from that iteration on.
        """
        if self.missing:
            self.report("no TensorBoard curves: TensorBoard is not installed (pip install tensorboard)")
        for name in self.names:
            kind = LOGGER_TYPE_TO_CLASS[name]
            options: dict[str, Any] = {"logging_dir": str(self.folder)} if kind.requires_logging_directory else {}
            if name in RUN_NAME:
                options[RUN_NAME[name]] = self.folder.absolute().parent.name
            if name == "tensorboard" and first > 1:
                options["purge_step"] = first
            with self._reported(f"{name} is disabled"):
                tracker = kind(PROJECT, **options)
                tracker.start()
                self.active.append(tracker)
                if name != "tensorboard":  # which would make a run of its own of it
                    self._configure(tracker, config)

    def _configure(self, tracker: Any, config: Mapping[str, Any]) -> None:
        """Give a tracker the settings by whole keys, lists and dicts as JSON."""
        plain = bool | int | float | str | None
        settings = {key: x if isinstance(x, plain) else json.dumps(x) for key, x in flat(config).items()}
        with self._reported(f"{tracker.name} lacks the configuration"):
            tracker.store_init_configuration(settings)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log an iteration's metrics."""
        for tracker in list(self.active):
            with self._reported(f"{tracker.name} is disabled from here on"):
                tracker.log(values, step=step)
                continue
            self.active.remove(tracker)

    def end(self) -> None:
        """Finish all trackers."""
        for tracker in self.active:
            with self._reported(f"{tracker.name} could not finish"):
                tracker.finish()
        self.active.clear()

    @contextmanager
    def _reported(self, failure: str) -> Iterator[None]:
        """A context in which an exception is a line for the user."""
        try:
            yield
        except Exception as error:
            self.report(f"the tracker {failure}: {type(error).__name__}: {error}")
