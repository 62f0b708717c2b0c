"""Runs of several processes under torchrun, in which processes die at chosen places and the job goes on by itself."""

import json
from pathlib import Path

from helpers.commands import python
from helpers.files import read_events
from helpers.warm import together

DYING = Path(__file__).with_name("dying.py")
COMMAND = ["train", "--model.dtype", "float32", "--rollout.batch_size", "8", "--rollout.max_new_tokens", "6"]
COMMAND += ["--run.trackers", "[]", "--run.show_every", "0", "--kl.target", "1", "--critic.prefix_every", "0"]
COMMAND += ["--ppo.epochs", "1", "--ppo.minibatches", "1"]
COMMAND += ["--run.iterations", "6", "--run.save_every", "2"]
COMMAND += ["--eval.every", "2", "--eval.samples", "8", "--eval.max_new_tokens", "4"]
GRACE = 3
"""Seconds for which a stopped process is waited for before it is killed."""


def death(place, rank, *, visit=1, after=0.0, signal="SIGKILL"):
    """A plan of `helpers.dying`: the end of a process, seconds after it comes to a place for the n-th time in a start;
    with None at the end of that visit."""
    return {"place": place, "rank": rank, "visit": visit, "after": after, "signal": signal}


def _plan(folder, deaths):
    """The folder of these plans, beside the run's."""
    plans = folder.with_name(f"{folder.name}-deaths")
    plans.mkdir(parents=True, exist_ok=True)
    for number, plan in enumerate(deaths):
        (plans / f"{number:03d}.json").write_text(json.dumps(plan))
    return plans


def _require_done(plans, output):
    """Fail if a plan was not carried out."""
    left = [file.name for file in plans.glob("*.json")]
    assert not left, f"did not happen: {left}\n{output[-3000:]}"


def forked(folder, *arguments, deaths=(), restarts=0):
    """As `torchrun`, in forks of a process with the libraries, which get what torchrun gives: variables and a store."""
    plans = _plan(folder, deaths)
    variables = {"ACCELERATE_USE_CPU": "true", "DEATHS": str(plans)}
    done = together(2, DYING, *arguments, starts=restarts + 1, grace=GRACE, **variables)
    _require_done(plans, done.stdout + done.stderr)
    return done.returncode, done.stdout + done.stderr


def torchrun(folder, *arguments, deaths=(), restarts=0, timeout=600.0):
    """Train with two processes; returns the exit code and all output."""
    plans = _plan(folder, deaths)
    launcher = ["--standalone", "--nproc_per_node", 2, "--max-restarts", restarts, "--shutdown-timeout", GRACE]
    variables = {"ACCELERATE_USE_CPU": "true", "DEATHS": str(plans)}
    done = python("-m", "torch.distributed.run", *launcher, DYING, *arguments, timeout=timeout, **variables)
    _require_done(plans, done.stdout + done.stderr)
    return done.returncode, done.stdout + done.stderr


def restarts(folder):
    """The events of a run that say why it was restarted."""
    events = read_events(folder) if (folder / "events.jsonl").exists() else []
    return [event for event in events if event.startswith("restarted by the launcher")]
