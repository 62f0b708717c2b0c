"""Commands of shell scripts, read and never run: continuation lines, variables, quoted commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

from tokencredit.tools.migration.arithmetic import shell_sum

VARIABLE = re.compile(r"\$\{(\w+)(?:\[@\])?(?::?-((?:[^{}]|\{[^{}]*\})*))?\}|\$(\w+)")
ASSIGNMENT = re.compile(r"(?:(?:export|declare|local|readonly)\s+)?(\w+)=(.*)", re.DOTALL)
ARRAY = re.compile(r"^\s*(\w+)\+?=\(([^)]*(?:\)\)[^)]*)*)\)[ \t]*$", re.MULTILINE)
SUM = re.compile(r"\$\(\(([^()`]*)\)\)|\$\(expr ([^()`]*)\)|`expr ([^`]*)`")
OTHER = re.compile(r"\$\([^()]*\)|`[^`]*`")
ENDS = re.compile(r"&&|\|\|?|;|&|\d?>+.*|&>+.*|<.*")
PROCESSES = re.compile(r"--(?:nproc_per_node|nproc-per-node|num_processes)[= ](\d+)")
MAX_NESTING = 3
MAX_VALUE = 100_000
"""Most characters of a variable; one that would be longer keeps the names of others."""


@dataclass
class Script:
    """A shell script's text, with the variables that were assigned so far."""

    variables: dict[str, str] = field(default_factory=lambda: {"HOME": "~"})  # which every path here may begin with
    arrays: dict[str, list[str]] = field(default_factory=dict)

    def commands(self, text: str) -> Iterator[list[str]]:
        """The words of each command, variables in place; those that the script does not assign stay as they are."""
        text = re.sub(r"\\[ \t]*(#[^\n]*)?\r?\n", " ", re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE))
        for line in ARRAY.sub(lambda match: " ".join(match[0].split()), text).splitlines():
            array = ARRAY.fullmatch(line)
            try:
                words = shlex.split(self._sums(line if array is None else array[2]), comments=True)
            except ValueError:  # a quote that goes on, as in a here document
                continue
            if array is not None:
                self.arrays[array[1]] = [*self.arrays.get(array[1], []), *map(self.fill, words)]
                continue
            while words and (match := ASSIGNMENT.fullmatch(words[0])) and not words[0].startswith("-"):
                self.variables[match[1]] = self.fill(match[2])
                words = words[1:]
            if words and words[0] in ("export", "declare", "local", "readonly"):
                pairs = [ASSIGNMENT.fullmatch(word) for word in words[1:]]
                self.variables.update({pair[1]: self.fill(pair[2]) for pair in pairs if pair})
            elif words:
                yield [inner for word in words for inner in self._words(word)]

    def fill(self, text: str) -> str:
        """A text with the variables that are known, or have a default, in place."""

        def value(match: re.Match[str]) -> str:
            return self.variables.get(match[1] or match[3], match[0] if match[2] is None else match[2])

        for _ in range(MAX_NESTING):
            if sum(len(value(match)) for match in VARIABLE.finditer(text)) > MAX_VALUE:  # they double each other
                return text
            text = VARIABLE.sub(value, text)
        return text

    def _words(self, word: str) -> list[str]:
        name = VARIABLE.fullmatch(word)
        return self.arrays.get(name[1] or name[3], [self.fill(word)]) if name else [self.fill(word)]

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
