"""Labels by hand: the pairs of a file, the file of labels, and what is asked next."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokencredit.errors import ConfigError
from tokencredit.runs.folder import append, flush, write_file
from tokencredit.runs.jsonl import TEXT, Leaf, mismatch, one_of, read_object, require
from tokencredit.runs.untrusted import visible_lines
from tokencredit.text.rewards.texts import Text, content

LABELS = ("A", "B", "tie", "skip")
START = b'{"pair": "'
"""Start of each line of a file of labels."""
CONTENT = Leaf(
    lambda value: value is None or isinstance(value, str) or not mismatch(value, [{"text?": TEXT}]), "a text or blocks"
)
MESSAGE = {"role": TEXT, "content?": CONTENT}
PROSE = Leaf(
    lambda value: isinstance(value, str) or bool(value and not mismatch(value, [MESSAGE])), "a text or a conversation"
)
LABEL = {"pair": TEXT, "label": one_of(LABELS), **dict.fromkeys(("prompt", "a", "b"), PROSE)}
"""A line of a file of labels."""


@dataclass(frozen=True)
class Pair:
    """Two completions of a prompt, in the order in which they are shown."""

    key: str
    """Digest of prompt and completions, the same in either order."""
    prompt: Text
    a: Text
    b: Text
    truncated: tuple[bool, bool] = (False, False)
    """True for A and for B if it has no end, because it reached the longest length."""


def read_pairs(file: Path, seed: int) -> list[Pair]:
    """The distinct pairs of a JSONL file, ranked or not; the seed decides which completion is A.

    Raises:
        ConfigError: there is no such file, it has no pair, or a line is not one; the message names it.
    """
    if not file.is_file():
        raise ConfigError(f"{str(file)!r} is not a file; give a file of pairs, such as `tokencredit pairs` writes")
    pairs: dict[str, Pair] = {}
    for where, row in _lines(file, file.read_bytes()):
        names = ("a", "b") if "a" in row and "chosen" not in row else ("chosen", "rejected")
        require(where, row, dict.fromkeys(("prompt", *names), PROSE))
        first, second = (row[name] for name in names)
        cut, other_cut = (row.get(f"{name}_truncated") is True for name in names)
        both = sorted((first, second), key=json.dumps)
        key = hashlib.sha256(json.dumps([row["prompt"], both], sort_keys=True).encode()).hexdigest()[:16]
        if random.Random(f"{seed} {key}").random() < 0.5:
            first, second, cut, other_cut = second, first, other_cut, cut
        pairs.setdefault(key, Pair(key, row["prompt"], first, second, (cut, other_cut)))
    if not pairs:
        raise ConfigError(f"{file} has no pairs; `tokencredit pairs` writes them")
    return list(pairs.values())


@dataclass
class Labels:
    """The labels of a file, to which each new one is appended at once; the last label of a pair counts."""

    file: Path
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By key of the pair, in the order of labelling."""

    @classmethod
    def open(cls, file: Path) -> Labels:
        """Read a file of labels, if there is one, and remove a last line that was not written to its end.

        Raises:
            ConfigError: a line is not a label, which the message names, or the file's folder does not exist.
        """
        labels = cls(file)
        if not file.parent.is_dir():
            raise ConfigError(f"the folder of {file} does not exist; make it first")
        if not file.exists():
            return labels
        written = file.read_bytes()
        cut = written[written.rfind(b"\n") + 1 :]
        try:
            whole = not mismatch(json.loads(cut), LABEL)  # an editor took its line break off
        except (ValueError, RecursionError):  # the latter at deep nesting
            whole = False
        if not whole and not cut.startswith(START) and not START.startswith(cut):
            raise ConfigError(f"{file} is not a file of labels; give another one")
        kept = written if whole else written[: len(written) - len(cut)]
        for where, row in _lines(file, kept):
            if mismatch(row, LABEL):
                raise ConfigError(f"{where} is not a label; give another file of labels")
            labels._keep(row)
        if whole:
            append(file, b"\n")
        elif cut:  # its process was killed
            os.truncate(file, len(kept))
        return labels

    def add(self, pair: Pair, label: str) -> None:
        """Append a label and flush it to the disk."""
        row: dict[str, Any] = {"pair": pair.key, "label": label, "prompt": pair.prompt, "a": pair.a, "b": pair.b}
        row |= dict(zip(("a_truncated", "b_truncated"), pair.truncated, strict=True))
        append(self.file, (json.dumps(row) + "\n").encode())
        flush(self.file)
        self._keep(row)

    def _keep(self, row: dict[str, Any]) -> None:
        self.rows.pop(row["pair"], None)
        self.rows[row["pair"]] = row


def export(labels: Labels, pairs: Collection[Pair], out: Path) -> int:
    """Write prompt, chosen and rejected of the pairs labelled A or B as JSON lines; returns their number.

    Raises:
        ConfigError: there is none.
    """
    sides = {"A": {"chosen": "a", "rejected": "b"}, "B": {"chosen": "b", "rejected": "a"}}
    rows = []
    for row in (labels.rows[pair.key] for pair in pairs if pair.key in labels.rows):
        if own := sides.get(row["label"]):
            texts = {name: row[side] for name, side in own.items()}
            cut = {f"{name}_truncated": row.get(f"{side}_truncated") is True for name, side in own.items()}
            rows.append({"prompt": row["prompt"], **texts, **cut})
    if not rows:
        raise ConfigError(f"{labels.file} has none of these pairs labelled A or B; label some first")
    write_file(out, "".join(json.dumps(row) + "\n" for row in rows))
    return len(rows)


class Session:
    """The pairs of a file in turn, until each has a label."""

    def __init__(self, pairs: Sequence[Pair], labels: Labels):
        self.pairs, self.labels = {pair.key: pair for pair in pairs}, labels
        self._again: str | None = None

    def current(self) -> Pair | None:
        """The pair to label; None if all have a label."""
        if self._again is not None:
            return self.pairs[self._again]
        return next((pair for key, pair in self.pairs.items() if key not in self.labels.rows), None)

    def label(self, label: str) -> None:
        """Label the current pair."""
        if (pair := self.current()) is not None:
            self.labels.add(pair, label)
            self._again = None

    def back(self) -> None:
        """Return to the pair that was labelled before the current one, if there is one."""
        done = [key for key in self.labels.rows if key in self.pairs]
        if self._again is not None:
            done = done[: done.index(self._again)]
        self._again = done[-1] if done else self._again

    def existing_label(self) -> str | None:
        """The label that the current pair already has, in its order of A and B; None for a new one."""
        if self._again is None:
            return None
        row = self.labels.rows[self._again]
        swapped = {"A": "B", "B": "A"} if row["a"] != self.pairs[self._again].a else {}
        return swapped.get(row["label"], str(row["label"]))

    def counts(self) -> dict[str, int]:
        """Number of pairs by label, and how many are left."""
        labels = Counter(row["label"] for key, row in self.labels.rows.items() if key in self.pairs)
        return {label: labels[label] for label in LABELS} | {"left": len(self.pairs) - labels.total()}


def readable(text: Text) -> str:
    """A text, or a conversation with the role of each message, escaped line by line."""
    if not isinstance(text, str):
        text = "\n".join(f"{message['role']}: {content(message)}" for message in text)
    return visible_lines(text)


def _lines(file: Path, text: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """The location and object of each line of a file's text."""
    for number, line in enumerate(text.split(b"\n"), start=1):
        if line.strip():
            where = f"{file}, line {number}"
            yield where, read_object(where, line)
