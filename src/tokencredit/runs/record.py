"""What happens to a run's figures: files, trackers and the screen, from its beginning to its end."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import ProjectConfiguration

from tokencredit.runs.config import RunConfig
from tokencredit.runs.console import Screen
from tokencredit.runs.diagnosis import diagnose
from tokencredit.runs.errors import ConfigError
from tokencredit.runs.folder import RunFolder

LAST = 5
"""Iterations whose mean counts as where a run ended."""


class RunRecord:
    """Writes a run down. Every process has one; only the main process's writes and speaks."""

    def __init__(self, args: RunConfig, mixed_precision: str, *, headline: str = "reward", unit: str = "tokens"):
        """Choose the folder and start Accelerate; nothing is written before `begin`.

        Args:
            args: how long the run is, and what it leaves where.
            mixed_precision: Accelerate's word for a number format.
            headline: the metric that says how well it goes.
            unit: the metric that counts what was sampled, and its name.

        Raises:
            ConfigError: the folder is in use, or a tracker is not installed.
        """
        self.args, self.headline, self.unit = args, headline, unit
        self.folder = RunFolder(args.dir)
        installed = [str(tracker) for tracker in get_available_trackers()]
        for tracker in args.trackers:  # Accelerate would leave out in silence what is missing
            if tracker not in installed:
                raise ConfigError(f"run.trackers has {tracker}, which is not installed: pip install {tracker}")
        # Accelerate keeps the number format of an earlier run in this process, and refuses another.
        AcceleratorState._reset_state(reset_partial_state=False)
        self.accelerator = Accelerator(
            mixed_precision=mixed_precision,
            log_with=args.trackers or None,
            project_config=ProjectConfiguration(logging_dir=str(self.folder.path / "tensorboard")),
        )
        self.main = self.accelerator.is_main_process
        if self.main:
            self.folder.refuse_if_used()
        self.screen = Screen(args.iterations, enabled=self.main)
        self.warned: set[str] = set()
        self.history: list[dict[str, float]] = []
        self.first_samples: Sequence[Mapping[str, Any]] = []
        self.last_samples: Sequence[Mapping[str, Any]] = []

    def begin(self, config: Any, reserve: int) -> None:
        """Make the folder, with room for what will be written at the end, and write the configuration into it."""
        self.config = asdict(config)
        if self.main:
            self.folder.create(reserve)
            self.folder.write("config.yaml", yaml.safe_dump(self.config, sort_keys=False, allow_unicode=True))
        if self.args.trackers:
            self.accelerator.init_trackers("tokencredit")
        self.started = time.perf_counter()

    def iteration(self, metrics: dict[str, float], samples: Sequence[Mapping[str, Any]]) -> None:
        """Write down and show one iteration."""
        self.history.append(metrics)
        self.first_samples, self.last_samples = self.first_samples or samples, samples
        number = int(metrics["iteration"])
        self.accelerator.log({name: value for name, value in metrics.items() if name != "iteration"}, step=number)
        if not self.main:
            return
        self.folder.append("metrics.jsonl", {k: v if math.isfinite(v) else None for k, v in metrics.items()})
        self.folder.append("samples.jsonl", *samples)
        self.screen.iteration(metrics)
        for finding in diagnose(self.history, self.config, ended=False):
            if finding.name not in self.warned:
                self.warned.add(finding.name)
                self.screen.say(f"iteration {number}: {finding.line()}")
        if samples and self.args.show_every and number % self.args.show_every == 0:
            self.screen.samples(number, samples)

    def end(self, stopped_by: str, save: Callable[[Path, dict[str, Any]], None]) -> dict[str, Any]:
        """Save the policy with `save(folder, summary)`, write and show the summary, and return it."""
        seconds = time.perf_counter() - self.started
        name = self.headline.split("/")[-1]
        summary = {
            f"{name}_first": next((m[self.headline] for m in self.history if math.isfinite(m[self.headline])), None),
            f"{name}_last": self._last(self.headline),
            "kl_last": self._last("kl"),
            "iterations": len(self.history),
            "seconds": seconds,
            f"{self.unit}_per_second": sum(m[self.unit] for m in self.history) / seconds,
            "stopped_by": stopped_by,
        }
        if self.main:
            with self.folder.replacing("policy") as folder:
                save(folder, summary)
            self.folder.write("summary.json", json.dumps(summary, indent=2) + "\n")
            self.screen.finish(
                summary, str(self.folder.path), self.first_samples, self.last_samples, headline=name, unit=self.unit
            )
            self.screen.findings(diagnose(self.history, self.config))
        self.accelerator.end_training()
        return summary

    def _last(self, name: str) -> float | None:
        """Mean of a metric over the last iterations, if they have it."""
        values = [metrics[name] for metrics in self.history[-LAST:] if math.isfinite(metrics.get(name, math.nan))]
        return sum(values) / len(values) if values else None
