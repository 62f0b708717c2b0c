"""Sweeps on a Ray cluster of two nodes, both on this machine: a node is killed, and Ctrl-C is pressed."""

import json
import os
import signal

import pytest

from helpers.commands import COMMAND, command, start_command, wait_for
from helpers.files import count_lines, read_metrics, without_times
from helpers.warm import python
from tokencredit.cli import main
from tokencredit.tools.sweep.sweep_file import read_sweep
from tools.sweep.test_runner import LONG, sweep_file

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}


@pytest.fixture(scope="module")
def cluster():
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="needs Ray: pip install tokencredit[ray]")
    made = cluster_utils.Cluster(initialize_head=True, head_node_args=NODE)
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = made.address
    yield made
    del os.environ["RAY_ADDRESS"]
    if before is not None:
        os.environ["RAY_ADDRESS"] = before
    made.shutdown()


@pytest.mark.proof
def test_the_runs_of_a_killed_node_go_on_elsewhere_and_ctrl_c_lets_all_save(cluster, tmp_path):
    other = cluster.add_node(num_cpus=1, object_store_memory=NODE["object_store_memory"])
    file, out = sweep_file(tmp_path, base=LONG | {"steps": 256}, seeds=[1, 2]), tmp_path / "out"
    runs = read_sweep(file)
    with start_command("sweep", file, "--on", "ray") as process:
        assert wait_for(
            lambda: all(count_lines(run.folder / "metrics.jsonl") > 6 for run in runs), process, seconds=300
        )
        cluster.remove_node(other, allow_graceful=False)
        shown = process.stdout.readline()
        assert "lost with " in shown
        assert "continuing it in another job" in shown
        process.send_signal(signal.SIGINT)
        shown = process.communicate(timeout=120)[0]
    assert process.returncode == 130
    assert f"resume with: tokencredit sweep {file} --on=ray" in shown
    stops = [run.summary().get("stopped_by") for run in runs]
    assert set(stops) <= {"SIGTERM", "interrupt", "iterations"}, "all have saved"
    assert "SIGTERM" in stops, "a killed node's run too: it noticed"

    done = command("sweep", file, "--on", "ray", "--cores", "1")
    assert done.returncode == 0, done.stderr
    assert "2 of 2 finished" in done.stdout
    assert [row["state"] for row in json.loads((out / "sweep.json").read_text())] == ["finished", "finished"]
    assert (out / "comparison" / "comparison.html").is_file()
    for run, stop in zip(runs, stops, strict=True):
        assert ("resumed after iteration" in run.log.read_text()) == (stop != "iterations")  # one may have ended first
        uninterrupted = tmp_path / f"seed-{run.seed}"
        assert main(["control", "--config", str(run.settings), "--run.dir", str(uninterrupted)]) == 0
        assert without_times(read_metrics(run.folder)) == without_times(read_metrics(uninterrupted))


@pytest.mark.proof
def test_a_sweep_runs_on_a_cluster_and_is_compared_without_a_pickle(cluster, tmp_path):
    done = python(*COMMAND, "sweep", sweep_file(tmp_path), "--on", "ray", "--cores", "1")
    assert done.returncode == 0, done.stderr
    assert "1 of 1 finished" in done.stdout
    assert (tmp_path / "out" / "comparison" / "comparison.html").is_file()
    for kind in ("*.pkl", "*.pickle"):
        assert not list(tmp_path.rglob(kind))


def test_an_address_without_a_cluster_is_one_message(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    done = python(*COMMAND, "sweep", sweep_file(tmp_path), "--on", "ray")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "found no Ray cluster at RAY_ADDRESS=127.0.0.1:1; start one with `ray start --head`" in done.stderr
