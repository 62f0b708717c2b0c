"""Software, machine, command and repository of a run."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "tokencredit",
    "torch",
    "transformers",
    "numpy",
    "datasets",
    "peft",
    "accelerate",
    "vllm",
    "gymnasium",
    "trl",
)
"""Packages whose versions are recorded, of those that a run has imported."""
MAX_FILES = 20
"""Most changed files of a repository that are named."""


def environment() -> dict[str, Any]:
    """Versions, platform, command and repository of this process, as JSON; what is not known is left out."""
    ours, users = _top(Path(__file__)), _top(Path.cwd())
    here = repository(ours) if ours else None
    found = {
        "versions": versions(),
        "tokencredit": here if here is not None and Path(here["folder"], "src/tokencredit").is_dir() else None,
        "platform": platform.platform(),
        "processor": processor(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv[0] else None,
        "script": getattr(sys.modules["__main__"], "__file__", None),
        "repository": repository(users) if users and users != ours else None,
        "started": now(),
    }
    return {name: value for name, value in found.items() if value}


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that this process has imported."""
    found = {name: _version(name) for name in PACKAGES if name in sys.modules}
    return {"python": platform.python_version()} | {name: x for name, x in found.items() if x}


def now() -> str:
    """This second, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def resumed(run: Path) -> dict[str, Any]:
    """Dates of a run that is resumed now, `begun` and a list `resumed`, and its first `command` and `script`.

    From the summary of its last end. If it was killed, `begun` is from its first event or the date of config.yaml, and
    the command and script are None.
    """
    try:
        before = json.loads((run / "summary.json").read_bytes())["environment"]
        begun = before.get("begun", before["started"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        written = (run / "config.yaml").stat().st_mtime  # of the last start
        before, begun = {}, datetime.fromtimestamp(written, UTC).isoformat(timespec="seconds")
        with suppress(OSError, ValueError, LookupError, TypeError), (run / "events.jsonl").open("rb") as events:
            begun = min(begun, str(json.loads(events.readline())["time"]))
    first = {name: before.get(name) for name in ("command", "script")}
    return {**first, "begun": begun, "resumed": [*before.get("resumed", []), now()]}


def processor() -> str:
    """The name of the processor."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), platform.processor())


def repository(folder: Path) -> dict[str, Any] | None:
    """The Git repository of a folder: its folder, commit and files with changes; None without one."""
    top, commit = _top(folder), _git(folder, "rev-parse", "HEAD")
    if not top or not commit:
        return None
    changed = [line[3:] for line in (_git(folder, "status", "--porcelain") or "").splitlines()]
    return {"folder": str(top), "commit": commit, "changed": changed[:MAX_FILES], "changed_files": len(changed)}


def _top(place: Path) -> Path | None:
    """The folder of the Git repository that a place is in."""
    place = place.resolve()
    return next((folder for folder in (place, *place.parents) if (folder / ".git").exists()), None)


@cache
def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of a git command; None if it fails."""
    try:
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.rstrip() if done.returncode == 0 else None
