"""NCCL's part in vLLM's weight transfer, done by a TCP store: all else of the transfer runs as on GPUs.

A vLLM server loads `install` as a plugin (`plugin`). The trainer of a test calls `install_in_trainer`, or is this file
in place of the module `tokencredit.cli`.
"""

import torch


class Communicator:
    """As much of vLLM's `PyNcclCommunicator` as a transfer calls."""

    def __init__(self, host, port, rank, world_size, device=None):
        from vllm.distributed.utils import StatelessProcessGroup

        self.rank = rank
        self.group = StatelessProcessGroup.create(host=host, port=port, rank=rank, world_size=world_size)

    def broadcast(self, tensor, src):
        sent = self.group.broadcast_obj(tensor if self.rank == src else None, src)
        if self.rank != src:
            tensor.copy_(sent)

    def destroy(self):
        pass


def send(iterator, group, src, post_iter_func, **_):
    for item in iterator:
        group.broadcast(post_iter_func(item).contiguous(), src)


def receive(iterator, group, src, post_unpack_func, **_):
    for name, (shape, dtype) in iterator:
        tensor = torch.empty(shape, dtype=dtype)
        group.broadcast(tensor, src)
        post_unpack_func([(name, tensor)])


def install():
    from vllm.distributed.weight_transfer import nccl_common, nccl_engine

    nccl_common.stateless_init_process_group = Communicator
    nccl_engine.packed_nccl_broadcast_producer, nccl_engine.packed_nccl_broadcast_consumer = send, receive
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.synchronize = lambda: None


def install_in_trainer():
    from tokencredit.text.engines.vllm import transfer

    install()
    transfer.check_nccl = lambda device: None


def plugin(folder, tests):
    """Write a package of this plugin's entry point; returns PYTHONPATH for a server that loads it."""
    info = folder / "nccl_on_cpu-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nccl-on-cpu\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nnccl_on_cpu = helpers.nccl_on_cpu:install\n")
    return f"{folder}:{tests}"


if __name__ == "__main__":
    from tokencredit.cli import main

    install_in_trainer()
    main()
