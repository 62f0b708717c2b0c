"""The reasoning recipe: worked solutions, the verifier, and the problems of training and evaluation."""

import importlib.util
from pathlib import Path

FILE = Path(__file__).parents[1] / "recipes" / "reasoning" / "sums.py"
SPEC = importlib.util.spec_from_file_location("reasoning_sums", FILE)
sums = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(sums)


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
