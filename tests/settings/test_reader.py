"""One YAML reader: what a person writes is read, and every mistake is named by its line."""

import doctest
import json
import math

import pytest
import yaml

from tokencredit.errors import ConfigError
from tokencredit.settings import fields
from tokencredit.settings.fields import flat
from tokencredit.settings.reader import MAX_DEPTH, MAX_SIZE, dump_yaml, load_yaml, read_yaml


def test_examples_in_docstrings():
    assert doctest.testmod(fields).failed == 0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1e-5", 1e-5),
        ("1e5", 1e5),
        ("-2E+3", -2000.0),
        ("1.5e-3", 1.5e-3),
        (".5", 0.5),
        ("1.", 1.0),
        ("1.0e-05", 1e-5),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("7", 7),
        ("1_000", 1000),
        ("0", 0),
        ("-10", -10),
        ("0x1F", 31),
    ],
)
def test_numbers_are_numbers(text, number):
    found = load_yaml(f"a: {text}")["a"]
    assert (found, type(found)) == (number, type(number))
    assert load_yaml(f"a: '{text}'") == {"a": text}, "in quotes it is a text"


@pytest.mark.parametrize(
    "text", ["2020-01-01", "2020-13-45", "e5", "1e", ".", "-", "1.2.3", "~x", "010", "-007", "1:30", "0b1"]
)
def test_texts_are_texts(text):
    assert load_yaml(f"[{text}]") == [text]


@pytest.mark.parametrize(
    "value", ["1e-5", "1.5", ".inf", "2020-01-01", "010", "null", "é “x”", "a: b\n", "", "12", 1e-5, 1e22]
)
def test_settings_are_read_back_as_they_were(value):
    text = dump_yaml({"b": value, "a": [value, None, True]})
    assert load_yaml(text) == {"b": value, "a": [value, None, True]}
    assert text.startswith("b"), "in their order"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "a is given twice line 3, column 1"),
        ("kl:\n  coef: 1\n  coef: 2\n", "coef is given twice line 3"),
        ("- {a: 1}\n- {b: 1, b: 2}\n", "b is given twice line 2"),
        ("{a: {b: 1}, c: {b: 2}, a: 3}", "a is given twice line 1"),
        ("a: !!python/name:os.system\n", "is a tag; configurations hold plain values line 1"),
        ("a: !!str 1\n", "is a tag"),
        ("a: &a [1]\nb: *a\n", r"\*a is an alias; write the value again line 2"),
        ("[" * (MAX_DEPTH + 1), f"more than {MAX_DEPTH} nested lists"),
        ("# " + "x" * MAX_SIZE, f"a configuration may have {MAX_SIZE}"),
        ("a: 1\n---\nb: 2\n", "expected a single document"),
        ("a: [\n", "line 2"),
        ("a:\n\tb: 1\n", "line 2, column 1; indent with spaces, not with tabs$"),
        ("a: " + "1" * 5000, "integer string conversion"),
    ],
)
def test_mistakes_are_named_by_file_and_line(text, message, tmp_path):
    file = tmp_path / "file.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_yaml(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)
    with pytest.raises(yaml.YAMLError):
        load_yaml(text)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml cannot be read: No such file"):
        read_yaml(tmp_path / "nowhere.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"bytes\.yaml: .*codec"):
        read_yaml(tmp_path / "bytes.yaml")


def test_a_value_may_look_like_a_key():
    """Keys only count as given twice in one mapping, and not as values, or in texts."""
    assert load_yaml("{a: b, b: a, c: [a, a], d: {a: 1}}") == {"a": "b", "b": "a", "c": ["a", "a"], "d": {"a": 1}}
    assert load_yaml("text: 'a: 1\n\n  a: 2'")["text"] == "a: 1\na: 2"


def test_settings_by_their_whole_keys():
    config = {"a": {"b": 1, "c": [1, 2]}, "reward": [{"name": "x"}, {"name": {"y": None}}], "empty": {}, "none": None}
    expected = {"a.b": 1, "a.c": [1, 2], "reward[0].name": "x", "reward[1].name.y": None, "none": None}
    assert flat(config) == expected
    assert flat(json.loads(json.dumps(config))) == expected
