"""The reasoning recipe: worked solutions, the verifier, the problems of training and evaluation, and its own parts."""

import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch


def recipe_file(name: str) -> ModuleType:
    file = Path(__file__).parents[1] / "recipes" / "reasoning" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"reasoning_{name}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sums, parts = recipe_file("sums"), recipe_file("parts")


def test_a_chain_is_worked_digit_by_digit_with_its_carries():
    assert sums.question([38, 47, 29]) == "38+47+29="
    assert sums.solution([38, 47, 29]) == "8+7=15,3+4+1=08,085;5+9=14,8+2+1=11,114"
    assert sums.solution([99, 99, 12]) == "9+9=18,9+9+1=19,198;8+2=10,9+1+1=11,210", "a carry into the hundreds"


def test_the_last_number_alone_is_verified():
    right, other = sums.solution([38, 47, 29]), "8+7=14,3+4=8,084;114"
    assert sums.correct([right, other, right[:-1], ""], ["114"] * 4) == [1.0, 1.0, 0.0, 0.0]


def test_worked_solutions_of_all_problems_are_right_and_short_enough():
    drawn = sums.problems(300, seed=1)
    answers = [f"{sum(terms):03}" for terms in drawn]
    assert sums.correct([sums.solution(terms) for terms in drawn], answers) == [1.0] * 300
    lengths = {len(terms): len(sums.solution(terms)) for terms in drawn}
    assert lengths == {2: 19, 3: 39, 4: 59, 5: 79}


def test_held_out_problems_are_not_trained_on():
    held_out = frozenset(sums.problems(100, seed=0))
    assert len(held_out) == 100
    assert not held_out & set(sums.problems(2_000, seed=1, without=held_out))


def test_the_loss_of_solved_problems_by_hand():
    """Two of three tokens are of a right answer."""
    ratio, returns = torch.tensor([1.0, 1.5, 0.5]), torch.tensor([1.0, 1.0, 0.0])
    losses, metrics = parts.with_positive_nll(
        ratio, torch.tensor([0.5, 0.2, 0.4]).log(), torch.ones(3), returns, (0.2, 0.2)
    )
    nll = [-math.log(0.5), -math.log(0.2), 0.0]
    assert metrics["positive_nll"].tolist() == pytest.approx(nll)
    assert losses.tolist() == pytest.approx([-1.0 + 0.1 * nll[0], -1.2 + 0.1 * nll[1], -0.5])


def test_groups_of_equal_rewards_count_in_no_mean():
    rewards = torch.tensor([[1.0], [1.0], [0.0], [1.0]])
    advantages, returns = parts.differing_groups(rewards, 2)
    half = 0.5 / (0.5**0.5 + 1e-4)
    assert advantages.flatten().tolist() == pytest.approx([0.0, 0.0, -2 * half, 2 * half])
    assert torch.equal(returns, rewards)
