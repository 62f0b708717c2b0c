"""Descriptions of functions, classes, objects and data."""

import json
import sys
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from functools import cache, cached_property, partial, wraps
from importlib.util import module_from_spec, spec_from_file_location
from itertools import count

import numpy as np
import pandas as pd
import pytest
import torch

from tokencredit.provenance import parts
from tokencredit.provenance.parts import describe, label, rows_digest

WORDS = ["good"]
SIGN = 1


def sign():
    return SIGN


def score(prompts, completions, power=2):
    """The score."""
    return [sign() * sum(word in text for word in WORDS) ** power for text in completions]


def scaled(scale):
    """A function with a variable of another."""

    def inner(completions):
        return [scale * len(text) for text in completions]

    return inner


@dataclass
class Lexicon:
    """A callable object."""

    weight: float

    def __call__(self, completions):
        return [self.weight * sign() for _ in completions]


class Doubled(Lexicon):
    """A subclass."""


def test_a_function_has_name_file_source_arguments_and_what_it_reads():
    part = describe(score)
    assert part["name"] == "score"
    assert part["file"] == __file__
    assert part["source"].startswith("def score(")
    assert '"""The score."""' in part["source"]
    assert part["arguments"] == {"power": 2}
    assert part["reads"]["WORDS"] == ["good"]
    assert part["reads"]["sign"]["reads"] == {"SIGN": 1}
    assert label(part) == f"score(power=2) (test_parts.py, {part['digest'][:8]})"
    json.dumps(part)


def test_equal_parts_have_equal_digests():
    for one, two in [(score, score), (Lexicon(1), Lexicon(1)), (scaled(2), scaled(2)), ([{"a": 1}], [{"a": 1}])]:
        assert describe(one) == describe(two)


different = [score, scaled(1), scaled(-1), partial(score, power=3), Lexicon(1), Lexicon(-1), Doubled(1), Lexicon]
different += [Lexicon(1).__call__, lambda texts: 1, lambda texts: 2, len, max, np.ones, torch.nn.Linear(1, 1)]


def test_other_code_or_arguments_have_other_digests():
    assert len({describe(value)["digest"] for value in different}) == len(different)


@pytest.mark.parametrize(("name", "value"), [("SIGN", -1), ("WORDS", ["bad"]), ("sign", lambda: 1)])
def test_what_a_function_reads_counts(monkeypatch, name, value):
    digests = [describe(x)["digest"] for x in (score, Lexicon(1))]
    monkeypatch.setitem(globals(), name, value)
    assert describe(score)["digest"] != digests[0]
    if name != "WORDS":  # which the class does not read
        assert describe(Lexicon(1))["digest"] != digests[1]


def test_a_variable_without_a_value_yet_is_no_argument():
    def reward(completions):
        return trainer.score(completions)

    assert "arguments" not in describe(reward)
    trainer = Lexicon(1)
    assert "trainer" in describe(reward)["arguments"]


def test_weights_of_a_module_count():
    module = torch.nn.Linear(2, 2)
    before = describe(module)
    assert before == describe(module)
    module.weight.data += 1
    assert describe(module)["digest"] != before["digest"]
    assert "source" not in before  # a library's


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bfloat16, torch.bool])
def test_each_number_of_a_tensor_counts(dtype):
    one, other = (
        partial(score, power=torch.tensor(2**24 + x).sub(2**24 * (dtype.itemsize < 8)).to(dtype)) for x in (0, 1)
    )
    assert describe(one)["digest"] != describe(other)["digest"]


def turned(function):
    """A decorator whose wrapper reads a constant."""

    @wraps(function)
    def wrapper(completions):
        return [SIGN * number for number in function(completions)]

    return wrapper


@turned
def decorated(completions):
    return [sign() + len(text) for text in completions]


@torch.no_grad()
def without_gradients(completions):
    return [sign() for _ in completions]


@cache
def cached_word(word):
    return SIGN * len(word)


def with_cached(completions):
    return [cached_word(text) for text in completions]


class Decorated:
    """An object whose call is decorated."""

    @turned
    def __call__(self, completions=()):
        return [len(text) for text in completions]


class Cached:
    """An object with a value that is computed once."""

    @cached_property
    def sign(self):
        return SIGN


class Outer:
    """A class around another."""

    class Inner:
        def sign(self):
            return SIGN


@pytest.mark.parametrize("function", [decorated, without_gradients, with_cached, Decorated, Cached, Outer])
def test_what_lies_below_and_in_decorators_counts(monkeypatch, function):
    before = describe(function)
    assert before["name"] == function.__name__
    assert f" {function.__name__}" in before["source"]
    monkeypatch.setitem(globals(), "SIGN", 2)
    assert describe(function)["digest"] != before["digest"]


class Signed:
    """A class with a constant that is computed."""

    sign = -SIGN


class Inherits(Signed):
    """A subclass."""


@pytest.mark.parametrize("part", [Signed, Inherits, Inherits()])
def test_attributes_of_a_class_count(monkeypatch, part):
    before = describe(part)["digest"]
    monkeypatch.setattr(Signed, "sign", 1)
    assert describe(part)["digest"] != before


def test_the_body_of_a_decorator_counts():
    other = turned(decorated.__wrapped__)
    assert describe(other)["digest"] == describe(decorated)["digest"]

    def turned_twice(function):
        @wraps(function)
        def wrapper(completions):
            return [2 * SIGN * number for number in function(completions)]

        return wrapper

    assert describe(turned_twice(decorated.__wrapped__))["digest"] != describe(decorated)["digest"]


MOVED = """import logging
log = logging.getLogger(__name__)

def helper():
    log.debug(__file__)
    return 1

def score(completions):
    return [helper() + len(type(completions).__name__)]
"""


def test_a_moved_file_is_the_same_part(tmp_path):
    digests = set()
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "moved.py"
        file.write_text(MOVED)
        name = f"tokencredit_user_moved_{folder}"  # a user's file has a name of its place
        spec = spec_from_file_location(name, file)
        module = sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(module)
        part = describe(module.score)
        assert part["reads"]["helper"]["file"] == str(file)
        digests.add(part["digest"])
        del sys.modules[name]
    assert len(digests) == 1


def test_code_that_is_typed_in_has_a_digest():
    space = {}
    exec("def f(x):\n    return x + 1\ndef g(x):\n    return x + 2", space)
    one, two = (describe(space[name]) for name in "fg")
    assert one["digest"] != two["digest"]
    assert not {"source", "file"} & one.keys()


def test_objects_that_contain_themselves_are_described():
    one = Lexicon(1)
    one.weight = one
    assert describe(one)["arguments"] == {"weight": "Lexicon, as above"}


@pytest.mark.parametrize("kind", ["list", "Dataset"])
def test_data_have_rows_columns_and_a_digest(kind):
    from datasets import Dataset  # takes a second

    rows = [{"prompt": "a"}, {"label": 1}] if kind == "list" else Dataset.from_list([{"prompt": "a", "label": 1}] * 2)
    part = describe(rows)
    assert (part["rows"], part["columns"]) == (2, ["prompt", "label"])
    assert label(part) == f"2 rows of prompt, label ({part['digest'][:8]})"


@pytest.mark.parametrize("make", [np.int64, np.array, torch.tensor, lambda x: pd.Series([x])])
def test_numbers_of_scalars_arrays_and_tables_count(make):
    one, two, same = make(1), make(2), make(1)
    digests = [describe([{"label": x}])["digest"] for x in (one, two, same)]
    assert digests[0] == digests[2] != digests[1]
    digests = [describe(partial(score, power=x))["digest"] for x in (one, two, same)]
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize("make", [Decimal, lambda x: date(2020, 1, x), lambda x: {x}, lambda x: bytes([x])])
def test_values_that_json_lacks_count(make):
    one, two, same = (describe([{"label": make(x)}])["digest"] for x in (1, 2, 1))
    assert one == same != two


def test_sets_and_objects_without_a_text_have_one_digest():
    one, two = {0, 8}, {8, 0}  # equal hashes, in the order of insertion
    assert [*one] != [*two]
    assert rows_digest([{"label": one}]) == rows_digest([{"label": two}])
    assert rows_digest([{"label": object()}]) == rows_digest([{"label": object()}])


@pytest.mark.parametrize("kind", [np.float32, torch.Tensor])
def test_types_of_numbers_are_known_by_their_names(kind):
    assert describe(partial(score, kind=kind))["arguments"]["kind"] == kind.__name__


def test_sparse_tensors_and_streams_are_described():
    from datasets import Dataset

    for value in (torch.eye(2).to_sparse(), Dataset.from_list([{"a": 1}]).to_iterable_dataset()):
        json.dumps(describe(partial(score, power=value)))


def doubled(completions, threshold, **columns):
    threshold *= 2
    return [len(text) > threshold for text in completions]


class Penalty:
    """An object with an argument, a local variable of its name, and state."""

    def __init__(self, penalty):
        self.penalty, self.calls = penalty, []

    def __call__(self, completions):
        self.calls.append(len(completions))
        penalty = {}
        penalty["x"] = self.penalty
        return [penalty["x"] for _ in completions]


@pytest.mark.parametrize("make", [lambda x: partial(doubled, threshold=x), Penalty])
def test_an_argument_counts_though_a_local_variable_has_its_name(make):
    one, other = describe(make(1)), describe(make(2))
    assert one["digest"] != other["digest"]
    assert "=1" in label(one)


COUNT, SEEN = 0, []


def counted(completions):
    global COUNT
    COUNT = COUNT + 1
    SEEN.append(completions)
    return [COUNT for _ in completions]


def counter():
    count, last = 0, []

    def inner(completions):
        nonlocal count
        count = count + 1
        last[:] = completions
        return [count for _ in completions]

    return inner


class Counted:
    """An object that counts its calls, and its class all objects."""

    objects, ids = 0, count()

    def __init__(self):
        self.calls, self.id = 0, next(Counted.ids)
        Counted.objects += 1

    def __call__(self, completions):
        self.calls += 1
        type(self)()


class Inheriting(Counted):
    """A subclass."""


@pytest.mark.parametrize("value", [counted, counter(), Penalty(1), Counted(), Inheriting()])
def test_what_code_changes_itself_is_no_argument(value):
    before = describe(value)["digest"]
    value(["a"])
    assert describe(value)["digest"] == before


def test_libraries_are_not_the_users():
    assert not parts.is_users(torch.nn.Linear)
    assert not parts.is_users(json)
    assert parts.is_users(score)
    assert parts.is_users(Lexicon(1))
