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

from tokencredit.errors import ConfigError, importing
from tokencredit.tools.sweep.cluster_job import NOT_SHARED, SHARE, JobFolder, command
from tokencredit.tools.sweep.launch import Ended, Launcher, Resources, RunJob, say
from tokencredit.tools.sweep.sweep_file import SweepRun


class Ray(Launcher):
    """Launcher of tasks on a Ray cluster that is already running."""

    def __init__(self, resources: Resources):
        """Join the cluster; raises `ConfigError` if Ray is not installed, or there is no cluster."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # telemetry
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "Raylet is terminated")  # with 20 lines of a dead node's log
        with importing("--on ray", "Ray", "tokencredit[ray]"):
            import ray
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
        enough = {"CPU": resources.cores, "GPU": resources.gpus}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(all(node.get(kind, 0) >= count for kind, count in enough.items()) for node in nodes):
            say(f"no node of the Ray cluster has {resources}; the runs wait until one joins")
        self.task = ray.remote(num_cpus=resources.cores, num_gpus=resources.gpus, max_retries=0)(work)

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
