"""Trains on two hosts, which are two network namespaces joined by a cable that can be slowed down and cut.

    sudo python benchmarks/two_hosts.py          # all cases; about ten minutes on two idle cores

Needs Linux, root, and the commands `ip`, `tc` and `unshare`. Addresses and cable exist in the namespaces alone, and go
with them at the end. Each host runs `torchrun --nnodes 2`; they share the file system.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from safetensors.numpy import load_file

HOSTS = {"host-a": "10.213.0.1", "host-b": "10.213.0.2"}
PORT = 29400
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TRAIN = [
    "train",
    "--model.dtype",
    "float32",
    "--rollout.batch_size",
    "16",
    "--rollout.max_new_tokens",
    "10",
    "--ppo.minibatches",
    "2",
]
TRAIN += ["--run.trackers", "[]", "--run.show_every", "0", "--run.save_every", "2"]
ENVIRONMENT = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
SLOW = "netem delay 5ms rate 50mbit", "tbf rate 50mbit burst 32kbit latency 100ms"
CUT = "netem loss 100%", "blackhole"
"""Queueing disciplines of a slow and of a cut link; the second ones for kernels without netem, which cannot delay."""
STORE_PER_START = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Makes torchrun tell each start of the job a new store, so that a host that died can come back (PyTorch 2.13)."""
LIMIT = 600.0
"""Seconds that a case may take."""
TIMES = ("seconds", "tokens_per_second")


def shell(*command: str) -> None:
    """Run a command of the system."""
    subprocess.run(command, check=True, capture_output=True, text=True)


@dataclass
class Network:
    """The two namespaces; the name of each and of its end of the cable."""

    namespaces: dict[str, str] = field(default_factory=dict)
    cables: dict[str, str] = field(default_factory=dict)

    def inside(self, host: str, *command: str) -> list[str]:
        """A command in a host's namespace, under the host's name."""
        naming = 'hostname "$0"; exec "$@"'
        return ["ip", "netns", "exec", self.namespaces[host], "unshare", "-u", "sh", "-c", naming, host, *command]

    def shape(self, *rules: str) -> str:
        """Let both ends of the cable delay or drop packets, by the first rule that the kernel has; none undoes it."""
        for rule in rules:
            with suppress(subprocess.CalledProcessError):
                for namespace, cable in zip(self.namespaces.values(), self.cables.values(), strict=True):
                    shell("tc", "-n", namespace, "qdisc", "replace", "dev", cable, "root", *rule.split())
                return rule
        for namespace, cable in zip(self.namespaces.values(), self.cables.values(), strict=True):
            shell("tc", "-n", namespace, "qdisc", "del", "dev", cable, "root")
        if rules:
            raise RuntimeError(f"this kernel has none of: {', '.join(rules)}")
        return "no rule"

    def kill(self, *hosts: str) -> None:
        """Kill all processes of these hosts."""
        for host in hosts:
            listed = subprocess.run(["ip", "netns", "pids", self.namespaces[host]], capture_output=True, text=True)
            for number in listed.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(number), signal.SIGKILL)


@contextmanager
def network() -> Iterator[Network]:
    """Two namespaces, removed at the end with all that runs in them."""
    number = os.getpid()
    made = Network()
    try:
        for host, letter in zip(HOSTS, "ab", strict=True):
            made.namespaces[host], made.cables[host] = f"tokencredit-{number}-{letter}", f"tc{number}{letter}"
            shell("ip", "netns", "add", made.namespaces[host])
        (one, first), (other, second) = made.cables.items()
        ends = (made.namespaces[one], "type", "veth", "peer", "name", second, "netns", made.namespaces[other])
        shell("ip", "link", "add", first, "netns", *ends)
        for host, address in HOSTS.items():
            inside = ("ip", "-n", made.namespaces[host])
            shell(*inside, "address", "add", f"{address}/24", "dev", made.cables[host])
            shell(*inside, "link", "set", made.cables[host], "up")
            shell(*inside, "link", "set", "lo", "up")
        yield made
    finally:
        made.kill(*made.namespaces)
        for namespace in made.namespaces.values():
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


@dataclass
class Done:
    """A case that was run."""

    folder: Path
    codes: list[int | None]
    seconds: float
    logs: list[str]

    def iterations(self) -> float:
        """Median seconds per iteration after the first."""
        return median(row["seconds"] for row in self.rows()[1:])

    def rows(self) -> list[dict[str, float]]:
        """What the run wrote of its iterations."""
        file = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def events(self) -> list[dict[str, str]]:
        """What happened in the run."""
        file = self.folder / "events.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


Launch = Callable[[str], None]
"""Starts torchrun on a host, again if it died."""


def train(
    network: Network,
    folder: Path,
    *flags: str,
    restarts: int = 0,
    then: Callable[[Launch], None] | None = None,
    **variables: str,
) -> Done:
    """Train on both hosts; `then` is called once both have started, and may disturb them.

    `variables` are of torchrun's environment.
    """
    started = time.monotonic()
    logs = [folder.with_name(f"{folder.name}-{host}.log") for host in HOSTS]
    launched: list[subprocess.Popen[bytes]] = []

    def launch(host: str) -> None:
        torchrun = [*TORCHRUN, "--nnodes", "2", "--nproc_per_node", "1", "--max-restarts", str(restarts)]
        torchrun += ["--rdzv_backend", "c10d", "--rdzv_id", folder.name, "--rdzv_endpoint", f"{HOSTS['host-a']}:{PORT}"]
        torchrun += ["--rdzv_conf", f"is_host={int(host == 'host-a')},join_timeout=240", "--local-addr", HOSTS[host]]
        torchrun += ["--shutdown-timeout", "5", "-m", "tokencredit.cli", *TRAIN, "--run.dir", str(folder), *flags]
        environment = os.environ | ENVIRONMENT | {"GLOO_SOCKET_IFNAME": network.cables[host]} | variables
        with folder.with_name(f"{folder.name}-{host}.log").open("a") as output:
            command = network.inside(host, *torchrun)
            launched.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))

    try:
        for host in HOSTS:
            launch(host)
        if then is not None:
            then(launch)
        for process in launched:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(LIMIT - (time.monotonic() - started), 1.0))
    finally:
        codes = [process.poll() for process in launched]
        network.kill(*HOSTS)
        for process in launched:
            process.kill()
            process.wait()
    return Done(folder, codes, time.monotonic() - started, [log.read_text() for log in logs])


def train_at_home(folder: Path, *flags: str) -> Done:
    """Train with two processes of one host, this one."""
    started = time.monotonic()
    torchrun = [*TORCHRUN, "--standalone", "--nproc_per_node", "2", "-m", "tokencredit.cli", *TRAIN]
    done = subprocess.run(
        [*torchrun, "--run.dir", str(folder), *flags],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    return Done(folder, [done.returncode], time.monotonic() - started, [done.stdout + done.stderr])


def same(one: Path, other: Path) -> bool:
    """True if two runs have the same metrics but for times, the same samples and the same final weights."""
    left, right = (
        [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in Done(run, [], 0, []).rows()]
        for run in (one, other)
    )
    if not left or left != right or (one / "samples.jsonl").read_bytes() != (other / "samples.jsonl").read_bytes():
        return False
    for file in [file for part in ("policy", "critic") for file in (one / part).glob("*.safetensors")]:
        expected, found = load_file(file), load_file(other / file.relative_to(one))
        if expected.keys() != found.keys() or any((expected[name] != found[name]).any() for name in expected):
            return False
    return True


def wait_for_lines(folder: Path, count: int, seconds: float = 180.0) -> None:
    """Wait until a run has written this many iterations."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        file = folder / "metrics.jsonl"
        if file.exists() and file.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.02)
    raise TimeoutError(f"{folder} did not do {count} iterations in {seconds:g} s")


def said(done: Done) -> Iterator[str]:
    """Lines of the hosts in which the command says why it ended."""
    for host, log in zip(HOSTS, done.logs, strict=True):
        for line in re.findall(r"^tokencredit: .*", log, re.MULTILINE):
            yield f"{host}: {line}"


def cut(network: Network, folder: Path, seconds: float) -> Callable[[Launch], None]:
    """Drop all packets for a time, once three iterations are done; prints how long until both hosts noticed."""

    def disturb(_launch: Launch) -> None:
        wait_for_lines(folder, 3)
        rule = network.shape(*CUT)
        began = time.monotonic()
        noticed: dict[str, float] = {}
        while time.monotonic() < began + seconds:
            for host in HOSTS:
                log = folder.with_name(f"{folder.name}-{host}.log").read_text()
                if host not in noticed and re.search(r"^tokencredit: ", log, re.MULTILINE):
                    noticed[host] = time.monotonic() - began
            time.sleep(0.1)
        network.shape()
        when = ", ".join(f"{after:.1f} s ({host})" for host, after in noticed.items()) or "never"
        print(f"link cut ({rule}) for {seconds:g} s; noticed after: {when}", flush=True)

    return disturb


def die(network: Network, folder: Path, seconds: float) -> Callable[[Launch], None]:
    """Kill all processes of host b once three iterations are done, torchrun included, and start it again later."""

    def disturb(launch: Launch) -> None:
        wait_for_lines(folder, 3)
        network.kill("host-b")
        time.sleep(seconds)
        launch("host-b")

    return disturb


def main() -> int:
    """All cases; the exit code is 1 if a result differs from that of one host."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=10.0, help="run.timeout of the cases with a cut link")
    parser.add_argument("--cut", type=float, default=40.0, help="seconds without a link")
    parser.add_argument("--only", default="", help="one case: undisturbed, slow, short, long, death or return")
    parser.add_argument("--keep", type=Path, help="folder for runs and logs; by default a temporary one")
    options = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("network namespaces need root")
    length, limit = ["--run.iterations", str(options.iterations)], ["--run.timeout", str(options.timeout)]
    failed = False
    with tempfile.TemporaryDirectory() as temporary, network() as hosts:
        place = (options.keep or Path(temporary)).resolve()
        place.mkdir(parents=True, exist_ok=True)
        home = train_at_home(place / "one-host", *length)

        def report(what: str, done: Done) -> None:
            nonlocal failed
            good = same(home.folder, done.folder)
            # PyTorch 2.13's torchrun does not tell a new agent where a store is that it keeps over starts.
            failed = failed or not (good or "death" in what)
            print(
                f"{what}: exit codes {done.codes}, {len(done.rows())} iterations, {done.seconds:.0f} s in all, "
                f"{done.iterations():.3f} s per iteration, {'equal' if good else 'NOT equal'} to one host",
                flush=True,
            )
            for line in said(done) if len(done.codes) > 1 else ():
                print("   ", line)
            for event in done.events():
                print("    events.jsonl:", event["time"], event["event"])

        report("one host, two processes", home)
        if options.only in "undisturbed":
            report("two hosts", train(hosts, place / "two-hosts", *length))
        if options.only in "slow":
            rule = hosts.shape(*SLOW)
            report(f"two hosts, {rule}", train(hosts, place / "slow", *length))
            hosts.shape()
        dies = partial(die, seconds=options.cut / 2)
        disturbances: dict[str, tuple[str, Callable[..., Callable[[Launch], None]], dict[str, str]]] = {
            "short": ("short cut", partial(cut, seconds=options.timeout / 2), {}),
            "long": ("long cut", partial(cut, seconds=options.cut), {}),
            "death": ("death of host b, which comes back", dies, {}),
            "return": ("host b comes back, a store per start", dies, STORE_PER_START),
        }
        for name, (what, disturbance, variables) in disturbances.items():
            if options.only in name:
                disturb = disturbance(hosts, place / name)
                done = train(hosts, place / name, *length, *limit, restarts=3, then=disturb, **variables)
                report(f"two hosts, {what}", done)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
