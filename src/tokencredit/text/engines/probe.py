"""The proof of a weight sync: log-probs of an engine beside those of the policy's own forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tokencredit.errors import RunStopped
from tokencredit.settings.rollout import SamplingConfig
from tokencredit.text.data.rollout import Rollout
from tokencredit.text.engines.requests import SEEDS, Completion, Request, Sampler

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

    def after(self, rollout: Rollout, logprobs: Tensor) -> Probe:
        """The next probe, which must not repeat this one bit for bit if the policy has changed."""
        half, now, was = slice(ROWS // 2), rollout, self.rollout
        same = torch.equal(now.response_ids[half], was.response_ids[half])
        same = same and torch.equal(now.logprobs[half], was.logprobs[half])
        moved = float((logprobs - self.logprobs)[half].abs().mean()) > MOVED
        return Probe(rollout, logprobs, self.number + 1, unmoved=same and moved)

    def require(self, name: str, *, bfloat16: bool) -> None:
        """Raise `RunStopped` if the engine's log-probs are not the policy's."""
        differences = (self.rollout.logprobs - self.logprobs).abs()
        repeated, fresh = (float(x.mean()) for x in differences.split(ROWS // 2))

        def cause(tolerance: float) -> str:
            if fresh <= tolerance < repeated:
                return "only texts that it has seen before differ, so it kept keys and values of earlier weights"
            if self.unmoved:
                return "it gives the same log-probs as before the sync, so the sync changed nothing"
            if max(repeated, fresh) < TOLERANCE_BFLOAT16:
                return "so small a difference is one of dtypes: it may compute, or keep its weights, in fewer bits"
            return "some weights did not arrive, or it holds another model"

        problem = f"log-probs of rollout.engine {name} are not the policy's after a weight sync"
        require_same_logprobs(differences, problem, cause, bfloat16=bfloat16, unmoved=self.unmoved)


def sample_probe(
    sampler: Sampler, tokenizer: PreTrainedTokenizerBase, length: int, number: int, device: torch.device
) -> Rollout:
    """Sample continuations of a probe's texts of this length; raises `EngineFailure`."""
    own = set(tokenizer.all_special_ids)
    usable = torch.tensor([i for i in sorted(set(tokenizer.get_vocab().values())) if i not in own])
    seeded = [torch.Generator().manual_seed(seed) for seed in (0, number + 1)]
    texts = usable[torch.cat([torch.randint(len(usable), (ROWS // 2, length), generator=g) for g in seeded])]
    completions: dict[int, Completion] = {}
    requests = [Request(tokens, NEW, 0, SEEDS // 2) for tokens in texts.tolist()]
    settings = SamplingConfig(max_new_tokens=NEW, stop_at_eos=False, temperature=TEMPERATURE)
    sampler.complete(requests, settings, completions.__setitem__)
    rows = [completions[row] for row in range(ROWS)]
    texts, ids = texts.to(device), torch.tensor([row.ids for row in rows], device=device)
    return Rollout(
        prompt_ids=texts,
        prompt_mask=torch.ones_like(texts, dtype=torch.bool),
        response_ids=ids,
        mask=torch.ones_like(ids, dtype=torch.bool),
        logprobs=torch.tensor([row.logprobs for row in rows], device=device),
        truncated=torch.ones(ROWS, dtype=torch.bool, device=device),
    )


def require_same_logprobs(
    differences: Tensor,
    problem: str,
    cause: Callable[[float], str],
    *,
    bfloat16: bool,
    temperature: float = TEMPERATURE,
    unmoved: bool = False,
) -> None:
    """Raise `RunStopped` unless an engine's log-probs are the policy's, up to rounding.

    Args:
        differences: absolute differences of log-probs at the sampling temperature, one per token.
        problem: the beginning of the message.
        cause: the likely cause of a difference, from the tolerance.
        bfloat16: the policy computes in bfloat16.
        temperature: the sampling temperature, by which rounding grows too.
        unmoved: the log-probs are known to be wrong.
    """
    tolerance = (TOLERANCE_BFLOAT16 if bfloat16 else TOLERANCE) / min(temperature, 1)
    mean = float(differences.mean()) if differences.numel() else 0.0
    if not mean <= tolerance or unmoved:
        raise RunStopped(
            f"{problem}: they differ by {mean:.2g} nats per token on average and {float(differences.max()):.2g} at "
            f"most, over {differences.numel()} tokens (expected at most {tolerance:g} on average); "
            f"{cause(tolerance)}. Nothing was learned from its samples"
        )
