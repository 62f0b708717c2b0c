"""Requests of token ids, and the `Sampler` that completes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from tokencredit.errors import RunStopped
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.text.data.detokenizer import StopSearch
from tokencredit.text.models.actor_critic import ActorCritic

SEEDS = 2**31
"""Number of seeds of requests."""
LONGER = "raise --max-model-len of the server to {} (without one, rollout.engine_memory)"
"""What lets vLLM take sequences of a length."""


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


class Completion(NamedTuple):
    """Sampled tokens."""

    ids: list[int]
    logprobs: list[float]
    """Log-prob with which each token was drawn, by the sampler's own arithmetic, after filters such as top_p."""
    truncated: bool
    """True if the limit ended it."""
    versions: list[int] | None = None
    """The version of the weights that drew each token, if they change while it is sampled."""


OnCompletion = Callable[[int, Completion], None]
"""Called with the index of a request and its completion."""


class EngineFailure(RuntimeError):
    """A sampler failed, or cannot be reached; the message is the cause, in a line."""


class Progress:
    """The tokens of a request so far, and the search for its end."""

    def __init__(self, request: Request, settings: SamplingConfig, tokenizer: PreTrainedTokenizerBase):
        start = len(request.tokens) - request.started
        self.started, self.shortest = request.tokens[start:], request.shortest
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.search: StopSearch | None = None
        if settings.stop:
            self.search = StopSearch(settings.stop, tokenizer, request.tokens[:start], searched=request.started)

    def take(self, ids: Sequence[int], logprobs: Sequence[float], reason: str | None) -> Completion | None:
        """Append new tokens; returns the completion, without tokens of the request, if it has ended.

        `reason` is `stop` at an end token, `length` at the limit, and None if the sampler goes on; `EngineFailure` for
        another one.
        """
        self.ids += ids
        self.logprobs += logprobs
        if self.search is not None:
            before = len(self.started)
            end = self.search.end(self.started + self.ids, before + self.shortest)
            if end is not None:
                return Completion(self.ids[: end - before], self.logprobs[: end - before], truncated=False)
        if reason not in (None, "stop", "length"):
            raise EngineFailure(f"a request ended with {reason}")
        return None if reason is None else Completion(self.ids, self.logprobs, truncated=reason == "length")


class Sampler(Protocol):
    """Samples completions with weights of its own, or with those of the policy; samplers inherit what they lack."""

    name: str
    """Its name in `rollout.engine`."""
    shares_weights: bool = False
    """True if its weights are the policy's own, so that there is nothing to sync."""
    syncs_in_step: bool = False
    """True if all processes of the job sync it together."""
    longest: int | None = None
    """Most tokens of a prompt with its completion, known after a sync; None where the model alone limits them."""

    def complete(self, requests: Sequence[Request], settings: SamplingConfig, ended: OnCompletion) -> None:
        """Sample a completion for each request.

        Args:
            requests: what to continue.
            settings: sampling settings; their limits of length are those of the requests.
            ended: called once for each request, with its index, if possible as soon as it has ended.

        Raises:
            EngineFailure: it cannot.
        """

    def check_lengths(self, requests: Sequence[Request]) -> None:
        """Raise `RunStopped` if a request is longer than `longest`."""
        longest = max((len(request.tokens) + request.limit for request in requests), default=0)
        if self.longest is not None and longest > self.longest:
            raise RunStopped(
                f"a prompt and its completion may have {longest} tokens, and rollout.engine {self.name} takes "
                f"{self.longest}; shorten prompts or max_new_tokens, or {LONGER.format(longest)}"
            )

    def sync(self, policy: ActorCritic) -> None:  # noqa: ARG002
        """Take over the policy's weights (`plain_weights`), and drop all keys and values of earlier ones.

        Raises:
            EngineFailure: it cannot.
        """
        return

    def sleep(self) -> None:
        """Free memory of the device until the next call, if it can: passes of the policy follow.

        Raises:
            EngineFailure: it failed.
        """
        return
