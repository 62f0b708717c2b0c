"""Continuous batching in the background: sampling goes on while the policy learns, and weights change in flight."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokencredit.errors import RunStopped
from tokencredit.settings.rollout import RolloutConfig, SamplingConfig
from tokencredit.text.data.rollout import Rollout
from tokencredit.text.engines.continuous import manager_of, pages_of, spared, take
from tokencredit.text.engines.engine import Engine
from tokencredit.text.engines.probe import require_same_logprobs
from tokencredit.text.engines.request_engine import RequestEngine
from tokencredit.text.engines.requests import SEEDS, Completion, EngineFailure, OnCompletion, Progress, Request, Sampler
from tokencredit.text.models.actor_critic import ActorCritic
from tokencredit.text.models.model_loading import errors_alone

POLL_SECONDS = 0.005
"""Seconds between looks at new tokens."""


@dataclass
class _Flight:
    """A request on its way."""

    request: Request
    progress: Progress
    results: queue.Queue[tuple[int, Completion | EngineFailure]]
    index: int
    before: int = 0
    """Tokens that it had when it was last submitted."""
    switches: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of a number of tokens and the version that drew the ones after it."""

    def versions(self, count: int) -> list[int]:
        """The version that drew each of the first tokens."""
        versions: list[int] = []
        for start, version in self.switches:
            versions[start:] = [version] * (count - start)
        return versions


class BackgroundSampler(Sampler):
    """A `Sampler` in a thread of its own, with a copy of the policy's weights.

    Several threads may call `complete` at once; all their requests share the running batch. `sync` changes the weights
    between two steps. Each token has the version that drew it: the number of syncs before.
    """

    name = "continuous"

    def __init__(
        self,
        policy: ActorCritic,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Sequence[int],
        settings: SamplingConfig,
        rows: int,
        longest: int,
        seed: int = 0,
    ):
        """Copy the policy's weights, and start the thread; `settings` are those of all requests.

        The cache is sized for `rows` requests at a time, of `longest` tokens each with their completions; for a longer
        one it grows. `seed` is that of the draws, below `SEEDS`.

        Raises:
            EngineFailure: the model is not supported, or memory is too small.
        """
        self.lm: Any = deepcopy(policy.lm).requires_grad_(False)
        self.tokenizer, self.settings = tokenizer, settings
        self.ends = list(end_ids) if settings.stop_at_eos else []
        self.version = 0
        self.flights: dict[str, _Flight] = {}
        self.lock = threading.Lock()
        """Held while flights change."""
        self.names = map(str, count())
        self.closed = threading.Event()
        self.failure: str | None = None
        """Why no more requests are taken, once that is so."""
        request = Request([0] * (longest - settings.max_new_tokens), settings.max_new_tokens, 0, seed)
        self.room = [request] * rows
        """Requests that fit into the cache together."""
        self.manager = manager_of(self.lm, self.room, settings, shares_prefixes=False)
        self.manager.start()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def complete(self, requests: Sequence[Request], settings: SamplingConfig, ended: OnCompletion) -> None:
        """Sample a completion for each request, among those of other threads; `settings` are those of all."""
        assert settings == self.settings, "all requests have the settings of the start"
        if not requests:
            return
        results: queue.Queue[tuple[int, Completion | EngineFailure]] = queue.Queue()
        with self.lock:
            if self.failure is not None:
                raise EngineFailure(self.failure)
            longest = max(requests, key=pages_of)
            if pages_of(longest) > sum(map(pages_of, self.room)):
                self._make_room(longest)
            for index, request in enumerate(requests):
                flight = _Flight(request, Progress(request, settings, self.tokenizer), results, index)
                flight.switches.append((0, self.version))
                self._submit(flight)
        for _ in requests:
            index, done = results.get()
            if isinstance(done, EngineFailure):
                raise done
            ended(index, done)

    def sync(self, policy: ActorCritic) -> None:
        """Take over the policy's weights between two steps; tokens drawn from now on have the next version."""
        with self.lock, self._paused():
            self._take_results()
            with torch.no_grad():
                for own, now in zip(self.lm.state_dict().values(), policy.lm.state_dict().values(), strict=True):
                    own.copy_(now)
            if self.lm.device.type == "cuda":  # the sampler's stream does not wait for that of the copies
                torch.cuda.synchronize(self.lm.device)
            self.version += 1
            for name, flight in list(self.flights.items()):
                flight.switches.append((len(flight.progress.ids), self.version))
                # The rest of the request begins anew, with keys and values of the new weights.
                self.manager.cancel_request(name)
                del self.flights[name]
                self._submit(flight)

    def close(self) -> None:
        """Stop the thread; requests on their way fail."""
        if self.closed.is_set():
            return
        self.closed.set()
        with self.lock, errors_alone(), spared():  # no request may start another manager meanwhile
            self._fail("its thread has ended: it was closed")
            self.manager.stop(hard_stop=True)
            self.manager.destroy()
        self.reader.join()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Pause between two steps; raises `EngineFailure` if the sampling thread has ended."""
        with ExitStack() as stack:
            try:
                stack.enter_context(self.manager.pause())
            except RuntimeError as error:
                raise EngineFailure(self._ended()) from error
            yield

    def _ended(self) -> str:
        return f"its thread has ended: {self.manager.background_thread_status.fatal_error}"

    def _make_room(self, request: Request) -> None:
        """Go on with a larger cache, into which a request fits beside those of the start."""
        with self._paused():
            self._take_results()
        self.room[0] = request
        with errors_alone(), spared():
            self.manager.stop(hard_stop=True)
            self.manager.destroy()
            self.manager = manager_of(self.lm, self.room, self.settings, shares_prefixes=False)
        self.manager.start()
        flights = list(self.flights.values())
        self.flights.clear()  # names of the stopped manager
        for flight in flights:
            self._submit(flight)

    def _submit(self, flight: _Flight) -> None:
        """Hand a request, or the rest of it, to the manager."""
        name, request, ids = next(self.names), flight.request, flight.progress.ids
        self.flights[name], flight.before = flight, len(ids)
        self.manager.add_request(
            request.tokens + ids,
            name,
            max_new_tokens=request.limit - len(ids),
            streaming=True,
            eos_token_id=self.ends or -1,
        )

    def _read(self) -> None:
        """Hand out results until the end; a failure of the thread goes to all requests."""
        while not self.closed.wait(POLL_SECONDS):
            with self.lock:
                if self.failure is not None:
                    return
                try:
                    self._take_results()
                except Exception as error:  # of a tokenizer, in the search for stop strings; nobody would see it here
                    self._fail(f"its tokens could not be read: {type(error).__name__}: {error}")
                if not self.manager.is_running():
                    self._fail(self._ended())

    def _fail(self, cause: str) -> None:
        """Fail all requests, on their way and later; the caller holds the lock."""
        self.failure = self.failure or cause
        for flight in self.flights.values():
            flight.results.put((flight.index, EngineFailure(self.failure)))
        self.flights.clear()

    def _take_results(self) -> None:
        """Take all new tokens; the caller holds the lock."""
        while (output := self.manager.get_result(timeout=0)) is not None:
            flight = self.flights.get(output.request_id)
            if flight is None:  # cancelled
                continue
            if output.error is not None:
                del self.flights[output.request_id]
                flight.results.put((flight.index, EngineFailure(str(output.error))))
                continue
            done = take(flight.progress, output, self.ends, flight.before)
            if done is not None:
                del self.flights[output.request_id]
                if not output.is_finished():
                    self.manager.cancel_request(output.request_id)
                done = done._replace(versions=flight.versions(len(done.ids)))
                flight.results.put((flight.index, done))


@dataclass
class BackgroundEngine(RequestEngine):
    """Samples in the background, for several threads at once, with weights that may be a few syncs old.

    Log-probs of its rollouts are those with which the tokens were drawn.
    """

    sampler: BackgroundSampler = field(kw_only=True)

    def complete(self, requests: Sequence[Request], settings: SamplingConfig, ended: OnCompletion) -> None:
        """Ask the sampler once: after a failure its weights may be those of half an update."""
        with self.losing():
            self.sampler.complete(requests, settings, ended)

    def exact(self, rollout: Rollout, settings: SamplingConfig) -> Rollout:  # noqa: ARG002
        """The rollout as it is: passes of the policy wait until its turn to be learned from."""
        return rollout

    def weights_changed(self) -> None:
        """Give the policy's weights to the sampler; raises `EngineLost`."""
        with self.losing():
            self.sampler.sync(self.policy)

    def recover(self) -> None:
        """Do nothing: a lost one is replaced."""

    def ages(self, rollout: Rollout) -> Tensor:
        """Syncs since each token of a rollout was drawn, 0 elsewhere."""
        assert rollout.versions is not None
        return (self.sampler.version - rollout.versions).masked_fill(~rollout.mask, 0)

    def proves(self, rollout: Rollout, settings: SamplingConfig) -> bool:
        """True if tokens of a scored rollout show that the weights are the policy's; False if it has none that can.

        Raises:
            RunStopped: they show that they are not.
        """
        assert rollout.behavior_logprobs is not None
        assert rollout.age is not None
        now = rollout.mask & (rollout.age == 0)
        if settings.filters() or not now.any():
            return False
        require_same_logprobs(
            (rollout.behavior_logprobs - rollout.logprobs)[now].abs(),
            "the copy of the policy that samples ahead does not have its log-probs",
            lambda _: "this model cannot be copied as it is; set rollout.max_age: 0",
            bfloat16=self.precision.bfloat16,
            temperature=settings.temperature,
        )
        return True

    def close(self) -> None:
        """End the sampling thread."""
        self.sampler.close()


def start_background(engine: Engine, settings: RolloutConfig, rows: int, longest: int, seed: float) -> BackgroundEngine:
    """An engine in the background beside that of the run; arguments as in `BackgroundSampler`, `seed` in [0, 1).

    Raises:
        RunStopped: the model is not supported, or memory is too small.
    """
    policy, tokenizer, end_ids = engine.policy, engine.tokenizer, engine.end_ids
    try:
        sampler = BackgroundSampler(policy, tokenizer, end_ids, settings, rows, longest, int(seed * SEEDS))
    except EngineFailure as failure:
        raise RunStopped(f"rollout.engine {settings.engine} cannot sample ahead: {failure}") from failure
    return BackgroundEngine(policy, tokenizer, end_ids, engine.precision, engine.budget, sampler=sampler)
