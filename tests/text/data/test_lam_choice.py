"""λ from the data: it is the one that correlates best with the truth, which here is known."""

import json

import pytest
import torch

from helpers.in_step import in_two
from tokencredit.core.advantages import gae
from tokencredit.text.data.lam_choice import LAMS, WITHOUT_DATA, LamChoice

ROWS, TIME, KINDS = 64, 24, 30
VALUES = {
    "exact": lambda before, late, noise: before,
    "noisy": lambda before, late, noise: before + noise,
    "one token late": lambda before, late, noise: late,
    "unknown": lambda before, late, noise: 0 * noise,
}
"""Values from the true ones, those of the token before, and noise."""


def batch_of(seed, values):
    """Completions whose tokens each add their own worth to the return: advantages by λ, token ids, true advantages."""
    random = torch.Generator().manual_seed(seed)
    worth = torch.randn(KINDS, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(KINDS, (ROWS, TIME), generator=random)
    truth = worth[ids] - worth.mean()  # the policy draws every kind alike
    before = truth.cumsum(1) - truth
    late = torch.nn.functional.pad(before, (1, 0))[:, :-1]
    found = VALUES[values](before, late, 1.5 * torch.randn(ROWS, TIME, generator=random))
    rewards = torch.zeros(ROWS, TIME)
    rewards[:, -1] = truth.sum(1)
    return lambda lam: gae(rewards, found, gamma=1.0, lam=lam)[0], ids, truth


@pytest.mark.slow
@pytest.mark.parametrize("values", VALUES)
def test_the_lambda_is_within_a_hundredth_of_the_best_correlation_with_the_truth(values):
    choice, every = LamChoice(), torch.ones(ROWS, TIME, dtype=torch.bool)
    batches = [batch_of(seed, values) for seed in range(6)]
    for advantages, ids, _ in batches:
        choice.update(advantages, ids, every, 0, lambda x: x)
    truth = torch.cat([x for _, _, x in batches]).flatten()
    found = [torch.cat([x(lam) for x, _, _ in batches]).flatten() for lam in LAMS]
    correlations = [float(torch.corrcoef(torch.stack([x, truth]))[0, 1]) for x in found]
    assert correlations[LAMS.index(choice.lam)] > max(correlations) - 0.01
    if values != "noisy":
        assert (choice.lam == 0) == (values == "exact")


def test_it_is_the_same_in_two_processes_and_after_a_checkpoint():
    (advantages, ids, _), every = batch_of(0, "noisy"), torch.ones(ROWS, TIME, dtype=torch.bool)
    whole, halves = LamChoice(), (LamChoice(), LamChoice())
    whole.update(advantages, ids, every, 0, lambda x: x)

    def update(rank, reduce):
        part = slice(32 * rank, 32 * rank + 32)
        halves[rank].update(lambda lam: advantages(lam)[part], ids[part], every[part], part.start, reduce)

    in_two(update)
    for half in halves:
        torch.testing.assert_close(half.sums, whole.sums, rtol=1e-12, atol=0)
        torch.testing.assert_close(half.effects, whole.effects, rtol=1e-12, atol=1e-12)
    again = LamChoice()
    again.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for choice in (whole, again):
        choice.update(advantages, ids, every, 0, lambda x: x)
    assert torch.equal(whole.effects, again.effects)
    assert torch.equal(whole.sums, again.sums)


def test_without_any_data_or_agreement_it_is_what_a_critic_alone_has():
    choice = LamChoice()
    assert choice.lam == WITHOUT_DATA
    nothing = torch.zeros(4, 3)
    choice.update(
        lambda lam: nothing, torch.zeros(4, 3, dtype=torch.long), torch.ones(4, 3, dtype=torch.bool), 0, lambda x: x
    )
    assert choice.lam == WITHOUT_DATA
