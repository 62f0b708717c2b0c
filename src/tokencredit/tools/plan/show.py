"""A plan as text for people, and as a JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tokencredit.runs.folder import write_file
from tokencredit.runs.summary import count, duration
from tokencredit.runs.untrusted import visible
from tokencredit.tools.plan.plan import USABLE, Plan, as_json, remedies
from tokencredit.tools.plan.work import this_device

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
    sizes = ", ".join(f"{name} {gigabytes(size)}" for name, size in plan.disk.items())
    yield f"disk      {gigabytes(sum(plan.disk.values()))}: {sizes}"
    yield from (f"assumed   {line}" for line in plan.work.assumptions)
    yield from (f"warning   {line}" for line in warnings(plan))


def overview(plan: Plan) -> Iterator[str]:
    """The model, the work and the machine."""
    work, config = plan.work, plan.work.config
    yield (
        f"model     {config.model.name}, {count(plan.parameters)} parameters, "
        f"{count(plan.trained)} trained with the critic"
    )
    yield (
        f"work      {config.run.iterations:,} iterations of {config.rollout.batch_size:,} completions of "
        f"{work.mean.new:,} tokens after prompts of {work.mean.prompt:,}: {count(work.sampled)} tokens sampled"
    )
    shared, processes = "models sharded" if work.sharded else "each with whole models", work.options.processes
    jobs = "1 process" if processes == 1 else f"{processes} processes, {shared}"
    limit = "" if plan.machine.memory is None else f" with {gigabytes(plan.machine.memory)}"
    yield f"device    {plan.machine.device}{limit}, {work.dtype}, {jobs}"


def memory_table(plan: Plan) -> Iterator[str]:
    """Memory by part, and the peaks."""
    rows = [("Python and libraries" if plan.work.device == "cpu" else "CUDA context", plan.libraries, ALWAYS)]
    for moment, parts in plan.parts.items():
        when = ALWAYS if moment == "kept" else moment
        rows += [(part, size, when) for part, size in parts.items() if size >= SMALLEST]
    yield f"{'memory per process':<28}{'GB':>8}  when"
    yield from (f"  {part:<26}{size / 1e9:>8.2f}  {when}" for part, size, when in rows)
    at, _ = plan.peak
    for moment, size in plan.peaks.items():
        notes = ["the highest"] * (moment == at)
        if plan.work.device == "cuda":
            card = plan.cards[moment]
            notes.append("on no single GPU" if card is None else f"fits on GPUs from {card} GB")
        yield f"  {'peak of the ' + moment:<26}{size / 1e9:>8.2f}  {', '.join(notes)}".rstrip()


def time_lines(plan: Plan) -> Iterator[str]:
    """The estimated time, with its stages."""
    if not plan.work.options.time:
        return
    if plan.seconds is None:
        reason = "two layers of the model do not fit into its memory"
        if plan.work.device != this_device():
            reason = f"it has no {plan.work.device} device"
        yield f"time      not estimated on this machine: {reason}"
        return
    iteration = sum(plan.seconds.values())
    stages = ", ".join(f"{stage} {short(seconds)}" for stage, seconds in plan.seconds.items())
    total = duration(iteration * plan.work.config.run.iterations)
    yield f"time      about {short(iteration)} per iteration: {stages}"
    yield f"          about {total} in all; an estimate, by passes timed on this machine just now"


def warnings(plan: Plan) -> Iterator[str]:
    """What does not fit into this machine, and what to change."""
    limit, (moment, size) = plan.machine.memory, plan.peak
    if limit is not None and not plan.fits:
        on_cpu, processes = plan.work.device == "cpu", plan.work.options.processes
        needed = f"{processes} × {gigabytes(size)}" if on_cpu and processes > 1 else gigabytes(size)
        yield (
            f"the {moment} needs {needed}, and {gigabytes(limit)} "
            f"{'of RAM are available' if on_cpu else 'are on the GPU'}, of which a plan uses {USABLE:.0%}"
        )
        better = plan
        for change, better in remedies(plan):
            yield f"with {change} the peak is {gigabytes(better.peak[1])}"
        if not better.fits:
            yield "that is not enough: lower rollout.batch_size or rollout.max_new_tokens, or take a smaller model"
    free, written = plan.machine.disk, sum(plan.disk.values())
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
