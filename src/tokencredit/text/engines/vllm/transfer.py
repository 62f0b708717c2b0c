"""Ways to give weights to a vLLM server: through a folder that both see, or by vLLM's own transfer over NCCL."""

from __future__ import annotations

import importlib
import queue
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from tokencredit.errors import ConfigError
from tokencredit.runs.folder import safetensors_errors
from tokencredit.text.engines.requests import EngineFailure
from tokencredit.text.engines.vllm.connection import CONNECT_SECONDS, LOOP, Connection
from tokencredit.text.engines.vllm.process import contained
from tokencredit.text.models.plain_weights import write_weights
from tokencredit.text.user_code.workers import Started

Weights = Iterator[tuple[str, Tensor]]
"""Names and tensors, as `plain_weights` gives them."""
START, FINISH = "/start_weight_update", "/finish_weight_update"
PART_BYTES = 2**30
"""Bytes of weights after which a part of them is sent, and may be freed."""


class Transfer(Protocol):
    """A way to give weights to a server."""

    hint: str
    """What the server must be able to do, for the message of one that could not load weights."""

    def offered(self, weights: Weights) -> AbstractContextManager[Callable[[], None]]:
        """A context with a function that has the server load the weights.

        The function may be called again if the server was lost; it says so if it has no weights left.

        Raises:
            EngineFailure: they cannot be offered; the function raises it if they cannot be loaded.
        """

    def renew(self) -> None:
        """Drop what connects it with the server, which was restarted or given weights by another run."""


class FolderTransfer:
    """A folder that the server sees under the same path (`rollout.server_folder`)."""

    def __init__(self, connection: Connection, parent: str | None):
        """Prepare; nothing is written.

        Args:
            connection: to the server.
            parent: the folder; None for a temporary folder of this machine.
        """
        self.connection = connection
        self.parent = Path(parent or tempfile.gettempdir()).absolute()
        self.hint = f"see the folder {self.parent}"

    def check(self) -> None:
        """Raise `ConfigError` if nothing can be written to the folder."""
        try:
            with self._new_folder():
                pass
        except OSError as error:
            message = f"rollout.server_folder is {str(self.parent)!r}, where no weights can be written: {error}"
            raise ConfigError(message) from error

    @contextmanager
    def offered(self, weights: Weights) -> Iterator[Callable[[], None]]:
        """A context with the weights as a checkpoint, which is renamed when it is whole, and deleted at the end."""
        with ExitStack() as stack:
            try:
                folder = stack.enter_context(self._new_folder())
                partial_folder, whole = folder / "partial", folder / "weights"
                with safetensors_errors(partial_folder):
                    write_weights(weights, partial_folder)
                partial_folder.rename(whole)
            except OSError as error:
                raise EngineFailure(f"weights could not be written to {self.parent}: {error}") from error
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(whole)}}
            yield partial(self.connection.request, "POST", "/collective_rpc", reload)

    def renew(self) -> None:
        """Do nothing: nothing stays between two syncs."""

    @contextmanager
    def _new_folder(self) -> Iterator[Path]:
        """A context with a new folder; whoever can read its parent can read it, such as a server of another user."""
        folder = Path(tempfile.mkdtemp(prefix="tokencredit-", dir=self.parent))
        try:
            if self.parent != Path(tempfile.gettempdir()):
                folder.chmod(0o700 | self.parent.stat().st_mode & 0o055)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class NcclTransfer:
    """vLLM's NCCL weight transfer: the trainer's GPU broadcasts to those of the server, without files.

    The trainer opens a channel at the first sync, and another one after a failure. The server is paused until it has
    all weights, and after a failure until a later sync: a request would end it. vLLM waits in NCCL for a server that
    has failed, without a limit, so its calls run in threads of their own, which are left behind then.
    """

    hint = """be started with --weight-transfer-config '{"backend": "nccl"}'"""

    def __init__(self, connection: Connection, device: torch.device):
        """Prepare; nothing is sent.

        Args:
            connection: to the server; its timeout is that of each step.
            device: the trainer's.

        Raises:
            ConfigError: the trainer has no vLLM, or no GPU.
        """
        check_nccl(device)
        self.connection, self.device = connection, device
        self.channel: _Channel | None = None

    @contextmanager
    def offered(self, weights: Weights) -> Iterator[Callable[[], None]]:
        """A context with a function that sends the weights, in parts of about `PART_BYTES`, once."""
        sent = False

        def send() -> None:
            nonlocal sent
            if sent:
                raise EngineFailure(f"{self.connection.url} was lost after it had taken weights")
            try:
                self.channel = self.channel or _Channel(self.connection, self.device)
                self.connection.request("POST", "/pause?mode=abort")
                self.channel.begin()
                sent = True
                self._send(self.channel, weights)
            except BaseException:
                self.renew()
                raise

        yield send

    def renew(self) -> None:
        """Open another channel at the next sync; the old one may wait for the server that it led to."""
        if self.channel is not None:
            self.channel.close()
        self.channel = None

    def _send(self, channel: _Channel, weights: Weights) -> None:
        try:
            for part in parts_of(weights):
                channel.send(part)
            self.connection.request("POST", FINISH)
        except EngineFailure as failure:  # never `Unreachable`: some of the weights are taken
            raise EngineFailure(f"{failure}, while weights were sent") from failure


class _Channel:
    """vLLM's trainer engine, connected with the server's workers.

    It is the engine's `WeightSource`, of one part of the weights at a time, and its `VLLMWeightSyncClient`.
    """

    closed = False
    """True after `close`."""

    def __init__(self, connection: Connection, device: torch.device):
        self.connection, self.device = connection, device
        self.part: list[tuple[str, Tensor]] = []
        self.outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self.request: Started | None = None
        """The request of vLLM's thread; None before the first."""
        self.engine: Any = None
        self.fresh = True
        """True until the first update, before which the server may hold a part of an earlier one."""
        with contained():
            from vllm.distributed.weight_transfer.base import ParamMeta
            from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        self.described = ParamMeta
        workers = number_of(connection.request("GET", "/get_world_size"), "world_size")
        info = NCCLTrainerInitInfo(address_towards(connection.url), free_port(), 1 + workers, rank=0)
        try:
            self.engine = self._within(
                partial(WeightTransferTrainerFactory.trainer_init, info, client=self, source=self)
            )
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        """Begin an update; a new channel first ends the one that a lost trainer may have left half done."""
        if self.fresh:
            with suppress(EngineFailure):  # one is under way
                self.connection.request("POST", START)
            self.connection.request("POST", FINISH)
            self.fresh = False
        self.connection.request("POST", START)

    def send(self, part: list[tuple[str, Tensor]]) -> None:
        """Send tensors to the server's workers, which load them.

        Raises:
            EngineFailure: the server refused them, or did not take them in time.
        """
        self.part = part
        if self.device.type == "cuda":  # vLLM reads them in streams that do not wait for the one that computes them
            torch.cuda.current_stream(self.device).synchronize()
        try:
            self._within(self.engine.send_weights)
        finally:
            self.part = []

    def close(self) -> None:
        """Let nothing wait for the server: a request of vLLM's thread, and a broadcast."""
        self.closed = True
        if self.request is not None:
            self.request.future.cancel()
        group = getattr(self.engine, "model_update_group", None)
        if group is not None:
            with suppress(Exception):  # of NCCL, whose peer is gone
                group.destroy()

    def metadata(self) -> list[Any]:
        """Names, dtypes and shapes of the part."""
        return [self.described(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.part]

    def __iter__(self) -> Weights:
        return iter(self.part)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the server's workers connect."""
        self._tell("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Do nothing: an update begins before its first part."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Have the server's workers receive the part."""
        self._tell("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Do nothing: an update ends after its last part."""

    def _tell(self, path: str, body: Any) -> None:
        """Send a request in a thread of vLLM, whose peer may wait in NCCL for one that has failed."""
        self.request = self.connection.start_request("POST", path, body)
        if self.closed:  # meanwhile
            self.request.future.cancel()
        try:
            LOOP.result(self.request, None)
        except BaseException as failure:
            self.outcome.put((None, failure))
            raise

    def _within(self, function: Callable[[], Any]) -> Any:
        """The result of a function of vLLM, called in a thread.

        Raises:
            EngineFailure: it or a request of it failed, or it took longer than the connection's timeout.
        """

        def call() -> None:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                try:
                    self.outcome.put((function(), None))
                except BaseException as error:
                    self.outcome.put((None, error))

        threading.Thread(target=call, name="tokencredit-transfer", daemon=True).start()
        seconds = self.connection.seconds
        try:
            result, error = self.outcome.get(timeout=seconds)
        except queue.Empty:
            raise EngineFailure(f"vLLM's weight transfer did not end within {seconds:g} s") from None
        if isinstance(error, EngineFailure):
            raise error
        if error is not None:
            raise EngineFailure(f"vLLM's weight transfer failed: {type(error).__name__}: {error}") from error
        return result


def check_nccl(device: torch.device) -> None:
    """Raise `ConfigError` if the trainer cannot send weights over NCCL."""
    if device.type != "cuda":
        raise ConfigError(
            f"rollout.server_transfer is nccl, which needs a GPU in the trainer, and it is on {device}; leave it out"
        )
    try:
        with contained():
            importlib.import_module("vllm.distributed.weight_transfer.nccl_engine")
    except (ImportError, OSError) as error:
        raise ConfigError(
            "rollout.server_transfer is nccl, which needs vLLM in the trainer too: pip install tokencredit[vllm] "
            f"({error})"
        ) from error


def parts_of(weights: Weights) -> Iterator[list[tuple[str, Tensor]]]:
    """The weights in lists of at least `PART_BYTES`, except for the last."""
    part: list[tuple[str, Tensor]] = []
    for name, tensor in weights:
        part.append((name, tensor))
        if sum(x.nbytes for _, x in part) >= PART_BYTES:
            yield part
            part = []
    if part:
        yield part


def number_of(answer: Any, key: str) -> int:
    """A number of a server's answer; raises `EngineFailure` if there is none."""
    try:
        return int(answer[key])
    except (LookupError, TypeError, ValueError) as error:
        raise EngineFailure(f"its answer has no {key}: {answer!r:.200}") from error


def address_towards(url: str) -> str:
    """This machine's address on the way to a server.

    Raises:
        EngineFailure: the server cannot be reached.
    """
    parts = urlsplit(url)
    try:
        place = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        with socket.create_connection(place, CONNECT_SECONDS) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise EngineFailure(f"{url} cannot be reached: {error}") from error


def free_port() -> int:
    """A port of this machine that nothing uses."""
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])
