"""Value targets from continuations: better returns for the critic to learn, at a few states of each completion."""

from __future__ import annotations

from dataclasses import replace

import torch

from tokencredit.audit.sampling import generator, spread
from tokencredit.audit.truth import Returns
from tokencredit.learn.experience import Experience
from tokencredit.text.audit.continuations import Continuations, in_all, states_of
from tokencredit.text.batch import Batch
from tokencredit.text.credit import Credit
from tokencredit.text.pipeline import Pipeline

STREAM = 3_000_017
"""First number of these generators, which keeps them apart from those of rollouts, evaluations and audits."""


def with_continuations(
    experience: Experience, batch: Batch, pipeline: Pipeline, credit: Credit, number: int
) -> tuple[Experience, dict[str, float]]:
    """The experience with the mean return of `critic.continuations` fresh continuations at some of its states.

    Kazemnejad et al. 2024 (VinePPO, arXiv 2410.01679) estimate values so and train no critic; here the means, whose
    variance is that of a return divided by the continuations, are what the critic learns. Advantages stay as they are.

    Args:
        experience: of the completions.
        batch: the completions.
        pipeline: of the run.
        credit: of the run, after it gave credit to them; it is left as it is.
        number: of the iteration, from which the randomness comes.

    Returns:
        The experience, and `continued_tokens`, the tokens that were sampled for it over all processes.

    Raises:
        UnusableBatch: a log-probability, KL or reward is not finite, in any process.
        RewardError: a reward cannot be had.
    """
    args, processes, scored = credit.args, pipeline.processes, batch.scored
    place = number * processes.count + processes.rank
    random = generator(STREAM, args.seed, place)
    lengths, most = scored.rollout.mask.sum(1).cpu(), args.rollout.batch_size // processes.count
    sampler = Continuations.of(pipeline, credit, scored, random, most)
    found, tokens = Returns(len(lengths), scored.rollout.mask.shape[1]), 0

    def sample() -> None:
        nonlocal tokens
        chosen = [spread(length, args.critic.continued_states, random) for length in lengths.tolist()]
        for part in sampler.returns(scored, states_of(chosen), args.critic.continuations):
            found.add(*part.states, part.values, part.actions)
            tokens += part.tokens

    in_all(processes, scored, sample)
    means = found.means().to(experience.returns.device, experience.returns.dtype)
    returns = torch.where(means.isnan(), experience.returns, means)
    total = processes.sum(torch.tensor(float(tokens), device=processes.device))
    return replace(experience, returns=returns), {"continued_tokens": float(total)}
