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
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

from helpers.commands import processes_in, python, start_command, wait_for
from helpers.elastic import death, restarts, train
from helpers.files import count_lines, read_jsonl, without_times

QUIET = ["--run.trackers", "[]"]
TEXT = ["train", "--model.dtype", "float32", "--rollout.batch_size", "8", "--rollout.max_new_tokens", "6", *QUIET]
TEXT += ["--kl.target", "1", "--score.normalize", "running", "--ppo.epochs", "2", "--ppo.minibatches", "2"]
TEXT += ["--run.show_every", "0"]
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
LENGTHS = {"text": {"iterations": 7, "save_every": 2}, "control": {"iterations": 300, "save_every": 50}}
"""Of the runs of a sweep, by its kind; all other settings have their defaults."""
VARIANTS = {"plain": {}, "another": {"ppo.clip": 0.1}}
STARTS = 5.0
"""About the seconds that a process needs before its first iteration."""


@dataclass
class Life:
    """One process that trains."""

    process: subprocess.Popen[str]
    folder: Path

    def lines(self) -> int:
        """Iterations that it, or one before it, has written down."""
        return count_lines(self.folder / "metrics.jsonl")

    def wait_for(self, condition: Callable[[], bool], seconds: float = 120.0) -> bool:
        """Wait until something holds; False if the process ended first."""
        return wait_for(condition, self.process, seconds)

    def saving(self) -> bool:
        """Whether it is in the middle of writing a checkpoint."""
        return any((self.folder / "checkpoints").glob(".*.part"))

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.communicate()  # closes its pipes

    def end(self, seconds: float = 300.0) -> tuple[int, str, str]:
        """Wait for its end: exit code, output, error output."""
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        return self.process.returncode, out, err


def begin(folder: Path, command: list[str], *flags: str) -> Life:
    """Start a run, or go on with it if it has left a configuration."""
    if (folder / "config.yaml").exists():
        arguments = [command[0], "--resume", str(folder), *flags]
    else:
        arguments = [*command, *flags, "--run.dir", str(folder)]
    return Life(start_command(*arguments), folder)


def finish(folder: Path, command: list[str], *flags: str) -> None:
    """Run to the end, which must be a good one."""
    code, out, err = begin(folder, command, *flags).end()
    assert code == 0, f"exit code {code}\n{out[-2000:]}\n{err[-2000:]}"
    assert "Traceback" not in err, err


def metrics(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, float]]:
    """What was written of each iteration, or batch of a pretraining, without what depends on the clock."""
    return without_times(read_jsonl(folder / name))


def assert_same(one: Path, other: Path) -> None:
    """Two runs, or those of two sweeps, have the same metrics, each iteration once, samples and final weights.

    So have their critics' pretrainings, batch for batch.
    """
    if not (one / "metrics.jsonl").exists():
        names = [folder.relative_to(one) for folder in sorted(one.glob("*/seed-*/"))]
        assert len(names) == len(VARIANTS)
        for name in names:
            assert_same(one / name, other / name)
        return
    left, right = metrics(one), metrics(other)
    assert [row["iteration"] for row in right] == list(range(1, len(right) + 1))
    assert left == right
    assert (one / "pretrain.jsonl").exists() == (other / "pretrain.jsonl").exists()
    if (one / "pretrain.jsonl").exists():
        assert metrics(one, "pretrain.jsonl") == metrics(other, "pretrain.jsonl")
    assert (one / "samples.jsonl").read_bytes() == (other / "samples.jsonl").read_bytes()
    for file in (one / "policy").rglob("*.safetensors"):
        expected, found = load_file(file), load_file(other / "policy" / file.relative_to(one / "policy"))
        assert expected.keys() == found.keys()
        assert all((expected[name] == found[name]).all() for name in expected), file.name


def sweep_file(place: Path, kind: str, **settings: Any) -> Path:
    """A sweep as people write it, into `place / "run"`, or `place / "whole"` for the one left in peace."""
    file = place / "run.yaml"
    base = {"run": LENGTHS[kind]} | settings
    for name in ("whole", "run"):
        asked = {"kind": kind, "dir": str(place / name), "seeds": [1], "base": base, "variants": VARIANTS}
        file.with_name(f"{name}.yaml").write_text(yaml.safe_dump(asked, sort_keys=False))
    return file


def begin_sweep(file: Path, *flags: str) -> Life:
    """Start a sweep, or go on with it; the command is the same."""
    return Life(start_command("sweep", file, *flags), file.with_suffix(""))


def finish_sweep(file: Path, *flags: str) -> str:
    """Do what is left of a sweep, which must end well; what it said."""
    code, out, err = begin_sweep(file, *flags).end(600)
    assert code == 0, f"exit code {code}\n{out[-2000:]}\n{err[-2000:]}"
    return out


def iterations_of(folder: Path) -> int:
    """Iterations that all runs of a sweep have written down."""
    return sum(count_lines(file) for file in folder.glob("*/seed-*/metrics.jsonl"))


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
            life.wait_for(lambda seen=before, life=life: life.lines() != seen)  # a resumed one goes back first
            until = life.lines() + chance.randint(1, 6)
            life.wait_for(lambda until=until, life=life: life.lines() >= until)
            time.sleep(chance.uniform(0, 0.1))
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
    file = chance.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
    at = chance.randrange(file.stat().st_size)
    os.truncate(file, at)
    return f"{newest.name}/{file.name} cut at byte {at:,}"


def half_a_line(folder: Path, chance: random.Random) -> str:
    """Let metrics.jsonl end in the middle of its last line; how."""
    file, lost = folder / "metrics.jsonl", chance.randrange(2, 200)
    os.truncate(file, file.stat().st_size - lost)
    return f"its last {lost} bytes were cut off"


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
from tokencredit.settings.rollout import RolloutConfig
from tokencredit.settings.training import EvalConfig, RunConfig, UpdateConfig
from tokencredit.settings.model import ModelConfig
from tokencredit.settings.text import PPOConfig
from tokencredit.text.ppo_trainer import PPOTrainer

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
    done = python("-c", GROWTH, folder, iterations, timeout=3600)
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


Outcome = tuple[str, Path, Path]
"""What happened in a trial, a run left in peace, and the run that must be like it."""


def in_peace(place: Path, command: list[str], iterations: int) -> list[str]:
    """Run a command to its end, in `place / "whole"`; returns it with its flags."""
    command = [*command, "--run.iterations", str(iterations), "--run.save_every", "3"]
    finish(place / "whole", command)
    return command


def kill(place: Path, chance: random.Random, command: list[str], iterations: int, kills: int) -> Outcome:
    """SIGKILL, again and again."""
    full = in_peace(place, command, iterations)
    moments = killed(place / "run", full, kills, chance)
    assert sum(moments.values()) == kills, f"the run was over after {moments}"
    finish(place / "run", full)
    return ", ".join(f"{n} while {moment}" for moment, n in moments.items()), place / "whole", place / "run"


def kill_ahead(place: Path, chance: random.Random, kills: int) -> Outcome:
    """Kill a run that samples ahead; it must go on each time, and have every iteration once."""
    ahead = ["--rollout.engine", "continuous", "--rollout.max_age", "1", "--run.save_every", "2"]
    ahead += ["--kl.estimator", "full"]  # kl.target needs a KL that older samples do not estimate
    command = [*TEXT, *ahead, "--run.iterations", str(10 * kills)]
    moments = killed(place / "run", command, kills, chance)
    finish(place / "run", command)
    rows = metrics(place / "run")
    assert [row["iteration"] for row in rows] == list(range(1, 10 * kills + 1))
    assert max(row["age_max"] for row in rows) == 1
    return f"{sum(moments.values())} of {kills}: {moments}", place / "run", place / "run"


def ask_to_stop(place: Path, chance: random.Random, expected: int, *numbers: signal.Signals) -> Outcome:
    """Signals that a run hears."""
    full = in_peace(place, TEXT, 30)
    code, said = stopped(place / "run", full, *numbers)
    assert code == expected, f"exit code {code}: {said[-500:]}"
    assert "--resume" in said, said[-500:]
    done = len(metrics(place / "run"))
    finish(place / "run", full)
    return f"exit code {code} after {done} of 30 iterations", place / "whole", place / "run"


def damage(place: Path, chance: random.Random, break_file: Callable[[Path, random.Random], str]) -> Outcome:
    """A run that is killed and whose files are then broken."""
    full = in_peace(place, TEXT, 12)
    life = begin(place / "run", full)
    assert life.wait_for(lambda: life.lines() >= 8)
    life.kill()
    happened = break_file(place / "run", chance)
    finish(place / "run", full)
    return happened, place / "whole", place / "run"


def fill(disk: Path) -> None:
    """Leave less on a disk than a run keeps for its end."""
    with suppress(OSError):  # the run may have taken some of it meanwhile
        (disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free - 2**20))


def empty(disk: Path) -> None:
    """Take back what `fill` did."""
    (disk / "other").unlink()


def forbid(disk: Path) -> None:
    """Let nobody write on a disk."""
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)


def allow(disk: Path) -> None:
    """Take back what `forbid` did."""
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)


def hinder(
    place: Path, chance: random.Random, hinder: Callable[[Path], None], free: Callable[[Path], None], expected: str
) -> Outcome:
    """A disk that can no longer be written to, and later can again."""
    full = in_peace(place, TEXT, 60)
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


def break_tracker(place: Path, chance: random.Random) -> Outcome:
    """A file where TensorBoard's folder should be."""
    full = in_peace(place, TEXT, 4)
    life = begin(place / "run", [*full, "--run.trackers", "[tensorboard]"])
    assert life.wait_for((place / "run" / "config.yaml").exists)
    shutil.rmtree(place / "run" / "tensorboard", ignore_errors=True)
    (place / "run" / "tensorboard").write_text("in the way")
    code, out, err = life.end()
    assert code == 0, err
    said = next(line for line in (out + err).splitlines() if "left out" in line)
    return said, place / "whole", place / "run"


def trouble_service(place: Path, chance: random.Random, trouble: str, calls: range, stops: bool) -> Outcome:
    """A reward service that is in trouble at some calls; if that stops the run, it is resumed."""
    with service(lambda call: "well") as port:
        in_peace(place, served(port, place / "reward"), 8)
    with service(lambda call: trouble if call in calls else "well") as port:
        command = served(port, place / "reward")
        flags = ["--run.iterations", "8", "--run.save_every", "3"]
        code, _, err = begin(place / "run", [*command, *flags]).end()
        assert code == (1 if stops else 0), err
        if stops:
            finish(place / "run", command)
    return "stopped, then resumed" if stops else "went on by itself", place / "whole", place / "run"


def cut_sweep(file: Path, chance: random.Random, iterations: int) -> None:
    """SIGKILL to a sweep and all its runs at once, as when a machine goes off, after that many more iterations."""
    folder, life = file.with_suffix(""), begin_sweep(file)
    seen = [iterations_of(folder)]

    def grows() -> bool:
        seen.append(iterations_of(folder))  # a run that is resumed goes back to its checkpoint first
        return seen[-1] >= min(seen) + iterations

    assert life.wait_for(grows, 600), life.end()
    time.sleep(chance.uniform(0, 1.0))
    life.kill()
    for process in processes_in(folder):
        os.kill(process, signal.SIGKILL)


def kill_sweep(place: Path, chance: random.Random, kind: str, kills: int, **settings: Any) -> Outcome:
    """Kills of a sweep past a checkpoint and before one."""
    file = sweep_file(place, kind, **settings)
    finish_sweep(place / "whole.yaml")
    for number in range(kills):
        cut_sweep(file, chance, 1 if number % 2 else LENGTHS[kind]["save_every"] + 1)
    done = iterations_of(place / "run")
    finish_sweep(file)
    return f"killed {kills} times, by then {done} iterations", place / "whole", place / "run"


def orphan_sweep(place: Path, chance: random.Random, kind: str, at_once: bool, **settings: Any) -> Outcome:
    """SIGKILL to a sweep alone; it goes on at once, beside the runs that it left behind, or once they have ended."""
    file = sweep_file(place, kind, **settings)
    finish_sweep(place / "whole.yaml", "--jobs", "2")
    life = begin_sweep(file, "--jobs", "2")
    assert life.wait_for(lambda: len(list((place / "run").glob("*/seed-1/metrics.jsonl"))) == len(VARIANTS), 600)
    time.sleep(chance.uniform(0, 1.0))
    life.kill()
    left = processes_in(place / "run")
    assert left, "the runs were over before"
    if at_once:
        for process in left:
            os.kill(process, signal.SIGSTOP)  # or they could be over before the next sweep looks
        life = begin_sweep(file, "--jobs", "2")
        assert life.process.stdout is not None
        said = [life.process.stdout.readline() for _ in left]
        for process in left:
            os.kill(process, signal.SIGCONT)
        code, out, err = life.end(600)
        assert code == 0, f"exit code {code}\n{out[-2000:]}\n{err[-2000:]}"
        assert all("a process of an earlier sweep is still running it" in line for line in said), said
    else:
        while processes_in(place / "run"):
            time.sleep(0.1)
        assert "still running it" not in finish_sweep(file, "--jobs", "2")
    for log in (place / "run").glob("*/seed-1.log"):
        text, last = log.read_text(), f"iteration {LENGTHS[kind]['iterations']}/{LENGTHS[kind]['iterations']}"
        assert text.count(last) == 1, f"{log}: done {text.count(last)} times"
        assert "resumed" not in text, f"{log}: begun twice"
    return f"{len(left)} runs left behind", place / "whole", place / "run"


PLACES = ("start", "rollout", "update", "save", "evaluation")
"""At which a process of several is killed."""
MOST_KILLS = 5
"""Of one such run."""
SHARDED_KILLS = 2
"""Of one such run with `run.shard: full`."""


def elastic(
    place: Path,
    chance: random.Random,
    where: str,
    rank: int,
    kills: int,
    signal: str = "SIGKILL",
    limit: float = 1800,
    shard: str = "none",
) -> Outcome:
    """One of two processes dies, again and again; torchrun starts both anew each time."""
    whole = place.parent / f"two-in-peace-{shard}"
    settings = ["--run.iterations", 2 * MOST_KILLS + 4, "--run.shard", shard]
    if not whole.exists():
        code, said = train(whole, *settings)
        assert code == 0, said[-2000:]
    if where == "start":
        deaths = [death(where, rank, after=chance.uniform(0, 2 * STARTS), signal=signal) for _ in range(kills)]
        if rank == 0:  # between the files of a new folder
            deaths[0] = death("folder", rank, visit=chance.randint(1, 4), after=None, signal=signal)
    else:
        # With a checkpoint every two iterations, some kills lose an iteration and some none.
        visits = [chance.randint(1, 2) if where in ("rollout", "update") else 1 for _ in range(kills)]
        after = [chance.uniform(0, 0.2) if number % 2 else None for number in range(kills)]
        deaths = [
            death(where, rank, visit=n, after=seconds, signal=signal) for n, seconds in zip(visits, after, strict=True)
        ]
    code, said = train(
        place / "run", *settings, "--run.timeout", limit, deaths=deaths, restarts=kills, timeout=180.0 * (kills + 1)
    )
    assert code == 0, f"exit code {code}: {said[-2000:]}"
    if signal == "SIGSTOP":
        assert re.search(rf"^tokencredit: process {rank} \(pid .* gave no sign of life", said, re.MULTILINE), said[
            -2000:
        ]
    return f"{kills} of {kills}, {len(restarts(place / 'run'))} restarts of the run", whole, place / "run"


def trials(kills: int) -> Iterator[tuple[str, Callable[[Path, random.Random], Outcome]]]:
    """What is done to runs, with its name in the table."""
    yield "SIGKILL, a language model", partial(kill, command=TEXT, iterations=10 * kills, kills=kills)
    yield "SIGKILL, samples ahead", partial(kill_ahead, kills=20)
    yield "SIGKILL, agents", partial(kill, command=CONTROL, iterations=30 * kills, kills=kills // 3)
    for name, code, numbers in (
        ("SIGTERM", 0, [signal.SIGTERM]),
        ("Ctrl-C", 130, [signal.SIGINT]),
        ("Ctrl-C twice", 130, [signal.SIGINT, signal.SIGINT]),
    ):
        yield name, lambda place, chance, code=code, numbers=numbers: ask_to_stop(place, chance, code, *numbers)
    for kind, what in (("text", "language models"), ("control", "agents")):
        yield f"SIGKILL, a sweep of {what}", partial(kill_sweep, kind=kind, kills=3)
        yield f"SIGKILL, a sweep of {what} alone", partial(orphan_sweep, kind=kind, at_once=False)
        yield (
            f"SIGKILL, a sweep of {what} alone, goes on at once",
            partial(orphan_sweep, kind=kind, at_once=True),
        )
    for where in PLACES:
        for rank in (0, 1):
            name, dies = f"SIGKILL, process {rank} of 2, {where}", partial(elastic, where=where, rank=rank)
            yield name, partial(dies, kills=MOST_KILLS)
            yield f"{name}, sharded", partial(dies, kills=SHARDED_KILLS, shard="full")
    for rank in (0, 1):
        yield (
            f"SIGSTOP, process {rank} of 2, rollout",
            partial(elastic, where="rollout", rank=rank, kills=1, signal="SIGSTOP", limit=8.0),
        )
    for number in range(1, 6):
        yield f"checkpoint cut short, {number}", partial(damage, break_file=damage_newest)
    yield "metrics.jsonl ends in half a line", partial(damage, break_file=half_a_line)
    yield "full disk", partial(hinder, hinder=fill, free=empty, expected="No space left on device")
    yield "read-only disk", partial(hinder, hinder=forbid, free=allow, expected="Read-only file system")
    yield "TensorBoard's folder is in the way", break_tracker
    for trouble in ("down", "hanging", "garbage"):
        few, many = range(3, 5), range(4, 8)
        yield (
            f"reward service {trouble} for two calls",
            partial(trouble_service, trouble=trouble, calls=few, stops=False),
        )
        yield f"reward service {trouble} for long", partial(trouble_service, trouble=trouble, calls=many, stops=True)


def main() -> int:
    """All of it, a row of a table each; the exit code is 1 if anything went otherwise than it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="of language models; a third as many of agents")
    parser.add_argument("--iterations", type=int, default=2000, help="of the run whose memory is watched")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="only what has this in its name")
    options = parser.parse_args()
    chance, table = random.Random(options.seed), Table("what was done", "what happened", "as if nothing had been")
    failed = 0

    def row(what: str, happened: str, good: bool) -> None:
        table.add_row(what, happened, "yes" if good else "NO")
        print(f"{what}: {happened} [{'yes' if good else 'NO'}]", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        os.environ["OMP_NUM_THREADS"] = "1"  # as the tests have it
        for what, trial in trials(options.kills):
            if options.only not in what:
                continue
            place = Path(folder) / re.sub(r"\W+", "-", what)
            place.mkdir()
            try:
                happened, expected, found = trial(place, chance)
                assert_same(expected, found)
                row(what, happened, True)
            except Exception as error:
                row(what, f"{type(error).__name__}: {error}"[:500], False)
                failed = 1
        if not options.only:
            grown = growth(Path(folder) / "long", options.iterations)
            row(f"{options.iterations:,} iterations", f"memory grew by {grown:.1f} MB", grown < 10)
            failed = failed or grown >= 10
    Console(width=140).print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
