"""λ from the data: it is the one that correlates best with the truth, which here is known."""

import json
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from tokencredit.core.advantages import gae
from tokencredit.text.data.lam_choice import LAMS, WITHOUT_DATA, LamChoice

ROWS, TIME, KINDS = 64, 24, 30


def batch_of(seed, error):
    """Completions whose tokens each add their own worth to the return, and values with an error.

    Returns rewards, values, token ids and the true advantages.
    """
    random = torch.Generator().manual_seed(seed)
    worth = torch.randn(KINDS, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(KINDS, (ROWS, TIME), generator=random)
    truth = worth[ids] - worth.mean()  # the policy draws every kind alike
    before = truth.cumsum(1) - truth  # the true value of the state before each token, less what all share
    late = torch.nn.functional.pad(before, (1, 0))[:, :-1]
    noise = torch.randn(ROWS, TIME, generator=random)
    values = {
        "none": before,
        "noise": before + 1.5 * noise,
        "one token late": late,
        "nothing known": torch.zeros(ROWS, TIME),
    }[error]
    rewards = torch.zeros(ROWS, TIME)
    rewards[:, -1] = truth.sum(1)
    return rewards, values, ids, truth


def advantages_of(rewards, values):
    return torch.stack([gae(rewards, values, gamma=1.0, lam=lam)[0] for lam in LAMS])


@pytest.mark.parametrize("error", ["none", "noise", "one token late", "nothing known"])
def test_the_lambda_chosen_is_within_a_hundredth_of_the_best_correlation_with_the_truth(error):
    choice, every = LamChoice(), torch.ones(ROWS, TIME, dtype=torch.bool)
    found, truths = [], []
    for seed in range(6):
        rewards, values, ids, truth = batch_of(seed, error)
        found.append(advantages_of(rewards, values))
        truths.append(truth)
        choice.update(found[-1], ids, every, 0, lambda x: x)
    joined, truth = torch.cat(found, 1).flatten(1), torch.cat(truths).flatten()
    correlations = [float(torch.corrcoef(torch.stack([x, truth]))[0, 1]) for x in joined]
    assert correlations[LAMS.index(choice.lam)] > max(correlations) - 0.01
    if error in ("none", "one token late"):
        assert (choice.lam == 0.0) == (error == "none")


def test_it_is_the_same_in_two_processes_and_after_a_checkpoint():
    rewards, values, ids, _ = batch_of(0, "noise")
    advantages, every = advantages_of(rewards, values), torch.ones(ROWS, TIME, dtype=torch.bool)
    whole, halves = LamChoice(), (LamChoice(), LamChoice())
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
        halves[number].update(advantages[:, part], ids[part], every[part], part.start, reduce)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(update, range(2)))
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
    nothing = torch.zeros(len(LAMS), 4, 3)
    choice.update(nothing, torch.zeros(4, 3, dtype=torch.long), torch.ones(4, 3, dtype=torch.bool), 0, lambda x: x)
    assert choice.lam == WITHOUT_DATA
