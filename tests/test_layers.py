"""The package's layers: no import goes upwards, and no files or folders import each other in a circle."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
PACKAGE = SRC / "tokencredit"
LAYERS = {
    "errors": 0,
    "core": 1,
    "provenance": 1,
    "settings": 2,
    "audit": 2,
    "distributed": 3,
    "learn": 4,
    "runs": 5,
    "user_code": 6,
    "report": 6,
    "text": 7,
    "control": 7,
    "trl": 8,
    "tools": 8,
    "commands": 9,
    "cli": 10,
    "__main__": 11,
}
FILES = {".".join(path.relative_to(SRC).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
MODULES = {name.removesuffix(".__init__"): path for name, path in FILES.items()}


def imported(path: Path) -> set[str]:
    """Modules of the package that a file imports anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tokencredit"):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in inner}
    return names & (set(MODULES) - {"tokencredit"})  # which has no layer, and only __version__


@cache
def imports() -> dict[str, set[str]]:
    """Those of each file but the package's own, which names all of it."""
    return {name: imported(path) for name, path in MODULES.items() if name != "tokencredit"}


def layer(module: str) -> int:
    """Height of a module's layer."""
    return LAYERS[module.split(".")[1]]


def folders(depth: int) -> dict[str, set[str]]:
    """Folders below the package at a depth, or files above it, by those from which they import."""
    graph: dict[str, set[str]] = {}
    for name, others in imports().items():
        here = ".".join(name.split(".")[:depth])
        graph.setdefault(here, set()).update({".".join(x.split(".")[:depth]) for x in others} - {here})
    return graph


def test_every_part_of_the_package_has_a_layer():
    parts = {name.split(".")[1] for name in MODULES if "." in name}
    assert parts == set(LAYERS)


def test_no_import_goes_upwards():
    pairs = [(name, other) for name, others in imports().items() for other in others]
    beside = {"text", "control"}
    wrong = [pair for pair in pairs if layer(pair[1]) > layer(pair[0]) or {x.split(".")[1] for x in pair} == beside]
    assert wrong == []


def test_no_module_imports_at_its_top_what_windows_lacks():
    tops = [(name, node) for name, path in FILES.items() for node in ast.parse(path.read_text(encoding="utf-8")).body]
    names = {(name, alias.name) for name, node in tops if isinstance(node, ast.Import) for alias in node.names}
    assert [pair for pair in names if pair[1] in ("fcntl", "pwd", "resource", "termios", "tty")] == []


@pytest.mark.parametrize("depth", [2, 3, 4, 9], ids=["packages", "folders", "folders in folders", "files"])
def test_nothing_imports_in_a_circle(depth):
    tuple(TopologicalSorter(folders(depth)).static_order())  # raises CycleError, which names the circle
