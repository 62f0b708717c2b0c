"""Continuations: completions sampled anew from states of given ones, and the returns that they give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tokencredit.settings.training import SamplingConfig
from tokencredit.text.credit import Credit, ScoreScale
from tokencredit.text.pipeline import Pipeline, Scored

ROWS = 512
"""Continuations that are sampled at once."""


@dataclass(frozen=True)
class Continuations:
    """Samples from states of completions as the run samples, and scores as it scores, the price of KL included."""

    pipeline: Pipeline
    """Of this process alone, since each has states of its own."""
    credit: Credit
    scale: ScoreScale
    """Of the scores, held still."""
    settings: SamplingConfig
    generator: torch.Generator
    bootstrap: bool = False
    """Continuations that are cut off are worth the critic's value there, as `advantage.bootstrap` has it."""

    def returns(self, scored: Scored, rows: Tensor, at: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Returns of continuations from the states before token `at` of completions, some rows at a time.

        Args:
            scored: the completions.
            rows: those of which there is a token `at`.
            at: the first token that is sampled anew.
            count: continuations of each state.

        Yields:
            Rows, and the discounted returns `[rows, count, time]` of their continuations from each token on.

        Raises:
            UnusableBatch: a log-probability, KL or reward is not finite.
            RewardError: a reward cannot be had.
        """
        for part in rows.split(max(ROWS // count, 1)):
            returns = self.credit.returns(self._sample(scored, part, at, count), self.scale)
            yield part, returns.unflatten(0, (len(part), count))

    def _sample(self, scored: Scored, rows: Tensor, at: int, count: int) -> Scored:
        rollout, device = scored.rollout, self.pipeline.precision.device
        repeated = rows.repeat_interleave(count).to(device)
        prompts = scored.prompts.select(repeated.tolist())
        uniforms = torch.rand(len(repeated), self.settings.max_new_tokens, generator=self.generator)
        started = rollout.response_ids[repeated, :at]
        sampled = self.pipeline.engine.generate(prompts, self.settings, uniforms, count, started)
        sampled.logprobs[:, :at] = rollout.logprobs[repeated, :at]
        texts = sampled.texts(self.pipeline.tokenizer)
        return self.pipeline.score(prompts, self.settings, sampled, texts, bootstrap=self.bootstrap)
