"""Accuracy, speed and memory of PPO on a GPU: one command, at most 8 minutes, a table.

    python benchmarks/gpu.py [--out gpu.json] [--size full] [--minutes 8] [--parts …] [--wheels FOLDER]
    python benchmarks/gpu.py --table gpu.json

It needs PyTorch, Transformers, Accelerate, PEFT and Rich, and this checkout, which need not be installed; no network.
`--wheels` first installs the wheels of a folder, for a machine that lacks one. Models have random weights and the
public shapes of costs.py; completions never end early. Each row is printed and written to `--out` as soon as it is
measured. Parts skipped for lack of time are named. gpu_parts.py has the measurements; `--size smallest`, the
default without a GPU, runs every part on tiny models. `--table` prints a file's rows in Markdown, for RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = (
    "ceilings",
    "correctness",
    "main",
    "decoding",
    "side_by_side",
    "engines",
    "variants",
    "growth",
    "others",
    "compiled",
)
WIDTHS = (13, 13, 56, 10, 9, 12)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--size", choices=("full", "smallest"))
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no part after so many")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first")
    parser.add_argument("--table", type=Path, help="print a file's rows in Markdown, and measure nothing")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.table.read_text())))
        return
    started = time.monotonic()
    if args.wheels:
        install(args.wheels)
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
    import torch
    from gpu_parts import SIZES, Bench

    cuda = torch.cuda.is_available()
    size = SIZES[args.size or ("full" if cuda else "smallest")]
    device = torch.device("cuda" if cuda else "cpu")
    rows: list[dict] = []
    print(cells("part", "model", "", "", "unit", "goal"))
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(device, size, Path(folder))
        for part in args.parts:
            late = time.monotonic() - started > 60 * args.minutes
            for row in [{"part": part, "name": "left out, no time was left"}] if late else measured(bench, part):
                row["at"] = round(time.monotonic() - started, 1)
                rows.append(row)
                print(line(row), flush=True)
                args.out.write_text(json.dumps({"machine": machine(), "size": size.name, "rows": rows}, indent=1))
    failed = [row for row in rows if "error" in row]
    print(f"{len(rows)} rows in {time.monotonic() - started:.0f} s, {len(failed)} failed")
    sys.exit(1 if failed else 0)


def measured(bench: object, part: str) -> Iterator[dict]:
    """The rows of a part; an exception becomes its last row, and the next part starts afresh."""
    try:
        for row in getattr(bench, part)():
            yield {"part": part, **row._asdict()}
    except Exception as error:
        traceback.print_exc()
        yield {"part": part, "name": "failed", "error": f"{type(error).__name__}: {error}"}
    finally:
        bench.release()


def line(row: dict) -> str:
    """Format a row as text."""
    return cells(row["part"], *texts(row))


def texts(row: dict) -> tuple[str, str, str, str, str]:
    """Model, name, value, unit and verdict of a row."""
    value = row.get("value", row.get("error", ""))
    shown = f"{value:,.4g}" if isinstance(value, float) else str(value)
    goal, met = row.get("goal"), row.get("met")
    verdict = "" if goal is None else f"{goal} {'met' if met else 'MISSED'}"
    return row.get("model", ""), row["name"], shown, row.get("unit", ""), verdict


def table(results: dict) -> str:
    """Format the rows of a file as a table."""
    header = [", ".join(results["machine"].values()), "", "| model | | | | goal |", "|---|---|---|---|---|"]
    return "\n".join([*header, *(f"| {' | '.join(texts(row))} |" for row in results["rows"])])


def cells(*texts: str) -> str:
    """Format texts in columns."""
    return "  ".join(f"{text:{width}}" for text, width in zip(texts, WIDTHS, strict=True)).rstrip()


def machine() -> dict[str, str]:
    """Device and versions."""
    import torch
    import transformers

    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def install(folder: Path) -> None:
    """Install the wheels of a folder for this process only."""
    target = tempfile.mkdtemp()
    options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--target", target]
    wheels = [str(wheel) for wheel in sorted(folder.glob("*.whl"))]
    if not wheels:
        sys.exit(f"--wheels {folder} holds no wheel")
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *wheels], check=True)
    sys.path.insert(0, target)


if __name__ == "__main__":
    main()
