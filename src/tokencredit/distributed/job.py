"""The job that a launcher such as torchrun started: its processes, and its memory over restarts.

Everything goes through the launcher's key-value store. torchrun keeps that store over restarts, with all keys of killed
processes; so the processes of each start first agree on a name, under which all other keys of the start are.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from secrets import token_hex
from typing import Any

from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]

from tokencredit.errors import ProcessLost

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables by which a launcher tells a process its job."""
POLL = 0.02
"""Seconds between two looks at the store while the processes gather."""
SPARE = 5.0
"""Seconds that other processes wait longer than process 0, which knows who is missing."""
AGREED = re.compile(r"process \d+: ")
"""What `Processes.agreed` puts before an error of another process."""
MEETING = 10.0
"""Seconds that processes wait for each other at a place to which an error has brought them."""


def launched() -> bool:
    """True in a process of several, and in one that torchrun may restart."""
    return set(NEEDED) <= set(os.environ) and (int(os.environ["WORLD_SIZE"]) > 1 or _kept())


def _kept() -> bool:
    """True if the launcher's store outlives this process: torchrun's."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


@dataclass(frozen=True)
class Member:
    """A process of the job, in one start."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.rank} (pid {self.pid} on {self.host})"


class Job:
    """A job of processes that have joined.

    Attributes:
        memory: store of the whole job; with torchrun it outlives restarts by default, and `remembers` is true.
        store: store of this start alone.
        members: the processes of this start, by rank.
        starts: number of starts so far, this one included; 1 without such a memory.
        visits: how often this process has come to `meet`, by place.
        id: name of the job; None if the launcher keeps no memory over restarts, and has no name for it either.
    """

    def __init__(self, timeout: float):
        """Wait until all processes have joined; raises `ProcessLost` with one that has not within `timeout` seconds."""
        self.rank, self.count, self.timeout = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout
        self.address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        try:
            self._launchers = self._connection(host=self.rank == 0 and not _kept())
        except DistError as error:
            raise ProcessLost(f"the job's store at {self.address} cannot be reached: {first_line(error)}") from error
        self.memory = PrefixStore("tokencredit", self._launchers)
        self.start, self.members = self._gather()
        self.store = PrefixStore(self.start, self.memory)
        self.remembers = _kept()
        name = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # of `--rdzv_id`; "none" is torchrun's default
        own = None if name == "none" else name
        self.id = self.memory.compare_set("job", "", token_hex(8)).decode() if self.remembers else own
        self.starts = int(self.memory.get("starts"))
        self.visits: Counter[str] = Counter()

    def _connection(self, *, host: bool) -> TCPStore:
        """Connect to the launcher's store, or host it where the launcher has none."""
        address, _, port = self.address.rpartition(":")
        limit = timedelta(seconds=self.timeout)
        return TCPStore(address, int(port), self.count, host, limit, wait_for_workers=False, multi_tenant=host)

    def _gather(self) -> tuple[str, list[Member]]:
        """Agree on a name for this start; returns it with the processes."""
        # A process joins only under its own token, since the store may hold those of killed ones. Process 0 goes on
        # once all processes of one list have answered.
        mine = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "token": token_hex(8)})
        self.memory.set(f"here/{self.rank}", mine)
        here = [f"here/{rank}" for rank in range(self.count)]
        previous = self.memory.get("list").decode() if self.rank == 0 and self.memory.check(["list"]) else None
        start, tokens = "", [""] * self.count
        end = time.monotonic() + self.timeout + (SPARE if self.rank else 0.0)
        while time.monotonic() < end:
            if self.rank == 0 and self.memory.check(here):
                now = [value.decode() for value in self.memory.multi_get(here)]
                if now != tokens:
                    start, tokens = token_hex(8), now
                    self.memory.set("list", json.dumps({"start": start, "members": tokens}))
                if all(self.memory.check([f"{start}/ready/{rank}"]) for rank in range(1, self.count)):
                    self.memory.set("previous", previous or "")
                    self.memory.add("starts", 1)
                    self.memory.set(f"{start}/go", "")
                    return start, members(tokens)
            elif self.rank and self.memory.check(["list"]):
                listed = json.loads(self.memory.get("list"))
                start, tokens = listed["start"], listed["members"]
                if len(tokens) == self.count and tokens[self.rank] == mine:
                    self.memory.set(f"{start}/ready/{self.rank}", "")
                    if self.memory.check([f"{start}/go"]):
                        return start, members(tokens)
            time.sleep(POLL)
        raise ProcessLost(self._missing(start))

    def _missing(self, start: str) -> str:
        """Message on the processes that have not joined; only process 0 knows of others."""
        others = range(1, self.count) if self.rank == 0 else ()
        late = [rank for rank in others if not (start and self.memory.check([f"{start}/ready/{rank}"]))] or [0]
        names = f"process{'es' if len(late) > 1 else ''} {', '.join(map(str, late))}"
        return f"{names} of this job of {self.count} did not start within {self.timeout:g} seconds (run.timeout)"

    def connect(self) -> PrefixStore:
        """A further connection to the store of this start, for another thread: a call blocks its connection."""
        return PrefixStore(self.start, PrefixStore("tokencredit", self._connection(host=False)))

    def group(self) -> dict[str, Any]:
        """Arguments of `init_process_group`.

        Its own store would be the launcher's, in which gloo finds the addresses of killed processes after a restart
        (PyTorch 2.13). Its timeout is only for hangs that the heartbeats do not see, which name the process.
        """
        return {
            "store": PrefixStore("group", self.store),
            "rank": self.rank,
            "world_size": self.count,
            "timeout": timedelta(seconds=1.5 * self.timeout + 10),
        }

    def agree(self, key: str, value: Any) -> Any:
        """Process 0's value, in every process; a tree of plain values."""
        if self.rank == 0:
            self.store.set(key, json.dumps(value))
            return value
        end = time.monotonic() + self.timeout
        try:
            while not self.store.check([key]):  # not `get`, which would block signals too
                if time.monotonic() > end:
                    raise ProcessLost(f"{self.members[0]} gave no answer for {self.timeout:g} seconds (run.timeout)")
                time.sleep(POLL)
            return json.loads(self.store.get(key))
        except DistError as error:
            raise ProcessLost(f"{self.members[0]} gave no answer: {first_line(error)}") from error

    def meet(self, place: str) -> bool:
        """True if all processes of this start come to this place, each as often as the others, within seconds."""
        self.visits[place] += 1
        keys = [f"{place}/{self.visits[place]}/{rank}" for rank in range(self.count)]
        end = time.monotonic() + min(MEETING, self.timeout / 2)
        with suppress(DistError):
            self.store.set(keys[self.rank], "")
            while time.monotonic() < end:
                if self.store.check(keys):
                    return True
                time.sleep(POLL)
        return False

    def remember(self, key: str, value: str) -> str:
        """The value that a process of this job, in any start, was first to remember under this key."""
        return self.memory.compare_set(key, "", value).decode()

    def recall(self, key: str) -> str | None:
        """The value remembered under a key, if any."""
        return self.memory.get(key).decode() if self.memory.check([key]) else None

    def sign_off(self, reason: str) -> None:
        """Record a clean exit and its reason."""
        for_torchrun(reason)
        with suppress(DistError):  # the store may be what was lost
            self.store.set(f"end/{self.rank}", reason)

    def ended(self, reason: str) -> bool:
        """As `sign_off`, for an error; false if another process reports the same, perhaps after a process's name."""
        self.sign_off(reason)
        with suppress(DistError):
            rank, first = json.loads(self.store.compare_set("error", "", json.dumps([self.rank, reason])))
            first, own = (AGREED.sub("", error) for error in (first, reason))
            return bool(rank == self.rank or not (first.endswith(own) or own.endswith(first)))
        return True

    def restarted_because(self) -> str | None:
        """Why the launcher restarted this job, in a line, by the records of its previous start; None at the first."""
        if self.starts < 2:
            return None
        previous = json.loads(self.memory.get("previous") or "{}")
        before = members(previous["members"])
        ends = [f"{previous['start']}/end/{member.rank}" for member in before]
        reasons = [f"{previous['start']}/{kind}" for kind in ("verdict", "error")]
        lines = [json.loads(self.memory.get(key))[1] for key in reasons if self.memory.check([key])][:1]
        silent = [str(member) for member, key in zip(before, ends, strict=True) if not self.memory.check([key])]
        if silent := [member for member in silent if member not in "".join(lines)]:
            lines.append(f"{', '.join(silent)} ended without a message, as if killed")
        return f"restarted by the launcher (start {self.starts}): {'; '.join(lines)}"


def members(listed: list[str]) -> list[Member]:
    """The processes of a list that process 0 wrote."""
    return [Member(rank, entry["host"], entry["pid"]) for rank, entry in enumerate(map(json.loads, listed))]


def first_line(error: BaseException) -> str:
    """The first line of an exception: PyTorch's go on with C++ frames."""
    return str(error).partition("\n")[0]


def for_torchrun(reason: str) -> None:
    """Let torchrun's own report of failed processes show the reason, in the file that it reads."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": reason, "timestamp": int(time.time())}), encoding="utf-8")
