"""Time of communication between the processes of a job on this machine."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

from tokencredit.distributed.processes import return_freed_memory
from tokencredit.distributed.sharding import shard
from tokencredit.tools.plan.memory import Batch, Setup, critic_parameters, head_count, micro_rows, trained_parameters
from tokencredit.tools.plan.shape import FLOAT, Shape, parameters

BUCKET = 2**25
"""Bytes of what is timed: about a bucket of DDP, and of the sharded weights of `LAYERS` layers together."""
LAYERS = 8
REPEATS = 5


@dataclass(frozen=True)
class Exchange:
    """Bytes of whole weights and gradients that an iteration's communication is about.

    Attributes:
        reduced: gradients of whole models, which DDP reduces once per minibatch.
        read: sharded weights that are gathered.
        trained: sharded weights that are gathered for a forward and a backward pass, and their gradients scattered.
    """

    reduced: float = 0.0
    read: float = 0.0
    trained: float = 0.0

    def seconds(self, rates: Mapping[str, float]) -> float:
        """Seconds at rates in bytes per second, by attribute."""
        return sum((amount / rates[kind] for kind, amount in vars(self).items() if amount), 0.0)


def exchange_of(shape: Shape, batch: Batch, setup: Setup, epochs: int, critic_epochs: int = 0) -> Exchange:
    """What the processes exchange in an iteration, with `critic_epochs` passes over the batch of the critic alone.

    Sharded models are gathered for each pass. The policy is, once more, for a rollout with
    `sharding.sampling: gathered`, and for each token with `layers`.
    """
    policy = FLOAT * parameters(shape)
    trunks, trained_trunks = (FLOAT * count for count in critic_parameters(shape, setup))
    if setup.processes == 1:
        return Exchange()
    if setup.shard == "none":
        critic = trained_trunks + FLOAT * head_count(shape, setup)
        joint = FLOAT * trained_parameters(shape, setup)
        return Exchange(reduced=batch.minibatches * (epochs * joint + critic_epochs * critic))
    rows = -(-batch.rows // batch.minibatches)
    passes = batch.minibatches * -(-rows // micro_rows(rows, batch, setup))
    scored = -(-batch.rows // micro_rows(batch.rows, batch, setup))
    read = policy * (1 if setup.gathered else batch.new) + scored * ((setup.half + setup.reference) * policy + trunks)
    trained, both = 0.0, epochs + critic_epochs
    if setup.lora_rank:
        read += passes * epochs * 2 * policy  # its gradients are not needed
    else:
        trained += passes * epochs * policy
    if trained_trunks:
        trained += passes * both * trunks
    else:
        read += passes * (both * trunks + (0 if trunks else critic_epochs * policy))
    return Exchange(read=read, trained=trained)


def exchange_rates(setup: Setup) -> dict[str, float]:
    """Bytes per second of each kind of communication between new processes on this machine, by gloo."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_exchange, (setup, folder), nprocs=setup.processes)
        return dict(json.loads((Path(folder) / "rates.json").read_text(encoding="utf-8")))


def _exchange(rank: int, setup: Setup, folder: str) -> None:
    """Time communication in one of the processes; the first writes the rates to a file."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=setup.processes)
    rates = {}
    if setup.shard == "none":
        gradients = torch.ones(BUCKET // FLOAT)
        rates["reduced"] = BUCKET / median_seconds(lambda: distributed.all_reduce(gradients))
    else:
        return_freed_memory()  # as in such a run, whose passes then take longer
        width = int((BUCKET / FLOAT / LAYERS) ** 0.5)
        model, row = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS))), torch.ones(1, width)

        def read() -> None:
            with torch.no_grad():
                model(row)

        def train() -> None:
            model(row).sum().backward()
            model.zero_grad()

        alone = {"read": median_seconds(read), "trained": median_seconds(train)}
        shard(model, model.children(), mesh=init_device_mesh("cpu", (setup.processes,)))
        together = {"read": median_seconds(read), "trained": median_seconds(train)}
        rates = {kind: BUCKET / max(together[kind] - alone[kind], 1e-9) for kind in alone}
    if rank == 0:
        (Path(folder) / "rates.json").write_text(json.dumps(rates), encoding="utf-8")
    distributed.destroy_process_group()


def median_seconds(call: Callable[[], object]) -> float:
    """Median seconds of a call that all processes make together, after a first one."""
    call()
    spent = []
    for _ in range(REPEATS):
        distributed.barrier()
        started = time.perf_counter()
        call()
        spent.append(time.perf_counter() - started)
    return sorted(spent)[REPEATS // 2]
