"""The engine over a sampler that takes requests of token ids: rollouts, turns, and the proof of each weight sync."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tokencredit.distributed.processes import Processes
from tokencredit.errors import EngineLost, RunStopped
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.text.data.prompts import PromptBatch
from tokencredit.text.data.rollout import Rollout, padded
from tokencredit.text.engines.engine import FAILURES, Conversation, Engine, OnTurn
from tokencredit.text.engines.probe import NEW, PROMPT, TEMPERATURE, Probe, require_same_logprobs, sample_probe
from tokencredit.text.engines.requests import SEEDS, Completion, EngineFailure, OnCompletion, Request, Sampler
from tokencredit.text.models.model_loading import max_prompt_length
from tokencredit.text.rollout_passes import evaluate_rollout, rollout_logprobs


@dataclass
class RequestEngine(Engine):
    """An `Engine` over a `Sampler`; equal uniforms give rollouts that are equal in distribution, not bit for bit."""

    sampler: Sampler = field(kw_only=True)
    report: Callable[[str], None] = print
    """Called with a line for each event, such as a failure after which the sampler is asked again."""
    probe: Probe | None = None
    """What the last sync was proven with; None before the first."""
    lost: bool = False
    """True after a failure, until a sync is proven."""

    @property
    def longest(self) -> int | None:
        """Most tokens of a prompt with its completion; None where the model alone limits them."""
        return self.sampler.longest

    def generate(
        self,
        prompts: PromptBatch,
        settings: SamplingConfig,
        uniforms: Tensor,
        per_prompt: int = 1,  # noqa: ARG002  (a sampler finds equal prefixes itself)
        started: Sequence[Tensor] | None = None,
    ) -> Rollout:
        """Sample with the sampler, then compute log-probs, and values of a critic on the trunk, by a full pass."""
        # A completion is an episode of one turn, whose first tokens may be fixed.
        conversation = self.converse(prompts, settings, uniforms)
        if started is not None:
            conversation.begin([tokens.tolist() for tokens in started], [0] * len(started))
        # All requests at once: the sampler schedules them, and each ends on its own.
        rows = range(len(uniforms))
        with self._before_passes():
            conversation.sample(rows, [[]] * len(rows), [conversation.left(row) for row in rows], lambda _row: None)
        # The sampler's log-probs become `behavior_logprobs`; those of a full pass are what an update's ratio begins at.
        return replace(conversation.rollout(), turn_ends=None)

    def converse(self, prompts: PromptBatch, settings: SamplingConfig, uniforms: Tensor) -> RequestConversation:
        """Begin episodes of several turns; a turn is a request with everything before it."""
        if self.processes.count == 1:  # several come to `recover` together
            self.recover()
        return RequestConversation(self, prompts, settings, uniforms)

    def complete(self, requests: Sequence[Request], settings: SamplingConfig, ended: OnCompletion) -> None:
        """Ask the sampler; after a failure sync it and ask once more for the requests that have not ended.

        Where processes sync in step, this one asks again without a sync.

        Raises:
            EngineLost: it failed twice in a row.
        """
        left = dict(enumerate(requests))

        def ask() -> None:
            numbers = list(left)

            def take(index: int, completion: Completion) -> None:
                del left[numbers[index]]
                ended(numbers[index], completion)

            self.sampler.complete([left[number] for number in numbers], settings, take)

        try:
            ask()
            return
        except EngineFailure as failure:
            self.report(f"rollout.engine {self.sampler.name} failed, and is asked again: {failure}")
        if self.in_step is None and not self.sampler.syncs_in_step:
            self._sync(self.processes.alone())
        with self.losing(" twice in a row"):
            ask()

    @contextmanager
    def losing(self, when: str = "") -> Iterator[None]:
        """A context in which a failure of the sampler is `EngineLost`: the engine is lost until a sync is proven."""
        try:
            yield
        except EngineFailure as failure:
            self.lost = True
            raise EngineLost(
                f"rollout.engine {self.sampler.name} failed{when}: {failure}; the run can be resumed when it works "
                "again, or with rollout.engine: local"
            ) from failure

    def exact(self, rollout: Rollout, settings: SamplingConfig) -> Rollout:
        """The rollout with log-probs by a full forward pass, and with values of a critic on the policy's trunk.

        Raises:
            EngineLost: the sampler failed.
            RunStopped: the sampler has weights of its own, and they are not the policy's.
        """
        with self._before_passes(), self.losing(" to free its memory"):
            self.sampler.sleep()
        filtered, temperature = bool(settings.filters()), settings.temperature
        entropy = filtered or rollout.age is not None  # which draws of another distribution do not estimate
        with self.precision.no_grad():
            exact = evaluate_rollout(self.policy, rollout, temperature, self.budget, self.in_step, entropy=entropy)
        if len(rollout.mask) and not (self.sampler.shares_weights or filtered):
            drawn = rollout.mask & (rollout.logprobs != 0)  # not those of `begin`
            require_same_logprobs(
                (rollout.logprobs - exact.logprobs)[drawn].abs(),
                f"log-probs of rollout.engine {self.sampler.name} are not the policy's in a rollout, though the sync "
                "before was proven",
                lambda _: "something else changes its weights, or it samples with settings of its own",
                bfloat16=self.precision.bfloat16,
                temperature=temperature,
            )
        return replace(exact, behavior_logprobs=rollout.logprobs)

    def agreed(self) -> AbstractContextManager[None]:
        """A context for sampling a rollout, in which a failure of one process is raised in all."""
        # Not a lack of memory where passes are in step: it may leave the others in one.
        return self.processes.agreed(*FAILURES, *([MemoryError] if self.in_step is None else []))

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

    def _before_passes(self) -> AbstractContextManager[None]:
        """A context whose failure in one process is that of all, before passes in step: the others would wait there."""
        return nullcontext() if self.in_step is None else self.in_step.agreed(EngineLost, RunStopped)

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
                drawn = None if later else self._sample_probe()
            with processes.agreed(EngineLost, RunStopped):
                drawn = self._sample_probe() if drawn is None else drawn
            # A row of the probe may be longer than those of the run.
            budget = self.budget and max(self.budget, PROMPT + NEW)
            with self.precision.no_grad():
                logprobs = rollout_logprobs(self.policy, drawn, TEMPERATURE, budget, self.in_step)
            self.probe = Probe(drawn, logprobs) if self.probe is None else self.probe.after(drawn, logprobs)
        with processes.agreed(RunStopped):
            self.probe.require(self.sampler.name, bfloat16=self.precision.bfloat16)
        self.lost = False

    def _sample_probe(self) -> Rollout:
        lengths = (PROMPT, max_prompt_length(self.policy.lm, NEW), (self.longest or PROMPT + NEW) - NEW)
        number = 0 if self.probe is None else self.probe.number + 1
        with self.losing():
            return sample_probe(self.sampler, self.tokenizer, min(filter(None, lengths)), number, self.precision.device)


class RequestConversation(Conversation):
    """Turns of a batch of rows, each a request of its own with all tokens before it."""

    def __init__(self, engine: RequestEngine, prompts: PromptBatch, settings: SamplingConfig, uniforms: Tensor):
        """Start before the first turns; arguments as in `Engine.converse`."""
        super().__init__(prompts, settings)
        self.engine, self.seeds = engine, (uniforms * SEEDS).long()
        count = len(self.prompt_ids)
        self.sampled: list[list[int]] = [[] for _ in range(count)]
        self.acted: list[list[bool]] = [[] for _ in range(count)]
        self.logprobs: list[list[float]] = [[] for _ in range(count)]
        self.turn_starts = [0] * count
        self.truncated = [True] * count
        self.versions: list[list[int]] = [[] for _ in range(count)]
        """Version of the weights at each sampled token, −1 elsewhere; empty if they do not change."""
        self.ends: list[list[int]] = [[] for _ in range(count)]
        """Position of the last token of each turn."""

    def begin(self, started: Sequence[Sequence[int]], turns: Sequence[int]) -> None:
        """Give rows their first tokens, as `engine.Conversation.begin`."""
        super().begin(started, turns)
        for row, ids in enumerate(started):
            self._append(row, ids, [0.0] * len(ids), acted=True)
            self.turn_starts[row] = turns[row]

    def turn(self, row: int) -> tuple[list[int], bool]:
        """The token ids of a row's last turn, and true if it was cut at its limit."""
        return self.sampled[row][self.turn_starts[row] :], self.truncated[row]

    def ids(self, row: int) -> list[int]:
        """All token ids of a row after its prompt."""
        return self.sampled[row]

    def sample(
        self, rows: Sequence[int], observations: Sequence[Sequence[int]], limits: Sequence[int], ended: OnTurn
    ) -> None:
        """Sample the next turn of some rows, as `engine.Conversation.sample`."""
        requests = []
        for row, observation, limit in zip(rows, observations, limits, strict=True):
            before, self.begun[row] = self.begun[row], 0
            self._append(row, observation, [0.0] * len(observation), acted=False)
            self.turn_starts[row] = len(self.sampled[row]) - before
            shortest = max(self.settings.min_new_tokens - before, 0)
            seed = int(self.seeds[row, len(self.sampled[row])])
            requests.append(Request(self.tokens(row), min(limit, self.left(row)), shortest, seed, before))

        def take(index: int, done: Completion) -> None:
            row = rows[index]
            self._append(row, done.ids, done.logprobs, acted=True)
            if done.versions is not None:
                gap = len(self.sampled[row]) - len(done.ids) - len(self.versions[row])
                self.versions[row] += [-1] * gap + done.versions
            self.truncated[row] = done.truncated
            self.ends[row].append(len(self.sampled[row]) - 1)
            ended(row)

        self.engine.complete(requests, self.settings, take)

    def rollout(self) -> Rollout:
        """The rollout of all rows, with log-probs by a full forward pass."""
        device, end = self.engine.precision.device, int(self.engine.end_ids[0])
        ends = [[place in at for place in range(len(ids))] for ids, at in zip(self.sampled, self.ends, strict=True)]
        prompts = self.prompts.to(device)
        rollout = Rollout(
            prompt_ids=prompts.ids,
            prompt_mask=prompts.mask,
            response_ids=padded(self.sampled, torch.long, end).to(device),
            mask=padded(self.acted, torch.bool).to(device),
            logprobs=padded(self.logprobs, torch.float32).to(device),
            truncated=torch.tensor(self.truncated, device=device),
            turn_ends=padded(ends, torch.bool).to(device),
            versions=padded(self.versions, torch.long, -1).to(device) if any(self.versions) else None,
        )
        return self.engine.exact(rollout, self.settings)

    def _append(self, row: int, ids: Sequence[int], logprobs: Sequence[float], *, acted: bool) -> None:
        self.sampled[row] += ids
        self.logprobs[row] += logprobs
        self.acted[row] += [acted] * len(ids)
