"""A plan as text for people."""

from __future__ import annotations

from collections.abc import Iterator

from tokencredit.runs.summary import count, duration
from tokencredit.runs.untrusted import visible
from tokencredit.tools.plan.plan import USABLE, Plan, free_disk, remedies
from tokencredit.tools.plan.work import this_device

SMALLEST = 0.5e6
"""Parts of fewer bytes are left out of the table."""


def show(plan: Plan) -> None:
    """Print a plan."""
    for line in (*overview(plan), "", *memory_table(plan), "", *totals(plan), *warnings(plan)):
        print(visible(line))


def overview(plan: Plan) -> Iterator[str]:
    """The model, the work and the machine."""
    work, config, sizes = plan.work, plan.work.config, plan.sizes
    counts = f"{count(sizes.parameters)} parameters, {count(sizes.trained)} trained with the critic"
    yield f"model     {config.model.name}, {counts}"
    yield (
        f"work      {config.run.iterations:,} iterations of {config.rollout.batch_size:,} completions of "
        f"{work.mean.new:,} tokens after prompts of {work.mean.prompt:,}: {count(work.sampled)} tokens sampled"
    )
    shared = "models sharded" if work.sharded else "each with whole models"
    jobs = "1 process" if work.processes == 1 else f"{work.processes} processes, {shared}"
    limit = "" if plan.memory is None else f" with {gigabytes(plan.memory)}"
    yield f"device    {work.device}{limit}, {work.dtype}, {jobs}"


def memory_table(plan: Plan) -> Iterator[str]:
    """Memory by part, and the peaks."""
    yield f"{'memory per process':<28}{'GB':>8}  when"
    libraries = "Python and libraries" if plan.work.device == "cpu" else "CUDA context"
    for moment, parts in {"always": {libraries: plan.libraries}, **plan.sizes.parts}.items():
        when = "always" if moment == "kept" else moment
        yield from (f"  {part:<26}{size / 1e9:>8.2f}  {when}" for part, size in parts.items() if size >= SMALLEST)
    for moment, size in plan.peaks.items():
        notes = ["the highest"] * (moment == plan.peak[0])
        if plan.work.device == "cuda":
            card = plan.cards[moment]
            notes.append("on no single GPU" if card is None else f"fits on GPUs from {card} GB")
        yield f"  {'peak of the ' + moment:<26}{size / 1e9:>8.2f}  {', '.join(notes)}".rstrip()


def totals(plan: Plan) -> Iterator[str]:
    """The estimated time with its stages, the disk, and what was assumed."""
    if plan.seconds is not None:
        iteration = sum(plan.seconds.values())
        stages = ", ".join(f"{stage} {short(seconds)}" for stage, seconds in plan.seconds.items())
        total = duration(iteration * plan.work.config.run.iterations)
        yield f"time      about {short(iteration)} per iteration: {stages}"
        yield f"          about {total} in all; an estimate, by passes timed on this machine just now"
    elif not plan.fits or plan.work.device != this_device():
        reason = f"this machine has no {plan.work.device} device" if plan.fits else "the run does not fit"
        yield f"time      not estimated: {reason}"
    for when, cost in plan.audits.items():
        yield f"audit     {when}: about {cost}, without the time of the reward"
    sizes = ", ".join(f"{name} {gigabytes(size)}" for name, size in plan.disk.items())
    yield f"disk      {gigabytes(sum(plan.disk.values()))}: {sizes}"
    yield from (f"assumed   {line}" for line in plan.work.assumptions)


def warnings(plan: Plan) -> Iterator[str]:
    """What does not fit into this machine, and what to change."""
    better, (moment, size) = plan, plan.peak
    if plan.memory is not None and not plan.fits:
        where = "of RAM are available" if plan.work.device == "cpu" else "are on the GPU"
        needed = f"{plan.together} × {gigabytes(size)}" if plan.together > 1 else gigabytes(size)
        yield (
            f"warning   the {moment} needs {needed}, and {gigabytes(plan.memory)} {where}, of which a plan uses "
            f"{USABLE:.0%}"
        )
        for change, better in remedies(plan):
            yield f"warning   with {change} the peak is {gigabytes(better.peak[1])}"
        if not better.fits:
            yield (
                "warning   that is not enough: lower rollout.batch_size or rollout.max_new_tokens, or take a smaller "
                "model"
            )
    written, free = sum(plan.disk.values()), free_disk(plan.work.config.run.dir)
    if written > free:
        yield (
            f"warning   the run writes {gigabytes(written)}, and {gigabytes(free)} are free on the disk; lower "
            "run.keep_last, or set run.dir to another disk"
        )


def short(seconds: float) -> str:
    """Format a time, below 10 s with two digits."""
    return f"{seconds:.2g} s" if seconds < 10 else duration(seconds)


def gigabytes(size: float) -> str:
    """Format bytes as GB, or as MB below 0.1 GB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.0f} MB"
