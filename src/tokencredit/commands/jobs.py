"""Commands that train, as processes of a job: torchrun's restarts go on with the run that the job began."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from tokencredit.errors import ConfigError, EngineLost, ProcessLost, RunComplete, RunStopped
from tokencredit.runs.folder import RunFolder, recover
from tokencredit.settings.control import ControlConfig
from tokencredit.settings.offline import OfflineSettings
from tokencredit.settings.text import PPOConfig

if TYPE_CHECKING:
    from tokencredit.distributed.job import Job

Config = TypeVar("Config", PPOConfig, ControlConfig, OfflineSettings)
FAILED, BAD_ARGUMENTS = 1, 2
"""Exit codes: a run that failed; invalid arguments."""
ERROR = "error"
"""Key of the error that a user can fix, which no restart of the job can."""


@contextmanager
def training(config: Config, *, resume: bool) -> Iterator[tuple[Config, bool]]:
    """Join the job, if a launcher started one; yields the configuration with the run's folder, and whether to resume.

    A folder that an earlier start of the same job began is resumed; any other that is in use is refused.

    Raises:
        ConfigError: the folder is in use, or the body raised it.
        RunStopped: the body raised it.
        ProcessLost: another process hung, ended or cannot be reached.
        SystemExit: on SIGTERM from the launcher, and for an error that another process says.
    """
    given = resume
    if not resume and "RANK" not in os.environ:
        RunFolder(config.run.dir).refuse_if_used(by_command=True)  # before slow imports
    from tokencredit.distributed.processes import Processes, connection_lost

    processes = Processes(config.run.timeout)
    job = processes.job
    try:
        if job is None:
            if not resume and processes.main:
                RunFolder(config.run.dir).refuse_if_used(by_command=True)
            yield config, resume
            return
        with _terminated(), processes.watched():
            refuse_again(job)
            folder, resume = job.agree("run", plan(job, config.run.dir, resume=resume) if job.rank == 0 else None)
            yield replace(config, run=replace(config.run, dir=folder)), resume
    except RunComplete:
        if job is None or (given and job.starts == 1):
            raise
        if job.rank == 0:
            print("the run was complete before the restart")
    except (ConfigError, RunStopped) as error:
        if job is not None:
            code = BAD_ARGUMENTS if isinstance(error, ConfigError) else FAILED
            if not isinstance(error, EngineLost):
                job.remember(ERROR, json.dumps([code, str(error)]))
            if not job.ended(str(error)):
                raise SystemExit(code) from None
        raise
    except SystemExit as error:
        if job is not None:
            job.sign_off(f"exit code {error.code}")
        raise
    except Exception as error:
        if job is None:
            raise
        if not connection_lost(error):
            job.ended(f"{type(error).__name__}: {error}")
            raise
        reason = "the connection to another process of this job was lost: it ended, or cannot be reached"
        if not job.ended(reason):
            raise SystemExit(FAILED) from None
        raise ProcessLost(reason) from error
    finally:
        processes.close()


def plan(job: Job, folder: str | None, *, resume: bool) -> tuple[str, bool]:
    """The folder of a job's run, the same in all starts, and whether to resume it.

    Raises:
        ConfigError: the folder is in use, and not by this job; or there is none, and a restart could not know it.
    """
    if folder is None and job.id is not None and not job.remembers:
        raise ConfigError(
            "run.dir is not given, and the store of this job (TORCH_DISABLE_SHARE_RDZV_TCP_STORE) does not outlive a "
            "restart, which would begin another run; give run.dir"
        )
    if folder is None:
        folder = job.remember("folder", str(RunFolder(None).path))
    run = RunFolder(folder, job.id)
    if run.begun():
        recover(run.path)
        resume = resume or (run.path / "config.yaml").is_file()
    if not resume:
        run.refuse_if_used(by_command=True)
    return folder, resume


def refuse_again(job: Job) -> None:
    """Raise the error that a user has to correct, if an earlier start of this job ended with it: torchrun starts all
    processes again after any error."""
    if (known := job.recall(ERROR)) is None or job.starts == 1:
        return
    code, message = json.loads(known)
    kind = ConfigError if code == BAD_ARGUMENTS else RunStopped
    raise kind(f"not tried again after the error of an earlier start: {message}")


@contextmanager
def _terminated() -> Iterator[None]:
    """A context in which SIGTERM raises SystemExit, so that a process leaves the reason for its end."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
