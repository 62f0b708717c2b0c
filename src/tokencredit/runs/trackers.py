"""Experiment trackers (TensorBoard, W&B and others) through Accelerate; a failing one is dropped, the run goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from tokencredit.errors import NotInstalled
from tokencredit.runs.transcript import acted, conversation, transcript
from tokencredit.runs.untrusted import visible_lines
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
COLUMNS = ("iteration", "reward", "log-prob", "reference log-prob", "prompt", "text", "credit")
"""Columns of the table of samples; log-probs are sums over the policy's tokens, in nats."""
NO_CURVES = "no TensorBoard curves: TensorBoard is not installed (pip install tensorboard)"
"""Event of a run without a tracker; not on the screen, since the run's page has the curves."""


class Trackers:
    """The trackers of one run. They may raise exceptions of any type; all are caught."""

    def __init__(
        self, names: Sequence[str] | None, folder: Path, report: Callable[[str], None], *, enabled: bool = True
    ) -> None:
        """Choose trackers by name; None for TensorBoard if it is installed.

        `folder` is that of trackers that write files, and `report` is called with a line per failure. Processes that
        track nothing are not `enabled`.

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

    def start(self, first: int, config: Mapping[str, Any], headline: str) -> None:
        """Start the trackers at this iteration, with the run's name and its configuration in plain dicts.

        TensorBoard then hides earlier records from that iteration on, and lists settings beside the metric `headline`.
        """
        for name in self.names:
            kind = LOGGER_TYPE_TO_CLASS[name]
            options: dict[str, Any] = {"logging_dir": str(self.folder)} if kind.requires_logging_directory else {}
            if name in RUN_NAME:
                options[RUN_NAME[name]] = run_name(self.folder.absolute().parent)
            if name == "tensorboard":
                options["purge_step"] = first
            with self._reported(f"{name} is disabled"):
                tracker = kind(PROJECT, **options)
                tracker.start()
                self.active.append(tracker)
                self._configure(tracker, config, headline)

    def _configure(self, tracker: Any, config: Mapping[str, Any], headline: str) -> None:
        """Give a tracker the settings by whole keys, lists and dicts as JSON."""
        plain = bool | int | float | str | None
        settings = {key: x if isinstance(x, plain) else json.dumps(x) for key, x in flat(config).items()}
        with self._reported(f"{tracker.name} lacks the configuration"):
            if tracker.name == "tensorboard":  # of which Accelerate would make a run of its own
                from torch.utils.tensorboard.summary import hparams

                known = {key: "null" if x is None else x for key, x in settings.items()}
                for summary in hparams(known, {headline: 0.0}):
                    tracker.writer.file_writer.add_summary(summary)
                return
            tracker.store_init_configuration(names_for(tracker.name, settings))
            if tracker.name == "mlflow":  # Accelerate leaves out what is too long for a parameter
                import mlflow

                mlflow.log_dict(dict(config), "config.yaml")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log an iteration's metrics."""
        for tracker in list(self.active):
            with self._reported(f"{tracker.name} is disabled from here on"):
                tracker.log(names_for(tracker.name, values), step=step)
                continue
            self.active.remove(tracker)

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """Log completions with their credit as a table, to trackers that have tables."""
        for tracker in self.active:
            with self._reported(f"{tracker.name} lacks the samples of iteration {step}"):
                rows = list(map(row_of, samples))
                if tracker.name == "tensorboard":
                    tracker.writer.add_text("samples", markdown_table(rows), global_step=step)
                elif tracker.name == "wandb":
                    tracker.log_table("samples", columns=list(COLUMNS), data=rows, step=step)
                elif tracker.name == "trackio":
                    import trackio

                    tracker.log({"samples": trackio.Table(columns=list(COLUMNS), data=rows)}, step=step)
                elif tracker.name == "mlflow":  # which appends to the table of earlier iterations
                    import mlflow

                    columns = dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
                    mlflow.log_table(columns, "samples.json")

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


def run_name(folder: Path) -> str:
    """A run's name: that of its folder, after its sweep and variant if it is a run of a sweep."""
    return "/".join(folder.parts[-3:]) if re.fullmatch(r"seed-\d+", folder.name) else folder.name


def names_for(tracker: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by names that a tracker accepts: MLflow gets `reward.0.weight` for `reward[0].weight`."""
    if tracker != "mlflow":
        return dict(values)
    return {re.sub(r"[^\w\-. :/]", "_", re.sub(r"\[(\d+)\]", r".\1", name)): x for name, x in values.items()}


def row_of(sample: Mapping[str, Any]) -> list[Any]:
    """A completion as a row of the table: in its credit, each token is followed by its advantage."""
    own, spoken = acted(sample), {name: x for name, x in sample.items() if name != "prompt"}
    text = "\n".join(line.text for line in transcript(spoken)) if "turns" in sample else sample["completion"]
    credit = "".join(f"{token}[{x:+.2f}]" for token, x in zip(own["tokens"], own["advantages"], strict=True))
    reference = sum(own["ref_logprobs"]) if "ref_logprobs" in own else None
    texts = map(visible_lines, (conversation(sample), text, credit))
    return [sample["iteration"], sample["reward"], sum(own["logprobs"]), reference, *texts]


def markdown_table(rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown in which no text has Markdown of its own, such as a picture to be loaded from elsewhere."""

    def cell(value: Any) -> str:
        text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
        return re.sub(r"[!-/:-@\[-`{-~]", lambda sign: f"&#{ord(sign[0])};", text).replace("\n", "⏎ ")

    lines = [COLUMNS, ["---"] * len(COLUMNS), *(map(cell, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
