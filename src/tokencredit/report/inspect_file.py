"""Read and check a run's inspect.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokencredit.errors import ConfigError
from tokencredit.runs.jsonl import (
    Check,
    all_of,
    is_count,
    is_number,
    is_text,
    of,
    optional,
    read_object,
    require_fields,
)

NAME = "inspect.json"
SIDES = ("base", "tuned")


PART: dict[str, Check] = {"name": is_text, "kind": is_text, "layer": optional(is_count), "head": optional(is_count)}
KNOWN = optional(is_number)
NUMBERS: dict[str, Check] = dict.fromkeys(SIDES, is_number)
TOKENS = all_of(of(token=is_text, **NUMBERS))
FIELDS: dict[str, tuple[Check, str]] = {
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
    try:
        require_fields(str(file), inspection, FIELDS)
        tokens = len(inspection["tokens"])
        length: Check = lambda value: is_count(value) and 0 < value < tokens  # noqa: E731
        require_fields(str(file), inspection, {"prompt_length": (length, f"a count from 1 to {tokens - 1}")})
        require_fields(str(file), inspection, _fields_of_text(inspection, tokens, inspection["prompt_length"]))
    except ConfigError as error:
        raise ConfigError(f"{error}; run `tokencredit inspect` again") from error
    return inspection


def _fields_of_text(inspection: Mapping[str, Any], tokens: int, prompt: int) -> dict[str, tuple[Check, str]]:
    """Fields with one entry per token of the text or of the prompt, as `FIELDS`."""

    def matrix(name: str, kind: Check, columns: int) -> Check:
        """Rows of one entry per column, as many as the layers of that lens, which may be invalid."""
        layers = inspection[name].get("layers") if isinstance(inspection.get(name), dict) else None
        return all_of(all_of(kind, columns), len(layers) if isinstance(layers, list) else 0)

    def place(limit: int) -> Check:
        return lambda value: is_count(value) and value < limit

    columns, numbers = tokens - prompt, all_of(is_number, prompt)
    kinds = {"token": is_text, "probability": is_number, "rank": is_count}
    side = of(**{key: matrix("lens", kind, columns) for key, kind in kinds.items()})
    return {
        "question": (
            of(
                up=all_of(is_text),
                down=all_of(is_text),
                source=is_text,
                **NUMBERS,
                change=is_number,
                position=place(tokens - 1),
            ),
            "an object with up, down, source, base, tuned, change, and the position of a token before the last",
        ),
        "lens": (
            of(
                layers=all_of(is_text),
                positions=all_of(place(tokens - 1), columns),
                base=side,
                tuned=side,
                kl=matrix("lens", is_number, columns),
            ),
            "an object with layers, positions, base, tuned and kl, one row per layer and one column per position",
        ),
        "attention": (
            of(
                **{"from": place(tokens - 1)},
                to=all_of(place(prompt), prompt),
                heads=all_of(of(layer=is_count, head=is_count, base=numbers, tuned=numbers)),
                input_gradient=of(base=numbers, tuned=numbers),
            ),
            "an object with from, to, heads and input_gradient, one number per token of the prompt",
        ),
        "critic": (
            optional(
                of(
                    layers=all_of(is_text),
                    values=matrix("critic", is_number, tokens),
                    final=all_of(is_number, tokens),
                    score=KNOWN,
                    note=is_text,
                )
            ),
            "null, or an object with layers, values, final, score and note, one number per token",
        ),
    }
