"""Memory and disk of this machine."""

from __future__ import annotations

import resource
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Machine:
    """Sizes in bytes; None where unknown."""

    device: str
    memory: int | None
    """Memory that processes may use: RAM that is available, or a GPU's whole memory."""
    disk: int | None
    """Free space at the run's folder."""


def machine(device: str, folder: str | None) -> Machine:
    """This machine, and the free space at a folder that need not exist yet."""
    if device == "cuda" and torch.cuda.is_available():
        return Machine(torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1], free_disk(folder))
    return Machine(device, available() if device == "cpu" else None, free_disk(folder))


def free_disk(folder: str | None) -> int | None:
    """Free bytes on the disk of a folder or of its first existing parent."""
    place = Path(folder or ".").absolute()
    existing = next((path for path in (place, *place.parents) if path.exists()), None)
    return None if existing is None else shutil.disk_usage(existing).free


def proc(file: str, key: str) -> int | None:
    """Bytes of an entry of a file of Linux's /proc, which counts in kB; None without one."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), None)


def available() -> int | None:
    """RAM available to new processes, within the limit of a container."""
    free = proc("/proc/meminfo", "MemAvailable")
    try:
        limit = CGROUP.read_text(encoding="utf-8").strip()
    except OSError:
        return free
    return int(limit) if limit.isdigit() and (free is None or int(limit) < free) else free


def resident() -> int:
    """Resident memory of this process."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return proc("/proc/self/status", "VmRSS") or most * (1 if sys.platform == "darwin" else 1024)
