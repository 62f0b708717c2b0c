"""OpenEnv: environments on a server, through its generic client."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Mapping
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from tokencredit.errors import ConfigError, importing
from tokencredit.text.data.prompts import Prompt
from tokencredit.text.turns.protocols.episode import appended

OWN = ("done", "reward", "metadata")
"""Fields of every observation that are not its content."""
SCHEMA_TIMEOUT = 10.0
"""Seconds within which a server answers with its schema."""
MESSAGE_TIMEOUT = 86400.0
"""Timeout of the client's messages in seconds; env.timeout is shorter."""


class OpenEnv:
    """One session on a server. A turn's text is a field of the action; observations are texts or JSON."""

    def __init__(self, url: str, action: str | None = None, observation: str | None = None):
        """Ask the server at `url` for its schema.

        `action` is the field of the action that receives the policy's text, by default the only required text;
        `observation` the field of the observation that the policy reads, by default all of them as JSON.
        """
        with importing("env.factory openenv", "OpenEnv", "tokencredit[openenv]"):
            from openenv.core import GenericEnvClient
        schema = _schema(url)
        actions, observations = schema["action"], schema["observation"]
        texts = {key for key, field in actions["properties"].items() if field.get("type") == "string"}
        required = sorted(texts & set(actions.get("required", ())))
        self._action = action or (required[0] if len(required) == 1 else None)
        self._observation = observation
        if self._action not in texts:
            raise ConfigError(
                f"env.kwargs.action is {action!r}; it must name the field of the action that receives the policy's "
                f"text: {', '.join(sorted(texts)) or 'this server has none'}"
            )
        if observation is not None and observation not in observations["properties"]:
            fields = ", ".join(key for key in observations["properties"] if key not in OWN)
            raise ConfigError(f"env.kwargs.observation is {observation!r}; it must be one of {fields}")
        self._client = GenericEnvClient(base_url=url, message_timeout_s=MESSAGE_TIMEOUT)

    async def reset(self, row: Mapping[str, Any]) -> Prompt:
        """Reset with the row's columns, its seed among them; the observation is appended to the row's prompt."""
        columns = {key: value for key, value in row.items() if key != "prompt"}
        result = await self._answered(self._client.reset(**columns))
        return appended(row.get("prompt") or "", self._text(result.observation))

    async def step(self, completion: str) -> tuple[str, float, bool]:
        """Send the completion as an action."""
        result = await self._answered(self._client.step({self._action: completion}))
        return self._text(result.observation), float(result.reward or 0), bool(result.done)

    async def _answered(self, call: Awaitable[Any]) -> Any:
        """The client's answer; after a failure or a timeout the next call opens a new session."""
        try:
            return await call
        except BaseException:
            await self._client.disconnect()
            raise

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self._observation is not None:
            value = observation.get(self._observation)
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return json.dumps({key: x for key, x in observation.items() if key not in OWN}, ensure_ascii=False)


def _schema(url: str) -> Any:
    if not url.startswith(("http://", "https://")):
        raise ConfigError("it must be an address that begins with http:// or https://")
    try:
        with urlopen(f"{url.rstrip('/')}/schema", timeout=SCHEMA_TIMEOUT) as reply:
            schema = json.load(reply)
        if {"action", "observation"} <= schema.keys() and all(
            "properties" in schema[key] for key in schema if key != "state"
        ):
            return schema
    except (URLError, OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"no OpenEnv server answers at {url}: {error}") from error
    raise ConfigError(f"{url} answers, but not as an OpenEnv server")
