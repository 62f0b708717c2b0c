import random

import pytest
import torch

from helpers.episodes import episode, grid
from tokencredit.core.advantages import gae
from tokencredit.core.estimators import Turns, estimate, estimate_by_turn
from tokencredit.report.what_if import ALTERNATIVES, what_if

SAMPLE = {"rewards": [0.0, 0.0, 1.0], "values": [0.5, 0.25, 0.5]}


def test_alternative_credit_by_hand():
    found = what_if(SAMPLE, gamma=1.0)
    assert list(found) == list(ALTERNATIVES)
    # δ = [0.25 − 0.5, 0.5 − 0.25, 1 − 0.5]
    assert found["td (gae, λ = 0)"] == pytest.approx([-0.25, 0.25, 0.5])
    assert found["gae, λ = 0.5"] == pytest.approx([-0.25 + 0.5 * 0.5, 0.25 + 0.5 * 0.5, 0.5])
    assert found["monte_carlo (gae, λ = 1)"] == pytest.approx([0.5, 0.75, 0.5])
    assert found["uniform"] == pytest.approx([1.0, 1.0, 1.0])


def test_the_discount_is_the_runs_own():
    assert what_if(SAMPLE, gamma=0.5)["monte_carlo (gae, λ = 1)"] == pytest.approx([-0.25, 0.25, 0.5])


def test_a_completion_that_was_cut_off_is_worth_its_bootstrap():
    found = what_if(SAMPLE | {"bootstrap": 2.0}, gamma=0.5)
    # δ = [0.125 − 0.5, 0.25 − 0.25, 1 + 0.5 · 2 − 0.5]
    assert found["td (gae, λ = 0)"] == pytest.approx([-0.375, 0.0, 1.5])
    assert found["monte_carlo (gae, λ = 1)"] == pytest.approx([0.25 * 2 - 0.5, 0.5 * 2 - 0.25, 1.5])
    assert found["uniform"] == pytest.approx([1.0, 1.0, 1.0])


def test_without_values_only_estimators_without_a_critic_are_there():
    assert what_if({"rewards": SAMPLE["rewards"]}, gamma=1.0) == {"uniform": [1.0, 1.0, 1.0]}


@pytest.mark.parametrize("bootstrap", [None, 0.5])
def test_observations_are_stepped_over_as_core_does(bootstrap):
    sample = grid()
    sample["rewards"][3] = sample["values"][4] = 100.0  # without effect: the mask is 0 there
    where = {"mask": torch.tensor([sample["mask"]], dtype=torch.bool)}
    if bootstrap is not None:
        sample["bootstrap"] = bootstrap
        last = torch.arange(9) == 8
        where |= {"truncated": last[None], "bootstrap": torch.full((1, 9), bootstrap, dtype=torch.float64)}
    rewards, values = (torch.tensor([sample[name]], dtype=torch.float64) for name in ("rewards", "values"))
    expected, _ = gae(rewards, values, gamma=0.9, lam=0.5, **where)
    assert what_if(sample, gamma=0.9)["gae, λ = 0.5"] == pytest.approx(expected[where["mask"]].tolist())


def test_turns_as_steps_by_hand():
    """Rewards −0.02 and 1 in two turns, whose first values are 0.5 and 0.25."""
    sample = grid(rewards=[-0.01, -0.01, 0, 0, 0, 0, 0, 0.5, 0.5], values=[0.5, 9.0, 0, 0, 0, 0, 0, 0.25, 9.0])
    found = what_if(sample, gamma=0.5, by_turn=True)
    second = 1 - 0.25
    first = -0.02 + 0.5 * 0.25 - 0.5
    assert found["td (gae, λ = 0)"] == pytest.approx([first, first, second, second])
    assert found["gae, λ = 0.9"] == pytest.approx([first + 0.45 * second] * 2 + [second] * 2)
    assert found["uniform"] == pytest.approx([0.98] * 4)
    cut = what_if(sample | {"bootstrap": 2.0}, gamma=0.5, by_turn=True)
    assert cut["td (gae, λ = 0)"][2:] == pytest.approx([second + 0.5 * 2.0] * 2)
    assert what_if(SAMPLE, gamma=0.5, by_turn=True) == what_if(SAMPLE, gamma=0.5), "a completion is one turn of tokens"


@pytest.mark.parametrize("seed", range(20))
def test_random_episodes_are_credited_as_by_core_with_a_mask(seed):
    """By token and by turn, with numbers at observations that must have no effect."""
    chance = random.Random(seed)
    lengths = [chance.randint(1, 6) for _ in range(chance.randint(1, 5))]
    speeches = [("assistant", ["a"] * length, None) for length in lengths]
    for place in range(len(speeches) - 1, 0, -1):
        speeches.insert(place, (chance.choice(["tool", "user"]), ["b"] * chance.randint(0, 3)))
    sample = episode(*speeches)
    count = len(sample["tokens"])
    sample |= {name: [chance.gauss(0, 1) for _ in range(count)] for name in ("rewards", "values")}
    mask, ends = torch.tensor([sample["mask"]], dtype=torch.bool), torch.zeros(1, count, dtype=torch.bool)
    ends[0, [turn["end"] - 1 for turn in sample["turns"] if turn["role"] == "assistant"]] = True
    rewards, values = (torch.tensor([sample[name]], dtype=torch.float64) for name in ("rewards", "values"))
    options = {"gamma": 0.9, "lam": 0.5}
    by_token, _ = estimate("gae", rewards, values, options=options, mask=mask)
    by_turn, _ = estimate_by_turn("gae", rewards, values, turns=Turns.of(mask, ends), options=options)
    assert what_if(sample, gamma=0.9)["gae, λ = 0.5"] == pytest.approx(by_token[mask].tolist())
    assert what_if(sample, gamma=0.9, by_turn=True)["gae, λ = 0.5"] == pytest.approx(by_turn[mask].tolist())
