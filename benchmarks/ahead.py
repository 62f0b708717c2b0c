"""Training while sampling, with a slow reward service: wall time and reward of `rollout.max_age` 0 and more.

    python benchmarks/ahead.py [--ages 0 1 2] [--seeds 3] [--iterations 24] [--latency 0.5]
                               [--in-turn]

The service is an HTTP server in a process of its own on this machine. It answers after a wait of `latency` times
the median sampling time of a first run without a wait, and scores words of praise. The reward has a timeout, so that
it is asked as soon as a batch is sampled; with `--in-turn` it has none, and the trainer's thread waits for it. Each
run is a process with the built-in model, `rollout.engine: continuous`, 64 completions of up to 48 tokens and two
epochs. Ages take turns, a seed each. The table has mean
and standard deviation over the seeds of the reward of the last five iterations, the mean `behavior_kl` of all, and the
median seconds of an iteration, without the first two, over the seeds. The ratio is the median of the seeds' ratios to
the first row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PRAISE = ("good", "great", "love", "best", "fine", "warm", "charming", "funny", "wonderful", "moving")
PORT = 18412


class Service(BaseHTTPRequestHandler):
    """Scores a batch of completions after a wait."""

    wait = 0.0

    def do_POST(self) -> None:
        """Answer a list of texts with a list of numbers."""
        texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(self.wait)
        body = json.dumps([float(min(sum(word in text for word in PRAISE), 3)) for text in texts]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def praise(completions: list[str], **_: object) -> list[float]:
    """The reward: the answer of the service."""
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}", json.dumps(completions).encode())
    with urllib.request.urlopen(request) as answer:
        scores: list[float] = json.load(answer)
    return scores


@contextmanager
def service(wait: float) -> Iterator[None]:
    """The service, while the context lasts."""
    process = subprocess.Popen([sys.executable, __file__, "--serve", str(wait)])
    try:
        time.sleep(1)
        yield
    finally:
        process.kill()
        process.wait()


def run(folder: Path, age: int, seed: int, iterations: int, in_turn: bool) -> list[dict[str, float]]:
    """Train, and return the metrics of the iterations."""
    settings = {
        "run.dir": folder,
        "run.iterations": iterations,
        "run.trackers": "[]",
        "run.save_every": 0,
        "run.show_every": 0,
        "seed": seed,
        "model.dtype": "float32",
        "rollout.engine": "continuous",
        "rollout.max_age": age,
        "rollout.max_new_tokens": 48,
        "ppo.epochs": 2,
        "reward": json.dumps([{"function": f"{__file__}:praise", "timeout": None if in_turn else 60}]),
    }
    flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    subprocess.run([sys.executable, "-m", "tokencredit", "train", *flags], check=True, capture_output=True)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def seconds(rows: list[dict[str, float]], key: str = "seconds") -> float:
    """Median of an iteration's seconds, without the first two iterations."""
    return statistics.median(row[key] for row in rows[2:])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ages", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--latency", type=float, default=0.5)
    parser.add_argument("--in-turn", action="store_true")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        Service.wait = options.serve
        ThreadingHTTPServer(("127.0.0.1", PORT), Service).serve_forever()
    results: dict[int, list[list[dict[str, float]]]] = {age: [] for age in options.ages}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with service(0.0):
            sampling = seconds(run(folder / "first", 0, 1, 6, options.in_turn), "seconds/rollout")
        with service(options.latency * sampling):
            for seed in range(1, options.seeds + 1):
                for age in options.ages:
                    results[age].append(run(folder / f"{age}-{seed}", age, seed, options.iterations, options.in_turn))
    print(f"sampling {sampling:.2f} s, latency of the service {options.latency * sampling:.2f} s")
    print(
        "| max_age | reward | behavior_kl | s per iteration | waiting for samples | reward call | update | time ratio |"
    )
    print("|---|---|---|---|---|---|---|---|")
    first = [seconds(rows) for rows in results[options.ages[0]]]
    for age, runs in results.items():
        rewards = [statistics.mean(row["reward"] for row in rows[-5:]) for rows in runs]
        spread = f" ± {statistics.stdev(rewards):.2f}" if len(runs) > 1 else ""
        kl = statistics.mean(row["behavior_kl"] for rows in runs for row in rows)
        keys = ("seconds", "seconds/rollout", "seconds/reward", "seconds/update")
        times = [statistics.median(seconds(rows, key) for rows in runs) for key in keys]
        ratio = statistics.median(one / seconds(rows) for one, rows in zip(first, runs, strict=True))
        times_shown = " | ".join(f"{x:.2f}" for x in times)
        reward = f"{statistics.mean(rewards):.2f}{spread}"
        print(f"| {age} | {reward} | {kl:.2g} | {times_shown} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
