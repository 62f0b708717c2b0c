"""Reading the files of a run, and its pages; checkpoints with manifests that fit whatever they hold."""

import hashlib
import json
import re

TIMES = ("seconds", "pretrain/seconds", "tokens_per_second", "steps_per_second")


def read_jsonl(file):
    """The rows of a JSONL file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def count_lines(file):
    """The number of finished lines; none if there is no file."""
    return file.read_bytes().count(b"\n") if file.exists() else 0


def read_metrics(folder):
    """The rows of a run's metrics.jsonl."""
    return read_jsonl(folder / "metrics.jsonl")


def read_events(folder):
    """The messages in a run's events.jsonl."""
    return [row["event"] for row in read_jsonl(folder / "events.jsonl")]


def drop_keys(rows, *prefixes):
    """Rows without the keys that begin with one of these."""
    return [{key: value for key, value in row.items() if not key.startswith(prefixes)} for row in rows]


def without_times(rows):
    """Rows without their measurements of time, which differ from run to run."""
    return drop_keys(rows, *TIMES)


def sign(checkpoint):
    """Let a checkpoint's manifest fit its files as they are."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != "manifest.json"]
    manifest["files"] = {
        path.relative_to(checkpoint).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in files
    }
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def data_of(html):
    """The data embedded in a page."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])
