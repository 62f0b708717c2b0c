import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from datasets import Dataset, DatasetDict

from tokencredit.errors import ConfigError
from tokencredit.provenance.parts import column_names
from tokencredit.text.data.datasets import column_values, read_dataset

ROWS = [{"prompt": "Ünë, two", "answer": 1}, {"prompt": 'line\n"two"\u2028three', "answer": 2}]


@pytest.fixture
def write(tmp_path):
    def write(name, data):
        (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
        return str(tmp_path / name)

    return write


def jsonl(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def test_json_files(write):
    assert read_dataset(write("rows.jsonl", jsonl(ROWS))) == ROWS
    assert read_dataset(write("lines.json", "\ufeff" + jsonl(ROWS).replace("\n", "\r\n\r\n"))) == ROWS
    assert read_dataset(write("array.json", json.dumps(ROWS, indent=2))) == ROWS


def test_csv_values_are_texts(write):
    file = write("rows.csv", 'prompt,answer\r\n"Ünë, two",1\r\n\r\n"line\n""two""",\r\n')
    assert read_dataset(file) == [{"prompt": "Ünë, two", "answer": "1"}, {"prompt": 'line\n"two"', "answer": ""}]


def test_parquet_and_saved_folders(tmp_path):
    data = Dataset.from_list(ROWS)
    data.to_parquet(tmp_path / "rows.parquet")
    data.save_to_disk(tmp_path / "one")
    DatasetDict(train=data, test=data.select([1])).save_to_disk(tmp_path / "two")
    for name in ("rows.parquet", "one", "two"):
        assert list(read_dataset(str(tmp_path / name))) == ROWS
    assert list(read_dataset(str(tmp_path / "two"), split="test")) == ROWS[1:]
    with pytest.raises(ConfigError, match=r"prompts\.split is 'dev'; the splits of .*two' are train, test"):
        read_dataset(str(tmp_path / "two"), split="dev")
    with pytest.raises(ConfigError, match=r"prompts\.split is 'test'; the splits of .*one' are train"):
        read_dataset(str(tmp_path / "one"), split="test")


def test_reading_leaves_nothing_behind(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    Dataset.from_list(ROWS).to_parquet(tmp_path / "rows.parquet")
    before = sorted(tmp_path.rglob("*"))
    for name in ("one", "rows.parquet"):
        list(column_values(read_dataset(str(tmp_path / name)), "prompt"))
    assert sorted(tmp_path.rglob("*")) == before


def test_columns():
    rows = [{"a": i} | ({"b": i} if i % 2 else {}) for i in range(2500)]
    table = Dataset.from_dict({name: [row.get(name) for row in rows] for name in "ab"})
    for data in (rows, table):
        assert sorted(column_names(data)) == ["a", "b"]
        values = [value for some in column_values(data, "b") for value in some]
        assert values == [i if i % 2 else None for i in range(2500)]


def test_a_broken_line_of_jsonl_is_named(write):
    lines = jsonl({"prompt": f"p{i}"} for i in range(400)).splitlines()
    lines[316] = '{"prompt": "p316"'
    with pytest.raises(
        ConfigError, match=r"rows\.jsonl, line 317, column 18: Expecting ',' delimiter; each line must be a JSON obj"
    ):
        read_dataset(write("rows.jsonl", "\n".join(lines)))
    lines[316] = '"p316"'
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 317: 'p316' is not an object"):
        read_dataset(write("rows.jsonl", "\n".join(lines)))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("rows.jsonl", b'{"prompt": "a"}\n{"prompt": "\xe9"}\n', r"rows\.jsonl, line 2: not UTF-8 text"),
        ("rows.csv", b"prompt\na\n\xe9\n", r"rows\.csv, line 3: not UTF-8 text"),
        ("rows.json", '[{"prompt": "a"},\n{"prompt" "b"}]', r"rows\.json, line 2, column 11: Expecting ':' delimiter"),
        ("rows.jsonl", '[\n{"prompt": "a"}\n]', r"line 1, .*each line .* \(an array belongs in a \.json file\)$"),
        ("rows.json", '["a"]', r"rows\.json, row 1: 'a' is not an object"),
        ("rows.csv", "prompt,answer\na,1\nb\n", r"rows\.csv, line 3: 1 fields under 2 column names"),
        ("rows.csv", "prompt,prompt\na,1\n", r"rows\.csv, line 1: a column name occurs twice"),
        ("rows.csv", 'prompt\n"a"b\n', r"rows\.csv, line 2: ',' expected after '\"'"),
        ("rows.csv", "prompt\n" + "a" * 140_000, r"line 2: field larger than .*; save the data as JSONL"),
        ("rows.parquet", b"PAR1 or not", r"rows\.parquet: cannot read this as a Parquet file"),
        ("rows.jsonl", '{"prompt": %s}' % ("1" * 5000), r"rows\.jsonl, line 1: Exceeds the limit"),
        ("rows.json", "[" * 100_000, r"rows\.json, line 1: maximum recursion depth exceeded"),
        ("rows.txt", "a\n", r"rows\.txt'; it must end in one of \.jsonl, \.json, \.csv, \.parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(write, name, data, message):
    with pytest.raises(ConfigError, match=message):
        read_dataset(write(name, data))


def test_a_missing_file_split_or_subset_is_refused(write):
    with pytest.raises(ConfigError, match=r"prompts\.dataset is 'missing\.csv', which does not exist"):
        read_dataset("missing.csv")
    with pytest.raises(ConfigError, match=r"is 'https://a\.org/rows\.csv'; addresses are not read: give a local file"):
        read_dataset("https://a.org/rows.csv")
    file = write("rows.jsonl", jsonl(ROWS))
    with pytest.raises(ConfigError, match=r"prompts\.split is 'test', but .*rows\.jsonl' is one file"):
        read_dataset(file, split="test")
    with pytest.raises(ConfigError, match=r"prompts\.config_name is 'main', but .*rows\.jsonl' is local"):
        read_dataset(file, config_name="main")


def test_a_folder_without_a_saved_data_set_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"which Dataset\.save_to_disk did not write; name one of its files"):
        read_dataset(str(tmp_path))
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    next((tmp_path / "one").glob("*.arrow")).unlink()
    with pytest.raises(ConfigError, match=r"one: cannot read this saved data set"):
        read_dataset(str(tmp_path / "one"))


def test_an_arrow_offset_beyond_the_file_is_refused(tmp_path):
    """Arrow takes a text's place on trust, and reading one that lies elsewhere can end the process."""
    Dataset.from_list([{"prompt": "a"}] * 3).save_to_disk(tmp_path / "one")
    file = next((tmp_path / "one").glob("*.arrow"))
    offsets = b"".join(i.to_bytes(4, "little") for i in range(4))
    data = file.read_bytes()
    assert data.count(offsets) == 1
    file.unlink()
    file.write_bytes(data.replace(offsets, offsets[:8] + (2**30).to_bytes(4, "little") + offsets[12:]))
    with pytest.raises(ConfigError, match="cannot read this saved data set"):
        read_dataset(str(tmp_path / "one"))


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as it takes to load the one data set that this one has, org/data."""

    files = {"train.jsonl": jsonl(ROWS).encode(), "test.jsonl": jsonl(ROWS[1:]).encode()}  # noqa: RUF012
    commit = "a" * 40

    def do_GET(self):
        path = self.path.split("?")[0]
        name = path.split("/")[-1]
        if not path.removeprefix("/api").startswith("/datasets/org/data"):
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("/api/"):
            self.answer(200, json.dumps(self.tree() if "/tree/" in path else {"id": "org/data", "sha": self.commit}))
        elif name in self.files:
            self.answer(200, self.files[name], {"ETag": name, "X-Repo-Commit": self.commit})
        else:
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.commit})

    do_HEAD = do_GET  # noqa: N815  (http.server's name)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200, json.dumps(self.tree()))

    def tree(self):
        return [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in self.files.items()]

    def answer(self, code, data, headers=None):
        data = data.encode() if isinstance(data, str) else data
        self.send_response(code)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def ask_hub(tmp_path_factory):
    """Read data sets in a process of its own, since the libraries learn the hub's address when they are imported."""
    program = """
import json, sys
from tokencredit.errors import ConfigError
from tokencredit.text.data.datasets import read_dataset
for options in json.loads(sys.argv[1]):
    try:
        print(json.dumps(list(read_dataset(**options))))
    except ConfigError as error:
        print(json.dumps(str(error)))
"""
    home = str(tmp_path_factory.mktemp("hub"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()

    def ask(*options, **variables):
        address = f"http://127.0.0.1:{server.server_port}"
        settings = {"HF_HOME": home, "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
        environment = os.environ | settings | variables
        arguments = [sys.executable, "-c", program, json.dumps(options)]
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    yield ask
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def answers(ask_hub):
    """What the hub's data sets are, which leaves one in the cache."""
    data = {"name": "org/data"}
    return ask_hub(
        data, data | {"split": "test"}, data | {"split": "dev"}, data | {"config_name": "main"}, {"name": "org/other"}
    )


def test_the_hub(answers):
    train, test, split, subset, missing = answers
    assert train == ROWS
    assert test == ROWS[1:]
    assert "'org/data' with prompts.split 'dev'" in split
    assert "['train', 'test']" in split
    assert "'main' not found" in subset
    assert "'org/other', which is not a local file or folder, and the hub request failed" in missing
    assert "a file (.jsonl, .json, .csv, .parquet) or a folder written by Dataset.save_to_disk" in missing
    assert missing.endswith("and HF_HUB_OFFLINE=1 loads a copy from the cache")


def test_without_a_hub_there_is_its_cache_and_what_is_local(ask_hub, answers):
    cached, message = ask_hub(
        {"name": "org/data"}, {"name": "org/other"}, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="1"
    )
    assert cached == ROWS
    assert message.endswith("or a folder written by Dataset.save_to_disk")
