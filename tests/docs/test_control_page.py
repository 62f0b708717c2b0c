"""docs/control.md: every function and setting that its table of details names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "control.md").read_text(encoding="utf-8")
DETAILS = re.findall(r"^\| (.+?) \| `(\S+\.py):(\S+)` \|$", PAGE, re.MULTILINE)


def defines(file: str, name: str) -> bool:
    """True if a module of the package defines the function, class, method or field with this qualified name."""
    nodes: list[ast.AST] = [ast.parse((ROOT / "src" / "tokencredit" / file).read_text(encoding="utf-8"))]
    for part in name.split("."):
        nodes = [child for node in nodes for child in ast.iter_child_nodes(node) if part == name_of(child)]
    return bool(nodes)


def name_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    return node.target.id if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else None


@pytest.mark.parametrize(("detail", "file", "name"), DETAILS)
def test_the_named_place_exists(detail, file, name):
    assert defines(file, name), f"{detail}: {file} defines no {name}"
