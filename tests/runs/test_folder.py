import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from datetime import datetime
from unittest.mock import Mock

import pytest
from pyarrow import parquet

from helpers.files import read_metrics
from tokencredit.errors import ConfigError
from tokencredit.runs.folder import CHOICES, RunFolder, apply_choices, read_choices, replacing


@contextmanager
def file_size_limit(size):
    """The system refuses to let any file of this process grow past `size` bytes, as a full disk would."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(str(tmp_path / "run"))
    folder.create(reserve=0)
    return folder


def test_a_folder_in_use_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"run\.dir .* holds a run or other files already; give another run\.dir, or"):
        RunFolder(str(tmp_path)).refuse_if_used()
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"


def test_an_empty_folder_is_used(tmp_path):
    folder = RunFolder(str(tmp_path))
    folder.refuse_if_used()
    folder.create(reserve=0)
    folder.write("note.txt", "a")
    assert [file.name for file in tmp_path.iterdir()] == ["note.txt"]


def test_without_a_name_a_new_folder_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(None)
    folder.create(reserve=0)
    assert folder.path.parent.name == "runs"


def test_two_runs_that_begin_in_one_second_have_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tokencredit.runs.folder.datetime", Mock(**{"now.return_value": datetime(2026, 1, 2)}))
    names = []
    for _ in range(3):
        folder = RunFolder(None)
        folder.create(reserve=0)
        names.append(folder.path.name)
    assert names == ["2026-01-02-00-00-00", "2026-01-02-00-00-00-2", "2026-01-02-00-00-00-3"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot make run\.dir .*file/run"):
        RunFolder(str(tmp_path / "file" / "run")).create(reserve=0)


def test_a_disk_that_is_too_small_is_noticed_before_the_run(tmp_path):
    with pytest.raises(ConfigError, match=r"MB free, and the run writes at least"):
        RunFolder(str(tmp_path / "run")).create(reserve=10**18)


LOCK_IT = """
import sys
from tokencredit.errors import ConfigError
from tokencredit.runs.folder import RunFolder
folder = RunFolder(sys.argv[1])
try:
    folder.lock()
    print("locked", flush=True)
    sys.stdin.read()
except ConfigError as error:
    print(error, flush=True)
"""


@contextmanager
def locking(folder):
    """Another process that locks the folder; its first line."""
    command, pipe = [sys.executable, "-c", LOCK_IT, str(folder.path)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        yield process, process.stdout.readline().strip()
        process.kill()


def test_one_process_at_a_time_trains_a_run(folder):
    with locking(folder) as (holder, told):
        assert told == "locked"
        folder.refuse_if_used()
        with pytest.raises(ConfigError, match=r"run' is being trained by another process"):
            folder.lock()
        holder.kill()
        holder.wait()
        folder.lock()
        with locking(folder) as (_, told):
            assert told == f"{str(folder.path)!r} is being trained by another process"
        folder.unlock()
        with locking(folder) as (_, told):
            assert told == "locked"


def test_a_run_trains_on_a_file_system_without_locks(folder, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", unsupported)
    folder.lock()


def test_records_are_lines_of_json(folder):
    folder.append("metrics.jsonl", {"iteration": 1, "text": "a\nb\ud800"}, {"iteration": 2})
    folder.append("metrics.jsonl", {"iteration": 3})
    records = read_metrics(folder.path)
    assert [record["iteration"] for record in records] == [1, 2, 3]
    assert records[0]["text"] == "a\nb\ud800"


def test_a_full_disk_leaves_no_part_of_a_line(folder):
    file = folder.path / "metrics.jsonl"
    folder.append("metrics.jsonl", {"iteration": 1})
    before = file.read_text()
    with file_size_limit(len(before) + 10), pytest.raises(OSError, match="File too large"):
        folder.append("metrics.jsonl", {"iteration": 2, "reward": 0.5}, {"iteration": 3})
    assert file.read_text() == before
    folder.append("metrics.jsonl", {"iteration": 2})
    assert len(file.read_text().splitlines()) == 2


def test_a_full_disk_leaves_the_old_file(folder):
    folder.write("summary.json", "old")
    with file_size_limit(10), pytest.raises(OSError, match="File too large"):
        folder.write("summary.json", "n" * 1000)
    assert (folder.path / "summary.json").read_text() == "old"
    assert [path.name for path in folder.path.iterdir()] == ["summary.json"]


def test_a_folder_is_replaced_whole_or_not_at_all(folder):
    with replacing(folder.path / "policy") as temporary:
        (temporary / "weights").write_text("old")

    def interrupted():
        with replacing(folder.path / "policy") as temporary:
            (temporary / "weights").write_text("ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (folder.path / "policy" / "weights").read_text() == "old"
    with replacing(folder.path / "policy") as temporary:
        (temporary / "weights").write_text("new")
    assert (folder.path / "policy" / "weights").read_text() == "new"
    assert [path.name for path in folder.path.iterdir()] == ["policy"]


def test_the_last_of_the_disk_is_kept_for_the_end(folder):
    folder.append("metrics.jsonl", {"iteration": 1})
    folder.reserve = 10**18
    with pytest.raises(OSError, match="No space left"):
        folder.append("metrics.jsonl", {"iteration": 2})
    assert (folder.path / "metrics.jsonl").read_text() == '{"iteration": 1}\n'


def test_choices_are_read_back_and_checked(tmp_path):
    assert read_choices(tmp_path) == {}
    (tmp_path / CHOICES).write_text('{"model.dtype": "float32", "other": 1}')
    assert read_choices(tmp_path) == {"model.dtype": "float32"}
    (tmp_path / CHOICES).write_text('{"model.dtype": "float8"}')
    with pytest.raises(ConfigError, match=r"choices\.json: model\.dtype is 'float8'; it must be one of float32, bf"):
        read_choices(tmp_path)


@pytest.mark.parametrize(
    ("model", "dtype"), [({"dtype": "auto"}, "bfloat16"), ({"dtype": "float32"}, "float32"), ({}, "bfloat16")]
)
def test_a_choice_stands_in_for_auto_alone(model, dtype):
    config = {"seed": 1, "model": {"name": "a"} | model}
    assert apply_choices(config, {"model.dtype": "bfloat16"}) == {"seed": 1, "model": {"name": "a", "dtype": dtype}}
    assert config["model"] == {"name": "a"} | model, "the configuration is left as it was"
    assert apply_choices(config, {}) == config


def completion(**fields):
    return {"iteration": 1, "completion": "ab", "terms": {"fit": 0.5}, "tokens": ["a", "b"], **fields}


def test_completions_are_a_parquet_file_with_a_column_per_field_and_term(folder):
    records = [completion(), completion(bootstrap=0.25, terms={"fit": None}, values=[0.5, 1.0])]
    folder.write_completions(1, records)
    turns = [{"role": "assistant", "start": 0, "end": 2, "reward": 1.0, "problems": ["cut"]}]
    folder.write_completions(2, [completion(terms={"fit": None}, turns=turns, after="x", loss_advantages=[None, None])])
    files = [folder.path / "samples" / f"00000{number}.parquet" for number in (1, 2)]
    assert sorted((folder.path / "samples").iterdir()) == files
    first, second = map(parquet.read_table, files)
    assert first["reward/fit"].to_pylist() == [0.5, None]
    assert first.schema == second.schema, "the files of all iterations fit together"
    assert first["values"].to_pylist() == [None, [0.5, 1.0]]
    assert first["bootstrap"].to_pylist() == [None, 0.25]
    assert second["turns"].to_pylist() == [turns]
    assert not {"true_values", "terms"} & {*first.column_names}


def test_rewinding_removes_completions_of_later_iterations(folder):
    for number in (1, 2, 3):
        folder.write_completions(number, [completion()])
    folder.rewind(1, {})
    assert [file.name for file in (folder.path / "samples").iterdir()] == ["000001.parquet"]


def test_completions_leave_the_last_of_the_disk(folder):
    folder.reserve = 10**18
    with pytest.raises(OSError, match="No space left"):
        folder.write_completions(1, [completion()])
    folder.write_completions(1, [])
    assert not (folder.path / "samples").exists()
