"""The address of a vLLM server."""

from __future__ import annotations

from urllib.parse import urlsplit

from tokencredit.errors import ConfigError


def check_server(address: str) -> None:
    """Raise `ConfigError` unless `rollout.server` is an http(s) address of a host, without a password."""
    if "@" in address:
        raise ConfigError(
            "rollout.server holds a user name or password, which would be written into the run's files; leave it out, "
            "and give an API key as the environment variable VLLM_API_KEY"
        )
    try:
        parts = urlsplit(address)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        good = good and not (parts.query or parts.fragment or parts.path.rstrip("/").endswith("/v1"))
    except ValueError:  # a port that is no number
        good = False
    if not good or address.split() != [address]:
        raise ConfigError(f"rollout.server is {address!r}; it must be an address such as http://localhost:8000")
