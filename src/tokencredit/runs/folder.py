"""A run's folder: plain files that any tool can read, each whole at any moment."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from tokencredit.runs.errors import ConfigError


class RunFolder:
    """Writes what a run leaves behind; it never overwrites another run."""

    def __init__(self, folder: str | None):
        """Choose the folder, by its path, or `runs/DATE-TIME` for None; `create` makes it."""
        self.reserve = 0
        self.path = Path(folder) if folder else Path("runs") / datetime.now().strftime("%Y-%m-%d-%H-%M-%S")

    def refuse_if_used(self) -> None:
        """Raise `ConfigError` if the folder holds something already. Of several processes only the first may ask."""
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ConfigError(
                f"run.dir {str(self.path)!r} holds a run or other files already; give another --run.dir or move it away"
            )

    def create(self, reserve: int) -> None:
        """Make the folder.

        Args:
            reserve: bytes that stay free for what a run writes at its end; once there are fewer, `append` refuses.

        Raises:
            ConfigError: it cannot be made, or the disk is too full.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.path).free
        except OSError as error:
            raise ConfigError(f"cannot make run.dir {str(self.path)!r}: {error.strerror}") from error
        self.reserve = reserve
        if free < reserve:
            raise ConfigError(
                f"the disk of run.dir {str(self.path)!r} has {free / 1e6:.0f} MB free, and the run writes at least "
                f"{reserve / 1e6:.0f} MB; free some space or give another --run.dir"
            )

    def write(self, name: str, text: str) -> None:
        """Write a whole file, or leave what was there."""
        target = self.path / name
        temporary = target.with_name(f".{name}.part")
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def append(self, name: str, *records: Mapping[str, Any]) -> None:
        """Add a line of JSON for each record: all of the lines, or, should the disk be full, none.

        Raises:
            OSError: the lines do not fit, or only at the cost of the reserve.
        """
        if shutil.disk_usage(self.path).free < self.reserve:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path / name))
        lines = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records).encode()
        with open(self.path / name, "ab", buffering=0) as file:
            before = file.tell()
            try:
                while lines:
                    lines = lines[file.write(lines) :]
            except BaseException:
                file.truncate(before)
                raise

    @contextmanager
    def replacing(self, name: str) -> Iterator[Path]:
        """A folder to write into that takes its place under `name` only once it is complete."""
        target, temporary = self.path / name, self.path / f".{name}.part"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            yield temporary
            shutil.rmtree(target, ignore_errors=True)
            os.replace(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
