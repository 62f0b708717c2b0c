"""The built-in environment `builtin:calculator`: arithmetic with a calculator as a tool."""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable
from typing import Any

MAX_LENGTH = 100
"""Longest expression, in characters; it bounds the size of numbers and the depth of brackets."""
Number = int | float
BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Calculator:
    """A question such as "What is 37 plus 58?", a calculator, and a tool that hands in the answer.

    Its form is that of TRL's `environment_factory`. The reward is 1 if the number that was handed in last is right.
    """

    def reset(self, seed: int, **row: Any) -> str:  # noqa: ARG002  # TRL passes all columns
        """Draw the question of a seed; returns it."""
        rng = random.Random(seed)
        one, other = rng.randint(10, 99), rng.randint(10, 99)
        self._right = one + other
        self._answer: int | None = None
        return f"What is {one} plus {other}?"

    def answer(self, number: int) -> str:
        """Hand in the answer to the question.

        Args:
            number: The answer.

        Returns:
            A receipt.
        """
        self._answer = int(number)
        return "Received."

    def calculate(self, expression: str) -> str:
        """Evaluate an arithmetic expression.

        Args:
            expression: Numbers with + - * / and brackets.

        Returns:
            The value.
        """
        return str(evaluate(expression))

    def get_reward(self) -> float:
        """1.0 if the right number was handed in."""
        return float(self._answer == self._right)


def evaluate(expression: str) -> Number:
    """Value of an arithmetic expression of numbers, + - * / and brackets; `ValueError` for anything else."""
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"an expression has at most {MAX_LENGTH} characters; this one has {len(expression)}")
    if re.search(r"[^0-9.+*/() -]", expression.strip()):
        raise ValueError("an expression may have numbers, + - * / and brackets, and nothing else")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError("this is no arithmetic expression; write numbers with + - * / and brackets") from error


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=value) if type(value) in (int, float):
            return value  # type: ignore[return-value]  # its type was just tested
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in BINARY:
            return BINARY[type(operation)](_value(left), _value(right))
    raise ValueError("an expression may have numbers, + - * / and brackets, and nothing else")
