"""The proof of a weight sync: log-probs of an engine beside those of the policy's own forward pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tokencredit.errors import RunStopped
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.text.data.prompts import PromptBatch
from tokencredit.text.engines.engine import Rollout
from tokencredit.text.models.model_loading import max_prompt_length
from tokencredit.text.scoring_passes import rollout_logprobs

if TYPE_CHECKING:
    from tokencredit.text.engines.requests import RequestEngine

ROWS = 4
"""Texts of a probe. The first half is the same in every probe, so that stale keys and values of a prefix show."""
PROMPT, NEW = 288, 8
"""Tokens of each text and of its continuation; more than two blocks of a prefix cache."""
TOLERANCE, TOLERANCE_BFLOAT16 = 1e-3, 0.1
"""Largest mean difference of log-probs, in nats per token. Other orders of sums differ by 1e-6 in float32, and by 0.02
in bfloat16."""
TEMPERATURE = 1.0
"""At which a probe is sampled."""
MOVED = 1e-5
"""Change of the policy's log-probs, in nats per token, that a sync must show in the engine's."""


@dataclass(frozen=True)
class Probe:
    """Continuations of fixed texts after a sync."""

    rollout: Rollout
    """Texts, continuations, and the engine's log-probs of them."""
    logprobs: Tensor
    """The policy's log-probs, `[ROWS, NEW]`."""
    number: int = 0
    """Number of probes before it."""
    unmoved: bool = False
    """True if the engine gives what it gave before the sync, though the policy's log-probs have changed."""

    @classmethod
    def of(cls, engine: RequestEngine, rollout: Rollout, before: Probe | None) -> Probe:
        """The probe of these samples, with the policy's log-probs; `before` is that of the last sync."""
        with engine.precision.no_grad():
            logprobs = rollout_logprobs(engine.policy, rollout, TEMPERATURE, engine.budget, engine.in_step)
        number = 0 if before is None else before.number + 1
        return cls(rollout, logprobs, number, before is not None and before.same_samples(rollout, logprobs))

    def same_samples(self, rollout: Rollout, logprobs: Tensor) -> bool:
        """True if a later probe repeats this one bit for bit, though the policy has changed."""
        half, now, was = slice(ROWS // 2), rollout, self.rollout
        same = torch.equal(now.response_ids[half], was.response_ids[half])
        return (
            same
            and torch.equal(now.logprobs[half], was.logprobs[half])
            and float((logprobs - self.logprobs)[half].abs().mean()) > MOVED
        )

    def require(self, name: str, bfloat16: bool) -> None:
        """Raise `RunStopped` if the engine's log-probs are not the policy's."""
        differences = (self.rollout.logprobs - self.logprobs).abs()
        tolerance = TOLERANCE_BFLOAT16 if bfloat16 else TOLERANCE
        repeated, fresh = (float(x.mean()) for x in differences.split(ROWS // 2))
        mean = float(differences.mean())
        if mean <= tolerance and not self.unmoved:
            return
        raise RunStopped(
            f"log-probs of rollout.engine {name} are not the policy's after a weight sync: they differ by {mean:.2g} "
            f"nats per token on average and {float(differences.max()):.2g} at most, over {differences.numel()} tokens "
            f"(expected at most {tolerance:g}); {self._cause(repeated, fresh, tolerance)}. Nothing was learned from "
            "its samples"
        )

    def _cause(self, repeated: float, fresh: float, tolerance: float) -> str:
        """The likely cause of a difference."""
        if fresh <= tolerance < repeated:
            return "only texts that it has seen before differ, so it kept keys and values of earlier weights"
        if self.unmoved:
            return "it gives the same log-probs as before the sync, so the sync changed nothing"
        if max(repeated, fresh) < TOLERANCE_BFLOAT16:
            return "so small a difference is one of dtypes: it may compute, or keep its weights, in fewer bits"
        return "some weights did not arrive, or it holds another model"


def sample_probe(engine: RequestEngine, before: Probe | None) -> Rollout:
    """Sample continuations of the next probe's texts; `before` is the probe of the last sync."""
    length = min(PROMPT, max_prompt_length(engine.policy.lm, NEW, engine.budget) or PROMPT)
    if engine.sampler.longest is not None:
        length = min(length, engine.sampler.longest - NEW)
    own = set(engine.tokenizer.all_special_ids)
    usable = torch.tensor([i for i in sorted(set(engine.tokenizer.get_vocab().values())) if i not in own])
    number = 0 if before is None else before.number + 1
    seeded = [torch.Generator().manual_seed(seed) for seed in (0, number + 1)]
    ids = usable[torch.cat([torch.randint(len(usable), (ROWS // 2, length), generator=g) for g in seeded])]
    mask = torch.ones_like(ids, dtype=torch.bool)
    prompts = PromptBatch(prompts=[""] * ROWS, texts=[""] * ROWS, ids=ids, mask=mask, columns={})
    settings = SamplingConfig(max_new_tokens=NEW, stop_at_eos=False, temperature=TEMPERATURE)
    once = replace(engine, deferred=True)  # a second try would sync, and probe, again
    conversation = once.converse(prompts, settings, torch.full((ROWS, NEW), 0.5))
    conversation.sample(range(ROWS), [[]] * ROWS, [NEW] * ROWS, lambda _row: None)
    return conversation.sampled()


def require_draws(name: str, apart: Tensor, temperature: float, bfloat16: bool) -> None:
    """Raise `RunStopped` if tokens of a rollout were not drawn from the policy: its weights were changed after a sync.

    Args:
        name: the engine's name.
        apart: differences of the engine's log-probs and the policy's, at the sampling temperature, one per token.
        temperature: the sampling temperature, by which rounding grows too.
        bfloat16: the policy computes in bfloat16.
    """
    tolerance = (TOLERANCE_BFLOAT16 if bfloat16 else TOLERANCE) / min(temperature, 1)
    mean = float(apart.mean()) if len(apart) else 0.0
    if not mean <= tolerance:
        raise RunStopped(
            f"rollout.engine {name} did not draw a rollout from the policy, though the sync before was proven: "
            f"log-probs differ by {mean:.2g} nats per token on average (expected at most {tolerance:g}); something "
            "else changes its weights, or it samples with settings of its own. Nothing was learned from its samples"
        )
