"""Commands of shell scripts, read and never run: continuation lines, variables, quoted commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from tokencredit.tools.migration.arithmetic import shell_sum

VARIABLE = re.compile(r"\$\{(\w+)(?:\[@\])?(?::?-((?:[^{}]|\{[^{}]*\})*))?\}|\$(\w+)")
ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
BEFORE = re.compile(
    r"export|declare|local|readonly|then|else|do|&&|\|\||-\w+|\S+\)|(if|for|while|until|case|select|\{)|(fi|done|esac|\})"
)
"""Words before an assignment; the first group begins a block that may not run once, the second ends one."""
ARRAY = re.compile(r"^\s*(\w+)(\+?)=\(([^)]*(?:\)\)[^)]*)*)\)[ \t]*$", re.MULTILINE)
SUM = re.compile(r"\$\(\(([^()`]*)\)\)|\$\(expr ([^()`]*)\)|`expr ([^`]*)`")
OTHER = re.compile(r"\$\([^()]*\)|`[^`]*`")
WORD = re.compile(rf"(?:{OTHER.pattern}|\S)+")
PIECE = re.compile(
    rf"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|{SUM.pattern}|{OTHER.pattern}|(?<!\S)\#.*"""
    rf"""|;|&&|\|\||(?<![^\s;])(?:{VARIABLE.pattern})(?![^\s;])"""
)
"""Pieces of a line: those in which nothing ends a command or is split, ends of commands, variables without quotes."""
ENDS = re.compile(r"&&|\|\|?|;|&|\d?>+.*|&>+.*|<.*")
LAUNCHER = re.compile(
    r"(?<![-\w])(torchrun|deepspeed|llamafactory-cli|distributed\.\w+|accelerate.(commands.)?launch) "
)
PROCESSES = re.compile(r"--(?:nproc[_-]per[_-]node|num[_-]processes|num_gpus)[= ](\S+)")
NODES = re.compile(r"--(?:nnodes|num_nodes)[= ](\S+)")
SPLIT = "\0"
"""Before a variable whose value is split into words."""
MAX_NESTING = 3
MAX_VALUE = 100_000
"""Most characters of a variable, and words of an array; one that would be longer keeps the names of others."""


@dataclass
class Script:
    """A shell script's text, with the variables that were assigned so far."""

    variables: dict[str, str] = field(default_factory=lambda: {"HOME": "~"})  # which every path here may begin with
    arrays: dict[str, list[str]] = field(default_factory=dict)

    def commands(self, text: str) -> Iterator[list[str]]:
        """The words of each command, variables in place; those without one value in the script stay as they are."""
        depth = 0
        text = re.sub(r"\\[ \t]*(#[^\n]*)?\r?\n", " ", re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE))
        for line in ARRAY.sub(lambda match: " ".join(match[0].split()), text).splitlines():
            array = ARRAY.fullmatch(line)
            for command in PIECE.sub(_marked, line if array is None else array[3]).split("\n"):
                try:
                    words = shlex.split(self._sums(command), comments=True)
                except ValueError:  # a quote that goes on, as in a here document
                    continue
                while array is None and words:
                    if before := BEFORE.fullmatch(words[0]):
                        depth = max(depth + (before.lastindex == 1) - (before.lastindex == 2), 0)
                    elif not self._assign(words[0], sure=not depth and command[:2] not in ("&&", "||")):
                        break
                    words = words[1:]
                words = [inner for word in words for inner in self._words(word)]
                if array is not None:
                    self.arrays[array[1]] = (self.arrays.get(array[1], []) * bool(array[2]) + words)[:MAX_VALUE]
                elif words:
                    yield words

    def processes(self, line: str) -> int | None:
        """The number of processes that a command starts; None if its launcher takes one that is not given."""
        line += self.fill(" --nproc_per_node=${NPROC_PER_NODE-} --nnodes=${NNODES-}")
        count, nodes = PROCESSES.search(line), NODES.search(line)
        if count is None:
            return None if LAUNCHER.search(line) else 1
        times = nodes[1] if nodes and "processes" not in count[0] else 1  # num_processes counts those of all nodes
        return int(shell_sum(f"{count[1]} * {times}") or 0) or None

    def fill(self, text: str) -> str:
        """A text with the variables that are known, or have a default, in place."""

        def value(match: re.Match[str]) -> str:
            return self.variables.get(match[1] or match[3], match[0] if match[2] is None else match[2])

        for _ in range(MAX_NESTING):
            if sum(len(value(match)) for match in VARIABLE.finditer(text)) > MAX_VALUE:  # they double each other
                return text
            text = VARIABLE.sub(value, text)
        return text

    def _assign(self, word: str, sure: bool) -> bool:
        """Keep the variable that a word assigns, or its name if it may have another value; False for another word."""
        if (match := ASSIGNMENT.fullmatch(word)) is None:
            return False
        name, more, text = match.groups()
        text = f"${{{name}-}}{text}" if more else text
        value, own = self.fill(text), any(name in used.groups() for used in VARIABLE.finditer(text))
        self.variables[name] = value if sure or own or self.variables.get(name, value) == value else f"${{{name}}}"
        return True

    def _words(self, word: str) -> list[str]:
        """The words that a word stands for: of an array, or of a variable without quotes, several."""
        text = word.removeprefix(SPLIT)
        words = [self.fill(text)] if text == word else WORD.findall(self.fill(text))
        name = VARIABLE.fullmatch(text)
        return self.arrays.get(name[1] or name[3], words) if name else words

    def _sums(self, line: str) -> str:
        """The line with sums of whole numbers computed, and other commands in it as one word."""

        def compute(match: re.Match[str]) -> str:
            given = self.fill(next(group for group in match.groups() if group is not None))
            numbers = self.fill(re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", r"$\1", given))
            return shell_sum(numbers.replace("\\", "")) or self._kept(match[0])

        return OTHER.sub(lambda match: self._kept(match[0]), SUM.sub(compute, line))

    def _kept(self, text: str) -> str:
        name = f"kept_{len(self.variables)}"
        self.variables[name] = text
        return f"${{{name}}}"


def _marked(match: re.Match[str]) -> str:
    """A piece of a line: a new line for the end of a command, and a variable without quotes as a word that is split."""
    if match[0] in (";", "&&", "||"):
        return f"\n{match[0].strip(';')} "
    alone = VARIABLE.fullmatch(match[0]) and not {"'", '"'} & set(match[0])  # quotes in a default are the shell's
    return shlex.quote(SPLIT + match[0]) if alone else match[0]


def arguments(words: list[str], program: re.Pattern[str], depth: int = 0) -> list[str] | None:
    """The words after the first that is a program's, up to the command's end; also inside a quoted command."""
    for number, word in enumerate(words):
        if len(word.split()) > 1 and depth < MAX_NESTING:
            try:
                found = arguments(shlex.split(word), program, depth + 1)
            except ValueError:
                continue
            if found is not None:
                return found
        if not program.fullmatch(word):
            continue
        rest = words[number + 1 :]
        end = next((place for place, word in enumerate(rest) if ENDS.fullmatch(word)), len(rest))
        return [word for word in rest[:end] if word not in ("$@", "$*", "${@:1}", "")]
    return None


def flags(words: list[str]) -> dict[str, object]:
    """Flags by name with underscores: the value, a list of several, or True if there is none."""
    found: dict[str, object] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = value if equals else True
        elif name:
            before = found[name]
            found[name] = word if before is True else [*before, word] if isinstance(before, list) else [before, word]
    return found
