"""HTTP requests to a vLLM server."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2

from tokencredit.errors import ConfigError
from tokencredit.text.engines.requests import EngineFailure
from tokencredit.text.engines.vllm.answers import COMMAND, excerpt, parsed
from tokencredit.text.user_code.workers import EventLoop, Started

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
        """Prepare; nothing is sent.

        Args:
            url: address of the server.
            seconds: timeout of an answer.

        Raises:
            ConfigError: the API key is none.
        """
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

    def start_request(self, method: str, path: str, body: Any = None) -> Started:
        """Begin a `request`; `LOOP.result` waits for it."""
        return LOOP.submit(self._with_client, self.fetch, method, path, body)

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
