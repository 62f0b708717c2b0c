"""Runs that learn from a data set: one iteration, and the run around it."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import torch

from tokencredit.distributed.processes import Processes, lack_of_memory
from tokencredit.errors import ConfigError
from tokencredit.learn import rng
from tokencredit.learn.controllers import EarlyStopping
from tokencredit.learn.optim import build_optimizer, clip_gradients, hidden_matrices, schedule, set_rates
from tokencredit.learn.state import load_training_state, nbytes, trainable, training_state
from tokencredit.learn.training_mode import training, training_modules
from tokencredit.learn.update import drop_gradients
from tokencredit.provenance.parts import describe, label
from tokencredit.report.page import LARGEST, write_final_report
from tokencredit.runs.loop import Iteration, State, Trainer, run
from tokencredit.runs.recorder import RunRecord
from tokencredit.runs.summary import Summary, count
from tokencredit.settings.fields import require_config
from tokencredit.settings.offline import DPOConfig, OfflineSettings, RewardModelConfig, SFTConfig
from tokencredit.settings.run_kind import refuse_python, run_kind_of
from tokencredit.text.data.datasets import Rows
from tokencredit.text.data.prompts import shuffled
from tokencredit.text.models.model_loading import check_origin
from tokencredit.text.models.precision import choose_precision, weights_in
from tokencredit.text.offline.examples import Example
from tokencredit.text.offline.offline_losses import OfflineLoss, combined, learned
from tokencredit.text.offline.offline_setup import Model, load_examples, load_model
from tokencredit.text.run_parts import part_of

ADVICE = "out of memory; lower data.micro_batch, or set model.gradient_checkpointing"


class OfflineTrainer(Trainer):
    """Trains a model on a data set: supervised fine-tuning, a reward model, or DPO, by the kind of configuration."""

    def __init__(self, args: OfflineSettings, train_dataset: Rows | None = None, eval_dataset: Rows | None = None):
        """Load everything that a run needs, or raise `ConfigError`; `train` creates its folder.

        Args:
            args: an `SFTConfig`, `RewardModelConfig` or `DPOConfig`.
            train_dataset: rows in place of `data.dataset`, as a `datasets.Dataset` or a list of dicts.
            eval_dataset: the same for held-out rows, in place of `eval.dataset`.
        """
        if not isinstance(args, SFTConfig | RewardModelConfig | DPOConfig):
            raise ConfigError(f"args is a {type(args).__name__}; give an SFTConfig, RewardModelConfig or DPOConfig")
        args = require_config(args, type(args))
        given = [name for name, rows in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)) if rows]
        refuse_python(args, f"{args.run.dir or 'RUN'}/config.yaml", given)
        self.processes = Processes(args.run.timeout)
        size, processes = args.data.batch_size, self.processes.count
        if size % processes:
            raise ConfigError(f"data.batch_size is {size}; it must be a multiple of the {processes} processes")
        with rng.isolated():
            rng.seed_all(args.seed)
            self.model: Model = load_model(args)
            lm = self.model.lm
            precision = choose_precision(args.model.dtype, self.processes, args.run.dir)
            loaded = load_examples(args, self.model, train_dataset, eval_dataset)
            self.examples, self.held_out, self.notes, read = loaded
            self.args, self.steps = args, args.run.iterations
            if args.data.epochs is not None:
                self.steps = max(math.ceil(args.data.epochs * len(self.examples) / size - 1e-9), 1)
            length = replace(args.run, iterations=self.steps)
            self.record = RunRecord(length, self.processes, run_kind_of(asdict(args)), precision.choices)
            rows = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
            parts = {name: describe(value) for name, value in rows.items() if value is not None}
            self.args = replace(args, python={name: label(part) for name, part in parts.items()})
            model = part_of(args.model.name)
            self.record.parts = parts | read | ({} if model is None else {"model.name": model})
            data = hashlib.sha256(json.dumps([self.examples, self.held_out]).encode()).hexdigest()
            self.origin: State = dict(self.model.start) | {"data": data}
            torch.nn.Module.to(lm, precision.device)
            self.loss = OfflineLoss(args, lm, self.model.tokenizer, precision)
            self.rng = rng.random_state()
        self.precision, self.notes = precision, [*precision.notes, *self.notes]
        self.wrapped = self.processes.wrap(lm)
        self.parameters = trainable(lm)
        optim = args.optim
        group = {"params": self.parameters, "lr": optim.lr, "weight_decay": optim.weight_decay}
        projection = lm.get_output_embeddings()
        excluded = [] if projection is None else list(projection.parameters())
        hidden = hidden_matrices(lm, excluded) if optim.name == "muon" else ()
        self.optimizer = build_optimizer([group], optim.name, hidden=hidden, eps=optim.eps)
        self.schedule = schedule(**optim.rates(self.steps))
        self.training_modules = training_modules(lm)
        self.stopping = EarlyStopping()
        self.drawn = 0
        """Rows read so far, over all processes; the position in the data."""

    def train(self, resume_from_checkpoint: bool = False) -> Summary:
        """Run all iterations, write the run's folder, and return its summary; raises as `PPOTrainer.train`."""
        size = nbytes(self.model.lm.parameters())
        with rng.isolated():
            rng.set_random_state(self.rng)
            if isinstance(self.args, DPOConfig) and not self.drawn:  # before weights are trained or loaded
                places = range(min(self.steps * self.args.data.batch_size, len(self.examples)))
                read = sorted({self._position(place) for place in places})
                self._add_reference([self.examples[i] for i in read])
                # A resumed run may read others. They come after, so that these are in the micro-batches of before.
                others = sorted({*range(len(self.examples))} - {*read}) if resume_from_checkpoint else []
                self._add_reference([self.examples[i] for i in others])
                self._add_reference(self.held_out)
            trained = nbytes(self.parameters)
            return run(self, resume=resume_from_checkpoint, reserve=size + LARGEST + 2**20, weights=trained)

    def overview(self) -> Iterator[tuple[str, str]]:
        """Model, data, device and folder: pairs of a label and a text."""
        size, trained = weights_in(self.model.lm.parameters()), sum(p.numel() for p in self.parameters)
        partly = f", {count(trained)} trained" if trained < size else ""
        yield "model", f"{self.args.model.name}, {count(size)} parameters{partly}"
        held = f", {len(self.held_out):,} held out" if self.held_out else ""
        name = self.args.data.dataset or "train_dataset"
        yield "data", f"{len(self.examples):,} rows of {name}{held}"
        jobs = f", {self.processes.count} processes" if self.processes.count > 1 else ""
        yield "device", f"{self.precision.device}, {self.precision.dtype}{jobs}"
        batch = self.args.data.batch_size
        rows = self.drawn + (self.steps - len(self.record.history)) * batch  # earlier batches may have had another size
        passes = f"{rows / len(self.examples):.3g} × the data"
        yield "run", f"{self.record.folder.path}, {self.steps:,} iterations of {batch:,} rows: {passes}"

    def iteration(self, number: int) -> Iteration:
        """Take one optimizer step; returns the iteration's metrics, and no samples."""
        started, self.progress = time.perf_counter(), None
        rates = set_rates(self.optimizer, self.schedule(number - 1))
        metrics = {"iteration": number} | self._step(number, self._next_batch()) | rates
        metrics["tokens_per_second"] = metrics["tokens"] / (time.perf_counter() - started)
        metrics["seconds"] = time.perf_counter() - started
        self.progress = metrics, []
        every = self.args.eval.every
        if self.held_out and (number == self.steps or (every and number % every == 0)):
            metrics |= {f"eval/{name}": value for name, value in self.evaluate().items()}
        metrics["seconds"] = time.perf_counter() - started
        return metrics, []

    def _next_batch(self) -> list[Example]:
        """This process's rows of the next batch, in an order that is drawn anew for each pass over the data."""
        size = self.args.data.batch_size
        share = size // self.processes.count
        first = self.drawn + share * self.processes.rank
        self.drawn += size
        return [self.examples[self._position(first + i)] for i in range(share)]

    def _position(self, place: int) -> int:
        """Index of the example at a place of the endless sequence."""
        return shuffled(place, len(self.examples), self.args.seed)

    def _step(self, number: int, rows: Sequence[Example]) -> dict[str, float]:
        """Take a step on a batch, unless its loss or gradient is not finite; returns its metrics."""
        drop_gradients(self.parameters)
        lm, optim = self.model.lm, self.args.optim
        # TRL's metrics are those of training if the whole model is in training mode.
        with training([lm, *self.training_modules]), self.precision.updates():
            loss, measured = self._passes(rows)
        norm = float(clip_gradients(self.parameters, optim.max_grad_norm, optim.grad_norm))
        lengths = [len(ids) for row in rows for ids in texts(row)]
        read, sequences = self._sum(sum(lengths)), self._sum(len(lengths))
        metrics = {**self._with_perplexity(loss, measured), "grad_norm": norm, "tokens": read}
        metrics["sequence_length"] = read / sequences
        if not self.processes.all(math.isfinite(loss + norm)):
            ids = {f"row_{i}_{j}": torch.tensor(x) for i, row in enumerate(rows) for j, x in enumerate(texts(row))}
            self.record.bad_step(number, "the loss or the gradient is not finite", ids, diverged=True)
            return metrics | {"loss": math.nan, "steps": 0, "bad_steps": 1}
        self.optimizer.step()
        drop_gradients(self.parameters)
        self.record.bad_in_a_row = 0
        return metrics | {"steps": 1, "bad_steps": 0}

    def _passes(self, rows: Sequence[Example]) -> tuple[float, dict[str, float]]:
        """The mean loss and the metrics of a batch over all processes, in micro-batches; adds its gradient."""
        size = self._sum(self.loss.size(rows))
        micro = self.args.data.micro_batch or len(rows)
        total, parts = 0.0, []
        with lack_of_memory(ADVICE):
            for part in cut(rows, micro):
                loss = self.loss(self.wrapped, part, size)
                loss.backward()
                total += float(loss.detach())
                parts.append((self.loss.metrics(), self._sum(len(part)), self._sum(learned(part))))
        return self._sum(total) / self.processes.count, combined(parts)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss and metrics on the held-out rows, all of them in each process; `ConfigError` without such rows."""
        if not self.held_out:
            raise ConfigError("no rows are held out; set data.held_out or eval.dataset, or give eval_dataset")
        if isinstance(self.args, DPOConfig) and not self.drawn:  # as `train` does, before weights are trained
            self._add_reference(self.held_out)
        rows, micro = self.held_out, self.args.data.micro_batch or self.args.data.batch_size
        total, parts = 0.0, []
        with lack_of_memory(ADVICE):
            for part in cut(rows, micro):
                total += float(self.loss(self.model.lm, part, self.loss.size(rows))) / self.processes.count
                parts.append((self.loss.metrics(), len(part), learned(part)))
        return self._with_perplexity(total, combined(parts))

    def _with_perplexity(self, loss: float, measured: dict[str, float]) -> dict[str, float]:
        """A loss with its metrics, and with the perplexity if it is a mean over tokens."""
        perplexity = {"perplexity": math.exp(min(loss, 20.0))} if self.loss.by_token else {}
        return {"loss": loss, **perplexity, **measured}

    def _sum(self, number: float) -> float:
        return float(self.processes.sum(torch.tensor(float(number), device=self.precision.device)))

    def _add_reference(self, rows: Sequence[Example]) -> None:
        """Add to each row its log-probs under the model as it is now."""
        micro = self.args.data.micro_batch or self.args.data.batch_size
        with lack_of_memory(ADVICE):
            for part in cut(rows, micro):
                for row, numbers in zip(part, self.loss.reference(part), strict=True):
                    row.update(numbers)

    def state(self) -> tuple[State, State]:
        """Resumable state: the part that all processes share, and this process's own."""
        place = {"origin": self.origin, "drawn": self.drawn, "iterations": len(self.record.history)}
        return place | training_state(self.model.lm, self.optimizer), {"random": rng.random_state()}

    def load(self, state: State, changed: set[str]) -> Sequence[str]:  # noqa: ARG002  (of `Trainer`)
        """Restore the result of `state`, its second part under `process`; refuses another model, tokenizer or data."""
        check_origin(state["origin"], self.origin, self.args.model.name)
        size, rows = self.args.data.batch_size, state["drawn"]
        if self.args.data.epochs is not None and rows != state["iterations"] * size:
            raise ConfigError(
                f"data.batch_size is {size}, and this run read {rows} rows in {state['iterations']} iterations; epochs "
                "are a number of iterations of one size: restore it, or set run.iterations in place of data.epochs"
            )
        if state["origin"]["data"] != self.origin["data"]:
            raise ConfigError(
                "the rows to train on, or those held out, are not those that this run began with; restore the data set "
                "and the settings under data, or begin a new run with the trained model as model.name"
            )
        load_training_state(self.model.lm, self.optimizer, state)
        self.drawn = state["drawn"]
        rng.set_random_state(state["process"]["random"])
        return ()

    def finish(self, stopped_by: str) -> Summary:
        """Write the model, the summary and the report, and return the summary."""
        summary = self.record.end(stopped_by, lambda folder, _summary: self.model.save(folder))
        write_final_report(self.record)
        self.record.next_steps(self.model.next_steps)
        return summary


def cut(rows: Sequence[Example], size: int) -> list[Sequence[Example]]:
    """The rows in parts of a size; the last part may be shorter."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def texts(row: Example) -> Iterator[list[int]]:
    """The sequences of token ids that a model reads for an example."""
    if "input_ids" in row:
        yield row["input_ids"]
    else:
        prompt = row.get("prompt_ids", [])
        yield prompt + row["chosen_ids"]
        yield prompt + row["rejected_ids"]
