"""Weights on their way to a vLLM server over NCCL, without vLLM; test_server.py has the whole way."""

import asyncio
import queue
import threading
from concurrent.futures import CancelledError
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from helpers.engines import CPU
from tokencredit.errors import ConfigError
from tokencredit.text.engines.requests import EngineFailure
from tokencredit.text.engines.vllm import transfer
from tokencredit.text.engines.vllm.connection import Connection
from tokencredit.text.engines.vllm.transfer import _Channel, address_towards, check_nccl, free_port, parts_of


def channel_of(seconds=20.0):
    channel = _Channel.__new__(_Channel)
    channel.connection, channel.device, channel.part = Connection("http://127.0.0.1:1", seconds), CPU, []
    channel.outcome, channel.request, channel.engine = queue.SimpleQueue(), None, None
    return channel


def test_parts_hold_all_weights_in_order(monkeypatch):
    monkeypatch.setattr(transfer, "PART_BYTES", 24)
    weights = [(name, torch.zeros(size)) for name, size in [("a", 4), ("b", 2), ("c", 9), ("d", 1), ("e", 1)]]
    parts = [[name for name, _ in part] for part in parts_of(iter(weights))]
    assert parts == [["a", "b"], ["c"], ["d", "e"]]  # 16 + 8 bytes, 36, and the rest
    assert list(parts_of(iter(()))) == []


def test_a_refused_request_is_reported_while_the_transfer_waits_for_the_server():
    over, channel = threading.Event(), channel_of()

    def broadcast():
        with pytest.raises(EngineFailure):
            channel.update_weights({"names": []})
        over.wait(20)

    with pytest.raises(EngineFailure, match="cannot be reached"):
        channel._within(broadcast)
    over.set()


def test_a_transfer_that_does_not_end_is_given_up():
    over = threading.Event()
    channel = channel_of(seconds=0.05)
    with pytest.raises(EngineFailure, match=r"did not end within 0\.05 s"):
        channel._within(over.wait)
    over.set()


def test_an_error_of_the_transfer_is_a_failure_of_the_engine():
    def broken():
        raise ValueError("no peer")

    with pytest.raises(EngineFailure, match="weight transfer failed: ValueError: no peer"):
        channel_of()._within(broken)
    assert channel_of()._within(lambda: 3) == 3


def test_a_trainer_without_a_gpu_is_refused():
    with pytest.raises(ConfigError, match=r"rollout\.server_transfer is nccl, which needs a GPU .* it is on cpu"):
        check_nccl(CPU)


def test_the_address_is_the_one_that_the_server_sees():
    with pytest.raises(EngineFailure, match="cannot be reached"):
        address_towards(f"http://127.0.0.1:{free_port()}")


def test_a_closed_channel_leaves_no_request_and_no_broadcast(monkeypatch):
    """Python waits for vLLM's thread at its exit, and a GPU for a broadcast without a peer."""
    channel, ended, begun = channel_of(), threading.Event(), threading.Event()

    async def never(*_):
        begun.set()
        await asyncio.sleep(60)

    def tell():
        with suppress(CancelledError):
            channel.update_weights({"names": []})
        ended.set()

    monkeypatch.setattr(channel.connection, "fetch", never)
    destroyed = []
    channel.engine = SimpleNamespace(model_update_group=SimpleNamespace(destroy=lambda: destroyed.append(True)))
    threading.Thread(target=tell, daemon=True).start()
    assert begun.wait(20)
    channel.close()
    assert ended.wait(20)
    assert destroyed == [True]
