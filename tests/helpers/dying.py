"""The `tokencredit` command, with processes that kill or stop themselves at chosen places.

Started by torchrun in place of `-m tokencredit.cli`. The environment variable DEATHS names a folder of plans, a JSON
file each: the place, the rank, the number of the visit in a start, the seconds after its begin, and the signal. A plan
is carried out once: the file is renamed before.
"""

import functools
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

VISITS = {}
LOCK = threading.RLock()
"""Held from the removal of a plan to its death, or another thread could carry out the next plan in between."""


def meet_fate(place, entered):
    """Carry out the plan for this visit, if there is one; at its end if its time has not come before."""
    for file in sorted(Path(os.environ["DEATHS"]).glob("*.json")):
        with LOCK, suppress(FileNotFoundError):  # another process has carried it out
            plan = json.loads(file.read_text())
            if (plan["place"], str(plan["rank"])) != (place, os.environ["RANK"]) or plan["visit"] > VISITS[place]:
                continue
            if entered and plan["after"] is not None:
                threading.Timer(plan["after"], die, (file, plan)).start()
            elif not entered:
                die(file, plan)
            return


def die(file, plan):
    """End or stop this process, unless it has happened meanwhile."""
    with LOCK, suppress(FileNotFoundError):
        file.rename(file.with_suffix(".done"))
        os.kill(os.getpid(), signal.Signals[plan["signal"]])


def fateful(owner, name, place):
    """Let a method be a place."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def visited(*args, **kwargs):
        VISITS[place] = VISITS.get(place, 0) + 1
        meet_fate(place, entered=True)
        result = method(*args, **kwargs)
        meet_fate(place, entered=False)
        return result

    setattr(owner, name, visited)


if __name__ == "__main__":
    VISITS["start"] = 1
    meet_fate("start", entered=True)
    from tokencredit.cli import main
    from tokencredit.distributed.signals import end_on_interrupt
    from tokencredit.runs.folder import RunFolder
    from tokencredit.runs.recorder import RunRecord
    from tokencredit.text.ppo_trainer import PPOTrainer

    for owner, name, place in [
        (RunFolder, "lock", "folder"),
        (RunFolder, "write", "folder"),
        (PPOTrainer, "collect", "rollout"),
        (PPOTrainer, "update", "update"),
        (PPOTrainer, "evaluate", "evaluation"),
        (RunRecord, "checkpoint", "save"),
    ]:
        fateful(owner, name, place)
    end_on_interrupt()
    sys.exit(main())
