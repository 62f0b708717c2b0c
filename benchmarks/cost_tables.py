"""Tables of costs.py in Markdown, and the pages that hold them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from costs import (
    COPY,
    GPT2,
    H200,
    MEASURED,
    QWEN3_06B,
    SHAPES,
    decode_weight_bytes,
    iteration_flops,
    optimizer_bytes,
    rollout_seconds,
    step_seconds,
    update_rate,
)

from tokencredit.tools.plan.memory import Batch, Setup, cache_bytes, memory, peak, trained_parameters
from tokencredit.tools.plan.shape import Shape, head_parameters, lora_parameters, parameters, projection, trunk_matrices

HERE = Path(__file__).parent
RESULTS, DOCS = HERE / "RESULTS.md", HERE.parent / "docs" / "gpu.md"
RANK = 16
"""Rank of the adapters."""
BATCH = Batch()
LONG = Batch(rows=16, prompt=512, new=3584)
VARIANTS = {
    "shared critic": Setup(),
    "separate critic": Setup("separate"),
    "no critic": Setup("none"),
    f"LoRA, rank {RANK}, shared critic": Setup(lora_rank=RANK),
    f"LoRA, rank {RANK}, separate critic": Setup("separate", lora_rank=RANK),
}
USABLE = 0.9
"""Share of a GPU's memory that settings may use, by the formula."""
CARDS = (8, 24, 80, 141)
"""Memory of GPUs, in GB."""
MICRO_BATCHES = (16384, 8192, 4096, 2048, 1024)
MFU = 0.4
STAGES = ("rollout", "re-evaluation", "reference", "update")


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def giga(size: float) -> str:
    """Format bytes as GB."""
    return f"{size / 1e9:.2f}" if size < 1e9 else f"{size / 1e9:.1f}"


def shape_rows() -> Iterator[list[str]]:
    """Parameters of each model."""
    for shape in SHAPES:
        adapter = lora_parameters(shape, RANK)
        counts = (parameters(shape), trunk_matrices(shape), projection(shape), head_parameters(shape), adapter)
        yield [shape.name, *(f"{count:,}" for count in (*counts, cache_bytes(shape)))]


def flop_rows() -> Iterator[list[str]]:
    """TFLOP of each stage, and their sum relative to that of a shared critic."""
    for shape in MEASURED:
        stages = {name: iteration_flops(shape, BATCH, setup) for name, setup in VARIANTS.items()}
        sums = {name: sum(flops.values()) for name, flops in stages.items()}
        for name, flops in stages.items():
            tera = [f"{x / 1e12:,.0f}" for x in (*(flops[stage] for stage in STAGES), sums[name])]
            yield [shape.name, name, *tera, f"{sums[name] / sums['shared critic']:.2f}"]


def decoding_rows() -> Iterator[list[str]]:
    """Bounds of a decoding step and a rollout."""
    for shape in MEASURED:
        cache = cache_bytes(shape) * BATCH.rows * (BATCH.prompt + BATCH.new)
        steps = [step_seconds(shape, BATCH.rows, length) * 1e3 for length in (BATCH.prompt + 1, BATCH.length)]
        datasheet, copy = (rollout_seconds(shape, BATCH, device) for device in (H200, COPY))
        seconds = [f"{x:.2f}" for x in (*steps, datasheet, copy)]
        rate = f"{BATCH.responses / datasheet:,.0f}"
        yield [shape.name, giga(decode_weight_bytes(shape)), giga(cache), *seconds, rate]


def update_rows() -> Iterator[list[str]]:
    """Rates of the update, and bytes of an optimizer step."""
    for shape in MEASURED:
        for name, setup in VARIANTS.items():
            trained = trained_parameters(shape, setup)
            moved = optimizer_bytes(trained)
            rates = [f"{update_rate(shape, BATCH, setup, mfu):,.0f}" for mfu in (1, MFU)]
            step = f"{moved / H200.bandwidth * 1e3:.2f}"
            yield [shape.name, name, *rates, f"{trained / 1e6:,.0f}", giga(moved), step]


def memory_rows() -> Iterator[list[str]]:
    """Memory by part, in GB."""
    for shape in MEASURED:
        for name, setup in VARIANTS.items():
            parts = memory(shape, BATCH, setup)
            sums = [sum(parts[stage].values()) for stage in ("rollout", "scoring")]
            sizes = [*parts["kept"].values(), *parts["update"].values(), *sums, peak(parts)]
            yield [shape.name, name, *(f"{size / 1e9:.1f}" for size in sizes)]


def results_tables() -> dict[str, str]:
    """The tables of RESULTS.md, by name."""
    counts = ["parameters", "trunk's matrices", "projection", "value head", f"LoRA, rank {RANK}", "KV cache, B/token"]
    steps = ["step at the start, ms", "at the end, ms", "rollout, s", "rollout at 4.3 TB/s, s", "tokens/s"]
    rates = ["tokens/s", f"at {MFU:.0%} MFU", "trained, M", "optimizer step, GB", "ms"]
    parts = memory(GPT2, BATCH, Setup())
    return {
        "shapes": markdown(["model", *counts], shape_rows()),
        "flops": markdown(["model", "variant", *STAGES, "sum", "relative"], flop_rows()),
        "decoding": markdown(["model", "weights, GB", "cache, GB", *steps], decoding_rows()),
        "update": markdown(["model", "variant", *rates], update_rows()),
        "memory": markdown(
            ["model", "variant", *parts["kept"], *parts["update"], "rollout", "scoring", "peak"], memory_rows()
        ),
    }


def choose(shape: Shape, card: float, critic: Literal["shared", "separate"], batch: Batch) -> Setup | None:
    """The first settings that fit into a GPU's memory, in GB; None if none does.

    The whole model comes before LoRA, smaller micro-batches before checkpointing; a micro-batch holds the longest row.
    """
    longest, minibatch = batch.prompt + batch.new, batch.rows * batch.length / batch.minibatches
    for rank in (0, RANK):
        for checkpointing in (False, True):
            for tokens in (None, *(x for x in MICRO_BATCHES if longest <= x < minibatch)):
                setup = Setup(critic, rank, checkpointing, tokens)
                if peak(memory(shape, batch, setup)) <= USABLE * card * 1e9:
                    return setup
    return None


def settings_cell(shape: Shape, card: float, critic: Literal["shared", "separate"], batch: Batch) -> str:
    """The settings that fit, and the memory they take."""
    setup = choose(shape, card, critic, batch)
    if setup is None:
        return "no"
    words = ["LoRA" if setup.lora_rank else "whole"]
    words += ["checkpointing"] if setup.gradient_checkpointing else []
    words += [f"{setup.micro_batch_tokens:,}"] if setup.micro_batch_tokens else []
    return f"{', '.join(words)}: {peak(memory(shape, batch, setup)) / 1e9:.1f}"


def example_rows() -> Iterator[tuple[str, str, str]]:
    """Memory of one run by part, with default settings."""
    parts = memory(QWEN3_06B, BATCH, Setup())
    for stage, sizes in parts.items():
        yield from ((stage, name, f"{size / 1e9:.2f}") for name, size in sizes.items())
    yield ("peak", "kept, and the largest of the others", f"{peak(parts) / 1e9:.2f}")


def docs_tables() -> dict[str, str]:
    """The tables of docs/gpu.md, by name."""
    head = ["model", *(f"{card} GB" for card in CARDS)]
    long = [shape for shape in SHAPES if shape.positions >= LONG.prompt + LONG.new]
    kinds: dict[str, tuple[tuple[Literal["shared", "separate"], Batch], Sequence[Shape]]] = {
        "shared": (("shared", BATCH), SHAPES),
        "separate": (("separate", BATCH), SHAPES),
        "long": (("shared", LONG), long),
    }
    tables = {
        name: markdown(head, [(shape.name, *(settings_cell(shape, card, *kind) for card in CARDS)) for shape in shapes])
        for name, (kind, shapes) in kinds.items()
    }
    return {**tables, "example": markdown(["when", "part", "GB"], example_rows())}


def fill(page: str, tables: Mapping[str, str]) -> str:
    """Insert each table between its two comments in the page."""
    for name, text in tables.items():
        pattern = re.compile(rf"(<!-- table {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        page, places = pattern.subn(lambda found, text=text: f"{found[1]}{text}\n{found[2]}", page)
        if places != 1:
            raise SystemExit(f"the page has {places} places for the table {name}")
    return page


def main(arguments: Sequence[str]) -> int:
    """Print the tables, or write them into their pages."""
    if "--write" in arguments:
        for page, tables in ((RESULTS, results_tables()), (DOCS, docs_tables())):
            page.write_text(fill(page.read_text(encoding="utf-8"), tables), encoding="utf-8")
        return 0
    for name, text in (docs_tables() if "--docs" in arguments else results_tables()).items():
        print(f"{name}\n\n{text}\n")
    return 0
