from enum import Enum
from typing import Any, Literal

import pytest

from tokencredit.errors import ConfigError
from tokencredit.text.turns.protocols.tools import describe, describe_all, methods


class Direction(Enum):
    UP = "up"
    DOWN = "down"


def every(
    a: int,
    b: float,
    c: str | None,
    d: list[int],
    e: dict[str, bool],
    f: Literal["x", "y"],
    g: Direction,
    h: Any,
    i: int | str = 0,
    j: bool = False,
) -> str:
    """Take all types.

    Args:
        a: a
        b: b
        c: c
        d: d
        e: e
        f: f
        g: g
        h: h
        i: i
        j: j
    """


RIGHT = {"a": 1, "b": 0.5, "c": "t", "d": [1, 2], "e": {"k": True}, "f": "x", "g": "up", "h": [None]}


def test_usage_names_each_argument_with_its_type():
    assert describe(every, "every").usage() == (
        'every(a: integer; b: number; c: string; d: array; e: object; f: "x" or "y"; g: "up" or "down"; h: any; '
        "i: integer or string, optional; j: boolean, optional)"
    )


@pytest.mark.parametrize(
    "changes", [{}, {"b": 2}, {"c": None}, {"d": []}, {"e": {}}, {"h": None}, {"i": "word"}, {"i": 3, "j": True}]
)
def test_arguments_of_the_right_types(changes):
    assert describe(every, "every").mistake(RIGHT | changes) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"a": 1.5},
        {"a": True},
        {"a": "1"},
        {"a": None},
        {"b": "1"},
        {"b": False},
        {"c": 3},
        {"d": ["1"]},
        {"d": {}},
        {"e": {"k": 1}},
        {"e": []},
        {"f": "z"},
        {"g": "UP"},
        {"g": []},
        {"i": None},
        {"j": 1},
    ],
)
def test_arguments_of_wrong_types(changes):
    (name,) = changes
    mistake = describe(every, "every").mistake(RIGHT | changes)
    assert mistake.startswith(f"{name} has the wrong type or value; it takes every(a: integer; ")


def test_missing_and_unknown_arguments():
    tool = describe(every, "every")
    assert tool.mistake(RIGHT | {"z": 1}).startswith("z is no argument; it takes every(")
    assert tool.mistake({"a": 1}).startswith("b is missing; it takes every(")
    assert tool.mistake(None).startswith("the arguments must be a JSON object")


def test_an_argument_whose_default_is_none_may_be_none():
    def search(limit: int = None) -> str:  # noqa: RUF013  # as generated tools have it
        """Search.

        Args:
            limit: most results
        """

    tool = describe(search, "search")
    assert [tool.mistake({"limit": value}) is None for value in (None, 3, "3")] == [True, True, False]


def no_docstring(x: int) -> str: ...


def no_hint(x) -> str:
    """Do.

    Args:
        x: it
    """


def no_description(x: int) -> str:
    """Do."""


def unknown_hint(x: "Nowhere") -> str:  # noqa: F821
    """Do.

    Args:
        x: it
    """


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (no_docstring, "no_docstring because it has no docstring"),
        (no_hint, "x is missing a type hint"),
        (no_description, "no description for the argument 'x'"),
        (unknown_hint, "'Nowhere' is not defined"),
    ],
)
def test_a_function_that_cannot_be_described(function, problem):
    with pytest.raises(ConfigError) as raised:
        describe(function, "the tool f")
    assert str(raised.value).startswith("the tool f cannot be a tool: ")
    assert problem in str(raised.value)
    assert str(raised.value).endswith("a docstring with a description of each under Args:")


@pytest.mark.parametrize("value", [3, "search", int, None, type("Callable", (), {"__call__": lambda self: 1})()])
def test_something_other_than_a_function(value):
    with pytest.raises(ConfigError, match="a tool must be a function with type hints and a docstring"):
        describe(value, "tools[0]")


def test_two_tools_of_one_name():
    with pytest.raises(ConfigError, match="two tools are named 'every'; give each its own name"):
        describe_all([every, every], "")


def test_methods_are_functions_of_the_class_and_nothing_is_evaluated():
    class Meta(type):
        @property
        def on_the_class(cls):
            raise ValueError("not to be read")

    class Raising:
        def __get__(self, instance, owner):
            raise ValueError("not to be read")

    class Base:
        def inherited(self): ...

        def hidden(self): ...

    class Kind(Base, metaclass=Meta):
        raising = Raising()
        number = 3
        hidden = None

        def second(self): ...

        async def first(self): ...

        @staticmethod
        def static(): ...

        @classmethod
        def of_the_class(cls): ...

        @property
        def value(self):
            raise ValueError("not to be read")

        def _private(self): ...

        class Inner: ...

    assert list(methods(Kind)) == ["first", "inherited", "second", "static"]
