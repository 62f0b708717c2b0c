"""Write, read and check a run's inspect.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokencredit.errors import ConfigError
from tokencredit.runs.folder import RunFolder
from tokencredit.runs.jsonl import all_of, is_count, is_number, is_text, read_object

NAME = "inspect.json"
VERSION = 1
Check = Callable[[Any], bool]
SIDES = ("base", "tuned")


def write_inspection(folder: RunFolder, result: Mapping[str, Any]) -> Path:
    """Write an inspection into a run's folder, replacing an earlier one; returns the file."""
    folder.write(NAME, json.dumps({"version": VERSION, **result}, allow_nan=False) + "\n")
    return folder.path / NAME


def optional(kind: Check) -> Check:
    """A check for values that pass this check, or None."""
    return lambda value: value is None or kind(value)


def of(**kinds: Check) -> Check:
    """A check for objects whose values under these names pass their checks."""
    return lambda value: (
        isinstance(value, dict) and all(name in value and kind(value[name]) for name, kind in kinds.items())
    )


def row(kind: Check, length: int) -> Check:
    """A check for lists of this length whose values pass this check."""
    return lambda value: isinstance(value, list) and len(value) == length and all(map(kind, value))


def is_place(limit: int) -> Check:
    """A check for positions below a limit."""
    return lambda value: is_count(value) and value < limit


PART: dict[str, Check] = {"name": is_text, "kind": is_text, "layer": optional(is_count), "head": optional(is_count)}
KNOWN = optional(is_number)
NUMBERS: dict[str, Check] = dict.fromkeys(SIDES, is_number)
TOKENS = all_of(of(token=is_text, **NUMBERS))
FIELDS: dict[str, tuple[Check, str]] = {
    "version": (lambda value: value == VERSION, f"{VERSION}"),
    **dict.fromkeys(("run", *SIDES, "prompt", "completion"), (is_text, "a text")),
    "seed": (is_count, "a count"),
    "seconds": (is_number, "a number"),
    "model": (
        of(layers=is_count, heads=is_count, width=is_count, family=is_text, parameters=is_count),
        "an object with the counts layers, heads, width and parameters, and the text family",
    ),
    "tokens": (lambda value: all_of(is_text)(value) and len(value) > 1, "a list of two texts or more"),
    "answer": (
        of(sentence=is_text, top=all_of(of(name=is_text, share=KNOWN, base=KNOWN, tuned=KNOWN, others=all_of(KNOWN)))),
        "an object with sentence and top",
    ),
    "attribution": (
        of(
            target=is_text,
            components=all_of(of(**PART, **NUMBERS, difference=is_number)),
            total=of(**NUMBERS, difference=is_number),
            error=of(**NUMBERS),
            norm=is_text,
        ),
        "an object with target, components, total, error and norm",
    ),
    "patching": (
        of(
            metric=is_text,
            components=all_of(of(**PART, patched=is_number, share=KNOWN, ablated=KNOWN, ablated_share=KNOWN)),
            top_five=of(names=all_of(is_text), patched=is_number, share=KNOWN),
        ),
        "an object with metric, components and top_five",
    ),
    "weights": (
        of(
            modules=all_of(of(name=is_text, relative_norm=is_number, effective_rank=KNOWN, parameters=is_count)),
            tokens_up=TOKENS,
            tokens_down=TOKENS,
        ),
        "an object with modules, tokens_up and tokens_down",
    ),
}
"""Fields whose form does not depend on the length of the text, by key: check and expected value."""


def read_inspect(file: Path) -> dict[str, Any] | None:
    """The inspection in this file; None if the file does not exist.

    Raises:
        ConfigError: the file is invalid; the message names the key.
    """
    if not file.is_file():
        return None
    inspection = read_object(file, file.read_text(encoding="utf-8", errors="replace"))
    _check(file, inspection, FIELDS)
    prompt: Any = inspection.get("prompt_length")
    limit = len(inspection["tokens"])
    if not (is_count(prompt) and 0 < prompt < limit):
        raise _invalid(file, "prompt_length", f"a count from 1 to {limit - 1}")
    _check(file, inspection, _fields_of_text(inspection, limit, prompt))
    return inspection


def _fields_of_text(inspection: Mapping[str, Any], tokens: int, prompt: int) -> dict[str, tuple[Check, str]]:
    """Fields with one entry per token of the text or of the prompt, as `FIELDS`."""
    lens = inspection.get("lens")
    critic = inspection.get("critic")
    columns, depth, critic_depth = tokens - prompt, _depth(lens), _depth(critic)

    def matrix(kind: Check) -> Check:
        return row(row(kind, columns), depth)

    side = of(token=matrix(is_text), probability=matrix(is_number), rank=matrix(is_count))
    numbers = row(is_number, prompt)
    return {
        "question": (
            of(
                up=all_of(is_text),
                down=all_of(is_text),
                source=is_text,
                **NUMBERS,
                change=is_number,
                position=is_place(tokens - 1),
            ),
            "an object with up, down, source, base, tuned, change, and the position of a token before the last",
        ),
        "lens": (
            of(
                layers=all_of(is_text),
                positions=row(is_place(tokens - 1), columns),
                base=side,
                tuned=side,
                kl=matrix(is_number),
            ),
            "an object with layers, positions, base, tuned and kl, one row per layer and one column per position",
        ),
        "attention": (
            of(
                **{"from": is_place(tokens - 1)},
                to=row(is_place(prompt), prompt),
                heads=all_of(of(layer=is_count, head=is_count, base=numbers, tuned=numbers)),
                input_gradient=of(base=numbers, tuned=numbers),
            ),
            "an object with from, to, heads and input_gradient, one number per token of the prompt",
        ),
        "critic": (
            optional(
                of(
                    layers=all_of(is_text),
                    values=row(row(is_number, tokens), critic_depth),
                    final=row(is_number, tokens),
                    score=KNOWN,
                    note=is_text,
                )
            ),
            "null, or an object with layers, values, final, score and note, one number per token",
        ),
    }


def _depth(lens: Any) -> int:
    """Number of layers in a lens that may be invalid."""
    layers = lens.get("layers") if isinstance(lens, dict) else None
    return len(layers) if isinstance(layers, list) else 0


def _check(file: Path, inspection: Mapping[str, Any], fields: Mapping[str, tuple[Check, str]]) -> None:
    """Raise `ConfigError` for a missing or invalid field."""
    for key, (fits, wanted) in fields.items():
        if key not in inspection or not fits(inspection[key]):
            raise _invalid(file, key, wanted)


def _invalid(file: Path, key: str, wanted: str) -> ConfigError:
    return ConfigError(f"{file}: {key} is not {wanted}; run `tokencredit inspect` again")
