"""A vLLM server elsewhere as a sampler: requests of token ids over HTTP, and weights through a folder."""

from __future__ import annotations

import asyncio
import json
import queue
import shutil
import tempfile
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx2
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokencredit.distributed.processes import Processes
from tokencredit.distributed.sharding import is_sharded
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.runs.folder import safetensors_errors
from tokencredit.settings.rollout import RolloutConfig, SamplingConfig
from tokencredit.text.engines.plain_weights import plain_weights, write_weights
from tokencredit.text.engines.requests import Completion, EngineFailure, OnCompletion, Progress, Request, Sampler
from tokencredit.text.engines.vllm.connection import (
    CERTAIN,
    COMMAND,
    LOOP,
    Connection,
    Unreachable,
    check_ending,
    choice_of,
    choice_version,
    excerpt,
    read_choice,
)
from tokencredit.text.engines.vllm.sampler import rows_of, sampling_arguments
from tokencredit.text.models.actor_critic import ActorCritic

RESET = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
"""Drops keys and values, also those that the server keeps outside of its memory for them."""
RUN = "tokencredit-"
"""Begins the versions of weights that a run of this library gives to a server."""


class VllmServer(Sampler):
    """A `Sampler` on a vLLM server, in the server's dtype, with weights that are synced after each update.

    The server labels every completion with a version of its weights, and each sync sets another one. Tokens of a
    server that was restarted meanwhile, or was given weights by another run, are so refused before they are used.

    Processes of a job share the server: each sends its own requests, the main process sends the weights.
    """

    name = "vllm"

    def __init__(
        self,
        policy: ActorCritic,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Sequence[int],
        rollout: RolloutConfig,
        report: Callable[[str], None] = print,
        processes: Processes | None = None,
    ):
        """Prepare requests; nothing is sent before the first sync.

        `policy` gives the size of the vocabulary, `rollout` the keys that begin with `server`. `report` is called with
        a line when the server is waited for. `processes` share the server, and sync in step.

        Raises:
            ConfigError: nothing can be written to the folder, or the API key cannot be one.
        """
        assert rollout.server is not None
        self.processes = processes or Processes()
        self.syncs_in_step = self.processes.count > 1
        self.connection = Connection(rollout.server.rstrip("/"), rollout.server_timeout)
        self.tokenizer, self.end_ids, self.report = tokenizer, list(end_ids), report
        self.vocabulary = rows_of(policy)
        self.run = f"{RUN}{self.processes.texts(uuid.uuid4().hex)[0]}"
        self.versions = map(f"{self.run}-{{}}".format, count(1))
        self.version: str | None = None
        """The version of the last sync; None before the first."""
        self.folder = Path(rollout.server_folder or tempfile.gettempdir()).expanduser().absolute()
        with self.processes.agreed(ConfigError):
            try:
                if self.processes.main:  # which alone gives the server its weights
                    with self._new_folder():
                        pass
            except OSError as error:
                raise ConfigError(
                    f"server_folder is {str(self.folder)!r}, where no weights can be written: {error}"
                ) from error

    def complete(self, requests: Sequence[Request], settings: SamplingConfig, ended: OnCompletion) -> None:
        """Send all requests at once, at most `IN_FLIGHT`; a failure, or an exception of `ended`, cancels the rest."""
        settings.check_vllm()
        settings.check_vllm_server()
        self.check_lengths(requests)
        results: queue.SimpleQueue[tuple[int, Completion | Exception]] = queue.SimpleQueue()

        async def sample(index: int, request: Request, client: httpx2.AsyncClient) -> None:
            done: Completion | Exception
            try:
                done = await self._sampled(client, request, settings)
            except Exception as error:  # raised below, in the caller's thread
                done = error
            results.put((index, done))

        async def sample_all(client: httpx2.AsyncClient) -> None:
            async with client, asyncio.TaskGroup() as tasks:
                for index, request in enumerate(requests):
                    tasks.create_task(sample(index, request, client))

        started = LOOP.submit(sample_all, self.connection.client())
        try:
            for _ in requests:
                index, done = results.get()
                if isinstance(done, Exception):
                    raise done
                ended(index, done)
        except BaseException:
            started.future.cancel()
            raise
        LOOP.result(started, None)

    def sync(self, policy: ActorCritic) -> None:
        """Replace the server's weights by the policy's, and drop its prefix cache; a restart is waited for.

        Processes that share the server must call it in step; none of their requests is then on its way.
        """
        version = next(self.versions)
        self.processes.wait()
        with self.processes.agreed(EngineFailure, ConfigError):
            weights = plain_weights(policy) if self.processes.main or is_sharded(policy.lm) else iter(())
            try:
                if self.processes.main:
                    with self._written(weights) as folder:
                        self._hand_over(folder, version)
            finally:
                deque(weights, maxlen=0)  # iterating over sharded ones takes all processes
        self.longest = self.processes.most(self.longest or 0)
        self.version = version

    @contextmanager
    def _new_folder(self) -> Iterator[Path]:
        """A context with a new folder; whoever can read its parent can read it, such as a server of another user."""
        folder = Path(tempfile.mkdtemp(prefix="tokencredit-", dir=self.folder))
        try:
            if self.folder != Path(tempfile.gettempdir()):
                folder.chmod(0o700 | self.folder.stat().st_mode & 0o055)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _written(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[Path]:
        """A context with the folder of a checkpoint, which is renamed when it is whole, and deleted at the end."""
        with ExitStack() as stack:
            try:
                folder = stack.enter_context(self._new_folder())
                with safetensors_errors(folder / "partial"):
                    write_weights(weights, folder / "partial")
                (folder / "partial").rename(folder / "weights")
            except OSError as error:
                raise EngineFailure(f"weights could not be written to {self.folder}: {error}") from error
            yield folder / "weights"

    def _hand_over(self, folder: Path, version: str) -> None:
        """Let the server load weights; one that has answered before, or to a job that was restarted, is waited for."""
        try:
            self._load(folder, version)
        except Unreachable as failure:
            if self.version is None and not self.processes.restarted():
                raise
            seconds = self.connection.seconds
            self.report(f"rollout.server is waited for, for up to {seconds:g} s: {failure}")
            self.connection.run(self.connection.wait)
            self._load(folder, version)

    def _load(self, folder: Path, version: str) -> None:
        """Let the server load weights. None of its tokens are drawn before: that ends one whose last load failed."""
        self.connection.run(self._take_longest)
        # Tokens that are drawn while weights are loaded have a version of their own.
        self._set_version(f"{version} loading")
        try:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            self.connection.request("POST", "/collective_rpc", reload)
        except Unreachable:
            raise
        except EngineFailure as failure:
            raise EngineFailure(
                f"{failure}; the server must hold the run's model, with a vocabulary of {self.vocabulary}, and see the "
                f"folder {self.folder}"
            ) from failure
        if self.connection.request("POST", RESET) != {"success": True}:
            raise EngineFailure("its prefix cache could not be dropped")
        self.connection.run(self._check_logprobs)
        self._set_version(version)

    def _set_version(self, version: str) -> None:
        self.connection.request("POST", "/update_weight_version", {"new_version": version})

    async def _sampled(self, client: httpx2.AsyncClient, request: Request, settings: SamplingConfig) -> Completion:
        """The completion of a request, drawn with the weights of the last sync."""
        progress = Progress(request, settings, self.tokenizer)
        done, choice = None, {}
        body = {
            "token_ids": request.tokens,
            "sampling_params": sampling_arguments(request, settings, self.end_ids),
            "stream": bool(settings.stop),
        }
        async with aclosing(self._choices(client, body)) as choices:
            async for choice in choices:
                ids, logprobs, reason = read_choice(choice, self.vocabulary)
                done = progress.take(ids, logprobs, reason)
                check_ending(progress.ids, reason, request, self.end_ids if settings.stop_at_eos else [])
                if done is not None:
                    break
        if done is None:
            raise EngineFailure("its answer broke off")
        version = choice_version(choice) or await self._version(client)  # a stop string ends it before vLLM does
        if self.syncs_in_step and version.startswith(RUN) and not version.startswith(self.run):
            raise RunStopped(
                f"another run gives weights to the server at {self.connection.url}; give each run one of its own"
            )
        if version != self.version:
            raise EngineFailure(
                "its weights are not those of the last sync: it was restarted, or another run gives it weights"
            )
        return done

    async def _choices(self, client: httpx2.AsyncClient, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The parts of an answer: one, or with `stream` one for each step."""
        async with self.connection.answer(client, "POST", "/inference/v1/generate", body) as response:
            if not body["stream"]:
                yield choice_of(await response.aread())
                return
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield choice_of(line.removeprefix("data: "))

    async def _take_longest(self, client: httpx2.AsyncClient) -> None:
        """Take over the server's longest sequence."""
        models = await self.connection.fetch(client, "GET", "/v1/models")
        try:
            self.longest = int(models["data"][0]["max_model_len"])
        except (LookupError, TypeError, ValueError) as error:
            known = excerpt(json.dumps(models))
            raise EngineFailure(f"it does not say how long a sequence it takes: {known}") from error

    async def _check_logprobs(self, client: httpx2.AsyncClient) -> None:
        """Raise `EngineFailure` if the server's log-probs are not those of its draws."""
        request = Request([0], 1, 0, 0)  # in any vocabulary: a token outside ends the server
        likeliest = SamplingConfig(top_k=1, stop_at_eos=False)
        body = {"token_ids": request.tokens, "stream": False}
        body |= {"sampling_params": sampling_arguments(request, likeliest, self.end_ids)}
        async with aclosing(self._choices(client, body)) as choices:
            _, logprobs, _ = read_choice(await anext(choices), self.vocabulary)
        if logprobs[0] < -CERTAIN:
            raise EngineFailure(
                f"the only token that top_k: 1 leaves has a log-prob of {logprobs[0]:.2g} and not 0, so its log-probs "
                f"are not those of its draws: start it as {COMMAND}"
            )

    async def _version(self, client: httpx2.AsyncClient) -> str:
        answer = await self.connection.fetch(client, "GET", "/weight_info")
        return str(answer.get("weight_version")) if isinstance(answer, dict) else ""
