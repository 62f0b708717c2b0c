"""The plan of a run: memory of each part, peak, disk, tokens and time."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from tokencredit.settings.text import PPOConfig
from tokencredit.tools.plan.machine import Machine, machine, resident
from tokencredit.tools.plan.memory import Parts, frozen_bytes, kept_bytes, memory, trained_parameters
from tokencredit.tools.plan.shape import FLOAT, parameters
from tokencredit.tools.plan.work import Options, Work, plan_work

KERNELS = 40e6
"""Bytes of the libraries' code and buffers that only a run brings into memory: 30 to 60 MB on Linux."""
CUDA_CONTEXT = 5e8
"""Bytes of a CUDA context and its libraries' buffers on the GPU, about."""
USABLE = 0.9
"""Share of the memory that a plan may use; the rest is for reward models, fragments and other programs."""
RANK = 16
"""Rank of the adapter that is proposed."""


@dataclass(frozen=True)
class Plan:
    """Everything that is known of a run before it begins; sizes in bytes, per process unless named otherwise."""

    work: Work
    machine: Machine
    parts: Parts
    libraries: float
    """Python and libraries in RAM, or the CUDA context on a GPU."""
    seconds: dict[str, float] | None = None
    """Estimated seconds of each stage of an iteration; None without a calibration."""

    @property
    def peaks(self) -> dict[str, float]:
        """Peak of each moment, libraries and kept parts included."""
        return peaks(self.parts, self.libraries)

    @property
    def peak(self) -> tuple[str, float]:
        """The moment of the highest peak, and its size."""
        return max(self.peaks.items(), key=lambda moment: moment[1])

    @property
    def needed(self) -> float:
        """Memory that all processes of this machine need together; a GPU has one process."""
        return self.peak[1] * (self.work.options.processes if self.work.setup.device == "cpu" else 1)


def peaks(parts: Parts, libraries: float) -> dict[str, float]:
    """Bytes at each moment, from `memory` and the libraries."""
    kept = sum(parts["kept"].values()) + libraries
    return {moment: kept + sum(sizes.values()) for moment, sizes in parts.items() if moment != "kept"}


def make_plan(config: PPOConfig, options: Options) -> Plan:
    """Plan a run; errors as in `plan_work`."""
    work = plan_work(config, options)
    if work.setup.device == "cpu":
        for module in ("tokencredit.text.ppo_trainer", *(["peft"] if work.setup.lora_rank else [])):
            importlib.import_module(module)  # so that this process holds what the run's will
        libraries = resident() + KERNELS
    else:
        libraries = CUDA_CONTEXT
    parts = memory(work.model.shape, work.batch, work.setup)
    own = machine(work.setup.device, config.run.dir)
    seconds = None
    if options.time:
        from tokencredit.tools.plan.duration import estimate

        seconds = estimate(work, own.memory)
    return Plan(work, own, parts, libraries, seconds)


def disk(plan: Plan) -> dict[str, float]:
    """Bytes that the run's folder will hold: checkpoints, and the models."""
    shape, setup, config = plan.work.model.shape, plan.work.setup, plan.work.config
    kept = kept_bytes(shape, plan.work.batch, replace(setup, processes=1, shard="none"))
    # Below an adapter the weights stay where they are.
    policy = kept["weights"] + kept["critic"] - (frozen_bytes(shape, half=False) if setup.lora_rank else 0)
    evaluated = config.eval.every > 0
    checkpoints = config.run.keep_last + evaluated if config.run.save_every else 0
    sizes = {"checkpoints": checkpoints * 3 * FLOAT * trained_parameters(shape, setup), "policy": policy}
    return sizes | ({"best": policy} if evaluated else {})


def remedies(plan: Plan) -> Iterator[tuple[str, float]]:
    """Changes of settings that lower the peak, one by one, each with the peak that it gives."""
    work, setup = plan.work, plan.work.setup
    longest = work.batch.prompt + work.batch.new
    changes: dict[str, dict[str, Any]] = {
        f"ppo.micro_batch_tokens: {longest}": {"micro_batch_tokens": longest},
        "model.gradient_checkpointing: true": {"gradient_checkpointing": True},
        f"model.lora.rank: {RANK}": {"lora_rank": RANK, "adapter": None},
        "run.shard: full": {"shard": "full"},
    }
    if setup.lora_rank:
        del changes[f"model.lora.rank: {RANK}"]
    if setup.processes == 1:
        del changes["run.shard: full"]
    for change, settings in changes.items():
        parts = memory(work.model.shape, work.batch, replace(setup, **settings))
        size = max(peaks(parts, plan.libraries).values())
        if size < 0.98 * plan.peak[1]:
            yield change, size


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan in plain values."""
    moment, size = plan.peak
    work = plan.work
    return {
        "parameters": parameters(work.model.shape),
        "trained": trained_parameters(work.model.shape, work.setup),
        "processes": work.options.processes,
        "memory": {"libraries": plan.libraries, **plan.parts},
        "peaks": plan.peaks,
        "peak": {"bytes": size, "at": moment},
        "disk": disk(plan),
        "tokens": work.sampled,
        "seconds": plan.seconds,
        "assumptions": work.assumptions,
        "machine": asdict(plan.machine),
    }
