"""Continuations: completions and episodes that start at states of others, and their returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tokencredit.distributed.processes import Processes, restored
from tokencredit.errors import ConfigError, EngineLost, RunStopped
from tokencredit.text.batch import Batch
from tokencredit.text.credit import Credit, ScoreScale
from tokencredit.text.models.model_loading import max_prompt_length
from tokencredit.text.pipeline import Pipeline, UnusableBatch
from tokencredit.text.rewards.calls import RewardError
from tokencredit.text.turns.replay import EpisodeStart


class States(NamedTuple):
    """States of completions, `[states]` each."""

    rows: Tensor
    """Row of the completion."""
    at: Tensor
    """Number of tokens before the state. After a turn of an episode, the environment has not answered it yet."""


def states_of(positions: Sequence[Sequence[int]]) -> States:
    """The states before the tokens at these positions of each completion."""
    pairs = [(row, at) for row, row_positions in enumerate(positions) for at in row_positions]
    rows, at = torch.tensor(pairs, dtype=torch.long).view(-1, 2).unbind(1)
    return States(rows, at)


def batch_by_position(at: Tensor, size: int, max_distance: int | None) -> list[Tensor]:
    """Indices of batches of at most `size` states whose positions `at` are at most `max_distance` tokens apart."""
    order = at.argsort(stable=True)
    positions, batches, start = at[order].tolist(), [], 0
    for end in range(1, len(positions) + 1):
        far = end < len(positions) and max_distance is not None and positions[end] - positions[start] > max_distance
        if end == len(positions) or end - start == size or far:
            batches.append(order[start:end])
            start = end
    return batches


class Continued(NamedTuple):
    """Discounted returns of continuations from states, `[states, count]` each."""

    states: States
    values: Tensor
    """Returns from the state on."""
    actions: Tensor
    """Returns from the token before the state on; for a first state the same as `values`."""
    tokens: int
    """Number of sampled tokens."""


@dataclass(frozen=True)
class Continuations:
    """Continues completions from their states, with the sampling, scores and KL penalty of the run."""

    pipeline: Pipeline
    """The run's pipeline in a process group of this process alone, since states differ between processes."""
    credit: Credit
    scale: ScoreScale
    """Fixed scale of the scores."""
    generator: torch.Generator
    most: int
    """Largest batch of continuations, unless one state has more: the rollout's batch size, known to fit in memory."""

    @classmethod
    def of(
        cls, pipeline: Pipeline, credit: Credit, scored: Batch, generator: torch.Generator, most: int
    ) -> Continuations:
        """Continuations of completions after `credit.give`."""
        scale = credit.score_scale(scored.scores)
        alone = Credit(credit.args, lambda x: x)
        alone.load_state_dict(credit.state_dict())
        return cls(replace(pipeline, processes=pipeline.processes.alone()), alone, scale, generator, most)

    def returns(
        self, scored: Batch, states: States, count: int, allows: Callable[[Tensor, int], bool]
    ) -> Iterator[Continued]:
        """Sample `count` continuations from each of these states; yields their returns, batched by position.

        Ends before the first batch that `allows`, of its states' positions and the count, refuses.
        """
        # Some models count left padding towards their context.
        longest = max_prompt_length(self.pipeline.policy.lm, self.credit.args.rollout.max_new_tokens)
        max_distance = None if longest is None else longest - scored.rollout.prompt_ids.shape[1]
        parts = batch_by_position(states.at, max(self.most // count, 1), max_distance)
        # In random order, so that an audit that runs out of time has sampled all positions alike.
        for i in torch.randperm(len(parts), generator=self.generator).tolist():
            part = States(states.rows[parts[i]], states.at[parts[i]])
            if not allows(part.at, count):
                return
            sampled = self._sample(scored, part, count)
            returns = pad(self.credit.returns(sampled, self.scale).cpu(), (0, 1)).unflatten(0, (-1, count))
            before, at = (x.clamp(min=0).view(-1, 1, 1).expand(-1, count, 1) for x in (part.at - 1, part.at))
            acted = scored.rollout.mask.cpu()[part.rows]
            started = acted & (torch.arange(acted.shape[1]) < part.at[:, None])
            tokens = int(sampled.rollout.mask.sum()) - count * int(started.sum())
            yield Continued(part, returns.gather(2, at).squeeze(2), returns.gather(2, before).squeeze(2), tokens)

    def _sample(self, scored: Batch, states: States, count: int) -> Batch:
        rollout, device, args = scored.rollout, self.pipeline.precision.device, self.credit.args
        repeated, at = (x.repeat_interleave(count).to(device) for x in (states.rows, states.at))
        prompts = scored.prompts.select(repeated.tolist())
        uniforms = torch.rand(len(repeated), args.rollout.max_new_tokens, generator=self.generator)
        started = [rollout.response_ids[row, :end] for row, end in zip(repeated.tolist(), at.tolist(), strict=True)]
        episodes = None
        if scored.episodes is None:
            sampled = self.pipeline.engine.generate(prompts, args.rollout, uniforms, count, started)
        else:
            assert self.pipeline.player is not None
            seeds = torch.randint(2**31, (len(repeated),), generator=self.generator).tolist()
            recorded = zip(repeated.tolist(), at.tolist(), seeds, strict=True)
            starts = [episode_start(scored, *state) for state in recorded]
            with restored():
                _, sampled, episodes = self.pipeline.player.resume(prompts, starts, started, args.rollout, uniforms)
        widths = (sampled.mask.shape[1], rollout.mask.shape[1])
        target, source = (torch.arange(width, device=device) < at.unsqueeze(1) for width in widths)
        for name in ("logprobs", *(["mask", "turn_ends"] if episodes else [])):
            getattr(sampled, name)[target] = getattr(rollout, name)[repeated][source]
        batch = Batch(prompts, sampled, sampled.texts(self.pipeline.tokenizer), episodes)
        return self.pipeline.scored(batch, args.rollout, bootstrap=args.advantage.bootstrap)


def episode_start(scored: Batch, row: int, at: int, seed: int | None = None) -> EpisodeStart:
    """The state of an episode after `at` tokens; arguments as in `EpisodeStart`."""
    assert scored.episodes is not None
    return EpisodeStart(scored.episodes[row], scored.prompts.prompts[row], at, seed)


def run_in_all(processes: Processes, scored: Batch, work: Callable[[], None]) -> None:
    """Run a function in every process, and let all fail if one does."""
    unusable = None
    with processes.agreed(EngineLost, RewardError, RunStopped, OSError, ConfigError, MemoryError):
        try:
            work()
        except UnusableBatch as caught:
            unusable = caught
    if not processes.all(unusable is None):
        message = "a continuation in another process is not finite"
        raise unusable or UnusableBatch(message, scored.rollout, scored.texts())
