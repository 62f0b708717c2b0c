"""Seconds of a run's stages on this machine, by passes timed on a model of the same shape with random weights."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

from tokencredit.distributed.processes import Processes, return_freed_memory, threads
from tokencredit.learn.optim import build_optimizer, clip_gradients
from tokencredit.learn.state import trainable
from tokencredit.text.models.precision import Precision
from tokencredit.tools.plan.model_skeletons import build_skeletons
from tokencredit.tools.plan.passes import Passes
from tokencredit.tools.plan.work import Work

MEMORY = 4e9
"""Bytes that the timed model may take; a deeper one, or one with longer rows, is extrapolated."""
SECONDS, REPEATS = 15.0, 5
"""All passes are timed in turns until this time is spent, at most so many times each."""
SHORT = 9
"""Tokens of a timed rollout; each decoding step is timed by itself."""
BUCKET = 2**25
"""Bytes of a timed all-reduce: about a bucket of DDP."""
Timings = dict[str, float]
"""Seconds of passes over some rows of the mean length (scoring, reference, critic, training, critic_training), of
the whole rollout's prefill, first_step and last_step, and of an optimizer step."""


def estimate(work: Work, peak: float, memory: float | None, trained: float, models: float) -> dict[str, float] | None:
    """Seconds of each stage of an iteration; None if two layers of the model do not fit into `memory`.

    Models whose `peak` is too large are timed with fewer layers and rows: twice, with one layer and with more, of which
    the difference is the time of a layer. Communication between GPUs is left out. `trained` and `models` are the bytes
    of trained parameters, and of policy and critic.
    """
    depth = work.lm_config.get_text_config().num_hidden_layers
    layers = max(min(depth, int(depth * MEMORY / peak)), min(2, depth))
    rows = work.micro_rows(-(-work.mean.rows // work.config.ppo.minibatches), work.mean)
    rows = max(1, min(rows, int(rows * MEMORY / (peak * layers / depth))))
    if memory is not None and min(peak * layers / depth, MEMORY) > memory:
        return None
    if work.sharded:
        return_freed_memory()  # as in such a run, whose passes then take longer
    processes = Processes()
    with threads(max(1, torch.get_num_threads() // work.options.processes) if work.device == "cpu" else None):
        timings = timed(work, processes, layers, rows)
        if layers < depth:
            timings = extrapolated(timed(work, processes, 1, rows), timings, (depth - layers) / (layers - 1))
    stages = stage_seconds(work, timings, rows)
    if work.options.processes > 1 and work.device == "cpu":
        stages["communication"] = exchanged_bytes(work, trained, models) / all_reduce_rate(work.options.processes)
    return stages


def extrapolated(shallow: Timings, deep: Timings, more: float) -> Timings:
    """Timings with `more` times the layers that two timings differ by."""
    return {name: seconds + more * max(seconds - shallow[name], 0.0) for name, seconds in deep.items()}


def stage_seconds(work: Work, timings: Timings, rows: int) -> dict[str, float]:
    """Seconds of each stage of an iteration; those that the work does not have are left out.

    With R rows per process, r rows per timed pass, and passes of similar speed per row: a pass over all rows takes
    R / r times as long as the timed one. The rollout is the prompts' pass and a decoding step per further token, whose
    time grows evenly with the cache; in bfloat16 a full pass follows.
    """
    batch, config, minibatches = work.mean, work.config, work.config.ppo.minibatches
    passes = {name: batch.rows / rows * seconds for name, seconds in timings.items()}
    rollout = timings["prefill"] + (batch.new - 1) * (timings["first_step"] + timings["last_step"]) / 2
    shown = min(config.run.samples, batch.rows) / batch.rows
    stages = {
        "rollout": rollout + passes["scoring"] * work.half + passes["critic"],
        "reference": passes["reference"],
        "update": config.ppo.epochs * (passes["training"] + minibatches * timings["optimizer"])
        + work.critic_epochs * (passes["critic_training"] + minibatches * timings["optimizer"]),
        "samples": shown * passes["scoring"],
    }
    return {stage: seconds for stage, seconds in stages.items() if seconds > 0}


def timed(work: Work, processes: Processes, layers: int, rows: int) -> Timings:
    """Timings of a model with this many layers, for passes over `rows` rows."""
    config, batch, new = work.config, work.mean, min(work.mean.new, SHORT)
    with torch.random.fork_rng(), torch.device(processes.device):
        torch.manual_seed(0)
        policy, reference = build_skeletons(work, layers)
        passes = Passes(work, policy, reference, Precision(work.dtype, processes.device))
        inputs = passes.inputs(rows, batch)
    parameters = trainable(policy)
    optimizer = build_optimizer([{"params": parameters, "lr": 1e-9}])
    first, last = list[float](), list[float]()

    def rollout(steps: list[float], prompt: int) -> None:
        with passes.sampling(replace(batch, prompt=prompt, new=new)) as sampling:
            sampling.prefill()
            steps += [seconds_of(sampling.step, processes) for _ in range(new - 1)]

    def step() -> None:
        clip_gradients(parameters, config.optim.max_grad_norm)
        optimizer.step()

    calls: dict[str, Callable[[], None]] = {
        "start": partial(rollout, first, batch.prompt),
        "end": partial(rollout, last, batch.prompt + batch.new - new),
        "scoring": partial(passes.score, policy, inputs),
        "training": partial(passes.train, inputs),
        "optimizer": step,
    }
    if reference is not None:
        calls["reference"] = partial(passes.score, reference, inputs)
    if config.critic.kind == "separate":
        calls["critic"] = partial(passes.value, inputs)
    if config.critic.epochs:
        calls["critic_training"] = partial(passes.train_critic, inputs)
    seconds = {"reference": 0.0, "critic": 0.0, "critic_training": 0.0} | median_seconds(calls, processes)
    if reference is None and config.kl.coef > 0:
        seconds["reference"] = seconds["scoring"]  # without the adapter
    first_step, last_step = (statistics.median(steps or [0.0]) for steps in (first, last))
    prefill = max(seconds["start"] - (new - 1) * first_step, 0.0)
    return seconds | {"prefill": prefill, "first_step": first_step, "last_step": last_step}


def median_seconds(calls: Mapping[str, Callable[[], None]], processes: Processes) -> dict[str, float]:
    """Median seconds of each call, in turns, so that other programs disturb all of them alike; first all warm up."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    started = time.perf_counter()
    for turn in range(REPEATS):
        if turn and time.perf_counter() - started > SECONDS:
            break
        for name, call in calls.items():
            spent[name].append(seconds_of(call, processes))
    return {name: statistics.median(times) for name, times in spent.items()}


def seconds_of(call: Callable[[], object], processes: Processes) -> float:
    """Seconds of a call, until the run's device has computed it."""
    processes.settle()
    started = time.perf_counter()
    call()
    processes.settle()
    return time.perf_counter() - started


def exchanged_bytes(work: Work, trained: float, models: float) -> float:
    """Bytes of all-reduces that take as long as an iteration's communication.

    Gradients of whole models are all-reduced once per minibatch. Sharded models are gathered for each pass, which is
    half an all-reduce; a pass that trains gathers them twice and scatters gradients, three halves.
    """
    config, batch = work.config, work.batch
    passes = config.ppo.epochs + work.critic_epochs
    if not work.sharded:
        return trained * config.ppo.minibatches * passes
    micro = work.micro_rows(work.minibatch_rows, batch)
    updates = passes * config.ppo.minibatches * -(-work.minibatch_rows // micro)
    read = (1 if config.sharding.sampling == "gathered" else batch.new) + work.half + (config.kl.coef > 0)
    return models * (1.5 * updates + 0.5 * read)


def all_reduce_rate(processes: int) -> float:
    """Bytes per second of an all-reduce between new processes on this machine, by gloo."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_all_reduce, (processes, folder), nprocs=processes)
        return BUCKET / float((Path(folder) / "seconds").read_text(encoding="utf-8"))


def _all_reduce(rank: int, processes: int, folder: str) -> None:
    """Time all-reduces in one of the processes; the first writes their median seconds to a file."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    gradients, spent = torch.ones(BUCKET // 4), list[float]()
    for _ in range(REPEATS):
        distributed.barrier()
        started = time.perf_counter()
        distributed.all_reduce(gradients)
        spent.append(time.perf_counter() - started)
    if rank == 0:
        (Path(folder) / "seconds").write_text(str(statistics.median(spent)), encoding="utf-8")
    distributed.destroy_process_group()
