"""A plan as text for people, and as a JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tokencredit.runs.folder import write_file
from tokencredit.runs.summary import count, duration
from tokencredit.runs.untrusted import visible
from tokencredit.tools.plan.memory import trained_parameters
from tokencredit.tools.plan.plan import USABLE, Plan, as_json, disk, remedies
from tokencredit.tools.plan.shape import parameters

ALWAYS = "always"
SMALLEST = 0.5e6
"""Parts of fewer bytes are left out of the table."""


def show(plan: Plan) -> None:
    """Print a plan."""
    for line in lines(plan):
        print(visible(line))


def lines(plan: Plan) -> Iterator[str]:
    """The lines of a plan."""
    yield from overview(plan)
    yield ""
    yield from memory_table(plan)
    yield ""
    yield from time_lines(plan)
    sizes = disk(plan)
    yield f"disk      {gigabytes(sum(sizes.values()))}: {', '.join(f'{x} {gigabytes(y)}' for x, y in sizes.items())}"
    yield from (f"assumed   {line}" for line in plan.work.assumptions)
    yield from (f"warning   {line}" for line in warnings(plan))


def overview(plan: Plan) -> Iterator[str]:
    """The model, the work and the machine."""
    work, setup = plan.work, plan.work.setup
    size, trained = parameters(work.model.shape), trained_parameters(work.model.shape, setup)
    yield f"model     {work.model.shape.name}, {count(size)} parameters, {count(trained)} trained with the critic"
    rollout, run = work.config.rollout, work.config.run
    yield (
        f"work      {run.iterations:,} iterations of {rollout.batch_size:,} completions of {work.mean.new:,} tokens "
        f"after prompts of {work.mean.prompt:,}: {count(work.sampled)} tokens sampled"
    )
    shared = {"none": "each with whole models", "full": "models sharded"}[setup.shard]
    jobs = "1 process" if setup.processes == 1 else f"{setup.processes} processes, {shared}"
    yield f"device    {plan.machine.device}, {setup.dtype}, {jobs}"


def memory_table(plan: Plan) -> Iterator[str]:
    """Memory by part, and the peaks."""
    rows = [("Python and libraries" if plan.work.setup.device == "cpu" else "CUDA context", plan.libraries, ALWAYS)]
    for moment, parts in plan.parts.items():
        when = ALWAYS if moment == "kept" else moment
        rows += [(part, size, when) for part, size in parts.items() if size >= SMALLEST]
    yield f"{'memory per process':<28}{'GB':>8}  when"
    yield from (f"  {part:<26}{size / 1e9:>8.2f}  {when}" for part, size, when in rows)
    at, _ = plan.peak
    for moment, size in plan.peaks.items():
        yield f"  {'peak of the ' + moment:<26}{size / 1e9:>8.2f}{'  the highest' if moment == at else ''}"


def time_lines(plan: Plan) -> Iterator[str]:
    """The estimated time, with its stages."""
    if not plan.work.options.time:
        return
    if plan.seconds is None:
        yield "time      not estimated: two layers of the model do not fit into this machine's memory"
        return
    iteration = sum(plan.seconds.values())
    stages = ", ".join(f"{stage} {short(seconds)}" for stage, seconds in plan.seconds.items())
    total = duration(iteration * plan.work.config.run.iterations)
    yield f"time      about {short(iteration)} per iteration: {stages}"
    yield f"          about {total} in all; an estimate, by passes timed on this machine just now"


def warnings(plan: Plan) -> Iterator[str]:
    """What does not fit into this machine, and what to change."""
    limit, (moment, size) = plan.machine.memory, plan.peak
    if limit is not None and plan.needed > USABLE * limit:
        on_cpu, processes = plan.work.setup.device == "cpu", plan.work.setup.processes
        kind = "of RAM are available" if on_cpu else f"are on the GPU ({plan.machine.device})"
        needed = f"{processes} × {gigabytes(size)}" if on_cpu and processes > 1 else gigabytes(size)
        yield f"the {moment} needs {needed}, and {gigabytes(limit)} {kind}, of which a plan uses {USABLE:.0%}"
        for change, lower in remedies(plan):
            yield f"with {change} the peak is {gigabytes(lower)}"
    free, written = plan.machine.disk, sum(disk(plan).values())
    if free is not None and written > free:
        yield (
            f"the run writes {gigabytes(written)}, and {gigabytes(free)} are free on the disk; lower run.keep_last, or "
            "set run.dir to another disk"
        )


def short(seconds: float) -> str:
    """Format a time, below 10 s with two digits."""
    return f"{seconds:.2g} s" if seconds < 10 else duration(seconds)


def gigabytes(size: float) -> str:
    """Format bytes as GB, or as MB below 0.1 GB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.0f} MB"


def write(plan: Plan, file: Path) -> None:
    """Write a plan as JSON."""
    write_file(file, json.dumps(as_json(plan), indent=2, allow_nan=False) + "\n")
