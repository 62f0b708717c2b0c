"""Files are UTF-8 and output fits any encoding, whatever the machine's locale is."""

import ast
from pathlib import Path

import pytest

SOURCES = sorted(
    path for part in ("src", "demo", "examples") for path in Path(__file__).parents[1].glob(f"{part}/**/*.py")
)
TEXT_CALLS = {"open", "fdopen", "read_text", "write_text", "TextIOWrapper"}


def named(call):
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def in_locale(call):
    """True for a call that reads or writes text in the locale's encoding, as ruff's PLW1514, which is a preview."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if keywords.keys() & {"encoding", None}:
        return False
    if named(call) in ("run", "Popen", "check_output") and keywords.keys() & {"text", "universal_newlines"}:
        return True
    of_paths = named(call) in ("read_text", "write_text") and not isinstance(call.func, ast.Attribute)
    if (
        named(call) not in TEXT_CALLS
        or of_paths
        or ast.unparse(call.func) in ("os.open", "webbrowser.open", "Labels.open")
    ):
        return False
    modes = [
        x.value for x in (*call.args, keywords.get("mode")) if isinstance(x, ast.Constant) and isinstance(x.value, str)
    ]
    return not any("b" in mode and len(mode) < 4 for mode in modes)


@pytest.mark.parametrize("code", ["x.read_text()", "open(f)", "f.open('w')", "run(c, text=True)", "p.write_text(t)"])
def test_calls_in_the_locales_encoding_are_found(code):
    assert in_locale(ast.parse(code).body[0].value)


@pytest.mark.slow
def test_text_files_are_read_and_written_in_utf_8():
    calls = ((path, node) for path in SOURCES for node in ast.walk(ast.parse(path.read_bytes())))
    found = [f"{path}:{node.lineno}" for path, node in calls if isinstance(node, ast.Call) and in_locale(node)]
    assert found == []
