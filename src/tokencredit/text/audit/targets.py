"""Value targets from continuations, at a few states of each completion."""

from __future__ import annotations

from dataclasses import replace

import torch

from tokencredit.audit.state_choice import generator, spread
from tokencredit.audit.truth import Returns
from tokencredit.learn.experience import Experience
from tokencredit.text.audit.continuations import Continuations, run_in_all, states_of
from tokencredit.text.batch import Batch
from tokencredit.text.credit import Credit
from tokencredit.text.pipeline import Pipeline

STREAM = 3_000_017
"""Seed component that separates these generators from those of rollouts, evaluations and audits."""


def continuation_targets(
    experience: Experience, batch: Batch, pipeline: Pipeline, credit: Credit, number: int
) -> tuple[Experience, dict[str, float]]:
    """Replace returns at some states by the mean return of `critic.continuations` fresh continuations.

    Kazemnejad et al. 2024 (VinePPO, arXiv 2410.01679) estimate values this way instead of training a critic; here the
    means, with a variance divided by the number of continuations, are targets of the critic. Advantages are unchanged.

    Args:
        experience: the experience from `credit.give`.
        batch: the batch from `credit.give`.
        pipeline: the run's pipeline.
        credit: the run's credit, which is not modified.
        number: the iteration, which seeds the randomness.

    Returns:
        The experience, and `continued_tokens`, the number of sampled tokens over all processes.

    Raises:
        UnusableBatch: a log-probability, KL or reward is not finite, in any process.
        RewardError: a reward could not be computed.
    """
    args, processes = credit.args, pipeline.processes
    place = number * processes.count + processes.rank
    random = generator(STREAM, args.seed, place)
    lengths, most = batch.rollout.mask.sum(1).cpu(), args.rollout.batch_size // processes.count
    sampler = Continuations.of(pipeline, credit, batch, random, most)
    sampled, tokens = Returns(len(lengths), batch.rollout.mask.shape[1]), 0

    def sample() -> None:
        nonlocal tokens
        positions = [spread(length, args.critic.continued_states, random) for length in lengths.tolist()]
        for part in sampler.returns(batch, states_of(positions), args.critic.continuations):
            sampled.add(*part.states, part.values, part.actions)
            tokens += part.tokens

    with pipeline.held():
        run_in_all(processes, batch, sample)
    means = sampled.means().to(experience.returns.device, experience.returns.dtype)
    returns = torch.where(means.isnan(), experience.returns, means)
    total = processes.sum(torch.tensor(float(tokens), device=processes.device))
    return replace(experience, returns=returns), {"continued_tokens": float(total)}
