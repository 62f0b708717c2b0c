"""Seconds per iteration of the main job beside busy processes, by how OpenMP's threads wait: a table for RESULTS.md.

    python benchmarks/busy.py [--rounds 3] [--iterations 8] [--neighbours 0 1 2]

Each run is a process of its own, and the settings take turns within a round. A neighbour is a process that does
nothing but arithmetic in Python, on one core. The figure of a run is the median of its iterations after the first; the
table has the median of the rounds, and in brackets its ratio to the best one alone. Nothing else may run then.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

SETTINGS: dict[str, dict[str, str]] = {
    "GOMP_SPINCOUNT=300": {"GOMP_SPINCOUNT": "300"},
    "GOMP_SPINCOUNT=1000 (set by commands)": {},
    "GOMP_SPINCOUNT=3000": {"GOMP_SPINCOUNT": "3000"},
    "GOMP_SPINCOUNT=10000": {"GOMP_SPINCOUNT": "10000"},
    "GOMP_SPINCOUNT=300000 (libgomp's default)": {"GOMP_SPINCOUNT": "300000"},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "OMP_NUM_THREADS=1": {"OMP_NUM_THREADS": "1"},
}
BUSY = "x = 0\nwhile True:\n    x += 1"


@contextmanager
def neighbour() -> Iterator[None]:
    """A busy process, ended with the context."""
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def seconds(variables: dict[str, str], neighbours: int, iterations: int) -> float:
    """Median seconds per iteration of one run."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        for _ in range(neighbours):
            stack.enter_context(neighbour())
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "tokencredit", "train", "--run.dir", str(run), "--run.save_every", "0"]
        command += ["--run.iterations", str(iterations), "--run.trackers", "[]"]
        subprocess.run(command, env=kept | variables, check=True, capture_output=True)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["seconds"] for row in rows[1:])


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    found: dict[tuple[str, int], list[float]] = {}
    for number in range(options.rounds):
        for neighbours in options.neighbours:
            for name, variables in SETTINGS.items():
                figure = seconds(variables, neighbours, options.iterations)
                found.setdefault((name, neighbours), []).append(figure)
                print(f"round {number + 1}: {name}, {neighbours} busy: {figure:.2f} s", file=sys.stderr, flush=True)
    print("| " + " | ".join(["", *(f"{count} busy" for count in options.neighbours)]) + " |")
    print("|---" * (1 + len(options.neighbours)) + "|")
    medians = {key: statistics.median(values) for key, values in found.items()}
    best = min(medians[name, options.neighbours[0]] for name in SETTINGS)
    for name in SETTINGS:
        cells = [f"{medians[name, count]:.2f} ({medians[name, count] / best:.2f})" for count in options.neighbours]
        print("| " + " | ".join([f"`{name}`" if " " not in name else name, *cells]) + " |")


if __name__ == "__main__":
    main()
