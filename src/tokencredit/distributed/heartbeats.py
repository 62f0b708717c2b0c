"""Heartbeats between the processes of a job: one that hangs is named, and the job ends."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, cast

import torch
from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from tokencredit.distributed.job import Job, first_line, for_torchrun

LEFT = b"left"
"""The beat of a process that has left the job."""
MAX_PAUSE, MIN_PAUSE = 5.0, 0.05
"""Bounds of the seconds between two beats; in between it is a twentieth of the timeout."""
EXIT_DELAY = 1.0
"""Seconds for the process that prints why the job ends, before the others end."""


def collectives() -> int:
    """Number of collective operations that this process has begun."""
    group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    return 0 if group is None else int(cast(Any, group)._get_sequence_number_for_group())  # its stubs lack it


class Beats:
    """The newest beat of each other process: a counter, and the number of collective operations begun.

    A process hangs if its counter stands still for the timeout, as when it is stopped or its machine is gone; or if
    this process has waited so long in a collective operation that the other has not begun.
    """

    def __init__(self, others: list[int], timeout: float, now: float):
        self.timeout = timeout
        self.latest = dict.fromkeys(others, b"")
        self._since = dict.fromkeys(others, now)
        """When the beat of each process last changed."""
        self._waiting: dict[int, tuple[int, float]] = {}
        """Collective operations begun by the processes that this one waits for, and since when it waits."""

    def receive(self, beats: Mapping[int, bytes], now: float) -> None:
        """Record the others' beats."""
        for rank, beat in beats.items():
            if beat != self.latest[rank]:
                self.latest[rank], self._since[rank] = beat, now

    def reset(self, now: float) -> None:
        """Restart all waiting times: this process itself was stopped."""
        self._since = dict.fromkeys(self._since, now)
        self._waiting.clear()

    def hanging(self, own: int, now: float) -> tuple[list[int], list[int]]:
        """Silent ranks, and ranks that this process waits for, which has begun `own` collective operations."""
        silent, late = [], []
        for rank, beat in self.latest.items():
            if beat == LEFT:
                continue
            if now - self._since[rank] > self.timeout:
                silent.append(rank)
            begun = int(beat.split()[1]) if beat else 0
            if begun >= own:
                self._waiting.pop(rank, None)
            elif self._waiting.get(rank, (-1, now))[0] != begun:
                self._waiting[rank] = begun, now
            elif now - self._waiting[rank][1] > self.timeout:
                late.append(rank)
        return silent, late


class Heartbeats:
    """Two threads: one exchanges beats through the job's store, one looks at the clock.

    The clock has a thread of its own, since calls to a store whose machine is gone block.
    """

    def __init__(self, job: Job):
        """Start beating."""
        self.job = job
        self._limit, self._place = f"{job.timeout:g} seconds (run.timeout)", f"the job's store at {job.address}"
        self.note: Callable[[str], None] | None = None
        """Called with the reason if the job ends."""
        self.pause = min(max(job.timeout / 20, MIN_PAUSE), MAX_PAUSE)
        self._store: Store = job.connect()
        self._others = [rank for rank in range(job.count) if rank != job.rank]
        self._lock, self._left = threading.Lock(), threading.Event()
        self._answered = time.monotonic()
        """When the store last answered."""
        self._beats = Beats(self._others, job.timeout, self._answered)
        self._problem: str | None = None
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._exchange, self._watch)]
        for thread in self._threads:
            thread.start()

    def leave(self) -> None:
        """Stop beating; the others no longer wait for this process."""
        self._left.set()
        for thread in self._threads:
            thread.join(2 * self.pause)  # it may be blocked by a store that is gone
        if not any(thread.is_alive() for thread in self._threads):
            with suppress(DistError):
                self._store.set(f"beat/{self.job.rank}", LEFT.decode())

    def _exchange(self) -> None:
        """Send this process's beat, and read the others', until the job ends."""
        beat = 0
        while not self._left.wait(self.pause):
            beat += 1
            try:
                self._store.set(f"beat/{self.job.rank}", f"{beat} {collectives()}")
                keys = {rank: f"beat/{rank}" for rank in self._others if self._has_begun(rank)}
                received = dict(zip(keys, self._store.multi_get(list(keys.values())), strict=True)) if keys else {}
                if self._problem is not None and self._claim(self._problem):
                    self._end(self._problem, report=True)
                elif self._store.check(["verdict"]):
                    self._end(json.loads(self._store.get("verdict"))[1], report=False)
            except DistError as error:
                self._end(f"{self._place} is gone: {first_line(error)}", report=True)
                return
            with self._lock:
                self._answered = time.monotonic()
                self._beats.receive(received, self._answered)

    def _has_begun(self, rank: int) -> bool:
        """True if a process has sent a beat: to read a missing one would block."""
        return self._beats.latest[rank] != b"" or self._store.check([f"beat/{rank}"])

    def _watch(self) -> None:
        """End the job if the store hangs, and note processes that do."""
        last = time.monotonic()
        while not self._left.wait(self.pause):
            now = time.monotonic()
            with self._lock:
                if now - last > self.job.timeout / 2:  # this process itself was stopped: the others are not late
                    self._answered = now
                    self._beats.reset(now)
                last = now
                self._problem = self._problem or self._message(*self._beats.hanging(collectives(), now))
                gone = now - self._answered > self.job.timeout
            if gone:
                reason = f"gave no answer for {self._limit}: its machine, or the link to it, is gone"
                self._end(f"{self._place} {reason}", report=True)

    def _message(self, silent: list[int], late: list[int]) -> str | None:
        """A message that names the processes that hang, if any."""
        names = ", ".join(str(self.job.members[rank]) for rank in silent or late)
        if silent:
            return f"{names} gave no sign of life for {self._limit}: stopped, or its machine is gone"
        if late:
            work = "a reward call that does not end, or in work of one process alone"
            return f"{names} kept the others waiting for {self._limit}, as in {work}"
        return None

    def _claim(self, reason: str) -> bool:
        """True for the first process that reports why the job ends."""
        self._store.set(f"end/{self.job.rank}", reason)
        mine = json.dumps([self.job.rank, reason])
        return self._store.compare_set("verdict", "", mine).decode() == mine

    def _end(self, reason: str, *, report: bool) -> None:
        """End this process, whose main thread may be blocked forever."""
        if self._left.is_set():
            return
        for_torchrun(reason)
        with suppress(Exception):  # of a full disk, or a closed terminal
            if report:
                os.write(2, f"\ntokencredit: {reason}\n".encode())
            if self.note is not None:
                self.note(reason)
        if not report:
            time.sleep(EXIT_DELAY)
        os._exit(1)
