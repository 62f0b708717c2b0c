"""Kills real training processes, breaks what they have written, resumes them, and compares with a run left in peace.

`make chaos` runs all of it and prints a table; tests/test_chaos.py runs a small part.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

QUIET = ["--run.show_every", "0", "--run.trackers", "[]"]
TEXT = ["train", "--model.dtype", "float32", "--rollout.batch_size", "8", "--rollout.max_new_tokens", "6", *QUIET]
TEXT += ["--kl.target", "1", "--score.normalize", "running", "--ppo.epochs", "2", "--ppo.minibatches", "2"]
CONTROL = [
    "control",
    "--env.id",
    "InvertedPendulum-v5",
    "--env.normalize_observations",
    "true",
    "--steps",
    "64",
    *QUIET,
]
CONTROL += ["--env.normalize_rewards", "true", "--env.number", "2"]
STARTS = 5.0
"""About the seconds that a process needs before its first iteration."""
MEASURES_TIME = ("seconds", "tokens_per_second", "steps_per_second")


@dataclass
class Life:
    """One process that trains."""

    process: subprocess.Popen[str]
    folder: Path

    def lines(self) -> int:
        """Iterations that it, or one before it, has written down."""
        file = self.folder / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def wait_for(self, condition: Callable[[], bool], seconds: float = 120.0) -> bool:
        """Wait until something holds; False if the process ended first."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if condition():
                return True
            if self.process.poll() is not None:
                return False
            time.sleep(0.002)
        raise TimeoutError(f"waited {seconds} s for the run in {self.folder}")

    def saving(self) -> bool:
        """Whether it is in the middle of writing a checkpoint."""
        return any((self.folder / "checkpoints").glob(".*.part"))

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def end(self, seconds: float = 300.0) -> tuple[int, str, str]:
        """Wait for its end: exit code, output, error output."""
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err


def begin(folder: Path, command: list[str], *flags: str) -> Life:
    """Start a run, or go on with it if it has left a configuration."""
    if (folder / "config.yaml").exists():
        arguments = [command[0], "--resume", str(folder), *flags]
    else:
        arguments = [*command, *flags, "--run.dir", str(folder)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tokencredit.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=hear_ctrl_c,
    )
    return Life(process, folder)


def hear_ctrl_c() -> None:
    """Whoever started us in the background of a shell has told us, and our children, to ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def finish(folder: Path, command: list[str], *flags: str) -> None:
    """Run to the end, which must be a good one."""
    code, out, err = begin(folder, command, *flags).end()
    assert code == 0, f"exit code {code}\n{out[-2000:]}\n{err[-2000:]}"
    assert "Traceback" not in err, err


def metrics(folder: Path) -> list[dict[str, float]]:
    """What was written of each iteration, without what depends on the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k.split("/")[0] not in MEASURES_TIME} for row in rows]


def assert_same(one: Path, other: Path) -> None:
    """Two runs have the same metrics, each iteration once, the same samples and the same final weights."""
    left, right = metrics(one), metrics(other)
    assert [row["iteration"] for row in right] == list(range(1, len(right) + 1))
    assert left == right
    assert (one / "samples.jsonl").read_bytes() == (other / "samples.jsonl").read_bytes()
    for file in (one / "policy").rglob("*.safetensors"):
        expected, found = load_file(file), load_file(other / "policy" / file.relative_to(one / "policy"))
        assert expected.keys() == found.keys()
        assert all((expected[name] == found[name]).all() for name in expected), file.name


MOMENTS = {"starting": 1, "training": 5, "saving": 4}
"""At which a run is killed, and how often each is chosen."""


def killed(
    folder: Path, command: list[str], kills: int, chance: random.Random, only: str | None = None
) -> dict[str, int]:
    """Begin a run, or go on with it, as often as `kills`, and kill it each time; counts the moments of that."""
    moments = dict.fromkeys(MOMENTS, 0)
    while sum(moments.values()) < kills:
        life = begin(folder, command)
        before = life.lines()
        moment = only or chance.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        if moment == "starting":
            time.sleep(chance.uniform(0, STARTS))
        elif moment == "training":
            life.wait_for(lambda seen=before, life=life: life.lines() != seen)
            time.sleep(chance.uniform(0, 1.5))
        else:
            life.wait_for(life.saving)
            time.sleep(chance.uniform(0, 0.03))
        if life.process.poll() is not None:
            return moments  # it was faster than we
        life.kill()
        moments[moment] += 1
    return moments


def stopped(folder: Path, command: list[str], *signals: signal.Signals) -> tuple[int, str]:
    """Send signals, half a second apart, to a run that has done two iterations; its exit code and what it said."""
    life = begin(folder, command)
    assert life.wait_for(lambda: life.lines() >= 2)
    for number in signals:
        life.process.send_signal(number)
        time.sleep(0.05)
    code, out, err = life.end()
    assert "Traceback" not in err, err
    return code, out + err


def damage_newest(folder: Path, chance: random.Random) -> str:
    """Cut a file of the newest checkpoint short at a random byte; which, and where."""
    newest = max((folder / "checkpoints").iterdir())
    file = chance.choice(sorted(newest.iterdir()))
    at = chance.randrange(file.stat().st_size)
    os.truncate(file, at)
    return f"{newest.name}/{file.name} cut at byte {at:,}"


def half_a_line(folder: Path) -> None:
    """Let metrics.jsonl end in the middle of its last line."""
    file = folder / "metrics.jsonl"
    os.truncate(file, file.stat().st_size - 20)


@contextmanager
def small_disk(place: Path, megabytes: int) -> Iterator[Path]:
    """A file system of its own, which takes root."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


GROWTH = """
import sys
from tokencredit.runs.config import EvalConfig, ModelConfig, PPOConfig, RolloutConfig, RunConfig, UpdateConfig
from tokencredit.text.trainer import PPOTrainer

class Watch:
    def after_iteration(self, trainer, metrics, **results):
        if int(metrics["iteration"]) % 50 == 0:
            pages = int(open("/proc/self/statm").read().split()[1])
            print("resident", pages * 4096, flush=True)

args = PPOConfig(
    model=ModelConfig(dtype="float32"),
    rollout=RolloutConfig(batch_size=4, max_new_tokens=4),
    ppo=UpdateConfig(epochs=1, minibatches=1),
    eval=EvalConfig(every=50, samples=4, max_new_tokens=4),
    run=RunConfig(dir=sys.argv[1], iterations=int(sys.argv[2]), save_every=50, show_every=0),
)
PPOTrainer(args=args, callbacks=[Watch()]).train()
"""


def growth(folder: Path, iterations: int) -> float:
    """Megabytes by which a run's memory grows from its hundredth iteration to its last, with all that a run does."""
    command = [sys.executable, "-c", GROWTH, str(folder), str(iterations)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    resident = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("resident ")]
    return (resident[-1] - resident[1]) / 1e6


SERVICE = """
import json, urllib.request

def judge(completions, **columns):
    body = json.dumps(completions).encode()
    with urllib.request.urlopen("http://127.0.0.1:{port}", body) as answer:
        return json.loads(answer.read())
"""


@contextmanager
def service(troubled: Callable[[int], str]) -> Iterator[int]:
    """A reward service on a port: `troubled` says of each call whether it is "down", "hanging", "garbage" or "well"."""
    calls = [0]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            calls[0] += 1
            texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            trouble = troubled(calls[0])
            if trouble == "hanging":
                time.sleep(5)
            if trouble == "down":
                self.send_error(503)
                return
            self.send_response(200)
            self.end_headers()
            scores = "<html>" if trouble == "garbage" else json.dumps([len(text) / 100 for text in texts])
            with suppress(OSError):  # the other side has given up waiting
                self.wfile.write(scores.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()


def served(port: int, folder: Path) -> list[str]:
    """The command of a run whose reward comes from a service."""
    file = folder.with_name(f"{folder.name}.py")
    file.write_text(SERVICE.format(port=port))
    return [*TEXT, "--reward", f"[{{function: '{file}:judge', timeout: 1}}]"]


class Chaos:
    """All of it, a row of the table each, in a folder."""

    def __init__(self, folder: Path, kills: int, seed: int):
        self.folder, self.kills, self.chance = folder, kills, random.Random(seed)
        self.table = Table("what was done", "what happened", "as if nothing had been")
        self.failed = 0

    def row(self, what: str, do: Callable[[Path], tuple[str, Path, Path]]) -> None:
        """Do something to a run; what happened, and the two runs that must be alike."""
        place = self.folder / re.sub(r"\W+", "-", what)
        place.mkdir()
        try:
            happened, expected, found = do(place)
            assert_same(expected, found)
            verdict = "yes"
        except Exception as error:
            happened, verdict = f"{type(error).__name__}: {error}"[:500], "NO"
            self.failed += 1
        self.say(what, happened, verdict)

    def say(self, what: str, happened: str, verdict: str) -> None:
        """Fill a row, and show it at once."""
        self.table.add_row(what, happened, verdict)
        print(f"{what}: {happened} [{verdict}]", flush=True)

    def whole(self, place: Path, command: list[str], iterations: int) -> list[str]:
        """Run a command in peace, to `place / "whole"`; returns it."""
        command = [*command, "--run.iterations", str(iterations), "--run.save_every", "3"]
        finish(place / "whole", command)
        return command

    def kill(self, command: list[str], iterations: int, kills: int) -> Callable[[Path], tuple[str, Path, Path]]:
        def do(place: Path) -> tuple[str, Path, Path]:
            full = self.whole(place, command, iterations)
            moments = killed(place / "run", full, kills, self.chance)
            assert sum(moments.values()) == kills, f"the run was over after {moments}"
            finish(place / "run", full)
            return ", ".join(f"{n} while {moment}" for moment, n in moments.items()), place / "whole", place / "run"

        return do

    def signals(self, expected: int, *numbers: signal.Signals) -> Callable[[Path], tuple[str, Path, Path]]:
        def do(place: Path) -> tuple[str, Path, Path]:
            full = self.whole(place, TEXT, 30)
            code, said = stopped(place / "run", full, *numbers)
            assert code == expected, f"exit code {code}: {said[-500:]}"
            assert "--resume" in said, said[-500:]
            done = len(metrics(place / "run"))
            finish(place / "run", full)
            return f"exit code {code} after {done} of 30 iterations", place / "whole", place / "run"

        return do

    def broken(self, breaks: Callable[[Path], str | None]) -> Callable[[Path], tuple[str, Path, Path]]:
        def do(place: Path) -> tuple[str, Path, Path]:
            full = self.whole(place, TEXT, 12)
            life = begin(place / "run", full)
            assert life.wait_for(lambda: life.lines() >= 8)
            life.kill()
            happened = breaks(place / "run") or ""
            finish(place / "run", full)
            return happened, place / "whole", place / "run"

        return do

    def disk(self, hinder: Callable[[Path], object], free: Callable[[Path], object], expected: str):
        def do(place: Path) -> tuple[str, Path, Path]:
            full = self.whole(place, TEXT, 60)
            with small_disk(place / "disk", 160) as disk:
                life = begin(disk / "run", full)
                assert life.wait_for(lambda: life.lines() >= 4)
                hinder(disk)
                code, _, err = life.end()
                last = err.strip().splitlines()[-1]
                assert code == 1, f"exit code {code}: {last}"
                assert expected in last, last
                assert "Traceback" not in err, err
                free(disk)
                finish(disk / "run", full)
                shutil.copytree(disk / "run", place / "run")
            return f"exit code 1: … {expected}", place / "whole", place / "run"

        return do

    def tracker(self, place: Path) -> tuple[str, Path, Path]:
        full = self.whole(place, TEXT, 4)
        (place / "run").mkdir()
        life = begin(place / "run", [*full, "--run.trackers", "[tensorboard]"])
        assert life.wait_for((place / "run" / "config.yaml").exists)
        shutil.rmtree(place / "run" / "tensorboard", ignore_errors=True)
        (place / "run" / "tensorboard").write_text("in the way")
        code, out, err = life.end()
        assert code == 0, err
        said = next(line for line in (out + err).splitlines() if "left out" in line)
        return said, place / "whole", place / "run"

    def reward(self, trouble: str, calls: range, stops: bool) -> Callable[[Path], tuple[str, Path, Path]]:
        def do(place: Path) -> tuple[str, Path, Path]:
            with service(lambda call: "well") as port:
                self.whole(place, served(port, place / "reward"), 8)
            with service(lambda call: trouble if call in calls else "well") as port:
                full = [*served(port, place / "reward"), "--run.iterations", "8", "--run.save_every", "3"]
                code, _, err = begin(place / "run", full).end()
                assert code == (1 if stops else 0), err
                if stops:
                    command = [full[0], "--reward", full[-5]]
                    finish(place / "run", command)
            return "stopped, then resumed" if stops else "went on by itself", place / "whole", place / "run"

        return do


def main() -> int:
    """The whole of it; the exit code is 1 if anything went otherwise than it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="of language models; a third as many of agents")
    parser.add_argument("--iterations", type=int, default=2000, help="of the run whose memory is watched")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        chaos = Chaos(Path(folder), options.kills, options.seed)
        int_, term = signal.SIGINT, signal.SIGTERM
        chaos.row("SIGKILL, a language model", chaos.kill(TEXT, 10 * options.kills, options.kills))
        chaos.row("SIGKILL, agents", chaos.kill(CONTROL, 30 * options.kills, options.kills // 3))
        chaos.row("SIGTERM", chaos.signals(0, term))
        chaos.row("Ctrl-C", chaos.signals(130, int_))
        chaos.row("Ctrl-C twice", chaos.signals(130, int_, int_))
        for number in range(1, 6):
            chaos.row(f"checkpoint cut short, {number}", chaos.broken(lambda run: damage_newest(run, chaos.chance)))
        chaos.row("metrics.jsonl ends in half a line", chaos.broken(half_a_line))
        full = "No space left on device"
        fill = lambda disk: (disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free - 2**20))  # noqa: E731
        chaos.row("full disk", chaos.disk(fill, lambda disk: (disk / "other").unlink(), full))
        remount = lambda how: lambda disk: subprocess.run(["mount", "-o", f"remount,{how}", disk], check=True)  # noqa: E731
        chaos.row("read-only disk", chaos.disk(remount("ro"), remount("rw"), "Read-only file system"))
        chaos.row("TensorBoard's folder is in the way", chaos.tracker)
        for trouble in ("down", "hanging", "garbage"):
            chaos.row(f"reward service {trouble} for two calls", chaos.reward(trouble, range(3, 5), False))
            chaos.row(f"reward service {trouble} for long", chaos.reward(trouble, range(4, 8), True))
        grown = growth(Path(folder) / "long", options.iterations)
        chaos.say(f"{options.iterations:,} iterations", f"memory grew by {grown:.1f} MB", "yes" if grown < 10 else "NO")
        chaos.failed += grown >= 10
        Console(width=140).print(chaos.table)
    return min(chaos.failed, 1)


if __name__ == "__main__":
    sys.exit(main())
