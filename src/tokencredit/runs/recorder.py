"""What happens to a run's figures: files, trackers and the screen, from its beginning to its end."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration
from safetensors.torch import save_file
from torch import Tensor

from tokencredit.errors import ConfigError, TooManyBadSteps
from tokencredit.runs.checkpoint import size_of, versions, write_manifest, write_process, write_state
from tokencredit.runs.console import Screen
from tokencredit.runs.diagnosis import diagnose
from tokencredit.runs.folder import RunFolder, beside, recover, replacing
from tokencredit.runs.history import History
from tokencredit.runs.jsonl import read_metrics, read_samples
from tokencredit.runs.resuming import LINES, changes, fixed, newest, saved
from tokencredit.runs.trackers import Trackers, require_installed
from tokencredit.settings.code_policy import foreign_code
from tokencredit.settings.training import RunConfig

Load = Callable[[dict[str, Any], set[str]], Sequence[str]]
LAST = 5
"""Iterations whose mean counts as where a run ended."""
BAD_STEPS_KEPT = 20
"""How many batches that could not be learned from stay in `bad_steps/`."""


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
            ConfigError: a tracker is not installed.
        """
        self.args, self.headline, self.unit = args, headline, unit
        self.folder = RunFolder(args.dir)
        require_installed(args.trackers)
        # Accelerate keeps the number format of an earlier run in this process, and refuses another.
        AcceleratorState._reset_state(reset_partial_state=False)
        self.accelerator = Accelerator(
            mixed_precision=mixed_precision,
            log_with=args.trackers or None,
            project_config=ProjectConfiguration(logging_dir=str(self.folder.path / "tensorboard")),
        )
        self.main = self.accelerator.is_main_process
        self.screen = Screen(args.iterations, enabled=self.main)
        self.trackers = Trackers(self.accelerator, args.trackers, self.event)
        self.warned: set[str] = set()
        self.history = History()
        self.first_samples: Sequence[Mapping[str, Any]] = []
        self.last_samples: Sequence[Mapping[str, Any]] = []
        self.bad_in_a_row = 0
        self.best = -math.inf
        """The highest evaluation so far."""
        self.best_iteration = 0

    def begin(self, config: Any, reserve: int, weights: int) -> None:
        """Make the folder, with room for what will be written, and write the configuration into it.

        Args:
            config: the whole configuration, a `PPOConfig` or a `ControlConfig`.
            reserve: bytes that are kept free for what is written at the end.
            weights: bytes of what is trained.

        Raises:
            ConfigError: the folder is in use, cannot be made, or its disk is too full.
        """
        self.config = asdict(config)
        if self.main:
            self.folder.refuse_if_used()
            # AdamW remembers two numbers a weight.
            self.folder.create(reserve, (self.args.keep_last + 1) * 3 * weights if self.args.save_every else 0)
            self._write_config()
        self._start()
        for line in foreign_code(config):
            self.event(line)

    def resume(self, config: Any, reserve: int, load: Load) -> int:
        """Go on in a folder: back to its newest checkpoint that is whole, or to the beginning if it has none yet.

        Args:
            config: the configuration now.
            reserve: as in `begin`.
            load: is given what `checkpoint` was given as the trainer's state, with the process's own part under
                `process`, and the keys of the configuration that have changed; returns what there is to say of it. It
                is not called for the beginning, and may refuse before any file has been touched.

        Returns:
            The iterations done.

        Raises:
            ConfigError: the folder holds no run that can go on, or a setting has changed that cannot change.
        """
        self.config = asdict(config)
        path = self.folder.path
        changed = changes(path / "config.yaml", self.config)
        for key, (then, now) in changed.items():
            if fixed(key):
                raise ConfigError(f"{key} is {now!r}, but this run was begun with {then!r}; it cannot change any more")
        checkpoints = path / "checkpoints"
        if self.main:
            self.folder.create(reserve)
            recover(path)
            recover(checkpoints)
        self.accelerator.wait_for_everyone()
        if not saved(checkpoints) and not self.args.save_every and (path / "metrics.jsonl").is_file():
            raise ConfigError(f"{str(path)!r} has no checkpoint to go on from; it ran without run.save_every")
        done, state, damaged = newest(checkpoints, self.accelerator.process_index, path)
        if done >= self.args.iterations and (path / "summary.json").is_file():
            raise ConfigError(f"{str(path)!r} has done all its {done} iterations; raise run.iterations to go on")
        said = [] if state is None else load(state["trainer"] | {"process": state["process"]}, set(changed))
        self.accelerator.wait_for_everyone()
        if self.main:
            self.folder.cut(state["files"] if state else dict.fromkeys(LINES, 0))
            (path / "summary.json").unlink(missing_ok=True)
            self._write_config()
        self.accelerator.wait_for_everyone()
        self._reread()
        self._start()
        for complaint in [*damaged, *foreign_code(config), *said]:
            self.event(complaint)
        self.event(f"resumed after iteration {done}" if state else "no checkpoint yet: the run begins anew")
        for key, (then, now) in changed.items():
            self.event(f"{key} is now {now!r}; it was {then!r}")
        if state is None:
            return 0
        for name, now in versions().items():
            if state["versions"].get(name) != now:
                self.event(f"{name} is now {now}; the checkpoint is of {state['versions'].get(name)}")
        self.started -= state["seconds"]
        self.bad_in_a_row = state["bad_in_a_row"]
        return done

    def _reread(self) -> None:
        """Remember what metrics.jsonl and samples.jsonl say of the iterations that are done."""
        for row in read_metrics(self.folder.path / "metrics.jsonl"):
            self.history.append(row)
            self._judge(row)
        last = len(self.history)
        samples = read_samples(self.folder.path / "samples.jsonl", {1, last})
        self.first_samples = [sample for sample in samples if sample["iteration"] == 1]
        self.last_samples = [sample for sample in samples if sample["iteration"] == last]
        self.warned = {finding.name for finding in diagnose(self.history, self.config, ended=False)}

    def _write_config(self) -> None:
        self.folder.write("config.yaml", yaml.safe_dump(self.config, sort_keys=False, allow_unicode=True))

    def _start(self) -> None:
        self.started = time.perf_counter()
        self.trackers.start(len(self.history) + 1)

    def event(self, text: str) -> None:
        """Say what happened beside the training, and write it into events.jsonl."""
        self.screen.say(text)
        if self.main:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            self.folder.append("events.jsonl", {"time": now, "after_iteration": len(self.history), "event": text})

    def iteration(self, metrics: dict[str, float], samples: Sequence[Mapping[str, Any]]) -> None:
        """Write down and show one iteration."""
        self.history.append(metrics)
        self._judge(metrics)
        if samples:
            self.first_samples, self.last_samples = self.first_samples or samples, samples
        number = int(metrics["iteration"])
        self.trackers.log({name: value for name, value in metrics.items() if name != "iteration"}, number)
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

    def _judge(self, metrics: Mapping[str, float | None]) -> None:
        """Remember which evaluation was the best."""
        value = metrics.get("eval/reward", metrics.get("eval/average_return"))
        if value is not None and value > self.best:
            self.best, self.best_iteration = value, int(metrics["iteration"] or 0)

    def due(self, number: int, last: bool) -> bool:
        """Whether a checkpoint is to be written after this iteration, which may be the run's last."""
        every = self.args.save_every
        return every > 0 and (last or number % every == 0 or number in (self.args.iterations, self.best_iteration))

    def how_to_resume(self) -> str:
        """The command that goes on with this run."""
        command = "control" if "env" in self.config else "train"
        return f"go on with: tokencredit {command} --resume {self.folder.path}"

    def checkpoint(self, number: int, state: Mapping[str, Any], process: Mapping[str, Any]) -> None:
        """Write a checkpoint of the run as it is after an iteration, and remove those that are too many.

        Args:
            number: of the iteration.
            state: the trainer's, the same in every process.
            process: what belongs to this process alone; no tensors.
        """
        target = self.folder.path / "checkpoints" / f"{number:06d}"
        with ExitStack() as stack:
            folder = beside(target, "part")
            if self.main:
                self.folder.make_room(f"checkpoints/{target.name}", size_of(state))
                folder = stack.enter_context(replacing(target))
            self.accelerator.wait_for_everyone()
            write_process(folder, self.accelerator.process_index, process)
            self.accelerator.wait_for_everyone()
            if self.main:
                ours = {"seconds": time.perf_counter() - self.started, "bad_in_a_row": self.bad_in_a_row}
                ours |= {"trainer": state, "files": self.folder.sizes(LINES), "config": self.config}
                write_state(folder, ours)
                write_manifest(folder)
        if self.main:
            for old in saved(target.parent)[: -self.args.keep_last]:
                if old != self.best_iteration:
                    shutil.rmtree(target.parent / f"{old:06d}")

    def bad_step(self, number: int, reason: str, tensors: Mapping[str, Tensor], **about: Any) -> None:
        """Keep what a step could not learn from, for study, and count it.

        Args:
            number: of the iteration.
            reason: what was not finite.
            tensors: the batch.
            about: more of it, for people.

        Raises:
            TooManyBadSteps: it is the `run.max_bad_steps`-th in a row.
        """
        self.bad_in_a_row += 1
        steps = self.folder.path / "bad_steps"
        steps.mkdir(exist_ok=True)
        folder = steps / f"{number:06d}-{len(list(steps.glob(f'{number:06d}-*'))) + 1}"
        if self.accelerator.num_processes > 1:
            folder = folder.with_name(f"{folder.name}-process-{self.accelerator.process_index}")
        with replacing(folder) as part:
            save_file({name: x.detach().contiguous() for name, x in tensors.items()}, part / "batch.safetensors")
            told = {"iteration": number, "reason": reason} | about
            (part / "about.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        for old in sorted(steps.glob("[0-9]*"))[:-BAD_STEPS_KEPT]:
            shutil.rmtree(old)
        self.event(f"iteration {number}: {reason}; the step was not taken, its batch is in {folder}")
        if self.bad_in_a_row >= self.args.max_bad_steps:
            raise TooManyBadSteps(f"{reason}, in {self.bad_in_a_row} steps in a row (run.max_bad_steps); see {folder}")

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
            with replacing(self.folder.path / "policy") as folder:
                save(folder, summary)
            self.folder.write("summary.json", json.dumps(summary, indent=2) + "\n")
            self.screen.finish(
                summary, str(self.folder.path), self.first_samples, self.last_samples, headline=name, unit=self.unit
            )
            self.screen.findings(diagnose(self.history, self.config))
        self.trackers.end()
        return summary

    def _last(self, name: str) -> float | None:
        """Mean of a metric over the last iterations, if they have it."""
        values = [metrics[name] for metrics in self.history[-LAST:] if math.isfinite(metrics.get(name, math.nan))]
        return sum(values) / len(values) if values else None
