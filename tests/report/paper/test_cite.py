"""What a paper says about runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from tokencredit.errors import ConfigError
from tokencredit.report.paper.cite import citation
from tokencredit.report.reading import Run

MADE = {
    "versions": {"tokencredit": "1.2", "torch": "2.0"},
    "device": "cpu",
    "threads": 1,
    "processes": 2,
    "command": "tokencredit train --seed 1",
}
MADE |= {
    "tokencredit": {"commit": "a" * 40, "changed_files": 0},
    "started": "2026-01-02T03:04:05+00:00",
    "begun": "2026-01-01T03:04:05+00:00",
}
MADE |= {"repository": {"commit": "b" * 40, "changed_files": 3}}


def run(seed, **changed):
    config = {"seed": seed, "model": {"name": "builtin:reviews"}, "advantage": {"n": 5}, "kl": {"coef": 0.05} | changed}
    python = {"reward_funcs": "score (mine.py, 1a2b3c4d)"}
    return Run(Path(f"run-{seed}"), config | {"python": python}, [], [], {"environment": MADE})


def test_software_machine_seeds_changed_settings_and_parts_are_named():
    text = citation([run(1), run(2), run(3, coef=0.1)])
    assert text.startswith("Trained with `tokencredit train` 1.2 (commit aaaaaaaaaaaa). Software: torch 2.0.")
    assert "Started by `tokencredit train --seed 1` (commit bbbbbbbbbbbb, changed files: 3)." in text
    assert "Hardware: cpu, 1 thread, 2 processes." in text
    assert "Dates: 2026-01-01 to 2026-01-02." in text
    assert "- setting 1: seeds 1, 2\n- setting 2: seeds 3\n" in text
    assert "| `kl.coef` | `0.05` | `0.05` | `0.1` |" in text
    assert "| `python.reward_funcs` | `not set` | `score (mine.py, 1a2b3c4d)` | `score (mine.py, 1a2b3c4d)` |" in text
    assert "model.name" not in text, "the default"
    assert "not read" not in text
    assert "version = {1.2}" in text


def test_a_part_of_ones_own_has_its_file_and_digest():
    part = {"name": "mixed", "file": "parts/mine.py", "digest": "1a2b3c4d5e"}
    made = Run(Path("run"), {"seed": 1, "advantage": {"estimator": "mine.py:mixed"}}, [], [], {})
    text = citation([replace(made, parts={"advantage.estimator": part})])
    assert "| `advantage.estimator` | `gae` | `mixed (mine.py, 1a2b3c4d)` |" in text


def test_a_run_counts_once_and_kinds_are_not_mixed():
    assert "seeds 1, 2\n" in citation([run(1), run(2), run(1)])
    agent = Run(Path("agent"), {"seed": 1, "env": {"id": "CartPole-v1"}, "algorithm": "ppo", "steps": 8}, [], [], {})
    with pytest.raises(ConfigError, match="'run-1' is a run of tokencredit train and 'agent' is a run of tokencredit"):
        citation([run(1), agent])


def test_runs_without_a_summary_have_their_settings():
    bare = Run(Path("run"), {"seed": 1, "model": {"name": "mine"}}, [], [], {})
    assert "| `model.name` | `builtin:reviews` | `mine` |" in citation([bare])
