"""Continuations: completions sampled anew from states of given ones, and the returns that they give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tokencredit.processes import Processes
from tokencredit.text.credit import Credit, ScoreScale
from tokencredit.text.models.loading import room_for_prompts
from tokencredit.text.pipeline import Pipeline, Scored, UnusableBatch


class States(NamedTuple):
    """States of completions, `[states]` each: the row of the completion, and the token before which the state is."""

    rows: Tensor
    at: Tensor


def states_of(places: Sequence[Sequence[int]]) -> States:
    """The states before these tokens of each completion."""
    pairs = [(row, at) for row, own in enumerate(places) for at in own]
    rows, at = torch.tensor(pairs, dtype=torch.long).view(-1, 2).unbind(1)
    return States(rows, at)


def of_like_position(at: Tensor, size: int, apart: int | None) -> list[Tensor]:
    """Cut states, by their positions `[states]`, into parts of like position; returns the indices of each.

    Args:
        at: the positions.
        size: the most states of a part.
        apart: the most tokens between two of them; None for any number.
    """
    order = at.argsort(stable=True)
    positions, parts, begin = at[order].tolist(), [], 0
    for end in range(1, len(positions) + 1):
        far = end < len(positions) and apart is not None and positions[end] - positions[begin] > apart
        if end == len(positions) or end - begin == size or far:
            parts.append(order[begin:end])
            begin = end
    return parts


class Continued(NamedTuple):
    """Discounted returns of continuations from states, `[states, count]` each."""

    states: States
    values: Tensor
    """From the state on."""
    actions: Tensor
    """From the token before it on; of a first state the same as `values`."""
    tokens: int
    """Tokens that were sampled."""


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

    def returns(self, scored: Scored, states: States, count: int) -> Iterator[Continued]:
        """Returns of continuations from states of completions, some states of like position at a time.

        Args:
            scored: the completions.
            states: those that are continued, all different.
            count: continuations of each.

        Raises:
            UnusableBatch: a log-probability, KL or reward is not finite.
            RewardError: a reward cannot be had.
        """
        # Sampling pads before the text, which some models' context must hold too.
        room = room_for_prompts(self.pipeline.policy.lm, self.credit.args.rollout.max_new_tokens)
        apart = None if room is None else room - scored.rollout.prompt_ids.shape[1]
        parts = of_like_position(states.at, max(self.most // count, 1), apart)
        # In a random order, so that an audit whose time is up has not seen the beginnings alone.
        for i in torch.randperm(len(parts), generator=self.generator).tolist():
            part = States(states.rows[parts[i]], states.at[parts[i]])
            sampled = self._sample(scored, part, count)
            returns = self.credit.returns(sampled, self.scale).cpu().unflatten(0, (-1, count))
            before, at = (x.clamp(min=0).view(-1, 1, 1).expand(-1, count, 1) for x in (part.at - 1, part.at))
            tokens = int(sampled.rollout.mask.sum()) - count * int(part.at.sum())
            yield Continued(part, returns.gather(2, at).squeeze(2), returns.gather(2, before).squeeze(2), tokens)

    def _sample(self, scored: Scored, states: States, count: int) -> Scored:
        rollout, device, args = scored.rollout, self.pipeline.precision.device, self.credit.args
        repeated, at = (x.repeat_interleave(count).to(device) for x in (states.rows, states.at))
        prompts = scored.prompts.select(repeated.tolist())
        uniforms = torch.rand(len(repeated), args.rollout.max_new_tokens, generator=self.generator)
        started = [rollout.response_ids[row, :begun] for row, begun in zip(repeated.tolist(), at.tolist(), strict=True)]
        sampled = self.pipeline.engine.generate(prompts, args.rollout, uniforms, count, started)
        kept, own = (torch.arange(x.shape[1], device=device) < at.unsqueeze(1) for x in (sampled.mask, rollout.mask))
        sampled.logprobs[kept] = rollout.logprobs[repeated][own]
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
