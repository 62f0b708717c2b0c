"""Measurements that are made once per machine: kept whole, by the first who made them, or made anew."""

import json
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from tokencredit.text.models.machine_timings import cache_file, measure_once, processor

KEY = {"processor": "one", "width": 64}
RESULTS = ("yes", "no")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokencredit"


def never():
    pytest.fail("it is known")


def test_a_measurement_is_made_once_and_its_origin_is_told(folder):
    result, origin = measure_once("pays", KEY, RESULTS, lambda: "yes")
    (file,) = folder.iterdir()
    assert (result, origin) == ("yes", f"timed now, and kept for later runs in {file}")
    record = json.loads(file.read_text())
    assert record == KEY | {"pays": "yes", "date": record["date"]}
    assert measure_once("pays", KEY, RESULTS, never) == ("yes", f"as timed on {record['date']} ({file})")


def test_each_key_has_a_measurement_of_its_own(folder):
    assert measure_once("pays", KEY, RESULTS, lambda: "yes")[0] == "yes"
    assert measure_once("pays", KEY | {"width": 65}, RESULTS, lambda: "no")[0] == "no"
    assert measure_once("pays", KEY, RESULTS, never)[0] == "yes"
    assert len(list(folder.iterdir())) == 2


def test_of_two_that_measure_at_once_the_second_takes_the_result_of_the_first(folder):
    def slow():
        assert measure_once("pays", KEY, RESULTS, lambda: "yes")[0] == "yes"
        return "no"

    result, origin = measure_once("pays", KEY, RESULTS, slow)
    assert result == "yes"
    assert origin.startswith("as timed on ")
    assert len(list(folder.iterdir())) == 1


def test_of_many_that_measure_at_once_all_agree(folder):
    together = Barrier(8)

    def one(number):
        def measure():
            together.wait()
            return RESULTS[number % 2]

        return measure_once("pays", KEY, RESULTS, measure)[0]

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(one, range(8)))) == 1
    assert [file.suffix for file in folder.iterdir()] == [".json"]


def in_process(number):
    return measure_once("pays", KEY, RESULTS, lambda: RESULTS[number % 2])[0]


def test_processes_agree():
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert len(set(pool.map(in_process, range(16), chunksize=1))) == 1


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff", b'{"pays": "yes"}', b'{"processor": "one", "width": 64, "pays": ["yes"]}'],
)
def test_a_file_that_holds_something_else_is_replaced(content, folder):
    file = cache_file("pays", KEY)
    folder.mkdir(parents=True)
    file.write_bytes(content)
    assert measure_once("pays", KEY, RESULTS, lambda: "no")[0] == "no"
    assert measure_once("pays", KEY, RESULTS, never)[0] == "no"


def test_a_folder_that_cannot_be_written_lets_each_measure(folder):
    folder.parent.write_text("a file in the way")
    for result in RESULTS:
        found, origin = measure_once("pays", KEY, RESULTS, lambda result=result: result)
        assert found == result
        assert origin == f"timed now, and not cached in {cache_file('pays', KEY)}: Not a directory"


def test_it_is_in_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a"))
    assert cache_file("pays", KEY).parent == tmp_path / "a" / "tokencredit"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in ("", "relative"):  # which the XDG specification says to pass over
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_file("pays", KEY).parent == tmp_path / "home" / ".cache" / "tokencredit"


def test_without_a_home_each_measures(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")

    def no_home():
        raise RuntimeError

    monkeypatch.setattr(Path, "home", no_home)
    for result in RESULTS:
        found, origin = measure_once("pays", KEY, RESULTS, lambda result=result: result)
        assert (found, "no home folder" in origin) == (result, True)


def test_the_processor_has_a_name():
    assert processor() == processor() != ""
