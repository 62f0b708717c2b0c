"""The plan of a run: memory of each part, peak, disk, tokens and time."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from tokencredit.errors import ConfigError
from tokencredit.runs.loop import AT_END, AUDIT_ROWS, AUDIT_SHARE, MIN_AUDITED
from tokencredit.settings.text import PPOConfig
from tokencredit.text.audit.cost import PLANNED, Cost, Pace, expected
from tokencredit.tools.plan.duration import estimate
from tokencredit.tools.plan.memory import Sizes, measure
from tokencredit.tools.plan.work import Work, plan_work, this_device

KERNELS = 40e6
"""Bytes of the libraries' code and buffers that only a run brings into memory: 30 to 60 MB on Linux."""
CUDA_CONTEXT = 5e8
"""Bytes of a CUDA context and its libraries' buffers on the GPU, about."""
USABLE = 0.9
"""Share of the memory that a plan may use; the rest is for reward models, fragments and other programs."""
CARDS = (8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 192)
"""Memory of GPUs, in GB."""
SAMPLE_BYTES = 80
"""Bytes per token of `run.samples: all`, about."""
RANK = 16
"""Rank of the adapter that is proposed."""


@dataclass(frozen=True)
class Plan:
    """Everything that is known of a run before it begins; sizes in bytes, per process unless named otherwise."""

    work: Work
    sizes: Sizes
    libraries: float
    """Python and libraries in RAM, or the CUDA context on a GPU."""
    memory: float | None
    """Memory that the processes may use: RAM that is available, or a GPU's whole memory; None if unknown."""
    seconds: dict[str, float] | None = None
    """Estimated seconds of each stage of an iteration; None if they are not estimated."""

    @property
    def peaks(self) -> dict[str, float]:
        """Peak of each moment, libraries and kept parts included."""
        kept = sum(self.sizes.parts["kept"].values()) + self.libraries
        return {moment: kept + sum(sizes.values()) for moment, sizes in self.sizes.parts.items() if moment != "kept"}

    @property
    def peak(self) -> tuple[str, float]:
        """The moment of the highest peak, and its size."""
        return max(self.peaks.items(), key=lambda moment: moment[1])

    @property
    def cards(self) -> dict[str, int | None]:
        """The smallest GPU on which each moment fits, in GB; None if it fits on none."""
        sizes = self.peaks.items()
        return {at: next((card for card in CARDS if size <= USABLE * card * 1e9), None) for at, size in sizes}

    @property
    def together(self) -> int:
        """Processes that share the memory: those of this machine, or a GPU's one."""
        return self.work.processes if self.work.device == "cpu" else 1

    @property
    def fits(self) -> bool:
        """True if the processes fit into the memory, or it is unknown."""
        return self.memory is None or self.peak[1] * self.together <= USABLE * self.memory

    @property
    def disk(self) -> dict[str, float]:
        """Sizes of what the run's folder will hold: checkpoints, the models, and every completion if all are kept."""
        run, best = self.work.config.run, self.work.config.eval.every > 0
        written = run.iterations if best else -(-run.iterations // (run.save_every or 1))
        checkpoints = min(run.keep_last + best, written) if run.save_every else 0
        sizes = {"checkpoints": checkpoints * self.sizes.checkpoint, "policy": self.sizes.saved}
        sizes |= {"samples": SAMPLE_BYTES * self.work.sampled} if run.samples == "all" else {}
        return sizes | ({"best": self.sizes.saved} if best else {})

    @property
    def audits(self) -> dict[str, Cost]:
        """The work of each audit in training and of that at the end, without the reward's own time."""
        config, seconds, audits = self.work.config, self.seconds, dict[str, Cost]()
        rollout, settings = config.rollout, config.audit
        sampled = None if seconds is None else (seconds["rollout"] + seconds.get("reference", 0.0)) / rollout.batch_size
        cost = partial(expected, group=rollout.per_prompt, pace=Pace(self.work.mean.new, sampled))
        if settings.every:
            audits[f"every {settings.every} iterations"] = cost(settings)
        total = None if seconds is None else config.run.iterations * sum(seconds.values())
        each = cost(PLANNED, completions=1)
        rows, budget = AUDIT_ROWS[1], None
        if total is not None and each.seconds is not None:
            budget = AUDIT_SHARE * total
            rows = min(rows, int(budget / each.seconds))
        if settings.at_end and rows >= AUDIT_ROWS[0] and (total is None or total >= MIN_AUDITED):
            size = replace(PLANNED, continuations=AT_END.continuations, seconds=budget)
            audits["at the end"] = cost(replace(size, calls=settings.calls, tokens=settings.tokens), completions=rows)
        return audits

    def as_json(self) -> dict[str, Any]:
        """The plan in plain values."""
        values = {name: getattr(self, name) for name in ("peaks", "fits", "cards", "disk", "seconds")}
        values |= {name: getattr(self.sizes, name) for name in ("parameters", "trained")}
        values |= {name: getattr(self.work, name) for name in ("processes", "assumptions")}
        return values | {
            "memory": {"libraries": self.libraries, **self.sizes.parts},
            "peak": {"bytes": self.peak[1], "at": self.peak[0]},
            "tokens": self.work.sampled,
            "audits": {when: cost._asdict() for when, cost in self.audits.items()},
            "machine": {"device": self.work.device, "memory": self.memory},
        }


def make_plan(config: PPOConfig, *, memory: float | None = None, time: bool = True, **options: Any) -> Plan:
    """Plan a run, on this machine's device or one of `memory` bytes, with the options of `plan_work`."""
    work = plan_work(config, **options)
    own, sizes = work.device == this_device(), measure(work)
    if memory is None and own:
        memory = torch.cuda.mem_get_info()[1] if work.device == "cuda" else available()
    plan = Plan(work, sizes, resident() + KERNELS if work.device == "cpu" else CUDA_CONTEXT, memory)
    return replace(plan, seconds=estimate(work, sizes)) if time and own and plan.fits else plan


def remedies(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Changes of settings that lower the peak, each on top of those before, with the plan; ends when the run fits."""
    changes, batch = list[str](), plan.work.batch
    ladder = {
        "ppo.micro_batch_tokens": batch.prompt + batch.new,
        "model.gradient_checkpointing": True,
        "run.shard": "full",
        **({} if plan.work.config.model.lora.rank else {"model.lora.rank": RANK}),
        **({} if plan.work.config.model.quantization else {"model.quantization": "nf4"}),
    }
    for key, value in ladder.items():
        try:
            work = replace(plan.work, config=changed(plan.work.config, key, value))
            better = replace(plan, work=work, sizes=measure(work))
        except ConfigError:  # settings that do not go together
            continue
        if better.peak[1] > 0.98 * plan.peak[1]:
            continue
        plan = better
        changes.append(f"{key}: {str(value).lower()}")
        yield " and ".join(changes), plan
        if plan.fits:
            return


def changed(config: Any, key: str, value: Any) -> Any:
    """A configuration with another value for a nested key."""
    name, _, rest = key.partition(".")
    return replace(config, **{name: changed(getattr(config, name), rest, value) if rest else value})


def free_disk(folder: str | None) -> int:
    """Free bytes at a folder that need not exist yet."""
    place = Path(folder or ".").absolute()
    return shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free


def available() -> float:
    """RAM available to new processes, within the limit of a container."""
    file = Path("/sys/fs/cgroup/memory.max")
    limit = file.read_text(encoding="utf-8").strip() if file.exists() else ""
    return float(min([psutil.virtual_memory().available, *([int(limit)] if limit.isdigit() else [])]))


def resident() -> float:
    """The most memory that this process has held."""
    if sys.platform == "win32":
        return float(psutil.Process().memory_info().peak_wset)
    import resource

    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
