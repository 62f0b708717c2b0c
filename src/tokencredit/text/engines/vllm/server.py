"""A vLLM server elsewhere as a sampler: requests of token ids over HTTP, and weights in one of two ways."""

from __future__ import annotations

import asyncio
import json
import queue
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from itertools import count
from typing import Any

import httpx2
import torch
from transformers import PreTrainedTokenizerBase

from tokencredit.distributed.processes import Processes
from tokencredit.distributed.sharding import is_sharded
from tokencredit.errors import ConfigError, RunStopped
from tokencredit.settings.rollout import RolloutConfig, SamplingConfig
from tokencredit.text.engines.requests import Completion, EngineFailure, Request
from tokencredit.text.engines.vllm.answers import (
    CERTAIN,
    COMMAND,
    check_ending,
    choice_of,
    choice_version,
    excerpt,
    read_choice,
)
from tokencredit.text.engines.vllm.connection import LOOP, Connection, Unreachable
from tokencredit.text.engines.vllm.sampler import Progress, rows_of, sampling_arguments
from tokencredit.text.engines.vllm.transfer import FolderTransfer, NcclTransfer, Transfer, Weights
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.plain_weights import plain_weights

RESET = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
"""Drops keys and values, also those that the server keeps outside of its memory for them."""
RUN = "tokencredit-"
"""Begins the versions of weights that a run of this library gives to a server."""


class VllmServer:
    """A `Sampler` on a vLLM server, in the server's dtype, with weights that are synced after each update.

    The server labels every completion with a version of its weights, and each sync sets another one. Tokens of a
    server that was restarted meanwhile, or was given weights by another run, are so refused before they are used.

    Processes of a job share the server: each sends its own requests, the main process sends the weights.
    """

    name = "vllm"
    shares_weights = False
    longest: int | None = None
    """Most tokens of a prompt with its completion."""

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

        Args:
            policy: gives the size of the vocabulary.
            tokenizer: decodes completions for stop strings.
            end_ids: token ids that end a completion.
            rollout: `server` and the settings whose names begin with it.
            report: called with a line when the server is waited for.
            processes: those that share the server, and sync in step; by default those of the job.

        Raises:
            ConfigError: the folder cannot be written to, there is no GPU for NCCL, or the API key is none.
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
        with self.processes.agreed(ConfigError):
            self.transfer = self._transfer(rollout, next(policy.lm.parameters()).device)

    def complete(
        self, requests: Sequence[Request], settings: SamplingConfig, ended: Callable[[int, Completion], None]
    ) -> None:
        """Send all requests at once, at most `IN_FLIGHT`; a failure, or an exception of `ended`, cancels the rest."""
        settings.check_vllm("sampling")
        settings.check_vllm_server()
        self._check_lengths(requests)
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
        with self.processes.agreed(EngineFailure):
            taken = plain_weights(policy) if self.processes.main or is_sharded(policy.lm) else iter(())
            self._send(taken, version)
        self.longest = self.processes.most(self.longest or 0)
        self.version = version

    def sleep(self) -> None:
        """Do nothing: the server has memory of its own."""

    def _transfer(self, rollout: RolloutConfig, device: torch.device) -> Transfer:
        """The way for weights, which the main process alone gives to the server, and checks.

        Raises:
            ConfigError: it is not there.
        """
        if rollout.server_transfer == "nccl":
            return NcclTransfer(self.connection, device)
        folder = FolderTransfer(self.connection, rollout.server_folder)
        if self.processes.main:
            folder.check()
        return folder

    def _send(self, weights: Weights, version: str) -> None:
        """Give weights to the server, in the main process; iterating over sharded ones takes all processes."""
        try:
            if self.processes.main:
                with self.transfer.offered(weights) as load:
                    self._hand_over(load, version)
        finally:
            deque(weights, maxlen=0)

    def _hand_over(self, load: Callable[[], None], version: str) -> None:
        """Let the server load weights; one that has answered before, or to a job that was restarted, is waited for."""
        try:
            self._load(load, version)
        except Unreachable as failure:
            if self.version is None and not self.processes.restarted():
                raise
            seconds = self.connection.seconds
            self.report(f"rollout.server is waited for, for up to {seconds:g} s: {failure}")
            self.connection.run(self.connection.wait)
            self._load(load, version)

    def _load(self, load: Callable[[], None], version: str) -> None:
        """Let the server load weights; tokens drawn meanwhile have a version of their own.

        None are drawn before: that ends a server whose last load failed.
        """
        self.connection.run(self._take_longest)
        if self.connection.run(self._version) != self.version:
            self.transfer.renew()
        self.connection.request("POST", "/update_weight_version", {"new_version": f"{version} loading"})
        try:
            load()
        except Unreachable:
            raise
        except EngineFailure as failure:
            raise EngineFailure(
                f"{failure}; the server must hold the run's model, with a vocabulary of {self.vocabulary}, and "
                f"{self.transfer.hint}"
            ) from failure
        self.connection.request("POST", "/resume")  # also a server that a lost trainer left paused
        dropped = self.connection.request("POST", RESET)
        if dropped != {"success": True}:
            raise EngineFailure("its prefix cache could not be dropped")
        self.connection.run(self._check_logprobs)
        self.connection.request("POST", "/update_weight_version", {"new_version": version})

    def _check_lengths(self, requests: Sequence[Request]) -> None:
        """Raise `RunStopped` for a request that is too long for the server, before any is sent."""
        longest = max((len(request.tokens) + request.limit for request in requests), default=0)
        if self.longest is not None and longest > self.longest:
            raise RunStopped(
                f"a prompt and its completion may have {longest} tokens, and the server at {self.connection.url} takes "
                f"{self.longest}; start it with --max-model-len {longest} or more, or shorten prompts or max_new_tokens"
            )

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
        """The present version of the server's weights."""
        answer = await self.connection.fetch(client, "GET", "/weight_info")
        return str(answer.get("weight_version")) if isinstance(answer, dict) else ""
