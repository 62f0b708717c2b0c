"""Record a run: files, trackers and screen."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tokencredit.distributed.processes import Processes
from tokencredit.distributed.signals import Signals
from tokencredit.errors import ConfigError, RunComplete, TooManyBadSteps
from tokencredit.provenance.environment import environment, now, resumed, versions
from tokencredit.provenance.parts import Part
from tokencredit.runs import resuming
from tokencredit.runs.checkpoint import size_of, write_checkpoint
from tokencredit.runs.console import Screen
from tokencredit.runs.diagnosis import Finding, diagnose
from tokencredit.runs.folder import CHOICES, JOB, PARTS, SHOWN, RunFolder, apply_choices, beside, read_parts, replacing
from tokencredit.runs.jsonl import (
    EVENTS,
    PRICED,
    comparable,
    evaluated_anew,
    read_changes,
    read_metrics,
    read_samples,
    scored_anew,
)
from tokencredit.runs.summary import WINDOW, History, Summary, in_iterations, summarise
from tokencredit.runs.trackers import NO_CURVES, Trackers
from tokencredit.runs.transcript import of_iteration
from tokencredit.settings.parts import is_own, label_of, plain
from tokencredit.settings.reader import dump_yaml
from tokencredit.settings.run_kind import OFFLINE, RunKind, foreign_code
from tokencredit.settings.training import RunSettings

Load = Callable[[dict[str, Any], set[str]], Sequence[str]]
BAD_STEPS_KEPT = 20
"""Maximum number of batches of skipped steps that a process keeps."""
MAX_BAD_STEPS = 3
"""Consecutive batches or steps with non-finite numbers after which a run stops."""


class RunRecord:
    """Recorder of a run. Every process has one; only the main process's writes and prints."""

    def __init__(
        self,
        args: RunSettings,
        processes: Processes,
        run_kind: RunKind,
        choices: dict[str, Any] | None = None,
        show_every: int = 0,
    ) -> None:
        """Choose the folder; nothing is written before `begin`.

        `choices` are the values chosen for settings that are `auto`, by key; None if there are no such settings.
        `show_every` are the iterations between tables of samples on the screen; 0 for none.

        Raises:
            ConfigError: a tracker is not installed.
        """
        self.args, self.processes, self.run_kind, self.choices = args, processes, run_kind, choices
        self.main, self.show_every, self.keeps_all = processes.main, show_every, getattr(args, "samples", 0) == "all"
        self.parts: dict[str, Part] = {}
        """Descriptions of what the run was given from Python or reads by name, by argument or key."""
        # Without one, each process would take its own clock's.
        folder = processes.texts(str(RunFolder(None).path))[0] if args.dir is None else args.dir
        self.folder = RunFolder(folder, processes.job.id if processes.job else None)
        self.screen = Screen(args.iterations, enabled=self.main)
        self.trackers = Trackers(args.trackers, self.folder.path / "tensorboard", self.event, enabled=self.main)
        self.warned: set[str] = set()
        self.environment: dict[str, Any] = {}
        self.history = History()
        self.samples: list[Mapping[str, Any]] = []  # of the first iteration and of the last `WINDOW`
        self.bad_in_a_row = 0
        self.best, self.best_iteration = -math.inf, -1  # the best evaluation so far; -1: none
        self.running = False  # true once the run has begun or is resumed
        self.early = [NO_CURVES] * self.trackers.missing  # events before that
        self.signals = Signals()
        self.failed = False  # once true, nothing but resuming is suggested
        self.by_hand = False

    def begin(self, config: Any, reserve: int, weights: int) -> None:
        """Create the folder, check its disk space, and write the whole configuration.

        `reserve` are bytes kept free for the final files, `weights` those of the trained weights.

        Raises:
            ConfigError: the folder is in use, cannot be made, or its disk is too full.
        """
        self.config = plain(config)
        # The main process makes and locks the folder; if it cannot, all processes raise.
        with self.processes.agreed(OSError, ConfigError):
            if self.main:
                self.folder.refuse_if_used()
                # AdamW keeps two numbers per weight.
                self.folder.create(reserve, (self.args.keep_last + 1) * 3 * weights if self.args.save_every else 0)
                self.folder.lock()
                self.folder.refuse_if_used()  # again: another run may have been quicker
                if self.folder.job is not None:
                    self.folder.write(JOB, self.folder.job)
                self._write_settings()
        # All processes write into it, so each must see it.
        seen = self.processes.texts(str((self.folder.path / "config.yaml").is_file()))
        if str(False) in seen:
            raise ConfigError(
                f"run.dir {str(self.folder.path)!r} of process 0 is not there in process {seen.index(str(False))}; "
                "give a folder that all processes share, whatever their machine"
            )
        self._start(foreign_code(config))

    def resume(self, config: Any, reserve: int, load: Load, sharded: Mapping[str, Tensor] | None = None) -> int:
        """Restore the newest valid checkpoint of a run, or the start if it has none yet; returns the iterations done.

        `load` restores the trainer from `resuming.for_trainer`'s state and the changed keys, and returns lines for the
        user. It is not called without a checkpoint, and may raise before any file is changed. `sharded` are the
        trainer's sharded parameters, by name.

        Raises:
            ConfigError: the folder holds no run that can be resumed, another process is training it, or a setting has
                changed that cannot change.
        """
        # Which settings have changed since, and may they?
        self.config, self.failed = plain(config), False
        path = self.folder.path
        if not (path / "config.yaml").is_file():
            known = "run.dir is not set" if self.args.dir is None else f"run.dir {str(path)!r} holds no run"
            raise ConfigError(f"resume_from_checkpoint is True, and {known}; set run.dir to the folder of a run")
        changed = resuming.allowed_changes(path / "config.yaml", self.config)
        before = read_parts(path)
        # Offline trainers compare their rows themselves, and allow no others.
        allowed = {**before, **self.parts} if self.run_kind in OFFLINE else self.args.allow_changed
        replaced = dict(resuming.changed_parts(before, self.parts, changed, allowed))
        # The main process takes the folder, and finishes or undoes replacements whose process was killed.
        with self.processes.agreed(OSError, ConfigError):
            if self.main:
                self.folder.reopen(reserve)
        if caution := resuming.never_saved(path, self.args.save_every):
            raise ConfigError(f"{str(path)!r} has no checkpoint: {caution}")
        # The newest checkpoint whose files are whole; damaged newer ones are named later.
        done, state, damaged = resuming.newest(path, self.processes, sharded)
        if message := self._complete(done):
            raise RunComplete(message)
        if state is None and self.running:
            raise ConfigError(
                f"{str(path)!r} has no checkpoint, and this trainer's weights may have changed; make another trainer"
            )
        # A start that was killed before its first checkpoint had changed settings too.
        earlier = {key for after, key in read_changes(path / EVENTS) if after >= done}
        lines = [] if state is None else load(resuming.for_trainer(state), {*changed, *replaced, *earlier})
        self.processes.wait()  # all have read the checkpoint
        # Back to that iteration: later lines, an end's summary and a later audit go, and are written again.
        if self.main:
            self.environment = resumed(path)
            self.folder.rewind(done, state["files"] if state else dict.fromkeys(resuming.LINES, 0))
        self.processes.wait()
        differences = list(resuming.changes_since(done, state, changed, replaced, self.processes.count))
        self._reread(done, [key for key, _ in differences if key])
        self._start([*damaged, *foreign_code(config), *lines])
        for key, text in differences:
            self.event(text, **({"changed": key} if key else {}))
        if self.main:  # after the events, which a start that is killed now would otherwise never write
            self._write_settings()
        if state is not None:
            self.started -= state["seconds"]
            self.bad_in_a_row = state["bad_in_a_row"]
        return done

    def _reread(self, done: int, changed: Sequence[str]) -> None:
        """Load the history and samples of finished iterations from the run's files, in place of an earlier start's.

        `changed` is what has changed now, after `done` iterations.
        """
        self.history, self.best, self.best_iteration = History(), -math.inf, -1
        changes = [*read_changes(self.folder.path / EVENTS), *((done, key) for key in changed)]
        self.history.since, self.history.priced = scored_anew(changes), scored_anew(changes, PRICED)
        self.history.evaluated = evaluated_anew(changes, self.config)
        for row in read_metrics(self.folder.path / "metrics.jsonl"):
            self.history.append(row)
            if len(self.history) > self.history.evaluated:
                self._judge(row)
        first, last = self.history.since + 1, len(self.history)
        kept = {first, *range(max(first, last - WINDOW + 1), last + 1)}
        self.samples = [*read_samples(self.folder.path / "samples.jsonl", kept)]
        self.warned = {finding.name for finding in self._diagnose(ended=False)}

    def _write_settings(self) -> None:
        self.folder.write_json(PARTS, self.parts, indent=2)
        if self.choices is not None:
            self.folder.write_json(CHOICES, self.choices, indent=2)
        self.folder.write("config.yaml", dump_yaml(self.config))  # last: with it the folder is a run

    def _diagnose(self, *, ended: bool) -> list[Finding]:
        """Findings on the run so far, with the values chosen for `auto` settings."""
        rows = comparable(self.history, self.history.since, self.history.evaluated)
        config = apply_choices(self.config, self.choices or {})
        return diagnose(rows, config, ended=ended, samples=self.samples)

    def _start(self, events: Sequence[str]) -> None:
        """Begin to log, with the events before, and these."""
        self.running = True
        while self.early:
            self.log(self.early.pop(0))
        self.started = time.perf_counter()
        found = environment() | self.processes.hardware() | self.environment if self.main else {}
        self.environment = {name: x for name, x in found.items() if x is not None}
        self.trackers.start(len(self.history) + 1, self.config, self.run_kind.headline)
        for event in events:
            self.event(event)

    def event(self, text: str, **about: Any) -> None:
        """Print an event, and append it to events.jsonl, both without the traceback of an error."""
        text = text.partition("\nTraceback")[0]
        self.screen.say(text)
        self.log(text, **about)

    def log(self, text: str, **about: Any) -> None:
        """Append an event to events.jsonl; one before the run has begun, or is resumed, comes then."""
        if not self.running:
            self.early.append(text)
        elif self.main:
            self.folder.append(EVENTS, {"time": now(), "after_iteration": len(self.history), "event": text} | about)

    def iteration(self, metrics: dict[str, float], samples: Sequence[Mapping[str, Any]]) -> None:
        """Record and show one iteration."""
        self.history.append(metrics)
        self._judge(metrics)
        every, samples = (samples, samples[:SHOWN]) if self.keeps_all else ((), samples)
        number = int(metrics["iteration"])
        if samples:
            kept = {(self.samples or samples)[0]["iteration"], *range(number - WINDOW + 1, number)}
            self.samples = [*(sample for sample in self.samples if sample["iteration"] in kept), *samples]
        self.trackers.log({name: value for name, value in metrics.items() if name != "iteration"}, number)
        shown = self.show_every and number % self.show_every == 0
        if samples and self.show_every and (shown or number in (1, self.args.iterations)):
            self.trackers.log_samples(samples, number)
        if not self.main:
            return
        self.folder.append("metrics.jsonl", {k: v if math.isfinite(v) else None for k, v in metrics.items()})
        self.folder.append("samples.jsonl", *samples)
        self.folder.write_completions(number, every)
        self.screen.iteration(metrics)
        for finding in self._diagnose(ended=False):
            if finding.name not in self.warned:
                self.warned.add(finding.name)
                self.screen.say(f"iteration {number}: {finding.line()}")
        if samples and shown:
            self.screen.samples(number, samples)

    def _judge(self, metrics: Mapping[str, float | None]) -> None:
        """Track the best evaluation."""
        value = metrics.get(self.run_kind.evaluation)
        if value is not None and (value := -value if self.run_kind.lower else value) > self.best:
            self.best, self.best_iteration = value, int(metrics["iteration"] or 0)

    def due(self, number: int, last: bool) -> bool:
        """True if a checkpoint is due after this iteration, which may be the run's last."""
        every = self.args.save_every
        return every > 0 and (last or number % every == 0 or number in (self.args.iterations, self.best_iteration))

    def how_to_resume(self, mended: Sequence[str] = ()) -> str:
        """How to resume this run: as `resuming.how_to_resume`, or how to continue one that is complete."""
        path, done = self.folder.path, max(resuming.saved(self.folder.path), default=0)
        how = {"python": bool(self.config["python"]) or self.registers, "by_hand": self.by_hand}
        return self._complete(done) or resuming.how_to_resume(path, self.run_kind, self.args.save_every, mended, **how)

    @property
    def registers(self) -> bool:
        """True if the user's script has registered the environment, so that no command knows it."""
        return "env.id" in self.parts and ":" not in self.config["env"]["id"]

    def _complete(self, done: int) -> str:
        """The setting to raise after `done` iterations if they are all, else an empty text."""
        if done < self.args.iterations or not (self.folder.path / "summary.json").is_file():
            return ""
        above, epochs = f", above {done} (it is {self.args.iterations})", self.config.get("data", {}).get("epochs")
        more = f"data.epochs to continue (it is {epochs:g})" if epochs else f"run.iterations to continue{above}"
        return f"{str(self.folder.path)!r} has done all its {done} iterations; raise {more}"

    def next_steps(self, commands: Mapping[str, str]) -> None:
        """Print where the results are, and commands for what to do next with their meaning; `RUN` is the run."""
        if self.failed:
            return
        folder, page = self.folder.path, self.folder.path / "report.html"
        written = page.is_file()
        if written:
            commands = {"tokencredit report RUN --open": "the report in the browser"} | dict(commands)

        def named(word: str) -> str:
            return shlex.quote(word.replace("RUN", str(folder))) if "RUN" in word else word

        lines = {" ".join(map(named, shlex.split(command))): meaning for command, meaning in commands.items()}
        width = max(map(len, lines))
        rows = [("report", str(page))] if written else []
        rows += [(self.run_kind.saved.replace("_", " "), str(folder / self.run_kind.saved))]
        self.screen.pairs([*rows, *(("next", f"{command:<{width}}  {text}") for command, text in lines.items())])

    def checkpoint(self, number: int, state: Mapping[str, Any], process: Mapping[str, Any]) -> None:
        """Write a checkpoint after an iteration, and remove surplus ones.

        `state` is the trainer's, the same in every process, and `process` this process's own.
        """
        target = resuming.place(self.folder.path, number)
        contents: dict[str, Any] = {"trainer": state, "bad_in_a_row": self.bad_in_a_row}
        contents["seconds"] = time.perf_counter() - self.started
        own = int(self.processes.sum(torch.tensor(size_of(process), device=self.processes.device)))
        with ExitStack() as stack:
            with self.processes.agreed(OSError):
                if self.main:
                    target.parent.mkdir(exist_ok=True)  # not its parents: a run's folder that was moved stays away
                    self.folder.make_room(f"checkpoints/{target.name}", size_of(state) + own)
                    stack.enter_context(replacing(target))
                    contents["files"] = self.folder.sizes(resuming.LINES)
            write_checkpoint(beside(target, "part"), contents, process, self.processes)
            with self.processes.agreed(OSError):
                stack.close()
        if self.main:
            for old in resuming.saved(self.folder.path)[: -self.args.keep_last]:
                if old != self.best_iteration:
                    shutil.rmtree(resuming.place(self.folder.path, old))

    def bad_step(
        self, number: int, reason: str, tensors: Mapping[str, Tensor], *, diverged: bool = False, **about: Any
    ) -> None:
        """Keep the batch of a skipped step, and count it.

        Args:
            number: the iteration; 0 before the first.
            reason: the non-finite quantity.
            tensors: the batch.
            diverged: it is computed by the trained model, from a finite reward.
            about: further information for the user.

        Raises:
            TooManyBadSteps: it is the `MAX_BAD_STEPS`-th in a row.
        """
        self.bad_in_a_row += 1
        folder = self._keep_batch(number, tensors, {"reason": reason} | about)
        place = f"iteration {number}" if number else "pretraining"
        self.event(f"{place}: {reason}; the step was skipped, its batch is in {folder}")
        if self.bad_in_a_row >= MAX_BAD_STEPS:
            loss = self.config.get("ppo", {}).get("loss")
            first = f"look for NaN in ppo.loss {label_of(loss)}, or " if is_own(loss) else ""
            cure = f"; {first}lower optim.lr, which is {self.config['optim']['lr']:g}" if diverged else ""
            raise TooManyBadSteps(f"{reason}, in {self.bad_in_a_row} steps in a row{cure}; see {folder}")

    def _keep_batch(self, number: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Path:
        """Write the batch of a skipped step into a new folder, and remove this process's oldest; returns the folder."""
        steps = self.folder.path / "bad_steps"
        steps.mkdir(exist_ok=True)
        # Each process has names of its own: others may write and remove theirs at the same time.
        ending = f"-process-{self.processes.rank}" if self.processes.count > 1 else ""
        names = {folder: re.fullmatch(rf"(\d+)-(\d+){ending}", folder.name) for folder in steps.iterdir()}
        kept = {(int(match[1]), int(match[2])): folder for folder, match in names.items() if match}
        step = 1 + max((step for iteration, step in kept if iteration == number), default=0)
        folder = steps / f"{number:06d}-{step}{ending}"
        with replacing(folder) as part:
            save_file({name: x.detach().contiguous() for name, x in tensors.items()}, part / "batch.safetensors")
            text = json.dumps({"iteration": number} | dict(about), indent=2)
            (part / "about.json").write_text(text + "\n", encoding="utf-8")
        for place in sorted(kept)[: max(0, len(kept) + 1 - BAD_STEPS_KEPT)]:
            shutil.rmtree(kept[place])
        return folder

    def nothing_learned(self) -> TooManyBadSteps | None:
        """The error of a run whose every optimizer step was skipped, so that its weights are unchanged; or None."""
        if not any(self.history.values("bad_steps")) or self.history.values("loss"):
            return None
        return TooManyBadSteps(
            f"nothing was learned in {in_iterations(len(self.history))}: no optimizer step was taken, and rewards, "
            f"losses or gradients were not finite; {self.folder.path / 'bad_steps'} holds the batches, with the reasons"
        )

    @contextmanager
    def replaced(self, *names: str, in_all: bool) -> Iterator[list[Path] | None]:
        """Folders that together take the places of some of the run's, for the main process to write.

        The others get None or, with `in_all`, the places; they too raise an `OSError` of the main process.
        """
        targets = [self.folder.path / name for name in names]
        with self.processes.agreed(OSError), ExitStack() as stack:
            with self.processes.agreed(OSError):
                folders = [stack.enter_context(replacing(x)) for x in targets] if self.main else targets
            yield folders if self.main or in_all else None

    def end(self, stopped_by: str, save: Callable[..., None], *more: str, in_all: bool = False) -> Summary:
        """Save the trained model with `save(folder, summary)`, write and show the summary, and return it.

        `save` also gets a folder for each of `more` names. With `in_all` every process calls `save`, and only the main
        one may write.
        """
        seconds = time.perf_counter() - self.started
        summary = summarise(self.history, self.run_kind, self.config, self.folder.path, seconds, stopped_by)
        summary = replace(summary, environment=self.environment | {"versions": versions(), "ended": now()})
        with self.replaced(self.run_kind.saved, *more, in_all=in_all) as folders:
            if folders is not None:
                save(folders[0], summary, *folders[1:])
        if self.main:
            self.folder.write_json("summary.json", dict(summary), indent=2)
            self.screen.finish(summary, of_iteration(self.samples, 0), of_iteration(self.samples, -1))
            self.screen.findings(self._diagnose(ended=True))
        self.trackers.end()
        return summary
