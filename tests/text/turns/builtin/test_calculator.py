import inspect
import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils import get_json_schema

from tokencredit.text.turns.builtin.calculator import MAX_LENGTH, Calculator, evaluate


def asked(seed):
    """A calculator, and its question as an expression."""
    world = Calculator()
    question = world.reset(seed=seed, prompt=[], other=1)
    return world, " + ".join(re.fullmatch(r"What is (\d\d) plus (\d\d)\?", question).groups())


@pytest.mark.parametrize("seed", range(20))
def test_the_calculator_knows_the_answer(seed):
    world, expression = asked(seed)
    assert world.get_reward() == 0.0
    value = world.calculate(expression)
    assert world.get_reward() == 0.0  # a calculation is no answer
    assert world.answer(int(value) + 1) == "Received."
    assert world.get_reward() == 0.0
    world.answer(int(value))
    assert world.get_reward() == 1.0
    world.answer(int(value) - 1)  # the last answer counts
    assert world.get_reward() == 0.0


def test_a_reset_asks_another_question():
    world = Calculator()
    questions = [world.reset(seed=seed) for seed in range(300)]
    assert len(set(questions)) > 250
    assert world.reset(seed=5) == questions[5]
    world, expression = asked(5)
    world.answer(evaluate(expression))
    world.reset(seed=6)
    assert world.get_reward() == 0.0


@pytest.mark.parametrize("number", ["many", None, [1]])
def test_an_answer_that_is_no_number_is_refused(number):
    with pytest.raises((TypeError, ValueError)):
        Calculator().answer(number)


def test_its_public_methods_are_its_tools():
    methods = [name for name, _ in inspect.getmembers(Calculator, inspect.isfunction) if not name.startswith("_")]
    assert methods == ["answer", "calculate", "get_reward", "reset"]
    schemas = [get_json_schema(tool)["function"] for tool in (Calculator().answer, Calculator().calculate)]
    assert [schema["name"] for schema in schemas] == ["answer", "calculate"]
    assert [schema["parameters"]["required"] for schema in schemas] == [["number"], ["expression"]]


@pytest.mark.parametrize(
    ("expression", "value"),
    [("37 * 58", 2146), (" 12-50\n", -38), ("(2 + 3) * -4", -20), ("7 / 2", 3.5), ("1.5 + 1", 2.5), ("--+3", 3)],
)
def test_values_of_expressions(expression, value):
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "no arithmetic expression"),
        ("1 +", "no arithmetic expression"),
        ("1\x00", "and nothing else"),
        ("(1)(2)", "and nothing else"),
        ("...", "and nothing else"),
        ("1e999", "and nothing else"),
        ("(" * MAX_LENGTH, "no arithmetic expression"),
        ("9" * (MAX_LENGTH + 1), f"at most {MAX_LENGTH} characters; this one has {MAX_LENGTH + 1}"),
        ("9 ** 9 ** 9", "and nothing else"),
        ("__import__('os').remove('x')", "and nothing else"),
        ("[1][0]", "and nothing else"),
        ("x", "and nothing else"),
        ("True + 1", "and nothing else"),
        ("2j * 2j", "and nothing else"),
        ("1; 2", "and nothing else"),
        ("7 % 4", "and nothing else"),
    ],
)
def test_expressions_that_are_refused(expression, message):
    with pytest.raises(ValueError, match=message):
        evaluate(expression)


def test_division_by_zero():
    with pytest.raises(ZeroDivisionError):
        evaluate("1 / (2 - 2)")


@given(st.text(alphabet="0123456789.+-*/() eE_jabx%<>=,[]{}'\"\\\n", max_size=MAX_LENGTH + 5))
def test_any_text_is_a_number_or_refused(text):
    with suppress(ValueError, ZeroDivisionError, OverflowError):
        assert type(evaluate(text)) in (int, float)
