"""Literals and arithmetic on numbers, as scripts write them, computed without running a script."""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from typing import Any

OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
MAX_NUMBER, MAX_POWER = 10**18, 64
UNREADABLE = (ValueError, TypeError, ArithmeticError, SyntaxError, MemoryError, RecursionError)
"""Errors of what is no such expression."""


def computed(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of a literal, of a name with a known value, or of arithmetic on numbers up to 10¹⁸.

    Raises:
        Exception: one of `UNREADABLE`, for anything else.
    """
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(computed(node.operand, names))
    if isinstance(node, ast.Call) and len(node.args) == 1 and isinstance(node.func, ast.Name) and node.func.id == "int":
        return int(_number(computed(node.args[0], names)))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = (_number(computed(side, names)) for side in (node.left, node.right))
        if isinstance(node.op, ast.Pow) and abs(right) > MAX_POWER:
            raise ValueError(right)
        return _number(OPERATORS[type(node.op)](left, right))
    return ast.literal_eval(node)


def _number(value: Any) -> Any:
    if not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
        raise ValueError(value)
    return value


def shell_sum(text: str) -> str:
    """The value of a shell's arithmetic on whole numbers; empty for anything else."""
    try:
        value = computed(ast.parse(text.strip().replace("/", "//"), mode="eval").body, {})
    except UNREADABLE:
        return ""
    return str(value) if type(value) is int else ""


def constants(nodes: list[ast.AST]) -> dict[str, Any]:
    """The last computable value of each name that a script assigns; none of a name whose last value is another."""
    found: dict[str, Any] = {}
    assignments = [node for node in nodes if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)]
    for node in sorted(assignments, key=lambda node: node.lineno):
        target, value = node.targets[0] if isinstance(node, ast.Assign) else node.target, node.value
        if isinstance(node, ast.AugAssign):
            value = ast.BinOp(node.target, node.op, node.value)
        if isinstance(target, ast.Name) and value is not None:
            try:
                found[target.id] = computed(value, found)
            except UNREADABLE:
                found.pop(target.id, None)
    return found
