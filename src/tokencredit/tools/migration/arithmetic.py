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
SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef | ast.GeneratorExp | ast.ListComp
SCOPES |= ast.SetComp | ast.DictComp
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


def names_in_scope(tree: ast.AST) -> dict[ast.AST, tuple[dict[str, ast.expr], dict[str, Any]]]:
    """For each node the names that its scope, or one around it, binds once: their expressions, and values if known."""
    nodes = list(ast.walk(tree))
    found: dict[ast.AST, tuple[dict[str, ast.expr], dict[str, Any]]] = {}
    parts = [x.value for x in nodes if isinstance(x, ast.Attribute) and x.attr in ("update", "pop")]
    parts += [x.value for x in nodes if isinstance(x, ast.Subscript) and not isinstance(x.ctx, ast.Load)]
    changed = {ast.unparse(part).partition("[")[0] for part in parts}
    changed |= {name for x in nodes if isinstance(x, ast.Global | ast.Nonlocal) for name in x.names}
    todo: list[tuple[ast.AST, dict[str, ast.expr], dict[str, Any]]] = [(tree, {}, {})]
    for scope, bound, known in todo:
        nodes = list(ast.iter_child_nodes(scope))
        for node in nodes:
            nodes += [] if isinstance(node, SCOPES) else ast.iter_child_nodes(node)
        count = Counter(x.id for x in nodes if isinstance(x, ast.Name) and not isinstance(x.ctx, ast.Load))
        count.update(x.arg for x in nodes if isinstance(x, ast.arg))
        count.update(x.asname or x.name for x in nodes if isinstance(x, ast.alias))
        here = {name: value for name, value in bound.items() if name not in count}
        values = {name: value for name, value in known.items() if name not in count}
        for target, node in assignments(nodes):
            name = getattr(target, "id", "")
            if node.value and count[name] == 1 and name not in changed:
                here[name] = node.value
                with suppress(*UNREADABLE):
                    values[name] = computed(node.value, values)
        found |= dict.fromkeys(nodes, (here, values))
        outer = (bound, known) if isinstance(scope, ast.ClassDef) else (here, values)  # methods do not see a class's
        todo += [(node, *outer) for node in nodes if isinstance(node, SCOPES)]
    return found
