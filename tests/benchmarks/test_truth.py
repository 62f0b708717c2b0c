"""benchmarks/truth.py keeps figures of runs and of each world's limit, in a file that it goes on with."""

import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import truth  # noqa: E402


def test_a_new_file_gets_the_worlds_limit_and_its_missing_runs_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(truth, "SAMPLES", 64)
    out = tmp_path / "worlds.json"
    change = "run.iterations=1,rollout.batch_size=8,rollout.max_new_tokens=4"
    monkeypatch.setattr(sys, "argv", ["truth.py", "--variants", change, "--seeds", "1", "--out", str(out)])
    assert truth.main() == 0
    kept = json.loads(out.read_text())["builtin"]
    assert kept["limit"]["reference"] < kept["limit"]["best"] < 1
    figures = kept[change]["1"]
    assert [len(figures[name]) for name in ("reward", "kl", "distinct_2", "clock")] == [1, 1, 1, 1]
    before = out.stat().st_mtime_ns
    capsys.readouterr()
    assert truth.main() == 0
    assert out.stat().st_mtime_ns == before
    assert change not in capsys.readouterr().out
