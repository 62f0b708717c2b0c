"""The engine over a sampler that takes requests of token ids: rollouts, turns, and the proof of each weight sync."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from tokencredit.distributed.processes import Processes
from tokencredit.distributed.sharding import gathered
from tokencredit.errors import EngineLost, RunStopped
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.text.data.prompts import PromptBatch
from tokencredit.text.engines.engine import Rollout
from tokencredit.text.engines.probe import Probe, require_draws, sample_probe
from tokencredit.text.models.actor_critic import ActorCritic, Inputs
from tokencredit.text.models.critic import Critic
from tokencredit.text.models.precision import Precision
from tokencredit.text.scoring_passes import read_by_length

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


@dataclass
class RequestEngine:
    """An `Engine` over a `Sampler`; equal uniforms give rollouts that are equal in distribution, not bit for bit."""

    policy: ActorCritic
    tokenizer: PreTrainedTokenizerBase
    end_ids: Sequence[int]
    """Tokens that end a completion."""
    precision: Precision
    sampler: Sampler
    budget: int | None = None
    """Tokens per micro-batch of a full forward pass, padding included; None for no limit."""
    report: Callable[[str], None] = print
    """Called with a line for each event, such as a failure after which the sampler is asked again."""
    deferred: bool = False
    """Leave log-probs of a full pass to a later call of `exact`, and try once only."""
    probe: Probe | None = None
    """What the last sync was proven with; None before the first."""
    in_step: Processes | None = None
    """Processes that sync and make full passes in step, since the policy is sharded over them and gathered layer by
    layer."""
    processes: Processes = field(default_factory=Processes)
    """Processes that sync together, and fail together if one of them cannot."""
    lost: bool = False
    """True after a failure, until a sync is proven."""

    def generate(
        self,
        prompts: PromptBatch,
        settings: SamplingConfig,
        uniforms: Tensor,
        per_prompt: int = 1,  # noqa: ARG002  (a sampler finds equal prefixes itself)
        started: Sequence[Tensor] | None = None,
    ) -> Rollout:
        """Sample with the sampler, then compute log-probs, and values of a critic on the trunk, by a full pass."""
        conversation = self.converse(prompts, settings, uniforms)
        rows = range(len(uniforms))
        if started is not None:
            conversation.begin([tokens.tolist() for tokens in started])
        with self._before_passes():
            conversation.sample(rows, [[]] * len(rows), [conversation.left(row) for row in rows], lambda _row: None)
        return replace(conversation.rollout(), turn_ends=None)

    def converse(self, prompts: PromptBatch, settings: SamplingConfig, uniforms: Tensor) -> RequestConversation:
        """Begin episodes of several turns; a turn is a request with everything before it."""
        if self.processes.count == 1 and not self.deferred:  # several come to `recover` together
            self.recover()
        return RequestConversation(self, prompts, settings, uniforms)

    def complete(
        self, requests: Sequence[Request], settings: SamplingConfig, ended: Callable[[int, Completion], None]
    ) -> None:
        """Ask the sampler; after a failure sync it and ask once more for the requests that have not ended.

        Where processes sync in step, this one asks again without a sync. With `deferred` there is no second try, since
        the weights may be those of half an update.

        Raises:
            EngineLost: it failed, the last time.
        """
        left = dict(enumerate(requests))

        def take(numbers: Sequence[int], index: int, completion: Completion) -> None:
            del left[numbers[index]]
            ended(numbers[index], completion)

        alone = self.in_step is None and not self.sampler.syncs_in_step
        for last in (True,) if self.deferred else (False, True):
            numbers = list(left)
            try:
                self.sampler.complete([left[number] for number in numbers], settings, partial(take, numbers))
                return
            except EngineFailure as failure:
                if last:
                    self.lost = True
                    raise EngineLost(
                        f"rollout.engine {self.sampler.name} failed{'' if self.deferred else ' twice in a row'}: "
                        f"{failure}; the run can be resumed when it works again, or with rollout.engine: local"
                    ) from failure
                self.report(f"rollout.engine {self.sampler.name} failed, and is asked again: {failure}")
                if alone:
                    self._sync(self.processes.alone())

    @property
    def shared_critic(self) -> bool:
        """True if the policy's pass for log-probs also gives the critic's values."""
        critic = self.policy.critic
        return isinstance(critic, Critic) and critic.reads_last

    def exact(self, rollout: Rollout, settings: SamplingConfig) -> Rollout:
        """The rollout with log-probs by a full forward pass, and with values of a critic on the policy's trunk.

        Raises:
            EngineLost: the sampler failed.
            RunStopped: the sampler has weights of its own, and they are not the policy's.
        """
        with self._before_passes():
            try:
                self.sampler.sleep()
            except EngineFailure as failure:
                self.lost = True
                message = f"rollout.engine {self.sampler.name} could not free its memory: {failure}"
                raise EngineLost(message) from failure
        shared, filtered = self.shared_critic, bool(settings.filters())

        def read(inputs: Inputs) -> dict[str, Tensor]:
            if not (shared or filtered):
                return {"logprobs": self.policy.logprobs(inputs, settings.temperature)[0]}
            outputs = self.policy(inputs, temperature=settings.temperature, entropy=filtered)
            named = {"logprobs": outputs.logprobs, "values": outputs.values, "entropy": outputs.entropy}
            return {name: x for name, x in named.items() if x is not None}

        with self.precision.no_grad():
            outputs = read_by_length(rollout, self.budget, read, self.in_step)
        if len(rollout.mask) and not (self.sampler.shares_weights or filtered):
            drawn = rollout.mask & (rollout.logprobs != 0)  # not those of `begin`
            apart = (rollout.logprobs - outputs["logprobs"])[drawn].abs()
            require_draws(self.sampler.name, apart, settings.temperature, self.precision.bfloat16)
        return replace(rollout, behavior_logprobs=rollout.logprobs, **outputs)

    def _before_passes(self) -> AbstractContextManager[None]:
        """A context whose failure in one process is that of all, before passes in step: the others would wait there."""
        return nullcontext() if self.in_step is None else self.in_step.agreed(EngineLost, RunStopped)

    def held(self) -> AbstractContextManager[None]:
        """A context in which this process holds a sharded policy whole, unless processes pass in step."""
        return gathered(self.policy.lm) if self.in_step is None else nullcontext()

    def weights_changed(self) -> None:
        """Sync the sampler with the policy's weights, and prove it, in all processes; shared ones are proven once.

        Raises:
            EngineLost: the sampler, which worked before, failed.
            RunStopped: it failed at its first sync, or its log-probs are not the policy's.
        """
        if not (self.sampler.shares_weights and self.probe is not None):
            self._sync(self.processes)

    def recover(self) -> None:
        """Sync and prove again if the sampler failed in some process; called in all, errors as in `weights_changed`."""
        if self.processes.any(self.lost):
            self._sync(self.processes)

    def _sync(self, processes: Processes) -> None:
        """Sync and prove, in step with these processes."""
        worked, self.lost = self.probe is not None or processes.restarted(), True
        with self.held():
            with processes.agreed(EngineLost, RunStopped):
                try:
                    self.sampler.sync(self.policy)
                except EngineFailure as failure:
                    raise (EngineLost if worked else RunStopped)(
                        f"rollout.engine {self.sampler.name} could not take over the policy's weights: {failure}"
                    ) from failure
                # At a shared sampler the main process comes first: in a busy one equal texts are rounded in other ways.
                later = self.sampler.syncs_in_step and not processes.main
                drawn = None if later else sample_probe(self, self.probe)
            with processes.agreed(EngineLost, RunStopped):
                drawn = sample_probe(self, self.probe) if drawn is None else drawn
            self.probe = Probe.of(self, drawn, self.probe)
        with processes.agreed(RunStopped):
            self.probe.require(self.sampler.name, self.precision.bfloat16)
        self.lost = False


class RequestConversation:
    """Turns of a batch of rows, each a request of its own with all tokens before it."""

    def __init__(self, engine: RequestEngine, prompts: PromptBatch, settings: SamplingConfig, uniforms: Tensor):
        """Start before the first turns; arguments as in `Engine.converse`."""
        self.engine, self.prompts, self.settings = engine, prompts, settings
        self.seeds = (uniforms * SEEDS).long()
        rows = zip(prompts.ids, prompts.mask, strict=True)
        self.prompt_ids: list[list[int]] = [ids[mask].tolist() for ids, mask in rows]
        count = len(self.prompt_ids)
        self.ids: list[list[int]] = [[] for _ in range(count)]
        self.acted: list[list[bool]] = [[] for _ in range(count)]
        self.logprobs: list[list[float]] = [[] for _ in range(count)]
        self.turn_starts = [0] * count
        self.truncated = [True] * count
        self.versions: list[list[int]] = [[] for _ in range(count)]
        """Version of the weights at each sampled token, −1 elsewhere; empty if they do not change."""
        self.ends: list[list[int]] = [[] for _ in range(count)]
        """Position of the last token of each turn."""

    def begin(self, started: Sequence[list[int]]) -> None:
        """Begin the first turns with these tokens, which count as sampled."""
        for row, ids in enumerate(started):
            self._append(row, ids, [0.0] * len(ids), acted=True)

    def left(self, row: int) -> int:
        """Tokens that are left of a row's `max_new_tokens`."""
        return self.settings.max_new_tokens - len(self.ids[row])

    def turn(self, row: int) -> tuple[list[int], bool]:
        """The token ids of a row's last turn, and true if it was cut at its limit."""
        return self.ids[row][self.turn_starts[row] :], self.truncated[row]

    def tokens(self, row: int) -> list[int]:
        """All token ids of a row so far: prompt, turns and observations."""
        return self.prompt_ids[row] + self.ids[row]

    def sample(
        self,
        rows: Sequence[int],
        observations: Sequence[Sequence[int]],
        limits: Sequence[int],
        ended: Callable[[int], None],
    ) -> None:
        """Sample the next turn of some rows, as `engine.Conversation.sample`."""
        requests = []
        for row, observation, limit in zip(rows, observations, limits, strict=True):
            before = len(self.ids[row]) - self.turn_starts[row] if not self.ends[row] else 0  # tokens of `begin`
            self._append(row, observation, [0.0] * len(observation), acted=False)
            self.turn_starts[row] = len(self.ids[row]) - before
            shortest = max(self.settings.min_new_tokens - before, 0)
            seed = int(self.seeds[row, len(self.ids[row])])
            requests.append(Request(self.tokens(row), min(limit, self.left(row)), shortest, seed, before))

        def take(index: int, done: Completion) -> None:
            row = rows[index]
            self._append(row, done.ids, done.logprobs, acted=True)
            if done.versions is not None:
                gap = len(self.ids[row]) - len(done.ids) - len(self.versions[row])
                self.versions[row] += [-1] * gap + done.versions
            self.truncated[row] = done.truncated
            self.ends[row].append(len(self.ids[row]) - 1)
            ended(row)

        self.engine.complete(requests, self.settings, take)

    def end(self, row: int) -> None:
        """Do nothing: a row keeps no keys and values."""

    def rollout(self) -> Rollout:
        """The rollout of all rows, with log-probs by a full forward pass unless that is deferred."""
        return self.sampled() if self.engine.deferred else self.engine.exact(self.sampled(), self.settings)

    def sampled(self) -> Rollout:
        """The rollout of all rows, with the sampler's log-probs."""
        device, end = self.engine.precision.device, int(self.engine.end_ids[0])

        def padded(rows: Sequence[Sequence[float]], dtype: torch.dtype, value: float = 0) -> Tensor:
            tensors = [torch.tensor(row, dtype=dtype) for row in rows]
            return pad_sequence(tensors, batch_first=True, padding_value=value).to(device)

        ends = [[position in at for position in range(len(ids))] for ids, at in zip(self.ids, self.ends, strict=True)]
        prompts = self.prompts.to(device)
        return Rollout(
            prompt_ids=prompts.ids,
            prompt_mask=prompts.mask,
            response_ids=padded(self.ids, torch.long, end),
            mask=padded(self.acted, torch.bool),
            logprobs=padded(self.logprobs, torch.float32),
            values=None,
            truncated=torch.tensor(self.truncated, device=device),
            turn_ends=padded(ends, torch.bool),
            versions=padded(self.versions, torch.long, -1) if any(self.versions) else None,
        )

    def _append(self, row: int, ids: Sequence[int], logprobs: Sequence[float], *, acted: bool) -> None:
        self.ids[row] += ids
        self.logprobs[row] += logprobs
        self.acted[row] += [acted] * len(ids)
