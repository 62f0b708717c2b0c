"""YAML of configurations, within bounds: plain values, no more of them than a person could mean."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

MOST_VALUES = 100_000
"""In one text, each alias counted as all that it stands for, and a hundred characters as one more value."""
DEEPEST = 50
"""Lists and mappings within one another."""

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class OutOfBounds(yaml.MarkedYAMLError):
    """YAML that no configuration needs: a tag, or more than the bounds allow."""


def load_yaml(text: str) -> Any:
    """The value of a YAML document: dicts, lists, texts, numbers, dates and None.

    Raises:
        yaml.YAMLError: as `check_yaml`, or a number or date that Python cannot hold.
    """
    try:
        check_yaml(text)
        return yaml.load(text, Loader=Loader)
    except ValueError as error:  # such as a month 13, or half a character
        raise yaml.YAMLError(str(error)) from error


def check_yaml(text: str) -> None:
    """Make sure that a text is YAML without tags and within the bounds, before anything is built from it.

    The texts in it are held to the bounds too, because the command's parser reads those of numbers as YAML again.

    Raises:
        yaml.YAMLError: it is not; where it stands in the text is said.
    """
    for inner in scan(text, tags=False):
        try:
            list(scan(inner, tags=True))
        except OutOfBounds:
            raise
        except (yaml.YAMLError, UnicodeError):
            continue  # a text like any other


def scan(text: str, *, tags: bool) -> Iterator[str]:
    """Each scalar of a YAML document, for as long as it is within the bounds.

    Args:
        text: the document.
        tags: whether values may name their types.

    Raises:
        yaml.YAMLError: it is no YAML, or not within the bounds.
    """
    sizes: dict[str, int] = {}  # values that each anchor stands for, once it is complete
    inside: list[str | None] = []  # anchors of what the scan is inside of
    begun: list[int] = []  # and the values before each of them
    values = 0
    for event in yaml.parse(text, Loader=Loader):
        mark = event.start_mark
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = inside.pop(), begun.pop()
            if anchor is not None:
                sizes[anchor] = values - before
        elif isinstance(event, yaml.NodeEvent):
            if not tags and getattr(event, "tag", None) not in (None, "!"):
                raise OutOfBounds(
                    problem=f"{event.tag!r} is a tag; configurations hold plain values", problem_mark=mark
                )
            if isinstance(event, yaml.AliasEvent):
                if event.anchor in inside:
                    raise OutOfBounds(problem=f"the alias *{event.anchor} stands inside itself", problem_mark=mark)
                values += sizes.get(event.anchor, 1)
            else:
                values += 1 + len(getattr(event, "value", "")) // 100
                if isinstance(event, yaml.ScalarEvent) and event.anchor is not None:
                    sizes[event.anchor] = 1 + len(event.value) // 100
            if values > MOST_VALUES:
                raise OutOfBounds(problem=f"more than {MOST_VALUES} values, aliases written out", problem_mark=mark)
            if isinstance(event, yaml.ScalarEvent):
                yield event.value
            elif isinstance(event, yaml.CollectionStartEvent):
                inside.append(event.anchor)
                begun.append(values - 1)
                if len(inside) > DEEPEST:
                    raise OutOfBounds(problem=f"more than {DEEPEST} lists in one another", problem_mark=mark)
