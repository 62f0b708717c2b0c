"""Requests of token ids, and the `Sampler` that completes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tokencredit.settings.rollout import SamplingConfig
from tokencredit.text.models.actor_critic import ActorCritic

SEEDS = 2**31
"""Number of seeds of requests."""


@dataclass(frozen=True)
class Request:
    """Token ids to continue."""

    tokens: list[int]
    """Prompt, earlier turns and observations."""
    limit: int
    """Most tokens to sample, at least 1."""
    shortest: int
    """Tokens before an end token or a stop string may end it."""
    seed: int
    """Seed of the sampler, below `SEEDS`."""
    started: int = 0
    """Number of its last tokens that belong to the completion, where a stop string may begin."""

    def searched(self) -> tuple[list[int], list[int]]:
        """The tokens before the completion, and its first ones."""
        start = len(self.tokens) - self.started
        return self.tokens[:start], self.tokens[start:]


class Completion(NamedTuple):
    """Sampled tokens."""

    ids: list[int]
    logprobs: list[float]
    """Log-prob with which each token was drawn, by the sampler's own arithmetic, after filters such as top_p."""
    truncated: bool
    """True if the limit ended it."""
    versions: list[int] | None = None
    """The version of the weights that drew each token, if they change while it is sampled."""


class EngineFailure(RuntimeError):
    """A sampler failed, or cannot be reached; the message is the cause, in a line."""


class Sampler(Protocol):
    """Samples completions with weights of its own, or with those of the policy."""

    name: str
    """Its name in `rollout.engine`."""
    shares_weights: bool
    """True if its weights are the policy's own, so that there is nothing to sync."""
    syncs_in_step: bool
    """True if all processes of the job sync it together."""
    longest: int | None
    """Most tokens of a prompt with its completion, known after a sync; None where the model alone limits them."""

    def complete(
        self, requests: Sequence[Request], settings: SamplingConfig, ended: Callable[[int, Completion], None]
    ) -> None:
        """Sample a completion for each request.

        Args:
            requests: what to continue.
            settings: sampling settings; their limits of length are those of the requests.
            ended: called once for each request, with its index, if possible as soon as it has ended.

        Raises:
            EngineFailure: it cannot.
        """

    def sync(self, policy: ActorCritic) -> None:
        """Take over the policy's weights (`plain_weights`), and drop all keys and values of earlier ones.

        Raises:
            EngineFailure: it cannot.
        """

    def sleep(self) -> None:
        """Free memory of the device until the next call, if it can: passes of the policy follow.

        Raises:
            EngineFailure: it failed.
        """
