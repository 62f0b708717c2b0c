"""Tables of costs.py in Markdown, and the pages that hold them."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from costs import (
    COPY,
    H200,
    LARGER,
    MEASURED,
    SHAPES,
    Batch,
    Setup,
    Shape,
    cache_bytes,
    config_of,
    decode_weight_bytes,
    head_parameters,
    iteration_flops,
    lora_parameters,
    optimizer_bytes,
    parameters,
    projection,
    rollout_seconds,
    step_seconds,
    trained_parameters,
    trunk_matrices,
    update_rate,
)

from tokencredit import PPOConfig
from tokencredit.tools.plan.plan import make_plan

HERE = Path(__file__).parent
RESULTS, DOCS = HERE / "RESULTS.md", HERE.parent / "docs" / "gpu.md"
RANK = 16
"""Rank of the adapters."""
BATCH = Batch()
VARIANTS = {
    "shared critic": Setup(),
    "separate critic": Setup("separate"),
    "no critic": Setup("none"),
    f"LoRA, rank {RANK}, shared critic": Setup("shared", RANK),
    f"LoRA, rank {RANK}, separate critic": Setup("separate", RANK),
}
LADDER: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "micro-batches of 1,024": {"ppo.micro_batch_tokens": 1024},
    "and checkpointing": {"ppo.micro_batch_tokens": 1024, "model.gradient_checkpointing": True},
    "micro-batches and LoRA": {"ppo.micro_batch_tokens": 1024, "model.lora.rank": RANK},
}
"""Settings of the table of docs/gpu.md."""
ADAPTED = {"model.lora.rank": RANK}
QUANTISED = ADAPTED | {"model.quantization": "nf4"}
LITTLE: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA": ADAPTED,
    "int8 and LoRA": QUANTISED | {"model.quantization": "int8"},
    "nf4 and LoRA": QUANTISED,
    "nf4, LoRA, `critic.lora`": QUANTISED | {"critic.kind": "separate", "critic.lora.rank": RANK},
}
"""Settings of the table of little memory, beside micro-batches of 1,024 and checkpointing."""
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


def results_tables() -> dict[str, str]:
    """The tables of RESULTS.md, by name."""
    counts = ["parameters", "trunk's matrices", "projection", "value head", f"LoRA, rank {RANK}", "KV cache, B/token"]
    steps = ["step at the start, ms", "at the end, ms", "rollout, s", "rollout at 4.3 TB/s, s", "tokens/s"]
    rates = ["tokens/s", f"at {MFU:.0%} MFU", "trained, M", "optimizer step, GB", "ms"]
    return {
        "shapes": markdown(["model", *counts], shape_rows()),
        "flops": markdown(["model", "variant", *STAGES, "sum", "relative"], flop_rows()),
        "decoding": markdown(["model", "weights, GB", "cache, GB", *steps], decoding_rows()),
        "update": markdown(["model", "variant", *rates], update_rows()),
    }


def planned(shape: Shape, critic: str, settings: Mapping[str, Any]) -> str:
    """The peak of a run on a GPU by `tokencredit plan`, and the smallest card on which it fits, in GB."""
    with tempfile.TemporaryDirectory() as folder:
        config_of(shape).save_pretrained(folder)
        batch = {"rollout.batch_size": BATCH.rows, "rollout.max_new_tokens": BATCH.new, "critic.kind": critic}
        config = PPOConfig.from_dict({"model.name": folder, **batch, **settings})
        plan = make_plan(config, prompt_tokens=BATCH.prompt, time=False, device="cuda")
    card = plan.cards[plan.peak[0]]
    return f"{plan.peak[1] / 1e9:.1f} ({'none' if card is None else card})"


def docs_tables() -> dict[str, str]:
    """The tables of docs/gpu.md, by name."""
    tables = {}
    for critic in ("shared", "separate"):
        rows = [[shape.name, *(planned(shape, critic, x) for x in LADDER.values())] for shape in SHAPES]
        tables[critic] = markdown(["model", *LADDER], rows)
    rows = [
        [shape.name, *(planned(shape, "shared", LADDER["and checkpointing"] | x) for x in LITTLE.values())]
        for shape in LARGER
    ]
    tables["little"] = markdown(["model", *LITTLE], rows)
    return tables


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
