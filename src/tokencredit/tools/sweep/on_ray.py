"""Runs of a sweep as tasks of a Ray cluster.

Ray pickles what it passes between its own processes: here a path, a token, two numbers and an exit code. No file of a
sweep holds a pickle.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokencredit.errors import ConfigError, NotInstalled
from tokencredit.tools.sweep.cluster_job import NOT_SHARED, SHARE, JobFolder, command
from tokencredit.tools.sweep.launch import Ended, Resources, RunJob, say
from tokencredit.tools.sweep.sweep_file import SweepRun


class Ray:
    """Launcher of tasks on a Ray cluster that is already running."""

    pause = 1.0

    def __init__(self, resources: Resources, home: Path):
        """Join the cluster, and check that each node shares `home`, the sweep's folder.

        Raises:
            ConfigError: Ray is not installed, there is no cluster, or a node does not share the folder.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # telemetry
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "Raylet is terminated")  # with 20 lines of a dead node's log
        try:
            import ray
        except ImportError as error:
            raise NotInstalled("--on ray", "Ray", "tokencredit[ray]") from error
        self.ray, self.resources = ray, resources
        address = os.environ.get("RAY_ADDRESS", "auto")
        try:
            refuse_dead(address)
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
        except (OSError, ValueError) as error:
            where = "" if address == "auto" else f" at RAY_ADDRESS={address}"
            raise ConfigError(
                f"found no Ray cluster{where}; start one with `ray start --head`, or set RAY_ADDRESS to its address"
            ) from error
        try:
            self.check_nodes(home)
        except BaseException:
            self.close()
            raise
        self.task = ray.remote(num_cpus=resources.cores, num_gpus=resources.gpus, max_retries=0)(work)

    def check_nodes(self, home: Path) -> None:
        """Raise `ConfigError` if a node does not see the sweep's folder; say so if none is large enough for a run."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        home.mkdir(parents=True, exist_ok=True)
        probe = home / f".probe-{os.getpid()}"
        probe.write_text("", encoding="utf-8")
        try:
            look = self.ray.remote(num_cpus=0, max_retries=0)(sees)
            strategies = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
            tasks = [look.options(scheduling_strategy=one).remote(str(probe.absolute())) for one in strategies]
            answers = [self.answer(task) for task in tasks]
        except self.ray.exceptions.RayTaskError as error:
            raise ConfigError(f"a node of the Ray cluster cannot run Tokencredit: {error.cause}") from error
        finally:
            probe.unlink()
        there = [(node, seen) for node, seen in zip(nodes, answers, strict=True) if seen is not None]
        without = [node["NodeManagerAddress"] for node, seen in there if not seen]
        if without:
            raise ConfigError(f"{str(home.absolute())!r} is not on {', '.join(without)}; {SHARE}")
        enough = {"CPU": self.resources.cores, "GPU": self.resources.gpus}
        if not any(all(node["Resources"].get(kind, 0) >= count for kind, count in enough.items()) for node, _ in there):
            say(f"no node of the Ray cluster has {self.resources}; the runs wait until one joins")

    def answer(self, task: Any) -> bool | None:
        """What `sees` found; None of a node that has left: the cluster lists nodes for a while after they died."""
        gone = (self.ray.exceptions.TaskUnschedulableError, self.ray.exceptions.NodeDiedError)
        try:
            return bool(self.ray.get(task))
        except gone:
            return None

    def start(self, run: SweepRun) -> RunJob:
        """A task that trains the run."""
        return RayJob(self, run)

    def close(self) -> None:
        """Leave the cluster; Ray ends tasks that are left."""
        self.ray.shutdown()


class RayJob:
    """A task of a Ray cluster."""

    inherited: str | None = None  # tasks end with their sweep

    def __init__(self, cluster: Ray, run: SweepRun):
        self.ray, self.folder = cluster.ray, JobFolder(run)
        arguments = command(run, self.folder.prepare(), cluster.resources)
        environment = cluster.resources.environment()
        self.result = cluster.task.options(name=run.name).remote(arguments, str(Path.cwd()), environment)
        self.withdrawn = False

    def poll(self) -> Ended | None:
        """How the task ended."""
        if self.withdrawn:
            return Ended()
        if not self.ray.wait([self.result], timeout=0)[0]:
            return None
        node = self.folder.status().get("node")
        try:
            code = self.ray.get(self.result)
        except self.ray.exceptions.RayTaskError as error:
            return Ended(f"cannot start on its node: {error.cause}")
        except self.ray.exceptions.RayError as error:
            return Ended(f"lost with {node or 'its node'} ({type(error).__name__})", lost=True)
        if code == NOT_SHARED:
            return Ended(f"its node does not see {str(self.folder.path.absolute())!r}; {SHARE}")
        return self.folder.ended() or Ended(f"exit code {code}; its job wrote no status", lost=True)

    def send(self, number: int) -> None:
        """Pass a signal on; a task that no node has begun is withdrawn."""
        self.folder.send(number)
        if not self.folder.status():
            self.withdrawn = True
            self.ray.cancel(self.result)


def refuse_dead(address: str) -> None:
    """Raise `OSError` if nothing listens at an address HOST:PORT, for which Ray would wait a minute and a half."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "://" not in address:
        socket.create_connection((host, int(port)), timeout=10).close()


def work(arguments: Sequence[str], folder: str, environment: dict[str, str]) -> int:
    """Train a run on this node, in the folder in which the sweep was started; returns the exit code."""
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=os.environ | environment).returncode


def sees(file: str) -> bool:
    """True if this node has the file."""
    return Path(file).is_file()
