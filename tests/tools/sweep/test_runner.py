"""Sweeps of real processes: what fails, what is killed, and what comes out in the end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from helpers import forking
from helpers.commands import processes_in, wait_for
from helpers.files import count_lines, read_metrics, without_times
from helpers.proofs import proofs
from tokencredit.cli import main
from tokencredit.errors import RunStopped
from tokencredit.tools.sweep.launch import Launcher, share, start, trouble
from tokencredit.tools.sweep.runner import sweep, table
from tokencredit.tools.sweep.sweep_file import read_sweep

TINY = {"steps": 16, "eval.episodes": 0, "run": {"iterations": 3, "save_every": 1, "trackers": []}}
LONG = TINY | {"steps": 64, "run": TINY["run"] | {"iterations": 40, "save_every": 5}}


def sweep_file(folder, **keys):
    """A sweep of CartPole whose runs are over at once."""
    asked = {"kind": "control", "dir": str(folder / "out"), "seeds": [1], "base": TINY, "variants": {"plain": {}}}
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(asked | keys, sort_keys=False))
    return file


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A sweep of three variants, of which the second cannot run; two at a time."""
    folder = tmp_path_factory.mktemp("three")
    variants = {"plain": {}, "nowhere": {"env.id": "Nowhere-v0"}, "faster": {"optim.lr": 0.01}}
    file = sweep_file(folder, variants=variants)
    return folder / "out", file, forking.python("tokencredit.cli", "sweep", file, "--jobs", "2")


@pytest.mark.slow
def test_a_run_that_fails_is_recorded_and_the_others_go_on(three):
    out, _, done = three
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "1 of 3 runs failed" in done.stderr
    states = {row["run"]: row for row in json.loads((out / "sweep.json").read_text())}
    assert [row["state"] for row in states.values()] == ["finished", "to begin", "finished"]
    failure = states["nowhere/seed-1"]["failure"]
    assert failure.startswith("exit code 2: env.id is 'Nowhere-v0'")
    assert f"nowhere/seed-1: {failure}; see {out / 'nowhere' / 'seed-1.log'}" in done.stdout
    assert "iteration 3/3" in (out / "plain" / "seed-1.log").read_text()
    assert "average return, first → last" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_it_ends_in_the_comparison_of_what_is_finished(three):
    out, _, done = three
    page = out / "comparison" / "comparison.html"
    assert f"compared in {page}" in done.stdout
    text = page.read_text()
    assert "optim.lr" in text
    assert "nowhere" not in text


@pytest.mark.slow
def test_a_dry_run_says_what_is_left_and_how_long_it_takes(three, capsys):
    out, file, _ = three
    before = sorted(out.rglob("*"))
    assert main(["sweep", str(file), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "finished   plain/seed-1\nto begin   nowhere/seed-1\nfinished   faster/seed-1\n" in shown
    assert "3 runs: 2 finished, 0 to resume, 1 to begin; about " in shown
    assert sorted(out.rglob("*")) == before, "it writes nothing"


def test_a_missing_package_is_named_before_the_first_run(tmp_path, monkeypatch, capsys):
    file = sweep_file(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["sweep", str(file), "--dry_run"]) == 0
    line = "format png needs Matplotlib, which is not installed: pip install 'tokencredit[compare]'"
    assert capsys.readouterr().out.startswith(f"no comparison at the end: {line}\nto begin   plain/seed-1\n")


@pytest.mark.slow
def test_a_file_that_asks_for_something_else_is_refused(three, tmp_path, capsys):
    asked = yaml.safe_load(three[1].read_text())
    asked["variants"]["faster"]["optim.lr"] = 0.02
    (tmp_path / "changed.yaml").write_text(yaml.safe_dump(asked, sort_keys=False))
    assert main(["sweep", str(tmp_path / "changed.yaml")]) == 2
    out, err = capsys.readouterr()
    assert "faster/seed-1 in " in err
    assert "optim.lr is 0.02 and was 0.01" in err
    assert (out, err.count("\n")) == ("", 1)


@pytest.mark.slow
def test_finished_runs_are_left_alone_and_too_many_jobs_named(three, monkeypatch, capsys):
    out, file, _ = three
    asked = yaml.safe_load(file.read_text())
    del asked["variants"]["nowhere"]
    file.write_text(yaml.safe_dump(asked, sort_keys=False))
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/seed-1/**/*")}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert main(["sweep", str(file), "--jobs", "2"]) == 0
    assert "--jobs 2 exceeds this machine's 1 CPU cores" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/seed-1/**/*")} == before


def test_nothing_is_compared_where_no_run_finished(tmp_path, capsys):
    class Nowhere(Launcher):
        def start(self, run):
            run.folder.parent.mkdir(parents=True)
            raise FileNotFoundError(2, "No such file", "python")

    with pytest.raises(RunStopped, match="1 of 1 runs failed; retry them with: again"):
        sweep(read_sweep(sweep_file(tmp_path)), Nowhere(), 1, "again")
    assert "no comparison" not in capsys.readouterr().out


@pytest.mark.slow
def test_an_exported_file_is_the_run(tmp_path, capsys):
    file, files = sweep_file(tmp_path, seeds=[1, 7]).rename(tmp_path / "a sweep.yaml"), tmp_path / "files"
    assert main(["sweep", str(file), "--export", str(files)]) == 0
    shown = capsys.readouterr().out
    assert f"2 files in {files}; run each with: tokencredit control --config FILE" in shown
    assert f"afterwards `tokencredit sweep '{file}'` runs what is missing" in shown
    assert [path.name for path in sorted(files.iterdir())] == ["plain-seed-1.yaml", "plain-seed-7.yaml"]
    assert not (tmp_path / "out").exists()
    assert main(["control", "--config", str(files / "plain-seed-7.yaml")]) == 0
    assert main(["sweep", str(file), "--dry_run"]) == 0
    assert "to begin   plain/seed-1\nfinished   plain/seed-7\n" in capsys.readouterr().out
    assert main(["sweep", str(file), "--export", str(files)]) == 2
    assert "holds files already" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds processes in /proc")
@pytest.mark.proof  # below: one process at a time per run; test_chaos.py: kills
def test_a_sweep_killed_twice_equals_uninterrupted_runs(tmp_path):
    """Once with all its processes, once alone: then the one it left behind is waited for."""
    cut, out = sweep_file(tmp_path, base=LONG, variants={"one": {}, "two": {"optim.lr": 0.01}}), tmp_path / "out"
    assert main(["sweep", str(cut), "--export", str(tmp_path / "files")]) == 0

    with forking.start("tokencredit.cli", "sweep", cut) as first:
        assert wait_for(lambda: count_lines(out / "one" / "seed-1" / "metrics.jsonl") > 5, first)  # a checkpoint
        for process in {first.pid, *processes_in(out)}:
            os.kill(process, signal.SIGKILL)
    assert not (out / "one" / "seed-1" / "summary.json").exists()

    with forking.start("tokencredit.cli", "sweep", cut) as second:
        assert wait_for(lambda: count_lines(out / "two" / "seed-1" / "metrics.jsonl") > 0, second)
        left_behind = set(processes_in(out)) - {second.pid}
        for process in left_behind:
            os.kill(process, signal.SIGSTOP)
        second.kill()

    with forking.start("tokencredit.cli", "sweep", cut) as third:
        assert wait_for(lambda: "\n" in third.said(), third)
        assert "two/seed-1: a process of an earlier sweep is still running it" in third.said().splitlines()[0]
        for process in left_behind:
            os.kill(process, signal.SIGCONT)
        shown = third.communicate(timeout=120)[0]
    assert third.returncode == 0, shown
    assert "resumed after iteration" in (out / "one" / "seed-1.log").read_text()
    assert "resumed" not in (out / "two" / "seed-1.log").read_text(), "one process wrote it, from beginning to end"
    for run in ("one", "two"):
        uninterrupted, config = tmp_path / run, tmp_path / "files" / f"{run}-seed-1.yaml"
        assert main(["control", "--config", str(config), "--run.dir", str(uninterrupted)]) == 0
        assert without_times(read_metrics(out / run / "seed-1")) == without_times(read_metrics(uninterrupted))
    assert (out / "comparison" / "comparison.html").is_file()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), *proofs((signal.SIGINT, 130))])
def test_a_signal_lets_the_runs_save_and_says_how_to_go_on(number, code, tmp_path):
    endless = LONG | {"run": LONG["run"] | {"iterations": 100_000}}
    file, run = sweep_file(tmp_path, base=endless), tmp_path / "out" / "plain" / "seed-1"
    with forking.start("tokencredit.cli", "sweep", file) as process:
        assert wait_for(lambda: count_lines(run / "metrics.jsonl") > 6, process)
        process.send_signal(number)
        try:
            shown = process.communicate(timeout=120)[0]
        except subprocess.TimeoutExpired:
            process.terminate()  # or the run, which has no end, would be waited for
            raise
    assert process.returncode == code
    assert f"resume with: tokencredit sweep {file}" in shown
    summary = json.loads((run / "summary.json").read_text())
    assert summary["stopped_by"] == ("interrupt" if number == signal.SIGINT else "SIGTERM")
    assert (run / "checkpoints" / f"{summary['iterations']:06d}" / "manifest.json").is_file()
    assert read_sweep(file)[0].state() == "to resume"


@pytest.mark.proof  # above: a sweep killed twice
def test_what_a_kill_left_before_the_first_iteration_is_tidied(tmp_path):
    (run,) = read_sweep(sweep_file(tmp_path))
    run.folder.mkdir(parents=True)
    (run.folder / ".config.yaml.part").write_text("half")
    process = start(run, os.environ)
    assert process is not None
    assert start(run, os.environ) is None, "the other one is at it"
    assert process.wait() == 0, run.log.read_text()
    assert run.state() == "finished"
    assert start(run, os.environ) is None, "it is finished"


def test_jobs_share_the_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_NUM_THREADS" not in share(8, 1)
    assert share(8, 3)["OMP_NUM_THREADS"] == "2"
    assert share(2, 3)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert share(8, 8)["OMP_NUM_THREADS"] == "4", "what is set stays"


def test_why_a_run_failed_is_its_exit_code_and_its_last_line(tmp_path):
    (run,) = read_sweep(sweep_file(tmp_path))
    run.log.parent.mkdir(parents=True)
    run.log.write_text("iteration 1/3\ntokencredit: the disk is full\n\n")
    assert trouble(run, 1) == "exit code 1: the disk is full"
    assert trouble(run, -9) == "killed by SIGKILL: the disk is full"
    run.log.write_text("")
    assert trouble(run, 0) == "exit code 0: no output"


def test_means_of_the_table_are_over_the_seeds_that_have_both_ends(tmp_path):
    runs = read_sweep(sweep_file(tmp_path, seeds=[1, 2, 3]))
    for run, last in zip(runs, (20.0, None, 40.0), strict=True):
        run.folder.mkdir(parents=True)
        ends = {"average_return_first": last and 10.0, "average_return_last": last}
        summary = ends | {"iterations": 3, "stopped_by": "iterations", "seconds": 2.0}
        (run.folder / "summary.json").write_text(json.dumps(summary))
    status = table(runs, ())
    assert [list(column.cells) for column in status.columns[1:3]] == [["3 of 3"], ["10 → 30 (of 2)"]]
