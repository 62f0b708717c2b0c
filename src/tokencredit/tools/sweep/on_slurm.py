"""Runs of a sweep as jobs of a Slurm cluster, submitted by submitit.

submitit's usual way pickles a function into the job's folder, and the job unpickles it. A run is a command, so its job
is submitted by the method below that, which takes one: no pickle is written or read.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokencredit.errors import ConfigError, importing
from tokencredit.runs.folder import write_file
from tokencredit.tools.sweep.cluster_job import SHARE, JobFolder, command, read_json
from tokencredit.tools.sweep.launch import Ended, Launcher, Resources, RunJob, say
from tokencredit.tools.sweep.sweep_file import SweepRun

if TYPE_CHECKING:
    from submitit.core.core import PicklingExecutor

PARAMETERS = (
    *("account", "partition", "qos", "time", "mem", "mem_per_cpu", "mem_per_gpu", "constraint", "nodelist", "exclude"),
    *("gres", "exclusive", "dependency", "comment", "wckey", "mail_type", "mail_user", "setup", "signal_delay_s"),
)
"""Parameters of submitit that `--slurm` accepts: those of sbatch that have an effect on a run of one node."""
LIST_EVERY = 10.0
"""Seconds between two looks at Slurm's queue."""
GRACE = 60.0
"""Seconds in which a file of a job that has left the queue becomes visible on a network file system."""


def parameters(texts: Sequence[str]) -> dict[str, Any]:
    """Parameters of submitit from `KEY=VALUE` texts.

    >>> parameters(["partition=gpu", "exclusive=true", "setup=module load cuda"])
    {'partition': 'gpu', 'exclusive': True, 'setup': ['module load cuda']}

    Raises:
        ConfigError: a text has another form, or its key is unknown or given twice.
    """
    read: dict[str, Any] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not value:
            raise ConfigError(f"--slurm has {text!r}; it must be KEY=VALUE, such as partition=gpu")
        if key not in PARAMETERS:
            raise ConfigError(f"--slurm has the key {key!r}; it may be {', '.join(PARAMETERS)}")
        if key in read:
            raise ConfigError(f"--slurm has {key} twice; give it once")
        if "\n" in value or "\r" in value:
            raise ConfigError(f"--slurm has a line break in {key}; leave it out")
        read[key] = [value] if key == "setup" else True if value == "true" else value
    return read


class Slurm(Launcher):
    """Launcher of jobs on a Slurm cluster, whose queue keeps them."""

    def __init__(self, resources: Resources, further: dict[str, Any]):
        """Find submitit and Slurm, or raise `ConfigError`; `further` are from `parameters`."""
        with importing("--on slurm", "submitit", "tokencredit[slurm]"):
            import submitit
        if missing := [name for name in ("sbatch", "srun", "squeue") if not shutil.which(name)]:
            raise ConfigError(f"--on slurm needs {', '.join(missing)} of Slurm, which this machine does not have")
        self.executor: type[PicklingExecutor] = submitit.SlurmExecutor
        self.resources = resources
        # Without a time, that of the partition; submitit's own would be 5 minutes.
        own: dict[str, Any] = {"cpus_per_task": resources.cores, "stderr_to_stdout": True, "time": None}
        own["srun_args"] = [f"--cpus-per-task={resources.cores}"]  # which srun no longer takes from sbatch
        if resources.gpus:
            own["gpus_per_node"] = resources.gpus
        self.parameters = own | further
        self.listed: set[str] = set()
        self.listed_at = float("-inf")

    def start(self, run: SweepRun) -> RunJob:
        """A job that trains the run: the one that an earlier sweep has left in the queue, or a new one."""
        folder = JobFolder(run)
        earlier = read_json(folder.path / "id.json").get("id")  # of the job submitted last
        if earlier and folder.ended() is None and earlier in (queued() or ()):
            return SlurmJob(self, folder, earlier, f"Slurm's job {earlier} of an earlier sweep is still in the queue")
        return SlurmJob(self, folder, self.submit(run, folder), None)

    def submit(self, run: SweepRun, folder: JobFolder) -> str:
        """Submit a run's job; returns its id. Raises `OSError` if Slurm refuses it."""
        text = shlex.join([sys.executable, *command(run, folder.prepare(), self.resources)])
        executor = self.executor(folder.path)
        executor.update_parameters(job_name=run.name, **self.parameters)
        try:
            job = executor._submit_command(text)
        except RuntimeError as error:  # submitit's FailedJobError, with what sbatch wrote
            raise OSError(0, " ".join(str(error).split()), "sbatch") from error
        write_file(folder.path / "id.json", json.dumps({"id": job.job_id}) + "\n")
        return str(job.job_id)

    def gone(self, job: str, since: float) -> bool:
        """True if a job submitted at that time, by `time.monotonic`, is missing in a newer listing of the queue."""
        now = time.monotonic()
        if now - self.listed_at > LIST_EVERY:
            listed = queued()
            if listed is not None:
                self.listed, self.listed_at = listed, now
        return self.listed_at > since and job not in self.listed


class SlurmJob:
    """A job of a Slurm cluster."""

    def __init__(self, cluster: Slurm, folder: JobFolder, number: str, inherited: str | None):
        self.cluster, self.folder, self.number, self.inherited = cluster, folder, number, inherited
        self.since = time.monotonic()
        self.stopped = False
        self.missing: float | None = None
        """When it was first not in the queue."""

    def poll(self) -> Ended | None:
        """How the job ended, by its status file, or because it left the queue without writing one."""
        if ended := self.folder.ended():
            return ended
        if not self.cluster.gone(self.number, self.since):
            self.missing = None
            return None
        if self.stopped:
            return Ended()
        self.missing = self.missing or time.monotonic()
        if time.monotonic() - self.missing < GRACE:
            return None
        node = self.folder.status().get("node")
        if node is None:
            shared = f"{str(self.folder.path.absolute())!r}, where Slurm's messages are, and {sys.executable}"
            why = f"it was cancelled, or its node does not share {shared}; {SHARE}"
            return Ended(f"Slurm's job {self.number} left the queue before it began: {why}")
        return Ended(f"Slurm's job {self.number} was lost on {node}", lost=True)

    def send(self, number: int) -> None:
        """Pass a signal on; a job that waits in the queue is withdrawn."""
        self.folder.send(number)
        self.stopped = True
        subprocess.run(["scancel", "--state=PENDING", self.number], capture_output=True, check=False)


def queued() -> set[str] | None:
    """Ids of this user's jobs that wait or run; None if Slurm does not answer."""
    done = subprocess.run(
        ["squeue", "--me", "--noheader", "--format=%A"],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode:
        say(f"squeue does not answer: {' '.join(done.stderr.split())}; asking again")
        return None
    return set(done.stdout.split())
