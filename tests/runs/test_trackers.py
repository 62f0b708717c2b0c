"""Trackers: the configuration, the run's name, metrics and samples, read back from what the libraries wrote."""

import json
import shutil
import sqlite3
import time

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from helpers.files import read_events
from tokencredit.distributed.processes import Processes
from tokencredit.errors import ConfigError
from tokencredit.runs.recorder import RunRecord
from tokencredit.runs.trackers import COLUMNS, markdown_table, row_of
from tokencredit.settings.run_kind import TEXT
from tokencredit.settings.text import PPOConfig
from tokencredit.settings.training import RunConfig

pytestmark = pytest.mark.slow

SAMPLE = {"prompt": "a ![x](http://x.x/y.png)|", "completion": " b<i>", "reward": 1.5, "truncated": False}
SAMPLE |= {"tokens": [" b", "<i>"], "logprobs": [-1.0, -0.5], "ref_logprobs": [-1.5, -0.75], "rewards": [0.0, 1.5]}
SAMPLE |= {"advantages": [0.5, -0.25]}
ROW = [1.5, -1.5, -2.25, "a ![x](http://x.x/y.png)|", " b<i>", " b[+0.50]<i>[-0.25]"]
"""The sample's row after its iteration."""


def config(folder, trackers, iterations=4):
    run = RunConfig(dir=str(folder), iterations=iterations, save_every=1, keep_last=5, trackers=[*trackers])
    return PPOConfig(run=run)


def record(args):
    return RunRecord(args.run, Processes(), TEXT, show_every=2)


def iterate(made, numbers, reward=1.0):
    for number in numbers:
        # As with a term named "a b[0]"
        row = {"iteration": number, "reward": reward * number, "reward/a b[0]": 2.0, "tokens": 10, "length": 2.0}
        made.iteration(row, [{"iteration": number} | SAMPLE])
        made.checkpoint(number, {"weights": torch.tensor([float(number)])}, {"own": number})


def tracked(folder, tracker):
    """A whole run with this tracker."""
    args = config(folder, [tracker])
    made = record(args)
    made.begin(args, 0, 0)
    iterate(made, range(1, 5))
    made.end("iterations", lambda folder, _: (folder / "weights").write_text(""))
    assert not (folder / "events.jsonl").exists()
    return args


def test_tensorboard_lists_settings_beside_the_reward_and_samples_as_text(tmp_path):
    args = tracked(tmp_path / "run", "tensorboard")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard" / "tokencredit")).Reload()
    listed = HParamsPluginData.FromString(events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content)
    settings = listed.session_start_info.hparams
    assert settings["optim.lr"].number_value == args.optim.lr
    assert settings["reward[0].classifier"].string_value == "builtin:reviews"
    assert settings["prompts.text"].string_value == "null"
    metrics = HParamsPluginData.FromString(events.SummaryMetadata("_hparams_/experiment").plugin_data.content)
    assert [info.name.tag for info in metrics.experiment.metric_infos] == ["reward"]
    tables = events.Tensors("samples/text_summary")
    assert [table.step for table in tables] == [1, 2, 4]
    text = tables[0].tensor_proto.string_val[0].decode()
    assert "![x]" not in text
    assert "<i>" not in text
    assert text.splitlines()[2].count(" | ") == len(COLUMNS) - 1


def test_a_table_in_markdown_has_no_markdown_of_a_text():
    text = markdown_table([[1, 0.5, None, "*a*|b\n<c>", "d_e"]]).splitlines()[-1]
    assert text == "| 1 | 0&#46;5 |  | &#42;a&#42;&#124;b⏎ &#60;c&#62; | d&#95;e |"


def test_a_row_of_an_episode_has_its_turns_and_credit_of_the_policys_tokens():
    episode = {"iteration": 3, "prompt": "p", "completion": "", "reward": 1.0, "truncated": False, "mask": [1, 0, 1]}
    episode |= {"tokens": ["a", "b", "c"], "logprobs": [-1.0, 0.0, -2.0], "rewards": [0.0] * 3}
    episode |= {"advantages": [0.5, 0.0, 1.0], "ending": "done"}
    turns = [("assistant", 0, 1), ("tool", 1, 2), ("assistant", 2, 3)]
    episode["turns"] = [{"role": role, "start": start, "end": end} for role, start, end in turns]
    said = "assistant › a\ntool › b\nassistant › c\n  (the environment ended the episode)"
    assert row_of(episode) == [3, 1.0, -3.0, None, "p", said, "a[+0.50]c[+1.00]"]


@pytest.mark.parametrize("done", [0, 2])
def test_tensorboard_finds_one_run_and_forgets_what_is_done_again(done, tmp_path):
    args = config(tmp_path / "run", ["tensorboard"])
    made = record(args)
    made.begin(args, 0, 0)
    iterate(made, range(1, 4))
    for number in range(done + 1, 4):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"{number:06d}")
    time.sleep(1)  # TensorBoard orders its files by the second in their names
    again = record(args)
    assert again.resume(args, 0, lambda *_: ()) == done
    iterate(again, range(done + 1, 5), reward=10.0)
    again.end("iterations", lambda folder, _: (folder / "weights").write_text(""))
    folder = tmp_path / "run" / "tensorboard" / "tokencredit"
    assert len(list(folder.glob("events*"))) == 2
    events = EventAccumulator(str(folder)).Reload()
    values = [(event.step, event.value) for event in events.Scalars("reward")]
    assert values == [(n, 1.0 * n if n <= done else 10.0 * n) for n in range(1, 5)]
    assert "iteration" not in events.Tags()["scalars"]


def test_a_tracker_that_fails_is_left_out(tmp_path):
    args = config(tmp_path / "run", ["tensorboard"])
    made = record(args)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").symlink_to("/dev/null")
    made.folder.refuse_if_used = lambda: None
    made.begin(args, 0, 0)
    assert made.trackers.active == []
    assert read_events(tmp_path / "run")[0].startswith("the tracker tensorboard is disabled: ")
    iterate(made, [1])


def test_a_table_that_fails_leaves_the_metrics(tmp_path):
    args = config(tmp_path / "run", ["tensorboard"])
    made = record(args)
    made.begin(args, 0, 0)
    made.trackers.active[0].writer.add_text = None
    iterate(made, [1, 2])
    assert [tracker.name for tracker in made.trackers.active] == ["tensorboard"]
    failed = "the tracker tensorboard lacks the samples of iteration 2: TypeError: "
    assert read_events(tmp_path / "run")[-1].startswith(failed)


def test_a_tracker_that_is_not_installed_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.trackers needs aim, which is not installed: pip install aim"):
        record(config(tmp_path / "run", ["aim"]))


# The libraries themselves, which `make test-trackers` installs.


def wandb_records(file):
    """Records of an offline run of W&B: protocol buffers in LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = file.read_bytes(), 7, b""  # after W&B's own header
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # the rest of a block is padding
            place += 32768 - place % 32768
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


@pytest.mark.filterwarnings("default")
def test_wandb_has_all_of_a_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    args = tracked(tmp_path / "sweep" / "high" / "seed-1", "wandb")
    wandb.teardown()  # its process writes until it ends
    [file] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows, settings, names = [], {}, set()
    for each in wandb_records(file):
        names |= {each.run.display_name} - {""}
        settings |= {x.key: json.loads(x.value_json) for x in [*each.run.config.update, *each.config.update] if x.key}
        rows.append({x.key or x.nested_key[0]: x.value_json for x in each.history.item})
    assert names == {"sweep/high/seed-1"}
    assert settings["optim.lr"] == args.optim.lr
    assert settings["reward[0].classifier"] == "builtin:reviews"
    assert [float(row["reward"]) for row in rows if "reward" in row] == [1.0, 2.0, 3.0, 4.0]
    tables = [json.loads(table.read_text()) for table in file.parent.glob("files/media/table/samples_*.json")]
    assert sorted(table["data"] for table in tables) == [[[number, *ROW]] for number in (1, 2, 4)]
    assert {tuple(table["columns"]) for table in tables} == {COLUMNS}


@pytest.mark.filterwarnings("default")
def test_trackio_has_all_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    args = tracked(tmp_path / "sweep" / "high" / "seed-1", "trackio")
    with sqlite3.connect(tmp_path / "trackio" / "tokencredit.db") as base:
        [(name, settings)] = base.execute("select run_name, config from configs").fetchall()
        rows = [json.loads(row) for (row,) in base.execute("select metrics from metrics order by step, id")]
    assert name == "sweep/high/seed-1"
    assert json.loads(settings)["optim.lr"] == args.optim.lr
    assert json.loads(settings)["reward[0].classifier"] == "builtin:reviews"
    assert [row["reward"] for row in rows if "reward" in row] == [1.0, 2.0, 3.0, 4.0]
    tables = [row["samples"]["_value"] for row in rows if "samples" in row]
    assert tables == [[dict(zip(COLUMNS, [number, *ROW], strict=True))] for number in (1, 2, 4)]


@pytest.mark.filterwarnings("default")
def test_mlflow_has_all_of_a_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)  # its database and artifacts
    args = tracked(tmp_path / "sweep" / "high" / "seed-1", "mlflow")
    [found] = mlflow.search_runs(experiment_names=["tokencredit"], output_format="list")
    assert found.info.run_name == "sweep/high/seed-1"
    assert found.data.params["optim.lr"] == str(args.optim.lr)
    assert found.data.params["reward.0.classifier"] == "builtin:reviews"
    assert found.data.metrics.keys() == {"reward", "reward/a b.0", "tokens", "length"}
    whole = yaml.safe_load(mlflow.artifacts.load_text(f"{found.info.artifact_uri}/config.yaml"))
    assert whole == yaml.safe_load((tmp_path / "sweep" / "high" / "seed-1" / "config.yaml").read_text())
    history = mlflow.MlflowClient().get_metric_history(found.info.run_id, "reward")
    assert [(x.step, x.value) for x in history] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    table = json.loads(mlflow.artifacts.load_text(f"{found.info.artifact_uri}/samples.json"))
    assert tuple(table["columns"]) == COLUMNS
    assert table["data"] == [[number, *ROW] for number in (1, 2, 4)]
