"""The share of the critic and λ from the data: those that correlate best with the truth, which here is known."""

import json
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from tokencredit.core.advantages import gae
from tokencredit.text.data.credit_choice import CHOICES, LAMS, SHARES, WITHOUT_DATA, CreditChoice, by_shares

ROWS, TIME, KINDS = 64, 24, 30
CASES = {
    "a fit that is exact, and noise of a critic": lambda before, late, noise: (before, noise),
    "a fit that is late, and a critic that knows": lambda before, late, noise: (late, before - late),
    "a fit that is late, and a critic that knows nothing": lambda before, late, noise: (late, 0 * noise),
    "noise in both": lambda before, late, noise: (before + noise, 0.5 * noise),
    "nothing known": lambda before, late, noise: (0 * noise, 0 * noise),
}
"""Values by the fit and what the critic adds, from the true ones, those of the token before, and noise."""


def batch_of(seed, case):
    """Completions whose tokens each add their own worth to the return: advantages, token ids and true advantages."""
    random = torch.Generator().manual_seed(seed)
    worth = torch.randn(KINDS, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(KINDS, (ROWS, TIME), generator=random)
    truth = worth[ids] - worth.mean()  # the policy draws every kind alike
    before = truth.cumsum(1) - truth
    late = torch.nn.functional.pad(before, (1, 0))[:, :-1]
    fitted, critic = CASES[case](before, late, 1.5 * torch.randn(ROWS, TIME, generator=random))
    rewards = torch.zeros(ROWS, TIME)
    rewards[:, -1] = truth.sum(1)
    every = torch.ones(ROWS, TIME, dtype=torch.bool)
    return by_shares(rewards, fitted, fitted + critic, 1.0, {"mask": every}), ids, truth


def test_each_choice_is_gae_with_its_share_of_the_critic():
    rewards, fitted, critic = torch.rand(3, 2, 5)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    found = by_shares(rewards, fitted, fitted + critic, 0.9, {"mask": mask})
    for lam in LAMS:
        for share, advantages in zip(SHARES, found(lam), strict=True):
            expected, _ = gae(rewards, fitted + share * critic, gamma=0.9, lam=lam, mask=mask)
            torch.testing.assert_close(advantages, expected)


@pytest.mark.parametrize("case", CASES)
def test_the_choice_is_within_a_hundredth_of_the_best_correlation_with_the_truth(case):
    choice, every = CreditChoice(), torch.ones(ROWS, TIME, dtype=torch.bool)
    batches = [batch_of(seed, case) for seed in range(6)]
    for advantages, ids, _ in batches:
        choice.update(advantages, ids, every, 0, lambda x: x)
    truth = torch.cat([x for _, _, x in batches]).flatten()
    by_lam = {lam: torch.cat([x(lam) for x, _, _ in batches], 1).flatten(1) for lam in LAMS}
    found = [by_lam[lam][SHARES.index(share)] for share, lam in CHOICES]
    correlations = [float(torch.corrcoef(torch.stack([x, truth]))[0, 1]) for x in found]
    assert correlations[CHOICES.index(choice.best)] > max(correlations) - 0.01
    if "exact" in case:
        assert choice.best == (0.0, 0.0)
    if case.endswith("that knows"):
        assert choice.best == (1.0, 0.0)


def test_it_is_the_same_in_two_processes_and_after_a_checkpoint():
    (advantages, ids, _), every = batch_of(0, "noise in both"), torch.ones(ROWS, TIME, dtype=torch.bool)
    whole, halves = CreditChoice(), (CreditChoice(), CreditChoice())
    whole.update(advantages, ids, every, 0, lambda x: x)
    both, given = Barrier(2), {}

    def update(number):
        def reduce(x):
            given[number] = x
            both.wait()
            total = given[0] + given[1]
            both.wait()
            return total

        part = slice(32 * number, 32 * number + 32)
        halves[number].update(lambda lam: advantages(lam)[:, part], ids[part], every[part], part.start, reduce)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(update, range(2)))
    for half in halves:
        torch.testing.assert_close(half.sums, whole.sums, rtol=1e-12, atol=0)
        torch.testing.assert_close(half.effects, whole.effects, rtol=1e-12, atol=1e-12)
    again = CreditChoice()
    again.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for choice in (whole, again):
        choice.update(advantages, ids, every, 0, lambda x: x)
    assert torch.equal(whole.effects, again.effects)
    assert torch.equal(whole.sums, again.sums)


def test_without_any_data_or_agreement_it_is_what_a_critic_alone_has():
    choice = CreditChoice()
    assert choice.best == WITHOUT_DATA
    nothing = torch.zeros(len(SHARES), 4, 3)
    choice.update(
        lambda lam: nothing, torch.zeros(4, 3, dtype=torch.long), torch.ones(4, 3, dtype=torch.bool), 0, lambda x: x
    )
    assert choice.best == WITHOUT_DATA
