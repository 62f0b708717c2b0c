"""Continuations: completions sampled anew from states of given ones, and the returns that they give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokencredit.processes import Processes
from tokencredit.text.credit import Credit, ScoreScale
from tokencredit.text.pipeline import Pipeline, Scored, UnusableBatch


@dataclass(frozen=True)
class Continuations:
    """Samples from states of completions as the run samples, and scores as it scores, the price of KL included."""

    pipeline: Pipeline
    """Of this process alone, since each has states of its own."""
    credit: Credit
    scale: ScoreScale
    """Of the scores, held still."""
    generator: torch.Generator
    most: int
    """Texts that are sampled at once, unless one state has more: as many as in a rollout, for which there is memory."""

    @classmethod
    def of(
        cls, pipeline: Pipeline, credit: Credit, scored: Scored, generator: torch.Generator, most: int
    ) -> Continuations:
        """For completions to which `credit` was given, in any number of processes."""
        scale = credit.score_scale(scored.scores)
        alone = Credit(credit.args, lambda x: x)
        alone.load_state_dict(credit.state_dict())
        return cls(replace(pipeline, processes=pipeline.processes.alone()), alone, scale, generator, most)

    def returns(self, scored: Scored, rows: Tensor, at: int, count: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Returns of continuations from the states before token `at` of completions, some rows at a time.

        Args:
            scored: the completions.
            rows: those of which there is a token `at`.
            at: the first token that is sampled anew.
            count: continuations of each state.

        Yields:
            Rows, the discounted returns `[rows, count, time]` of their continuations from each token on, and how many
            tokens were sampled.

        Raises:
            UnusableBatch: a log-probability, KL or reward is not finite.
            RewardError: a reward cannot be had.
        """
        for part in rows.split(max(self.most // count, 1)):
            sampled = self._sample(scored, part, at, count)
            returns = self.credit.returns(sampled, self.scale)
            tokens = int(sampled.rollout.mask.sum()) - len(sampled.rollout.mask) * at
            yield part, returns.unflatten(0, (len(part), count)), tokens

    def _sample(self, scored: Scored, rows: Tensor, at: int, count: int) -> Scored:
        rollout, device, args = scored.rollout, self.pipeline.precision.device, self.credit.args
        repeated = rows.repeat_interleave(count).to(device)
        prompts = scored.prompts.select(repeated.tolist())
        uniforms = torch.rand(len(repeated), args.rollout.max_new_tokens, generator=self.generator)
        started = rollout.response_ids[repeated, :at]
        sampled = self.pipeline.engine.generate(prompts, args.rollout, uniforms, count, started)
        sampled.logprobs[:, :at] = rollout.logprobs[repeated, :at]
        texts = sampled.texts(self.pipeline.tokenizer)
        return self.pipeline.score(prompts, args.rollout, sampled, texts, bootstrap=args.advantage.bootstrap)


def in_all(processes: Processes, scored: Scored, work: Callable[[], None]) -> None:
    """Do what each process does alone.

    Raises:
        UnusableBatch: in all of them, if one raises it.
    """
    error = None
    try:
        work()
    except UnusableBatch as caught:
        error = caught
    if not processes.all(error is None):
        raise error or UnusableBatch("a continuation in another process is not finite", scored.rollout, scored.texts())
