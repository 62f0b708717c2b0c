"""The plan of a run: memory of each part, peak, disk, tokens and time."""

from __future__ import annotations

import importlib
import re
import resource
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tokencredit.errors import ConfigError
from tokencredit.settings.text import PPOConfig
from tokencredit.tools.plan.work import Options, Work, plan_work, this_device

KERNELS = 40e6
"""Bytes of the libraries' code and buffers that only a run brings into memory: 30 to 60 MB on Linux."""
CUDA_CONTEXT = 5e8
"""Bytes of a CUDA context and its libraries' buffers on the GPU, about."""
USABLE = 0.9
"""Share of the memory that a plan may use; the rest is for reward models, fragments and other programs."""
CARDS = (8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 192)
"""Memory of GPUs, in GB."""
RANK = 16
"""Rank of the adapter that is proposed."""
Parts = dict[str, dict[str, float]]
"""Bytes by moment and part: `kept` throughout, and the additional ones of each moment."""


@dataclass(frozen=True)
class Machine:
    """Sizes in bytes; None where unknown."""

    device: str
    memory: float | None
    """Memory that processes may use: RAM that is available, or a GPU's whole memory."""
    disk: int | None
    """Free space at the run's folder."""


@dataclass(frozen=True)
class Plan:
    """Everything that is known of a run before it begins; sizes in bytes, per process unless named otherwise."""

    work: Work
    machine: Machine
    parts: Parts
    parameters: int
    """Of the language model."""
    trained: int
    """Trained parameters, the critic's included."""
    disk: dict[str, float]
    """What the run's folder will hold: checkpoints, and the models."""
    libraries: float
    """Python and libraries in RAM, or the CUDA context on a GPU."""
    seconds: dict[str, float] | None = None
    """Estimated seconds of each stage of an iteration; None without a calibration."""

    @property
    def peaks(self) -> dict[str, float]:
        """Peak of each moment, libraries and kept parts included."""
        kept = sum(self.parts["kept"].values()) + self.libraries
        return {moment: kept + sum(sizes.values()) for moment, sizes in self.parts.items() if moment != "kept"}

    @property
    def peak(self) -> tuple[str, float]:
        """The moment of the highest peak, and its size."""
        return max(self.peaks.items(), key=lambda moment: moment[1])

    @property
    def cards(self) -> dict[str, int | None]:
        """The smallest GPU on which each moment fits, in GB; None if it fits on none."""
        return {
            moment: next((card for card in CARDS if size <= USABLE * card * 1e9), None)
            for moment, size in self.peaks.items()
        }

    @property
    def fits(self) -> bool:
        """True if all processes of this machine fit into its memory; a GPU has one process."""
        together = self.work.options.processes if self.work.device == "cpu" else 1
        return self.machine.memory is None or self.peak[1] * together <= USABLE * self.machine.memory


def make_plan(config: PPOConfig, options: Options) -> Plan:
    """Plan a run; errors as in `plan_work`."""
    work, libraries = plan_work(config, options), CUDA_CONTEXT
    if work.device == "cpu":
        for module in ("tokencredit.text.ppo_trainer", *(["peft"] if config.model.lora.rank else [])):
            importlib.import_module(module)  # so that this process holds what the run's will
        libraries = resident() + KERNELS
    own = machine(work.device, options.memory, config.run.dir)
    plan = measured(work, own, libraries)
    if options.time and work.device == this_device():
        from tokencredit.tools.plan.duration import estimate

        kept, shares = plan.parts["kept"], options.processes if work.sharded else 1
        models = shares * (kept["weights"] + kept["critic"])
        plan = replace(plan, seconds=estimate(work, plan.peak[1] - libraries, own.memory, 4.0 * plan.trained, models))
    return plan


def measured(work: Work, own: Machine, libraries: float) -> Plan:
    """The plan without its time."""
    from tokencredit.tools.plan.memory import measure

    found, config = measure(work), work.config
    evaluated = config.eval.every > 0
    checkpoints = config.run.keep_last + evaluated if config.run.save_every else 0
    disk = {"checkpoints": checkpoints * found.checkpoint, "policy": found.saved}
    disk |= {"best": found.saved} if evaluated else {}
    return Plan(work, own, found.parts, found.parameters, found.trained, disk, libraries)


def remedies(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Changes of settings that lower the peak, each on top of those before, with the plan; ends when the run fits."""
    work, changes = plan.work, list[str]()
    longest = work.batch.prompt + work.batch.new
    ladder: dict[str, tuple[Any, bool]] = {
        "ppo.micro_batch_tokens": (longest, work.config.ppo.micro_batch_tokens != longest),
        "model.gradient_checkpointing": (True, not work.config.model.gradient_checkpointing),
        "run.shard": ("full", work.options.processes > 1 and not work.sharded),
        "model.lora.rank": (RANK, not work.config.model.lora.rank),
    }
    for key, (value, applies) in ladder.items():
        if not applies:
            continue
        try:
            better = measured(replace(work, config=with_setting(work.config, key, value)), plan.machine, plan.libraries)
        except ConfigError:  # settings that do not go together
            continue
        if better.peak[1] > 0.98 * plan.peak[1]:
            continue
        work, plan = better.work, better
        changes.append(f"{key}: {str(value).lower()}")
        yield " and ".join(changes), better
        if better.fits:
            return


def with_setting(config: Any, key: str, value: Any) -> Any:
    """A configuration with another value for a nested key."""
    name, _, rest = key.partition(".")
    return replace(config, **{name: with_setting(getattr(config, name), rest, value) if rest else value})


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan in plain values."""
    moment, size = plan.peak
    return {
        "parameters": plan.parameters,
        "trained": plan.trained,
        "processes": plan.work.options.processes,
        "memory": {"libraries": plan.libraries, **plan.parts},
        "peaks": plan.peaks,
        "peak": {"bytes": size, "at": moment},
        "fits": plan.fits,
        "cards": plan.cards,
        "disk": plan.disk,
        "tokens": plan.work.sampled,
        "seconds": plan.seconds,
        "assumptions": plan.work.assumptions,
        "machine": asdict(plan.machine),
    }


def machine(device: str, memory: float | None, folder: str | None) -> Machine:
    """This machine, or one with a device of this memory, and the free space at a folder that need not exist yet."""
    place = Path(folder or ".").absolute()
    existing = next((path for path in (place, *place.parents) if path.exists()), None)
    disk = None if existing is None else shutil.disk_usage(existing).free
    if memory is None and device == "cuda" and torch.cuda.is_available():
        return Machine(torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1], disk)
    return Machine(device, available() if memory is None and device == "cpu" else memory, disk)


def available() -> int | None:
    """RAM available to new processes, within the limit of a container."""
    limit, free = Path("/sys/fs/cgroup/memory.max"), proc("meminfo", "MemAvailable")
    text = limit.read_text(encoding="utf-8").strip() if limit.exists() else ""
    return min(int(text), free or int(text)) if text.isdigit() else free


def resident() -> int:
    """Resident memory of this process."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return proc("self/status", "VmRSS") or most * (1 if sys.platform == "darwin" else 1024)


def proc(file: str, key: str) -> int | None:
    """Bytes of an entry of a file of Linux's /proc, which counts in kB; None without one."""
    path = Path("/proc", file)
    match = re.search(rf"^{key}:\s+(\d+)", path.read_text(encoding="utf-8"), re.MULTILINE) if path.exists() else None
    return None if match is None else 1024 * int(match[1])
