"""Time of communication between the processes of a job on this machine."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

from tokencredit.plan.memory import Batch, Setup, micro_rows, trained_parameters
from tokencredit.plan.shape import FLOAT, Shape, parameters

BUCKET = 2**25
"""Bytes of the timed all-reduce, about one bucket of DDP."""
REPEATS = 5


def reduced_bytes(shape: Shape, batch: Batch, setup: Setup, epochs: int) -> float:
    """Bytes that are all-reduced per iteration; a gather and a scatter of sharded weights count half each.

    DDP reduces the gradients once per minibatch. Sharded models are gathered for each forward and backward pass, and
    their gradients scattered; once for a rollout with `sharding.sampling: gathered`, or for each token with `layers`.
    """
    minibatches, trained = batch.minibatches * epochs, FLOAT * trained_parameters(shape, setup)
    if setup.processes == 1:
        return 0.0
    if setup.shard == "none":
        return minibatches * trained
    rows = -(-batch.rows // batch.minibatches)
    passes = minibatches * -(-rows // micro_rows(rows, batch, setup))
    policy, scored = FLOAT * parameters(shape), -(-batch.rows // micro_rows(batch.rows, batch, setup))
    sampling = policy * (1 if setup.gathered else batch.new)
    return (passes * 3 * max(policy, trained) + (setup.half + setup.reference) * scored * policy + sampling) / 2


def reduce_rate(count: int) -> float:
    """Bytes per second of an all-reduce between `count` new processes on this machine, by gloo."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_reduce, (count, folder), nprocs=count)
        return BUCKET / float((Path(folder) / "seconds").read_text(encoding="utf-8"))


def _reduce(rank: int, count: int, folder: str) -> None:
    """Time an all-reduce in one of the processes; the first writes the least time to a file."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    tensor, spent = torch.ones(BUCKET // FLOAT), []
    for _ in range(REPEATS):
        distributed.barrier()
        started = time.perf_counter()
        distributed.all_reduce(tensor)
        spent.append(time.perf_counter() - started)
    if rank == 0:
        (Path(folder) / "seconds").write_text(str(sorted(spent)[REPEATS // 2]), encoding="utf-8")
    distributed.destroy_process_group()
