"""Literals and arithmetic on numbers, as scripts write them, computed without running a script."""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

OPERATORS: dict[type, Any] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: operator.pow},
    **{ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod},
}
MAX_NUMBER, MAX_POWER = 10**18, 64
UNREADABLE = (ValueError, TypeError, ArithmeticError, SyntaxError, MemoryError, RecursionError)


def computed(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of a literal, of a known name, or of arithmetic on numbers up to 10¹⁸; raises one of `UNREADABLE`."""
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(computed(node.operand, names))
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "int" and len(node.args) == 1:
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


def assignments(nodes: list[ast.AST]) -> list[tuple[ast.expr, ast.Assign | ast.AnnAssign | ast.AugAssign]]:
    """A script's assignments, after the first target of each, in the order of lines."""
    found = [node for node in nodes if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)]
    found.sort(key=lambda node: node.lineno)
    return [(node.targets[0] if isinstance(node, ast.Assign) else node.target, node) for node in found]


def bound_once(nodes: list[ast.AST]) -> dict[str, ast.expr]:
    """The value of each name that a script assigns, and binds or changes nowhere else, in the order of lines."""
    stored = (node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del))
    names = [ast.unparse(node).partition("[")[0] for node in stored]
    names += [ast.unparse(x.value) for x in nodes if isinstance(x, ast.Attribute) and x.attr in ("update", "pop")]
    names += [node.arg for node in nodes if isinstance(node, ast.arg)]
    names += [node.asname or node.name for node in nodes if isinstance(node, ast.alias)]
    count = Counter(names)
    values = {getattr(target, "id", ""): node.value for target, node in assignments(nodes)}
    return {name: value for name, value in values.items() if value is not None and count[name] == 1}


def constants(values: Mapping[str, ast.expr]) -> dict[str, Any]:
    """The values of names that can be computed, in their order."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        with suppress(*UNREADABLE):
            found[name] = computed(value, found)
    return found
