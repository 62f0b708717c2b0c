"""Read and check a run's inspect.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokencredit.errors import ConfigError
from tokencredit.runs.jsonl import COUNT, KNOWN, NUMBER, TEXT, Form, Leaf, is_count, read_object, require

NAME = "inspect.json"
SIDES = ("base", "tuned")
COUNT_OR_NULL = Leaf(lambda value: value is None or is_count(value), "a count or null")
PART: dict[str, Form] = {"name": TEXT, "kind": TEXT, "layer": COUNT_OR_NULL, "head": COUNT_OR_NULL}
NUMBERS: dict[str, Form] = dict.fromkeys(SIDES, NUMBER)
TOKENS = [{"token": TEXT, **NUMBERS}]
FIELDS: dict[str, Form] = {
    **dict.fromkeys(("run", *SIDES, "prompt", "completion"), TEXT),
    "seed": COUNT,
    "seconds": NUMBER,
    "model": {"family": TEXT, **dict.fromkeys(("layers", "heads", "width", "parameters"), COUNT)},
    "tokens": [TEXT],
    "answer": {
        "sentence": TEXT,
        "top": [{"name": TEXT, **dict.fromkeys(("share", *SIDES), KNOWN), "others": [KNOWN]}],
    },
    "attribution": {
        "target": TEXT,
        "components": [{**PART, **NUMBERS, "difference": NUMBER}],
        "total": {**NUMBERS, "difference": NUMBER},
        "error": NUMBERS,
        "norm": TEXT,
    },
    "patching": {
        "metric": TEXT,
        "components": [
            {**PART, "patched": NUMBER, **dict.fromkeys(("share", "ablated", "ablated_share"), KNOWN)},
        ],
        "top_five": {"names": [TEXT], "patched": NUMBER, "share": KNOWN},
    },
    "lens": {"layers": [TEXT]},
    "critic": Leaf(lambda value: value is None or isinstance(value, dict), "an object or null"),
    "weights": {
        "modules": [{"name": TEXT, "relative_norm": NUMBER, "effective_rank": KNOWN, "parameters": COUNT}],
        "tokens_up": TOKENS,
        "tokens_down": TOKENS,
    },
}
"""Fields whose form does not depend on the length of the text."""


def read_inspect(file: Path) -> dict[str, Any] | None:
    """The inspection in this file; None if the file does not exist.

    Raises:
        ConfigError: the file is invalid; the message names the key.
    """
    if not file.is_file():
        return None
    inspection = read_object(file, file.read_text(encoding="utf-8", errors="replace"))
    try:
        require(file, inspection, FIELDS)
        require(file, inspection, {"prompt_length": _place(len(inspection["tokens"]), first=1)})
        if inspection["critic"] is not None:
            require(file, inspection, {"critic": {"layers": [TEXT]}})
        require(file, inspection, _fields_of_text(inspection))
    except ConfigError as error:
        raise ConfigError(f"{error}; run `tokencredit inspect` again") from error
    return inspection


def _place(end: int, first: int = 0) -> Leaf:
    """The form of a position before `end`."""
    return Leaf(lambda value: is_count(value) and first <= value < end, f"a count from {first} to {end - 1}")


def _fields_of_text(inspection: Mapping[str, Any]) -> dict[str, Form]:
    """Fields with one entry per token of the text or of the prompt, and per layer."""
    tokens, prompt, critic = len(inspection["tokens"]), inspection["prompt_length"], inspection["critic"]
    position, columns = _place(tokens - 1), tokens - prompt

    def rows(kind: Leaf) -> Form:
        """One row per layer of the lens, and one column per position."""
        return [[kind, columns], len(inspection["lens"]["layers"])]

    side = {"token": rows(TEXT), "probability": rows(NUMBER), "rank": rows(COUNT)}
    numbers = {key: [NUMBER, prompt] for key in SIDES}
    fields: dict[str, Form] = {
        "question": {"up": [TEXT], "down": [TEXT], "source": TEXT, **NUMBERS, "change": NUMBER, "position": position},
        "lens": {"positions": [position, columns], **dict.fromkeys(SIDES, side), "kl": rows(NUMBER)},
        "attention": {
            "from": position,
            "to": [_place(prompt), prompt],
            "heads": [{"layer": COUNT, "head": COUNT, **numbers}],
            "input_gradient": numbers,
        },
    }
    if critic is not None:
        values = [[NUMBER, tokens], len(critic["layers"])]
        fields["critic"] = {"values": values, "final": [NUMBER, tokens], "score": KNOWN, "note": TEXT}
    return fields
