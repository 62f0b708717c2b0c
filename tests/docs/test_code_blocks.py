"""Code blocks of the pages: commands have real options and values, settings are real, Python compiles.

Other tests run the blocks of python.md, from-trl.md, turns.md and your-own.md, and the functions and the service of
rewards.md. Only compiled are those of README.md, audit.md, compare.md and serving.md, which train for minutes or read
runs that others made. Commands are not run: they train, install, or need files of the reader's.
"""

import re
import shlex
from contextlib import suppress
from pathlib import Path

import pytest

from docs.site_gallery import CARDS
from tokencredit.cli import command_parser
from tokencredit.commands import COMMANDS
from tokencredit.commands.command_line import Options, value_of
from tokencredit.errors import ConfigError
from tokencredit.settings.fields import settings_of
from tokencredit.settings.reader import load_yaml
from tokencredit.settings.run_kind import RUN_KINDS

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(x for folder in ("docs", "examples", "recipes") for x in (ROOT / folder).rglob("*.md"))]
BLOCKS = [
    (f"{page.relative_to(ROOT)}:{text[: found.start()].count(chr(10)) + 1}", found[1], found[2])
    for page in PAGES
    for text in [page.read_text(encoding="utf-8")]
    for found in re.finditer(r"^```(\w+)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
]
BLOCKS += [(f"gallery: {card.name}", "sh", "\n".join(card.commands)) for card in CARDS]
OPERATORS = ("<", ">", ">>", "|", "&&", ";", "done")


def of(*languages):
    """Parametrise a test with the blocks of languages."""
    blocks = [(place, text) for place, language, text in BLOCKS if language in languages]
    return pytest.mark.parametrize("block", [text for _, text in blocks], ids=[place for place, _ in blocks])


def commands(block):
    """The arguments of each `tokencredit` command of a block, up to the shell's next operator."""
    for line in block.replace("\\\n", " ").splitlines():
        tokens = shlex.split(line, comments=True)
        for start, word in enumerate(tokens):
            if word in ("tokencredit", "tokencredit.cli"):
                ends = (end for end in range(start, len(tokens)) if tokens[end] in OPERATORS)
                yield tokens[start + 1 : next(ends, None)]


@of("sh", "bash")
def test_commands_have_real_options_and_values(block):
    for name, *arguments in commands(block):
        if name not in COMMANDS:
            assert name == "--print_completion"
        elif "--help" not in arguments:
            parser = command_parser(name)
            options, unknown = parser.parse_known_args(arguments, Options(given=[], settings={}))
            assert not unknown
            for key, text in options.given:
                if key != "config" and "$" not in text:
                    value_of(settings_of(parser.kind)[key.removesuffix("+")].hint, key, text)


@of("yaml")
def test_settings_are_real(block):
    settings = load_yaml(block)
    if not {"grid", "variants"} & settings.keys():
        assert is_configuration(settings)
        return
    variants = [settings.get("base", {}), *settings.get("variants", {}).values()]
    grid = [{key: value} for key, values in settings.get("grid", {}).items() for value in values]
    assert all(map(is_configuration, variants + grid))


def is_configuration(settings):
    """True if a command that trains takes these settings."""
    for run_kind in RUN_KINDS.values():
        with suppress(ConfigError):
            run_kind.config.from_dict(settings)
            return True
    return False


@of("python", "py")
def test_python_compiles(block):
    compile(block, "block", "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_targets_of_make_are_real(page):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(re.findall(r"`make ([a-z-]+)`", page.read_text(encoding="utf-8"))) <= {*targets}
