import os
import sys

import pytest

from tokencredit.errors import ConfigError
from tokencredit.user_code.user_objects import check_kwargs, load_object


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.v2.py"
    path.write_text(
        "import dataclasses\nRUNS = []\n@dataclasses.dataclass\nclass One:\n    level: int = 1\nNONE = None\n"
    )
    return path


def test_a_file_is_run_once_for_all_its_objects(file):
    one, runs = load_object(f"{file}:One", "environment"), load_object(f"{file}:RUNS", "tool")
    runs.append(1)
    assert load_object(f"{file}:RUNS", "reward") is runs
    assert load_object(f"{file}:One", "reward") is one


def test_a_changed_file_is_run_again(file, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    before = load_object(f"{file}:One", "environment")
    stat = file.stat()
    file.write_text(file.read_text().replace("= 1", "= 2"))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # Python would take a compiled file for this one's
    after = load_object(f"{file}:One", "environment")
    assert (before().level, after().level) == (1, 2)


def test_files_of_one_name_and_text_in_two_folders_are_two(file, tmp_path):
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "mine.py"
    other.write_text(file.read_text())
    assert load_object(f"{file}:One", "tool") is not load_object(f"{other}:One", "tool")


def test_a_file_that_fails_is_run_again(tmp_path):
    path, flag = tmp_path / "failing.py", tmp_path / "flag"
    path.write_text(f"import pathlib\nassert pathlib.Path({str(flag)!r}).exists(), 'no flag'\nvalue = 3\n")
    with pytest.raises(ConfigError, match=r"the tool file '.*failing\.py' raised AssertionError: no flag at .*:2$"):
        load_object(f"{path}:value", "tool")
    flag.touch()
    assert load_object(f"{path}:value", "tool") == 3


def test_an_object_that_does_not_exist_is_refused(file):
    for spec, problem in {
        "nowhere.py:f": r"there is no tool file 'nowhere\.py' \(looked for /.*nowhere\.py\)",
        "no_module.here:f": r"the tool module 'no_module\.here' cannot be imported: .*, as in 'tools\.py:name'",
        f"{file}:Ones": r"has no 'Ones'; did you mean 'One'\?",
        f"{file}:NONE": "has no 'NONE'",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            load_object(spec, "tool")


def test_arguments_of_a_factory():
    def free(*names, **settings): ...

    def takes(level, depth=1): ...

    check_kwargs("free", free, {})
    check_kwargs("free", free, {"anything": 1})
    check_kwargs("takes", takes, {"level": 1})
    with pytest.raises(ConfigError, match=r"takes needs level; give it in kwargs, as in kwargs: \{level: …\}"):
        check_kwargs("takes", takes, {"depth": 1})
    with pytest.raises(ConfigError, match="kwargs has 'width', which takes does not take; it takes level, depth"):
        check_kwargs("takes", takes, {"width": 1})
    check_kwargs("takes", takes, {}, others=("level",))
    with pytest.raises(ConfigError, match="it takes depth"):
        check_kwargs("takes", takes, {"width": 1}, others=("level",))
    check_kwargs("dict", dict, {"anything": 1})
