"""HTTP requests to a vLLM server, and its answers: it may be another program, another version or started otherwise."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from tokencredit.errors import ConfigError
from tokencredit.runs.untrusted import visible
from tokencredit.text.engines.requests import EngineFailure, Request
from tokencredit.user_code.workers import EventLoop

COMMAND = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --tokens-only --generation-config vllm --logprobs-mode processed_logprobs"
)
"""The command that starts a server."""
SHOWN = 300
"""Most characters of an answer in a message."""
MISSING = -9999.0
"""vLLM's log-prob of a token that has none."""
CERTAIN = 1e-4
"""Largest log-prob that rounding makes of the probability 1, in nats."""
KEY = "VLLM_API_KEY"
"""Environment variable of the API key; the server reads the same one."""
IN_FLIGHT = 256
"""Most requests on their way at once; the server schedules them."""
CONNECT_SECONDS = 10.0
"""Timeout of a connection attempt."""
POLL_SECONDS = 1.0
"""Seconds between attempts to reach a server that is waited for."""
HINTS = {
    401: f"give its --api-key as the environment variable {KEY}",
    403: f"start it as {COMMAND}",
    404: f"start it as {COMMAND}",
}
LOOP = EventLoop()
"""The event loop of all servers; the caller, such as a notebook, may already run one of its own."""


class Unreachable(EngineFailure):
    """The server cannot be reached, or did not answer in time."""


class Connection:
    """Requests to a server, each call with a client of its own: one that is kept may have been closed meanwhile."""

    def __init__(self, url: str, seconds: float):
        """Prepare requests to `url`, each answered within `seconds`; `ConfigError` if the API key cannot be one."""
        self.url, self.seconds = url, seconds
        key = os.environ.get(KEY, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(f"the environment variable {KEY} has characters that no API key can have")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.tls = httpx2.create_ssl_context()

    def client(self) -> httpx2.AsyncClient:
        """A client for one call."""
        timeout = httpx2.Timeout(self.seconds, connect=CONNECT_SECONDS, pool=None)
        limits = httpx2.Limits(max_connections=IN_FLIGHT)
        return httpx2.AsyncClient(
            base_url=self.url, headers=self.headers, timeout=timeout, limits=limits, verify=self.tls
        )

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of an answer; None if it is empty. Errors as in `answer`."""
        return self.run(self.fetch, method, path, body)

    def run(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """The result of a coroutine function, called with a client; an exception here cancels it."""
        started = LOOP.submit(self._with_client, function, *args)
        try:
            return LOOP.result(started, None)
        finally:
            started.future.cancel()

    async def wait(self, client: httpx2.AsyncClient) -> None:
        """Wait until the server is healthy."""
        end = time.monotonic() + self.seconds
        while True:
            try:
                async with self.answer(client, "GET", "/health"):
                    return
            except EngineFailure:
                if time.monotonic() > end:
                    raise
            await asyncio.sleep(POLL_SECONDS)

    async def fetch(self, client: httpx2.AsyncClient, method: str, path: str, body: Any = None) -> Any:
        """The JSON of an answer; None if it is empty."""
        async with self.answer(client, method, path, body) as response:
            text = await response.aread()
        return parsed(text) if text else None

    @asynccontextmanager
    async def answer(
        self, client: httpx2.AsyncClient, method: str, path: str, body: Any = None
    ) -> AsyncIterator[httpx2.Response]:
        """A context with the answer to a request, unread.

        Raises:
            Unreachable: there was none in time, or it broke off.
            EngineFailure: the server refused.
        """
        try:
            async with client.stream(method, path, json=body) as response:
                if response.status_code != 200:
                    text, hint = excerpt(await response.aread()), HINTS.get(response.status_code)
                    hint = f"; {hint}" if hint else ""
                    raise EngineFailure(f"{self.url}{path} answered HTTP {response.status_code}: {text}{hint}")
                yield response
        except httpx2.HTTPError as error:
            raise Unreachable(f"{self.url} cannot be reached: {type(error).__name__} {error}".rstrip()) from error

    async def _with_client(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        async with self.client() as client:
            return await function(client, *args)


def parsed(text: str | bytes) -> Any:
    """JSON of a server; raises `EngineFailure` for anything else."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EngineFailure(f"its answer is not JSON: {excerpt(text)}") from error


def choice_of(text: str | bytes) -> dict[str, Any]:
    """The only choice of an answer of /inference/v1/generate, or of a part of it."""
    answer = parsed(text)
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not (isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict)):
        raise EngineFailure(f"its answer has no completion: {excerpt(text)}")
    return choices[0]


def read_choice(choice: dict[str, Any], vocabulary: int) -> tuple[list[int], list[float], str | None]:
    """New token ids, their log-probs and the reason to finish; checked, since the server may be another than expected.

    Raises:
        EngineFailure: tokens are none of the vocabulary, or do not have a log-prob each.
    """
    try:
        ids, reason = choice["token_ids"], choice.get("finish_reason")
        places = choice["logprobs"]["content"]
        logprobs = [place["logprob"] for place in places]
        named = [place["token_id"] for place in places]
    except (LookupError, TypeError) as error:
        raise EngineFailure("its answer lacks token ids or log-probs") from error
    if named != ids:
        raise EngineFailure("its log-probs are not those of its tokens")
    if not all(type(token) is int and 0 <= token < vocabulary for token in ids):
        raise EngineFailure(f"its answer has tokens outside the vocabulary of {vocabulary}")
    for logprob in logprobs:
        if not (isinstance(logprob, float | int) and math.isfinite(logprob) and MISSING < logprob <= CERTAIN):
            raise EngineFailure(f"a token has the log-prob {excerpt(str(logprob))}: start it as {COMMAND}")
    return ids, [float(logprob) for logprob in logprobs], None if reason is None else str(reason)


def check_ending(ids: Sequence[int], reason: str | None, request: Request, ends: Sequence[int]) -> None:
    """Raise `EngineFailure` if the tokens so far end, or go on, where the request does not let them.

    `reason` is vLLM's to finish, None if it has not; `ends` are token ids that end a completion.
    """
    count, ended = len(ids), bool(ids) and ids[-1] in ends
    if count > request.limit:
        raise EngineFailure(f"it gave {count} tokens, and was asked for {request.limit} at most")
    if reason is None:
        return
    if any(token in ends for token in ids[:-1]):
        raise EngineFailure("it went on after an end token")
    if reason == "length" and count < request.limit:
        raise EngineFailure(f"it cut a completion at {count} tokens, and was asked for {request.limit}")
    if reason == "stop" and (not ended or count < request.shortest):
        raise EngineFailure(f"it ended a completion at token {ids[-1] if ids else 'none'}, which is no end there")


def choice_version(choice: dict[str, Any]) -> str | None:
    """The version of the weights that drew all tokens; all versions, if there are several; None without any."""
    spans = choice.get("weight_versions")
    if not isinstance(spans, list):
        return None
    return " and ".join(sorted({str(span.get("version")) for span in spans if isinstance(span, dict)})) or None


def excerpt(text: str | bytes) -> str:
    """The beginning of a server's answer, safe on a terminal, in a line."""
    whole = text.decode(errors="replace") if isinstance(text, bytes) else text
    return visible(" ".join(whole[: 4 * SHOWN].split()))[:SHOWN]
